"""Real architectures of `transformers` with seeded random weights: compiled, run, compared with the module itself.

Configurations are a fraction of the published sizes, with every kind of layer that the architecture has. Overloads
named here have no oneDNN op: they run on the reference target, and the report names them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import fmtprop as fp
from fmtprop.runtime.agreement import relative_error

transformers = pytest.importorskip("transformers")

#: relative to the largest magnitude of each output
TOLERANCE = 1e-4

STAGES = {"hidden_sizes": [32, 64, 96, 128], "depths": [2, 2, 3, 2]}
TOKENS = {"hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 192}


@dataclass(frozen=True)
class Model:
    """How to build one, and the overloads or ops that run on the reference target."""

    cls: str
    config: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    fallbacks: frozenset[str] = frozenset()
    image: int = 96

    def build(self) -> torch.nn.Module:
        torch.manual_seed(0)
        module = getattr(transformers, self.cls)(getattr(transformers, self.config)(**self.arguments)).eval()
        for name, buffer in module.named_buffers():
            # fresh statistics are 0 and 1: they would not tell a mean from a variance
            if name.endswith("running_mean"):
                buffer.normal_(0.0, 0.1)
            if name.endswith("running_var"):
                buffer.uniform_(0.5, 1.5)
        return module


VISION = {
    "resnet": Model("ResNetForImageClassification", "ResNetConfig", {"embedding_size": 32, **STAGES}),
    "regnet": Model(
        "RegNetForImageClassification", "RegNetConfig", {"embedding_size": 32, "groups_width": 16, **STAGES}
    ),
    "convnext": Model("ConvNextForImageClassification", "ConvNextConfig", STAGES),
    "mobilenet_v1": Model("MobileNetV1ForImageClassification", "MobileNetV1Config", {"depth_multiplier": 0.5}),
    "mobilenet_v2": Model("MobileNetV2ForImageClassification", "MobileNetV2Config", {"depth_multiplier": 0.5}),
    "efficientnet": Model(
        "EfficientNetForImageClassification",
        "EfficientNetConfig",
        {"width_coefficient": 0.5, "depth_coefficient": 0.5, "image_size": 96, "hidden_dim": 640},
    ),
    # zeros before a maximum are no padding of oneDNN's, and its group normalization is a loop; the
    # standardisation of its weights is a batch normalization of constants, folded
    "bit": Model(
        "BitForImageClassification",
        "BitConfig",
        {"embedding_size": 32, "hidden_sizes": [128, 256, 384, 512], "depths": [1, 2, 2, 1]},
        frozenset({"pad", "group_normalization"}),
    ),
    # shifted windows: rolls, and a lookup of the position bias
    "swin": Model(
        "SwinForImageClassification",
        "SwinConfig",
        {"image_size": 64, "embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4},
        frozenset({"aten.roll.default"}),
        image=64,
    ),
    "vit": Model("ViTForImageClassification", "ViTConfig", {"image_size": 96, **TOKENS}),
}
QUICK = ("resnet", "vit")

vision = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in VISION]
)


pytestmark = pytest.mark.usefixtures("cache_of_module")


def outputs_agree(got: Any, want: Any) -> None:
    """Compare two ModelOutputs: type, keys, nested tensors."""
    assert type(got) is type(want)
    assert list(got.keys()) == list(want.keys())
    for key in want:
        assert relative_error(got[key], want[key]) < TOLERANCE, key


def fallbacks(net: fp.CompiledModel) -> set[str]:
    """Return the overloads and ops that run on the reference target."""
    steps = [step.node for step in net.plan.steps if step.target == "reference"]
    return {node.attrs.target if node.op == "aten" else node.op for node in steps}


def report_names_fallbacks(net: fp.CompiledModel) -> None:
    report = net.report(repeats=1)
    planned = {step.node.name for step in net.plan.steps if step.target == "reference"}
    assert {row.name for row in report.fallbacks} == planned
    text = report.to_text()
    assert all(name in text for name in planned)
    assert ("without optimized code" in text) == bool(planned)


@vision
def test_vision_models(name: str) -> None:
    model = VISION[name]
    module = model.build()
    torch.manual_seed(1)
    x = torch.randn(2, 3, model.image, model.image)
    net = fp.compile(module, x)
    with torch.no_grad():
        want = module(x)
        outputs_agree(net(x), want)
        outputs_agree(net(-x), module(-x))
    assert want.logits.abs().max() > 0
    found = fallbacks(net)
    assert model.fallbacks <= found
    # an op of ours may run by PyTorch where that costs less; one of ATen's alone runs nowhere else
    assert not {name for name in found - model.fallbacks if name.startswith("aten.")}
    report_names_fallbacks(net)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["plain", "naive"])
@pytest.mark.parametrize("name", ["regnet", "bit", "swin"])
def test_other_policies(name: str, policy: str) -> None:
    model = VISION[name]
    module, x = model.build(), torch.randn(1, 3, model.image, model.image, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        outputs_agree(fp.compile(module, x, policy=policy)(x), module(x))


@pytest.mark.slow
def test_hidden_states_come_back_as_a_tuple_in_the_output() -> None:
    module, x = VISION["resnet"].build(), torch.randn(1, 3, 64, 64)
    module.config.output_hidden_states = True
    with torch.no_grad():
        want = module(x)
    got = fp.compile(module, x)(x)
    assert type(got) is type(want)
    assert isinstance(got.hidden_states, tuple)
    assert len(got.hidden_states) == len(want.hidden_states) > 1
    for a, b in zip(got.hidden_states, want.hidden_states, strict=True):
        assert relative_error(a, b) < TOLERANCE


@pytest.mark.slow
def test_bert_takes_tokens_and_a_mask() -> None:
    model = Model("BertModel", "BertConfig", {"vocab_size": 200, **TOKENS})
    module = model.build()
    ids = torch.randint(0, 200, (2, 24), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[1, 17:] = 0
    net = fp.compile(module, (ids, mask))
    with torch.no_grad():
        outputs_agree(net(ids, mask), module(ids, mask))
        mask[0, 20:] = 0  # the mask is an input, not baked in
        outputs_agree(net(ids, mask), module(ids, mask))
    assert "aten.embedding.default" in fallbacks(net)
    report_names_fallbacks(net)
