"""Architectures of transformers, with small seeded configurations.

Owns what is asked of transformers, by the sweep and by the comparison of both doors.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

__all__ = ["TRANSFORMERS", "transformer"]

_SMALL = {"hidden_size": 192, "num_hidden_layers": 4, "num_attention_heads": 6, "intermediate_size": 768}
_TEXT = {**_SMALL, "vocab_size": 1000}
_DECODER = {**_TEXT, "use_cache": False}
_GROUPED = {**_DECODER, "num_key_value_heads": 2}
_VISION = {**_SMALL, "image_size": 224}
_STAGES = {"hidden_sizes": [32, 64, 128, 192], "depths": [2, 2, 4, 2]}
_SEQ2SEQ = {
    "vocab_size": 1000, "d_model": 192, "encoder_layers": 3, "decoder_layers": 3, "encoder_attention_heads": 6,
    "decoder_attention_heads": 6, "encoder_ffn_dim": 768, "decoder_ffn_dim": 768, "use_cache": False,
}  # fmt: skip
_SPEECH = {**_SMALL, "vocab_size": 32, "num_conv_pos_embeddings": 32}


def _tokens(batch: int = 1, length: int = 128) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(1, 1000, (batch, length))}


def _few_tokens() -> torch.Tensor:
    """Return tokens, none of which stands for a part of an image."""
    return torch.randint(1, 999, (1, 79))


def _masked(batch: int = 2, length: int = 128) -> dict[str, torch.Tensor]:
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[-1, length // 2 :] = 0
    return {**_tokens(batch, length), "attention_mask": mask}


def _both() -> dict[str, torch.Tensor]:
    return {**_tokens(), "decoder_input_ids": torch.randint(1, 1000, (1, 32))}


def _image(height: int = 224, width: int = 224, channels: int = 3) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(1, channels, height, width)}


def _sound(samples: int = 16000) -> dict[str, torch.Tensor]:
    return {"input_values": torch.randn(1, samples)}


#: transformers: class, configuration, its arguments, inputs
TRANSFORMERS: Mapping[str, tuple[str, str, Mapping[str, Any], Callable[[], dict[str, torch.Tensor]]]] = {
    "bert": ("BertForSequenceClassification", "BertConfig", _TEXT, _masked),
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", {**_TEXT, "max_position_embeddings": 160}, _masked),
    "distilbert": (
        "DistilBertModel", "DistilBertConfig", {"vocab_size": 1000, "dim": 192, "n_layers": 4, "n_heads": 6}, _masked
    ),
    "albert": ("AlbertModel", "AlbertConfig", {**_TEXT, "embedding_size": 64}, _masked),
    "electra": ("ElectraModel", "ElectraConfig", {**_TEXT, "embedding_size": 64}, _masked),
    "deberta_v2": (
        "DebertaV2Model", "DebertaV2Config", {**_TEXT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
        _masked,
    ),
    "mpnet": ("MPNetModel", "MPNetConfig", _TEXT, _masked),
    "mobilebert": ("MobileBertModel", "MobileBertConfig", {"vocab_size": 1000, "num_hidden_layers": 3}, _masked),
    "squeezebert": ("SqueezeBertModel", "SqueezeBertConfig", {**_TEXT, "embedding_size": 192}, _masked),
    "convbert": ("ConvBertModel", "ConvBertConfig", {**_TEXT, "embedding_size": 192}, _masked),
    "fnet": ("FNetModel", "FNetConfig", {**_TEXT, "tpu_short_seq_length": 128}, _tokens),
    "nystromformer": (
        "NystromformerModel", "NystromformerConfig", {**_TEXT, "segment_means_seq_len": 128, "num_landmarks": 32},
        _tokens,
    ),
    "roformer": ("RoFormerModel", "RoFormerConfig", _TEXT, _masked),
    "modernbert": ("ModernBertModel", "ModernBertConfig", {**_TEXT, "pad_token_id": 0}, _masked),
    "funnel": (
        "FunnelBaseModel", "FunnelConfig",
        {"vocab_size": 1000, "block_sizes": [1, 1, 1], "d_model": 192, "n_head": 6, "d_head": 32, "d_inner": 768},
        _tokens,
    ),
    "xlnet": (
        "XLNetModel", "XLNetConfig",
        {"vocab_size": 1000, "d_model": 192, "n_layer": 3, "n_head": 6, "d_inner": 768, "use_mems_eval": False},
        _tokens,
    ),
    "gpt2": (
        "GPT2LMHeadModel", "GPT2Config",
        {"vocab_size": 1000, "n_embd": 192, "n_layer": 4, "n_head": 6, "use_cache": False}, _tokens,
    ),
    "gpt_neo": (
        "GPTNeoModel", "GPTNeoConfig",
        {
            "vocab_size": 1000, "hidden_size": 192, "num_layers": 2, "num_heads": 6,
            "attention_types": [[["global", "local"], 1]], "use_cache": False,
        },
        _tokens,
    ),
    "gpt_neox": ("GPTNeoXModel", "GPTNeoXConfig", _DECODER, _tokens),
    "opt": (
        "OPTModel", "OPTConfig",
        {
            "vocab_size": 1000, "hidden_size": 192, "num_hidden_layers": 4, "ffn_dim": 768, "num_attention_heads": 6,
            "word_embed_proj_dim": 192, "use_cache": False,
        },
        _masked,
    ),
    "bloom": (
        "BloomModel", "BloomConfig",
        {"vocab_size": 1000, "hidden_size": 192, "n_layer": 4, "n_head": 6, "use_cache": False}, _tokens,
    ),
    "falcon": ("FalconModel", "FalconConfig", _DECODER, _tokens),
    "mpt": (
        "MptModel", "MptConfig", {"vocab_size": 1000, "d_model": 192, "n_layers": 4, "n_heads": 6, "use_cache": False},
        _tokens,
    ),
    "llama": ("LlamaForCausalLM", "LlamaConfig", _GROUPED, _tokens),
    "mistral": ("MistralModel", "MistralConfig", {**_GROUPED, "sliding_window": 64}, _tokens),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", _GROUPED, _masked),
    "qwen3": ("Qwen3Model", "Qwen3Config", {**_GROUPED, "head_dim": 32}, _tokens),
    "gemma": ("GemmaModel", "GemmaConfig", {**_GROUPED, "head_dim": 32}, _tokens),
    "gemma2": ("Gemma2Model", "Gemma2Config", {**_GROUPED, "head_dim": 32, "sliding_window": 64}, _tokens),
    "phi": ("PhiModel", "PhiConfig", _DECODER, _tokens),
    "stablelm": ("StableLmModel", "StableLmConfig", _GROUPED, _tokens),
    "mixtral": ("MixtralModel", "MixtralConfig", {**_GROUPED, "num_local_experts": 4}, _tokens),
    "mamba": (
        "MambaModel", "MambaConfig",
        {"vocab_size": 1000, "hidden_size": 128, "num_hidden_layers": 2, "use_cache": False},
        partial(_tokens, 1, 32),
    ),
    "t5": (
        "T5Model", "T5Config",
        {"vocab_size": 1000, "d_model": 192, "d_kv": 32, "d_ff": 768, "num_layers": 3, "num_heads": 6,
         "use_cache": False},
        _both,
    ),
    "gptj": (
        "GPTJModel", "GPTJConfig",
        {"vocab_size": 1000, "n_embd": 192, "n_layer": 4, "n_head": 6, "rotary_dim": 16, "use_cache": False}, _tokens,
    ),
    "gpt_bigcode": (
        "GPTBigCodeModel", "GPTBigCodeConfig",
        {"vocab_size": 1000, "n_embd": 192, "n_layer": 4, "n_head": 6, "use_cache": False}, _tokens,
    ),
    "xglm": (
        "XGLMModel", "XGLMConfig",
        {"vocab_size": 1000, "d_model": 192, "ffn_dim": 768, "num_layers": 4, "attention_heads": 6, "use_cache": False},
        _tokens,
    ),
    "starcoder2": ("Starcoder2Model", "Starcoder2Config", {**_GROUPED, "sliding_window": 64}, _tokens),
    "olmo2": ("Olmo2Model", "Olmo2Config", _GROUPED, _tokens),
    "granite": ("GraniteModel", "GraniteConfig", _GROUPED, _tokens),
    "smollm3": ("SmolLM3Model", "SmolLM3Config", {**_GROUPED, "pad_token_id": 0}, _tokens),
    "phi3": ("Phi3Model", "Phi3Config", {**_GROUPED, "pad_token_id": 0}, _masked),
    "helium": ("HeliumModel", "HeliumConfig", {**_GROUPED, "head_dim": 32}, _tokens),
    "nemotron": ("NemotronModel", "NemotronConfig", _GROUPED, _tokens),
    "cohere2": ("Cohere2Model", "Cohere2Config", {**_GROUPED, "sliding_window": 64}, _tokens),
    "gemma3": ("Gemma3TextModel", "Gemma3TextConfig", {**_GROUPED, "head_dim": 32, "sliding_window": 64}, _masked),
    "gpt_oss": (
        "GptOssModel", "GptOssConfig",
        {**_GROUPED, "head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 64}, _tokens,
    ),
    "lfm2": ("Lfm2Model", "Lfm2Config", {**_GROUPED, "full_attn_idxs": [1, 3]}, _tokens),
    "rwkv": (
        "RwkvModel", "RwkvConfig",
        {"vocab_size": 1000, "hidden_size": 192, "num_hidden_layers": 3, "attention_hidden_size": 192,
         "context_length": 128, "use_cache": False},
        partial(_tokens, 1, 32),
    ),
    "mamba2": (
        "Mamba2Model", "Mamba2Config",
        {"vocab_size": 1000, "hidden_size": 128, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 32, "n_groups": 2,
         "state_size": 16, "chunk_size": 16, "use_cache": False},
        partial(_tokens, 1, 32),
    ),
    "jamba": (
        "JambaModel", "JambaConfig",
        {**_GROUPED, "num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
        partial(_tokens, 1, 32),
    ),
    "bamba": (
        "BambaModel", "BambaConfig",
        {**_GROUPED, "mamba_n_heads": 8, "mamba_d_head": 48, "mamba_d_state": 16, "mamba_chunk_size": 16,
         "attn_layer_indices": [1, 3]},
        partial(_tokens, 1, 32),
    ),
    "recurrent_gemma": (
        "RecurrentGemmaModel", "RecurrentGemmaConfig", {**_GROUPED, "lru_width": 192}, partial(_tokens, 1, 32)
    ),
    "xlstm": (
        "xLSTMModel", "xLSTMConfig",
        {"vocab_size": 1000, "hidden_size": 192, "num_hidden_layers": 2, "num_heads": 4, "chunk_size": 16,
         "use_cache": False},
        partial(_tokens, 1, 32),
    ),
    "eurobert": ("EuroBertModel", "EuroBertConfig", {**_GROUPED, "pad_token_id": 0}, _masked),
    "esm": ("EsmModel", "EsmConfig", {**_TEXT, "pad_token_id": 0, "position_embedding_type": "rotary"}, _masked),
    "marian": ("MarianModel", "MarianConfig", {**_SEQ2SEQ, "pad_token_id": 0, "decoder_start_token_id": 1}, _both),
    "m2m_100": ("M2M100Model", "M2M100Config", _SEQ2SEQ, _both),
    "longt5": (
        "LongT5Model", "LongT5Config",
        {"vocab_size": 1000, "d_model": 192, "d_kv": 32, "d_ff": 768, "num_layers": 3, "num_heads": 6,
         "local_radius": 31, "use_cache": False},
        _both,
    ),
    "wav2vec2_bert": (
        "Wav2Vec2BertModel", "Wav2Vec2BertConfig", {**_SMALL, "feature_projection_input_dim": 80},
        lambda: {"input_features": torch.randn(1, 100, 80)},
    ),
    "moonshine": (
        "MoonshineModel", "MoonshineConfig",
        {"vocab_size": 1000, "hidden_size": 192, "intermediate_size": 768, "encoder_num_hidden_layers": 3,
         "decoder_num_hidden_layers": 3, "use_cache": False},
        lambda: {**_sound(), "decoder_input_ids": torch.randint(1, 1000, (1, 16))},
    ),
    "dinov3_vit": ("DINOv3ViTModel", "DINOv3ViTConfig", {**_VISION, "num_register_tokens": 4}, _image),
    "sam_vision": (
        "SamVisionModel", "SamVisionConfig",
        {**_SMALL, "image_size": 256, "window_size": 7, "global_attn_indexes": [1, 3], "output_channels": 64,
         "initializer_range": 0.02},
        partial(_image, 256, 256),
    ),
    "rt_detr_backbone": ("RTDetrResNetBackbone", "RTDetrResNetConfig", {"depths": [2, 2, 2, 2]}, _image),
    "timesformer": (
        "TimesformerModel", "TimesformerConfig", {**_SMALL, "image_size": 112, "num_frames": 4},
        lambda: {"pixel_values": torch.randn(1, 4, 3, 112, 112)},
    ),
    "patchtsmixer": (
        "PatchTSMixerForPrediction", "PatchTSMixerConfig",
        {"context_length": 128, "patch_length": 16, "num_input_channels": 4, "d_model": 64},
        lambda: {"past_values": torch.randn(2, 128, 4)},
    ),
    "bart": ("BartModel", "BartConfig", _SEQ2SEQ, _both),
    "pegasus": ("PegasusModel", "PegasusConfig", _SEQ2SEQ, _both),
    "biogpt": ("BioGptModel", "BioGptConfig", _DECODER, _tokens),
    "codegen": (
        "CodeGenModel", "CodeGenConfig",
        {"vocab_size": 1000, "n_embd": 192, "n_layer": 4, "n_head": 4, "rotary_dim": 16, "use_cache": False}, _tokens,
    ),
    "cohere": ("CohereModel", "CohereConfig", _GROUPED, _tokens),
    "diffllama": ("DiffLlamaModel", "DiffLlamaConfig", _GROUPED, _tokens),
    "bitnet": ("BitNetModel", "BitNetConfig", _GROUPED, _tokens),
    "apertus": ("ApertusModel", "ApertusConfig", _GROUPED, _tokens),
    "arcee": ("ArceeModel", "ArceeConfig", _GROUPED, _tokens),
    "ctrl": (
        "CTRLModel", "CTRLConfig",
        {"vocab_size": 1000, "n_embd": 192, "n_layer": 4, "n_head": 6, "dff": 768, "use_cache": False}, _tokens,
    ),
    "deberta": (
        "DebertaModel", "DebertaConfig", {**_TEXT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]}, _tokens
    ),
    "canine": ("CanineModel", "CanineConfig", _SMALL, partial(_tokens, 1, 256)),
    "blenderbot": ("BlenderbotModel", "BlenderbotConfig", _SEQ2SEQ, _both),
    "aimv2": ("Aimv2VisionModel", "Aimv2VisionConfig", _VISION, _image),
    "dinov2_registers": (
        "Dinov2WithRegistersModel", "Dinov2WithRegistersConfig", {**_SMALL, "image_size": 224, "mlp_ratio": 4}, _image
    ),
    "dinov3_convnext": ("DINOv3ConvNextModel", "DINOv3ConvNextConfig", _STAGES, _image),
    "data2vec_vision": ("Data2VecVisionModel", "Data2VecVisionConfig", _VISION, _image),
    "whisper": (
        "WhisperModel", "WhisperConfig", {**_SEQ2SEQ, "num_mel_bins": 80, "max_source_positions": 200,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
        lambda: {"input_features": torch.randn(1, 80, 400), "decoder_input_ids": torch.randint(1, 1000, (1, 16))},
    ),
    "wav2vec2": ("Wav2Vec2Model", "Wav2Vec2Config", _SPEECH, _sound),
    "hubert": ("HubertModel", "HubertConfig", _SPEECH, _sound),
    "wavlm": ("WavLMModel", "WavLMConfig", _SPEECH, _sound),
    "sew": ("SEWModel", "SEWConfig", _SPEECH, _sound),
    "audio_spectrogram": (
        "ASTModel", "ASTConfig", {**_SMALL, "max_length": 256}, lambda: {"input_values": torch.randn(1, 256, 128)}
    ),
    "encodec": (
        "EncodecModel", "EncodecConfig", {"num_filters": 16, "hidden_size": 64, "codebook_dim": 64},
        lambda: {"input_values": torch.randn(1, 1, 12000)},
    ),
    "univnet": (
        "UnivNetModel", "UnivNetConfig", {},
        lambda: {"input_features": torch.randn(1, 40, 100), "noise_sequence": torch.randn(1, 40, 64)},
    ),
    "vit": ("ViTForImageClassification", "ViTConfig", _VISION, _image),
    "deit": ("DeiTModel", "DeiTConfig", _VISION, _image),
    "beit": ("BeitForImageClassification", "BeitConfig", {**_VISION, "use_relative_position_bias": True}, _image),
    "dinov2": ("Dinov2Model", "Dinov2Config", {**_SMALL, "image_size": 224, "mlp_ratio": 4}, _image),
    "swin": (
        "SwinForImageClassification", "SwinConfig",
        {"embed_dim": 48, "depths": [2, 2, 2, 2], "num_heads": [2, 4, 8, 16]}, _image,
    ),
    "swinv2": (
        "Swinv2Model", "Swinv2Config",
        {"image_size": 256, "embed_dim": 48, "depths": [2, 2, 2], "num_heads": [2, 4, 8], "window_size": 8},
        partial(_image, 256, 256),
    ),
    "hiera": ("HieraModel", "HieraConfig", {"embed_dim": 48, "depths": [1, 2, 3, 1]}, _image),
    "convnext": ("ConvNextForImageClassification", "ConvNextConfig", _STAGES, _image),
    "convnextv2": ("ConvNextV2ForImageClassification", "ConvNextV2Config", _STAGES, _image),
    "hf_resnet": ("ResNetForImageClassification", "ResNetConfig", {}, _image),
    "hf_regnet": ("RegNetForImageClassification", "RegNetConfig", {}, _image),
    "bit": (
        "BitForImageClassification", "BitConfig", {"hidden_sizes": [128, 256, 512, 768], "depths": [2, 2, 2, 2]}, _image
    ),
    "hf_mobilenet_v1": ("MobileNetV1ForImageClassification", "MobileNetV1Config", {}, _image),
    "mobilevit": ("MobileViTForImageClassification", "MobileViTConfig", {}, partial(_image, 256, 256)),
    "mobilevitv2": ("MobileViTV2ForImageClassification", "MobileViTV2Config", {}, partial(_image, 256, 256)),
    "hf_efficientnet": ("EfficientNetForImageClassification", "EfficientNetConfig",
        {"width_coefficient": 1.0, "depth_coefficient": 1.0, "image_size": 224, "hidden_dim": 1280}, _image),
    "segformer": (
        "SegformerForSemanticSegmentation", "SegformerConfig", {"num_labels": 19}, partial(_image, 256, 256)
    ),
    "poolformer": ("PoolFormerForImageClassification", "PoolFormerConfig", {}, _image),
    "levit": ("LevitForImageClassification", "LevitConfig", {}, _image),
    "cvt": ("CvtForImageClassification", "CvtConfig", {"depth": [1, 2, 4]}, _image),
    "pvt": ("PvtForImageClassification", "PvtConfig", {}, _image),
    "pvt_v2": ("PvtV2ForImageClassification", "PvtV2Config", {}, _image),
    "focalnet": ("FocalNetForImageClassification", "FocalNetConfig", {}, _image),
    "swiftformer": ("SwiftFormerForImageClassification", "SwiftFormerConfig", {}, _image),
    "hgnet_v2": ("HGNetV2ForImageClassification", "HGNetV2Config", {}, _image),
    "textnet": ("TextNetForImageClassification", "TextNetConfig", {}, _image),
    "dpt": (
        "DPTForDepthEstimation", "DPTConfig",
        {**_SMALL, "image_size": 224, "backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [32, 64, 128, 128],
         "fusion_hidden_size": 64},
        _image,
    ),
    "glpn": ("GLPNForDepthEstimation", "GLPNConfig", {}, partial(_image, 192, 256)),
    "yolos": ("YolosForObjectDetection", "YolosConfig",
        {**_SMALL, "image_size": [256, 256], "num_detection_tokens": 20}, partial(_image, 256, 256)),
    "vitdet": ("VitDetModel", "VitDetConfig",
        {"hidden_size": 192, "num_hidden_layers": 4, "num_attention_heads": 6, "image_size": 224, "window_size": 7,
         "window_block_indices": [0, 2]}, _image),
    "clip_vision": ("CLIPVisionModel", "CLIPVisionConfig", _VISION, _image),
    "clip_text": ("CLIPTextModel", "CLIPTextConfig", {**_TEXT, "eos_token_id": 2}, partial(_tokens, 1, 64)),
    "llava": (
        "LlavaForConditionalGeneration", "LlavaConfig",
        {"vision_config": {"model_type": "clip_vision_model", **_SMALL, "image_size": 112, "patch_size": 16},
         "text_config": {"model_type": "llama", **_GROUPED}, "image_token_index": 999},
        lambda: {**_image(112, 112), "input_ids": torch.cat([torch.full((1, 49), 999), _few_tokens()], 1)},
    ),
    "siglip_vision": ("SiglipVisionModel", "SiglipVisionConfig", _VISION, _image),
    "swin2sr": (
        "Swin2SRForImageSuperResolution", "Swin2SRConfig",
        {"embed_dim": 60, "depths": [2, 2], "num_heads": [6, 6], "window_size": 8}, partial(_image, 64, 64),
    ),
    # with the default, scores differ by less than rounding, and so do the keypoints
    "superpoint": (
        "SuperPointForKeypointDetection", "SuperPointConfig", {"initializer_range": 0.05}, partial(_image, 120, 160)
    ),
    "videomae": (
        "VideoMAEForVideoClassification", "VideoMAEConfig", {**_SMALL, "image_size": 112, "num_frames": 8},
        lambda: {"pixel_values": torch.randn(1, 8, 3, 112, 112)},
    ),
    "perceiver": (
        "PerceiverModel", "PerceiverConfig",
        {"d_model": 96, "d_latents": 128, "num_latents": 64, "num_self_attends_per_block": 3,
         "num_self_attention_heads": 4, "num_cross_attention_heads": 4},
        lambda: {"inputs": torch.randn(1, 200, 96)},
    ),
    "patchtst": (
        "PatchTSTForPrediction", "PatchTSTConfig",
        {"num_input_channels": 4, "context_length": 128, "patch_length": 16, "patch_stride": 8, "d_model": 64,
         "num_hidden_layers": 3, "num_attention_heads": 4},
        lambda: {"past_values": torch.randn(2, 128, 4)},
    ),
}  # fmt: skip


def transformer(name: str) -> tuple[nn.Module, tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
    """Make a network, its positional arguments and its keyword arguments."""
    transformers = importlib.import_module("transformers")
    transformers.logging.set_verbosity_error()
    cls, config, arguments, inputs = TRANSFORMERS[name]
    torch.manual_seed(0)
    module = getattr(transformers, cls)(getattr(transformers, config)(**arguments))
    return module, (), inputs()
