"""The built-in architectures: published sizes, healthy activations, outputs that depend on the input."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest
import torch
from torch import nn

from fmtprop.errors import GraphError
from fmtprop.ir.initialiser import Initialiser
from graphs.architectures import ARCHITECTURES
from graphs.architectures.attention import SelfAttention
from graphs.architectures.initialise import apply, fan_in, initialiser_of

# Parameter counts of torchvision's models of the same name, and of transformers' BertModel; the last line counts this
# project's own.
PUBLISHED = {
    "resnet50": 25_557_032,
    "mobilenet_v2": 3_504_872,
    "vgg16": 138_357_544,
    "densenet121": 7_978_856,
    "inception_v3": 27_161_264 - 3_326_696,  # less the auxiliary head
    "efficientnet_b0": 5_288_548,
    "shufflenet_v2": 2_278_604,
    "convnext_t": 28_589_128,
    "bert_base": 109_482_240 - 590_592,  # less the pooler
    "vit_b16": 86_567_656,
    "unet": 7_763_041,
    **{"conv3d": 3_701_744, "chain": 896, "residual": 19_488, "concat": 9_544},
}
OUTPUT_SHAPES = {
    "bert_base": (1, 128, 768),
    "unet": (1, 1, 256, 256),
    "conv3d": (1, 400),
    "chain": (1, 32, 16, 16),
    "residual": (1, 32, 32, 32),
    "concat": (1, 32, 32, 32),
}
BIG = {"vgg16", "densenet121", "inception_v3", "bert_base", "vit_b16"}
MATMULS = (nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.Linear)

names = pytest.mark.parametrize("name", sorted(ARCHITECTURES))
names_big_slow = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in BIG else ()) for name in sorted(ARCHITECTURES)]
)


def meta_module(name: str) -> nn.Module:
    with torch.device("meta"):
        return ARCHITECTURES[name].build()


def test_registry_is_complete() -> None:
    assert set(ARCHITECTURES) == set(PUBLISHED)
    for name, architecture in ARCHITECTURES.items():
        assert architecture.name == name
        assert architecture.input_shape[0] == 1
        assert architecture.description and architecture.source


@names
def test_parameter_count_is_the_published_one(name: str) -> None:
    count = sum(parameter.numel() for parameter in meta_module(name).parameters())
    assert count == PUBLISHED[name]
    assert ARCHITECTURES[name].parameter_count == count


@names
def test_output_shape(name: str) -> None:
    module = meta_module(name).eval()
    architecture = ARCHITECTURES[name]
    dtype = torch.int64 if architecture.vocabulary else torch.float32
    with torch.no_grad():
        y = module(torch.empty(architecture.input_shape, dtype=dtype, device="meta"))
    assert tuple(y.shape) == OUTPUT_SHAPES.get(name, (1, 1000))


@names
def test_every_tensor_has_its_own_initialiser(name: str) -> None:
    module = meta_module(name)
    seeds = []
    for key, tensor in module.state_dict().items():
        spec = initialiser_of(key, tensor, module)
        assert Initialiser.from_json(spec).to_json() == spec
        if key.endswith("num_batches_tracked"):
            assert spec == {"kind": "constant", "value": 0.0}
        else:
            assert spec["kind"] in ("normal", "uniform")
            seeds.append(spec["seed"])
        if key.endswith("running_var"):
            assert spec["low"] > 0
    assert len(set(seeds)) == len(seeds), "two tensors of one graph would hold the same values"


@names
def test_init_scales_name_existing_tensors(name: str) -> None:
    """A pattern that matches nothing is a correction that silently does not happen."""
    module = meta_module(name)
    keys = module.state_dict().keys()
    for pattern in getattr(module, "init_scales", {}):
        assert any(fnmatchcase(key, pattern) for key in keys), f"{pattern} matches no tensor of {name}"


@names_big_slow
def test_activations_stay_in_range(name: str) -> None:
    """No layer blows up, vanishes or dies, whatever the depth."""
    architecture = ARCHITECTURES[name]
    module = architecture.module()
    checked = 0

    def check(layer: nn.Module, _: object, y: torch.Tensor) -> None:
        nonlocal checked
        checked += 1
        assert torch.isfinite(y).all()
        if isinstance(layer, nn.ReLU):
            assert 0.03 < (y == 0).float().mean() < 0.8, f"{layer} is dead or linear"
        elif y[0, 0].numel() > 1 or isinstance(layer, nn.Linear):  # the rest are squeeze-and-excitation's few means
            assert 0.1 < y.std() < 10, f"{layer} puts out a standard deviation of {y.std()}"
        if isinstance(layer, nn.Sigmoid):  # its steep middle would magnify every rounding of larger numbers
            assert ((y > 0.01) & (y < 0.99)).float().mean() > 0.95, "a sigmoid is saturated"

    for layer in module.modules():
        if isinstance(layer, (*MATMULS, nn.ReLU, nn.Sigmoid)):
            layer.register_forward_hook(check)
    with torch.no_grad():
        y = module(architecture.example_input())
    assert checked > 1
    assert 0.1 < y.std() < 10


@names_big_slow
def test_every_output_depends_on_the_input(name: str) -> None:
    architecture = ARCHITECTURES[name]
    module = architecture.module()
    with torch.no_grad():
        first, second, again = (module(architecture.example_input(seed)) for seed in (100, 200, 100))
    assert torch.equal(first, again)
    assert (first - second).norm() > 0.03 * first.norm()
    moved = (first - second).abs() > 1e-3 * first.std()
    # A ReLU at the end leaves about a quarter of the elements at zero for both inputs.
    assert moved.float().mean() > (0.6 if isinstance(list(module.modules())[-1], nn.ReLU) else 0.95)


def test_module_is_reproducible_and_ready_for_inference() -> None:
    architecture = ARCHITECTURES["mobilenet_v2"]
    first, second = architecture.module(), architecture.module()
    assert not any(layer.training for layer in first.modules())
    assert not any(parameter.requires_grad for parameter in first.parameters())
    for key, tensor in first.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[key])


def test_weights_are_pinned() -> None:
    """Graph files name only seeds: the values behind them must never change."""
    module = meta_module("resnet50")
    tensor = module.state_dict()["stem.conv.weight"]
    spec = initialiser_of("stem.conv.weight", tensor, module)
    assert spec == {"kind": "normal", "seed": 408779573, "mean": 0.0, "std": (2 / 147) ** 0.5}
    expand = "stage1.0.expand.bn.weight"
    spec = initialiser_of(expand, module.state_dict()[expand], module)
    assert (spec["low"], spec["high"]) == pytest.approx((0.8 * 0.3, 1.2 * 0.3))


def test_batch_norm_statistics_are_not_trivial() -> None:
    module = ARCHITECTURES["residual"].module()
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm2d):
            for tensor in (layer.running_mean, layer.running_var, layer.weight, layer.bias):
                assert tensor is not None
                assert tensor.std() > 0.02
            assert layer.running_var is not None
            assert layer.running_var.min() > 0.5


def test_example_input_has_unit_variance_and_structure() -> None:
    x = ARCHITECTURES["resnet50"].example_input()
    assert x.dtype == torch.float32 and x.is_contiguous()
    assert 0.5 < x.std() < 2
    neighbours = torch.corrcoef(torch.stack((x[..., :-1].flatten(), x[..., 1:].flatten())))[0, 1]
    assert neighbours > 0.5


def test_example_tokens_are_spread_over_the_vocabulary() -> None:
    tokens = ARCHITECTURES["bert_base"].example_input()
    assert tokens.dtype == torch.int64 and tokens.shape == (1, 128)
    assert 0 <= tokens.min() < 2_000 and 28_000 < tokens.max() < 30_522


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (nn.Linear(12, 3), 12),
        (nn.Conv2d(8, 4, (1, 7)), 56),
        (nn.Conv3d(8, 8, 3, groups=8), 27),
        (nn.ConvTranspose2d(16, 4, 2, stride=2, groups=2), 8),
        (nn.ConvTranspose2d(16, 4, 3, stride=2), 36),
    ],
)
def test_fan_in(layer: nn.Module, expected: float) -> None:
    assert fan_in(layer) == expected


def test_unknown_tensor_is_refused() -> None:
    with pytest.raises(GraphError) as caught:
        apply(nn.Sequential(nn.PReLU(3)))
    assert str(caught.value) == (
        "0.weight (PReLU, shape (3,)): no initialiser rule for this tensor; "
        "add one to graphs/architectures/initialise.py"
    )


@pytest.mark.parametrize("fused", [False, True])
def test_attention_is_pytorchs(fused: bool) -> None:
    """Head by head, against ``nn.MultiheadAttention`` with the same weights."""
    torch.manual_seed(0)
    ours, theirs = SelfAttention(24, 3, fused).eval(), nn.MultiheadAttention(24, 3, batch_first=True).eval()
    layers = [ours.qkv] if fused else [ours.query, ours.key, ours.value]
    assert theirs.in_proj_bias is not None
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat([layer.weight for layer in layers]))
        theirs.in_proj_bias.copy_(torch.cat([layer.bias for layer in layers]))
        theirs.out_proj.load_state_dict(ours.out.state_dict())
        x = torch.randn(2, 5, 24)
        torch.testing.assert_close(ours(x), theirs(x, x, x, need_weights=False)[0])
