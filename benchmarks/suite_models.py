"""The networks of PyTorch's three lists for CPUs, with the batches that they stand for. Weights are seeded.

PyTorch's developers judge a backend by `benchmarks/dynamo/{timm,huggingface,torchbench}_models_list_cpu.txt` of
pytorch/pytorch. timm's and transformers' are built by these packages, with the configurations and lengths of PyTorch's
own runner; of torchbench, what torchvision, pytorchcv or a few lines give (:mod:`benchmarks.suite_modules`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.suite_modules import MODULES
from fmtprop.capture.factories import Made

__all__ = ["SUITES", "Network"]

#: the batch of the list, and what makes the module with inputs of a batch, and the loss of its results
Network = tuple[int, Callable[[int], Made]]

_TIMM = """
adv_inception_v3,128 beit_base_patch16_224,64 botnet26t_256,128 cait_m36_384,4 coat_lite_mini,32 convit_base,64
convmixer_768_32,2 convnext_base,64 crossvit_9_240,32 cspdarknet53,64 deit_base_distilled_patch16_224,64 dm_nfnet_f0,128
dpn107,32 eca_botnext26ts_256,128 eca_halonext26ts,128 fbnetc_100,32 fbnetv3_b,32 gernet_l,128 ghostnet_100,128
gluon_inception_v3,128 gmixer_24_224,16 gmlp_s16_224,128 hrnet_w18,128 inception_v3,128 jx_nest_base,32 lcnet_050,64
mixer_b16_224,128 mixnet_l,128 mnasnet_100,32 mobilenetv2_100,32 mobilenetv3_large_100,32 mobilevit_s,256 nfnet_l0,128
pnasnet5large,16 poolformer_m36,64 repvgg_a2,128 res2net101_26w_4s,64 res2net50_14w_8s,128 res2next50,128 resnest101e,64
rexnet_100,128 sebotnet33ts_256,64 selecsls42b,128 spnasnet_100,32 swin_base_patch4_window7_224,64
swsl_resnext101_32x16d,32 tf_efficientnet_b0,128 tf_mixnet_l,32 tnt_s_patch16_224,32 twins_pcpvt_base,64
visformer_small,128 vit_base_patch16_224,64 volo_d1_224,64 xcit_large_24_p8_224,5
"""
#: names that timm has given up for others
_RENAMED = {
    "adv_inception_v3": "inception_v3", "gluon_inception_v3": "inception_v3", "jx_nest_base": "nest_base_jx",
    "swsl_resnext101_32x16d": "resnext101_32x16d",
}  # fmt: skip

_TRANSFORMERS = """
AlbertForMaskedLM,4 AllenaiLongformerBase,4 BartForCausalLM,4 BertForMaskedLM,16 BigBird,32 BlenderbotForCausalLM,32
DebertaV2ForMaskedLM,16 DistilBertForMaskedLM,128 DistillGPT2,16 ElectraForCausalLM,8 GoogleFnet,16
GPT2ForSequenceClassification,4 LayoutLMForMaskedLM,16 M2M100ForConditionalGeneration,16 MBartForCausalLM,4
MegatronBertForCausalLM,4 MobileBertForMaskedLM,64 MT5ForConditionalGeneration,16 OPTForCausalLM,2 PegasusForCausalLM,32
PLBartForCausalLM,8 RobertaForCausalLM,16 T5ForConditionalGeneration,4 T5Small,1 TrOCRForCausalLM,32 XGLMForCausalLM,8
XLNetLMHeadModel,8 YituTechConvBert,16
"""
#: names of the list that are no classes: class, and the published configuration where it is not the class's default
_CHECKPOINTS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "AllenaiLongformerBase": (
        "LongformerForMaskedLM",
        {"vocab_size": 50265, "max_position_embeddings": 4098, "attention_window": 512, "type_vocab_size": 1},
    ),
    "BigBird": ("BigBirdForMaskedLM", {"attention_type": "block_sparse"}),
    "DistillGPT2": ("GPT2LMHeadModel", {"n_layer": 6}),
    "GoogleFnet": ("FNetForMaskedLM", {"tpu_short_seq_length": 512}),
    "T5Small": ("T5ForConditionalGeneration", {}),
    "YituTechConvBert": ("ConvBertForMaskedLM", {}),
}
#: tokens of a sequence, by the beginning of the name; 128 otherwise
_LENGTHS = {
    **dict.fromkeys(("GPT2", "Bart", "T5", "PLBart", "MBart", "AllenaiLongformerBase", "BigBird"), 1024),
    **dict.fromkeys(("Albert", "Deberta", "Layout", "Electra", "XLNet", "MegatronBert", "Bert", "Roberta"), 512),
    **dict.fromkeys(("DistillGPT2", "GoogleFnet", "YituTechConvBert"), 512),
    "OPT": 2048,
    "TrOCR": 256,
}
#: models whose decoder reads the same tokens
_BOTH = ("T5", "M2M100", "MT5")

_TORCHBENCH = """
alexnet,128 attention_is_all_you_need_pytorch,64 BERT_pytorch,32 dcgan,256 densenet121,512 dlrm,2048 fastNLP_Bert,8
functorch_dp_cifar10,1024 LearningToPaint,96 lennard_jones,1024 mnasnet1_0,32 mobilenet_v2,16 mobilenet_v3_large,32
nvidia_deeprecommender,256 phlippe_densenet,128 phlippe_resnet,512 pytorch_unet,4 resnet152,32 resnet18,256 resnet50,256
resnext50_32x4d,256 shufflenet_v2_x1_0,64 speech_transformer,1024 squeezenet1_1,16 Super_SloMo,1024 tts_angular,1024
vgg16,64 vision_maskrcnn,1 yolov3,32
"""


def _mean(results: Any) -> torch.Tensor:
    """Return a loss as PyTorch's runner reduces results: the mean of all floating-point ones."""
    leaves = torch.utils._pytree.tree_leaves(results)
    means = [t.float().mean() for t in leaves if isinstance(t, torch.Tensor) and t.is_floating_point()]
    return torch.stack(means).sum()


