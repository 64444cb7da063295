"""Pins in compiled models: the format is really there, the answer stays right, a refusal lists available formats."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fmtprop as fp
from fmtprop import dnnl
from fmtprop.errors import OptionError
from fmtprop.layout import MemoryDesc
from tests.models.odd import lost_pins

#: the blocked format that this CPU's pooling, element-wise and depthwise kernels know
BLOCKED = "nChw16c" if "avx512" in dnnl.lib().isa else "nChw8c"


class Net(nn.Module):
    """One op of each kind that pins are for."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(8, 16, 3, padding=1)
        self.narrow = nn.Conv2d(16, 16, 1)
        self.deep = nn.Conv2d(16, 16, 3, padding=1, groups=16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = F.relu(self.stem(x))
        joined = torch.cat([F.max_pool2d(y, 2), F.avg_pool2d(y, 2)], 1)
        product = joined * joined.sum((2, 3), keepdim=True)
        return self.deep(self.narrow(y)), product


X = (2, 8, 10, 10)


pytestmark = pytest.mark.usefixtures("cache_of_module")


def pinned(pin: dict[str, Any]) -> fp.CompiledModel:
    """Compile with pins, compare with PyTorch, and look for the formats."""
    model, x = Net().eval(), torch.randn(X)
    net = fp.compile(model, x, policy="optimal", tune="model", pin=pin)
    with torch.no_grad():
        for got, expected in zip(net(x), model(x), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    return net


@pytest.mark.parametrize(
    "pin",
    [
        {"conv_1.dst": "nChw8c"},
        {"conv_1.src": "nhwc", "conv_1.dst": "nhwc"},
        {"conv_1.src": "nchw"},
        {"pool_1.src": "nhwc", "pool_1.dst": "nhwc"},
        {"pool_1.src": "nhwc", "conv_1.dst": "nChw8c"},
        {"pool_1.dst": BLOCKED, "pool_2.dst": "nhwc"},
        {"concat_1.dst": "nhwc"},
        {"concat_1.src_0": BLOCKED, "concat_1.dst": BLOCKED},
        {"binary_1.src_0": BLOCKED, "binary_1.dst": BLOCKED},
        {"binary_1.dst": "nhwc", "concat_1.dst": "nchw"},
        {"conv_2.src": "nchw", "conv_3.src": "nhwc"},
        {"conv_3.dst": "nhwc"},
    ],
    ids=lambda pin: " ".join(f"{name}={tag}" for name, tag in pin.items()),
)
def test_a_pinned_format_is_there(pin):
    net = pinned(pin)
    sizes = {
        "conv_1.src": (2, 8, 10, 10),
        "pool": (2, 16, 5, 5),
        "concat_1.dst": (2, 32, 5, 5),
        "binary": (2, 32, 5, 5),
    }
    descs = {}
    for name, tag in pin.items():
        dims = sizes.get(name) or sizes.get(name.partition("_")[0], (2, 16, 10, 10))
        dims = dims if not name.startswith("pool") or name.endswith("dst") else (2, 16, 10, 10)
        dims = (2, 16, 5, 5) if name.startswith("concat_1.src") else dims
        descs[name] = MemoryDesc(dims, tag=tag)
    assert lost_pins(net, descs) == []


def test_a_pin_may_be_of_a_format_that_is_not_tried_without():
    net = pinned({"conv_1.weights": "hwio"})
    assert lost_pins(net, {"conv_1.weights": MemoryDesc((16, 8, 3, 3), tag="hwio")}) == []


def test_sources_come_as_a_pinned_result_is():
    class Rows(nn.Module):
        def forward(self, x):
            return torch.sigmoid(x)

    x = torch.randn(6, 9)
    net = fp.compile(Rows(), x, policy="optimal", tune="model", pin={"logistic_1.dst": "ba"})
    assert not lost_pins(net, {"logistic_1.dst": MemoryDesc((6, 9), tag="ba")})
    torch.testing.assert_close(net(x), torch.sigmoid(x))


def test_readers_may_ask_for_more_formats_than_a_pin_does():
    class Views(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x[None, ..., 0:2][..., None] + 1.0, F.conv2d(x, torch.ones(16, 16, 3, 3))

    x, pin = torch.randn(3, 16, 12, 12), {"reshape_1.src": "abcd", "slice_1.src": "abdec"}
    net = fp.compile(Views(), x, policy="optimal", tune="model", pin=pin)
    assert not lost_pins(net, {"slice_1.src": MemoryDesc((1, 3, 16, 12, 12), tag="abdec")})
    torch.testing.assert_close(net(x), Views()(x), rtol=1e-4, atol=1e-4)


def test_strides_that_interleave_are_left_in_two_steps():
    class Slice(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.relu(F.conv3d(x[:, :, :, ::3], torch.ones(8, 8, 3, 3, 3), padding=1))

    x = torch.randn(1, 8, 1, 4, 1)  # the slice has two elements 3 apart in rows of 4: no reorder leads into blocks
    net = fp.compile(Slice(), x, policy="optimal", deterministic=True, pin={"conv_1.src": "nCdhw8c"})
    torch.testing.assert_close(net(x), Slice()(x), rtol=1e-4, atol=1e-4)
    steps = [node.descs[0].tag for node in net.graph.nodes() if node.op == "reorder" and node.descs[0].dims[3] == 2]
    assert steps[:2] == ["abcde", "aBcde8b"]
    packed = {node.name for node in net.plan.packed}  # once, when the model is compiled
    costs = [node.choice.cost for node in net.graph.nodes() if node.choice and node.name not in packed]
    assert net.certificate.objective == pytest.approx(sum(costs))


def test_a_pin_of_what_a_fused_pair_hides_keeps_the_pair_apart():
    net = pinned({"conv_3.src": BLOCKED})
    assert "conv_2" in net.graph
    assert lost_pins(net, {"conv_3.src": MemoryDesc((2, 16, 10, 10), tag=BLOCKED)}) == []


@pytest.mark.parametrize(
    ("pin", "message"),
    [
        (
            {"pool_1.src": "nhwc", "pool_1.dst": "nChw8c"},
            r"pin 'pool_1\.src' asks for f32:acdb and pin 'pool_1\.dst' asks for f32:aBcd8b, but no implementation of "
            r"node pool_1 \(pooling\) offers that together; available: .*src f32:acdb, dst f32:acdb",
        ),
        (
            {"concat_1.src_0": "nchw", "concat_1.src_1": "nChw8c", "concat_1.dst": "wcnh"},
            r"offers that together; available: .*src_0 f32:acdb, src_1 f32:acdb, dst f32:acdb",
        ),
        ({"conv_1.dst": "wcnh"}, r"'conv_1\.dst' asks for f32:dbac, but no .* offers that; available: .*dst f32:abcd"),
        ({"conv_1.bias": "b"}, r"'b' is not a format of f32\[16\]"),
        ({"conv_1.post_op_0": "nchw"}, r"conv_1 \(convolution\) has no 'post_op_0'; it has src, weights, bias, dst"),
        ({"relu_1.dst": "nchw"}, r"names no node of .* nodes fused into others are gone"),
        ({"conv_1": "nchw"}, r"write \"node\.operand\" or \"node\.dst\""),
        ({"conv_1.src": MemoryDesc.any(X, "f32")}, r"'conv_1\.src' must be one format, not any"),
    ],
)
def test_a_pin_that_cannot_be_had_says_what_can(pin, message):
    with pytest.raises(OptionError, match=message):
        fp.compile(Net().eval(), torch.randn(X), policy="optimal", tune="model", pin=pin)


def test_pins_are_for_the_optimal_policy_only():
    with pytest.raises(OptionError, match="pin needs policy='optimal'"):
        fp.compile(Net().eval(), torch.randn(X), policy="plain", pin={"conv_1.dst": "nchw"})


class Nested(nn.Module):
    """A concat that begins with another."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.cat([x, x, x.tanh()], 1), torch.cat([x, x], 1).relu()


@pytest.mark.parametrize("policy", ["plain", "propagate", "optimal"])
def test_every_plan_names_the_operands_of_a_concat_alike(policy):
    x = torch.randn(1, 4, 5, 5)
    shown = fp.compile(Nested(), x, policy=policy, tune="model", confirm=False).graph
    (name,) = {n.name for n in shown.nodes() if n.op == "concat" and n.results[0].dims[1] == 12}
    pin = {f"{name}.{operand}": desc for operand, desc in shown.node(name).choice.operands.items()}
    net = fp.compile(Nested(), x, policy="optimal", tune="model", pin=pin)
    assert pin
    assert lost_pins(net, pin) == []
