"""Real architectures with random weights and small configurations: each graph computes what its model computes.

The expected `aten` overloads are those that no op of ours expresses; the list shrinks as ops are added.
"""

from __future__ import annotations

import pytest
import torch

from fmtprop.capture import from_torch
from fmtprop.errors import ImportModelError
from tests.capture.checking import check

transformers = pytest.importorskip("transformers")

IMAGE = (1, 3, 64, 64)
STAGES = {"depths": [1, 2, 1, 1]}
WIDTHS = {"hidden_sizes": [16, 32, 48, 64], **STAGES}
TOKENS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}

# model -> (configuration, arguments of it, overloads that run on the reference target)
VISION = {
    "ResNetForImageClassification": ("ResNetConfig", {"embedding_size": 16, **WIDTHS}, set()),
    "RegNetForImageClassification": ("RegNetConfig", {"embedding_size": 16, "groups_width": 8, **WIDTHS}, set()),
    "ConvNextForImageClassification": ("ConvNextConfig", WIDTHS, set()),
    "ConvNextV2ForImageClassification": ("ConvNextV2Config", WIDTHS, set()),
    "MobileNetV1ForImageClassification": ("MobileNetV1Config", {"depth_multiplier": 0.25}, set()),
    "MobileNetV2ForImageClassification": ("MobileNetV2Config", {"depth_multiplier": 0.25}, set()),
    "EfficientNetForImageClassification": (
        "EfficientNetConfig",
        {"width_coefficient": 0.25, "depth_coefficient": 0.25, "image_size": 64, "hidden_dim": 320},
        set(),
    ),
    # its weight standardisation is a batch normalization of the weights: folded before anything runs
    "BitForImageClassification": (
        "BitConfig",
        {"embedding_size": 32, "hidden_sizes": [128, 256, 384, 512], **STAGES},
        {"aten._native_batch_norm_legit.no_stats"},
    ),
    "SwinForImageClassification": (
        "SwinConfig",
        {"image_size": 64, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4},
        {"aten.index.Tensor", "aten.roll.default", "aten.add.Tensor"},
    ),
    "ViTForImageClassification": ("ViTConfig", {"image_size": 64, **TOKENS}, set()),
}
QUICK = ("ViTForImageClassification", "ConvNextForImageClassification")


def build(model: str, config: str, arguments: dict) -> torch.nn.Module:
    torch.manual_seed(0)
    module = getattr(transformers, model)(getattr(transformers, config)(**arguments))
    for name, buffer in module.named_buffers():
        # fresh statistics are 0 and 1: they would not tell a mean from a variance
        if name.endswith("running_mean"):
            buffer.normal_(0.0, 0.1)
        if name.endswith("running_var"):
            buffer.uniform_(0.5, 1.5)
    return module


@pytest.mark.parametrize("model", [m if m in QUICK else pytest.param(m, marks=pytest.mark.slow) for m in VISION])
def test_vision_models(model):
    config, arguments, fallback = VISION[model]
    graph = check(build(model, config, arguments), torch.randn(IMAGE), aten=None, rtol=1e-4, atol=1e-5)
    assert {node.attrs.target for node in graph if node.op == "aten"} <= fallback
    assert graph.count("convolution") >= 1 and all(node.origin for node in graph if node.op == "convolution")


@pytest.mark.slow
def test_bert_takes_tokens_and_a_mask():
    module = build("BertModel", "BertConfig", {"vocab_size": 99, **TOKENS})
    ids = torch.randint(0, 99, (2, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, 8:] = 0
    graph = check(module, (), {"input_ids": ids, "attention_mask": mask}, aten=None, rtol=1e-4, atol=1e-5)
    assert [node.name for node in graph.input_nodes] == ["input_ids", "attention_mask"]
    assert "aten.embedding.default" in {node.attrs.target for node in graph if node.op == "aten"}
    assert graph.count("matmul") + graph.count("inner_product") >= 2 * 6


def test_a_cache_that_is_updated_in_place_has_a_remedy():
    configuration = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, vocab_size=40
    )
    model = transformers.LlamaForCausalLM(configuration).eval()
    cache = transformers.StaticCache(config=configuration, max_cache_len=8)
    arguments = {"input_ids": torch.zeros(1, 1, dtype=torch.long), "past_key_values": cache}
    with pytest.raises(ImportModelError, match=r"If it is a cache .*torch\.compile\(model, backend=\"fmtprop\"\)"):
        from_torch(model, kwargs=arguments)