def _numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def _tokens(largest: int, *shape: int) -> torch.Tensor:
    return torch.randint(1, largest, shape, generator=torch.Generator().manual_seed(1))


def _timm(name: str, batch: int) -> Made:
    torch.manual_seed(0)
    timm = importlib.import_module("timm")
    module = timm.create_model(_RENAMED.get(name, name), pretrained=False)
    return Made(module, (_numbers(batch, *module.default_cfg["input_size"]),), _mean)


class _Results(nn.Module):
    """A model of transformers whose results are a tuple, and which gets its tokens by position."""

    def __init__(self, model: nn.Module, is_both: bool) -> None:
        super().__init__()
        self.model, self.is_both = model, is_both

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the logits and what else the model gives."""
        more = {"decoder_input_ids": tokens} if self.is_both else {}
        found = self.model(input_ids=tokens, **more)
        return tuple(t for t in found.to_tuple() if isinstance(t, torch.Tensor))


def _transformer(name: str, batch: int) -> Made:
    torch.manual_seed(0)
    cls, given = _CHECKPOINTS.get(name, (name, {}))
    model_class = getattr(importlib.import_module("transformers"), cls)
    config = model_class.config_class(**given)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    if name.startswith(("GPT2", "Roberta")):
        config.pad_token_id = 0
    if name.startswith("Roberta"):  # as the published ones: positions begin behind the padding's
        config.max_position_embeddings = 514
    length = next((tokens for start, tokens in _LENGTHS.items() if name.startswith(start)), 128)
    tokens = _tokens(config.vocab_size, batch, length)
    if "Bart" in name:
        tokens[:, -1] = config.eos_token_id
    return Made(_Results(model_class(config), name.startswith(_BOTH)), (tokens,), _mean)


def _torchvision(name: str, batch: int) -> Made:
    torch.manual_seed(0)
    module = getattr(importlib.import_module("torchvision.models"), name)(weights=None)
    return Made(module, (_numbers(batch, 3, 224, 224),), _mean)


def _mask_rcnn(batch: int) -> Made:
    torch.manual_seed(0)
    detection = importlib.import_module("torchvision.models.detection")
    module = detection.maskrcnn_resnet50_fpn(weights=None, weights_backbone=None)
    return Made(module, ([_numbers(3, 800, 1067)] * batch,), _mean)


def _own(name: str, batch: int) -> Made:
    torch.manual_seed(0)
    make, inputs = MODULES[name]
    module = make()
    return Made(module, inputs(batch), _mean)


def _torchbench(name: str) -> Callable[[int], Made]:
    if name == "vision_maskrcnn":
        return _mask_rcnn
    if name == "fastNLP_Bert":
        return partial(_transformer, "BertModel")
    return partial(_own if name in MODULES else _torchvision, name)


def _listed(text: str, make: Callable[[str], Callable[[int], Made]]) -> dict[str, Network]:
    pairs = (entry.split(",") for entry in text.split())
    return {name: (int(batch), make(name)) for name, batch in pairs}


#: network by name, by list
SUITES: Mapping[str, Mapping[str, Network]] = {
    "timm": _listed(_TIMM, lambda name: partial(_timm, name)),
    "huggingface": _listed(_TRANSFORMERS, lambda name: partial(_transformer, name)),
    "torchbench": _listed(_TORCHBENCH, _torchbench),
}
