"""Whole quantized networks: plans in bytes and in real numbers agree, and with the meaning of the graph."""

from __future__ import annotations

import pytest
import torch

import fmtprop as fp
from fmtprop.errors import OptionError
from fmtprop.ir.graph import Graph
from fmtprop.ir.tensors import tensor_type
from fmtprop.ir.types import TensorType
from fmtprop.ops import Binary, Conv, Dequantize, Eltwise, Pooling, Quantize, Resampling, Reshape, Shuffle, emit
from fmtprop.ops.evaluate import evaluate

STEP = 0.05


class Network:
    """A graph of quantized layers.

    Parameters
    ----------
    dims : tuple of int
        Of the input.
    signed : bool
        Whether quantized activations are signed.
    """

    def __init__(self, dims, signed):
        self.graph, self.signed = Graph("quantized"), signed
        self.value, self.drawn = self.graph.input("x", TensorType(dims)), torch.Generator().manual_seed(0)

    def held(self, data):
        return self.graph.constant(self.graph.fresh_name("c"), tensor_type(data), data)

    def rounded(self, value, zero):
        kind, limits = (torch.int8, (-128, 127)) if self.signed else (torch.uint8, (0, 255))
        zero = self.held(torch.tensor(zero + limits[0], dtype=kind))
        inputs = {"scale": self.held(torch.tensor(STEP)), "zero_point": zero}
        attrs = Quantize("s8" if self.signed else "u8", *limits)
        stored = emit(self.graph, "quantize", {"src": value, **inputs}, attrs)
        return emit(self.graph, "dequantize", {"src": stored, **inputs}, Dequantize())

    def convolution(self, value, outputs, kernel, groups=1):
        channels = self.graph.type_of(value).dims[1]
        dims = (outputs, channels // groups, kernel, kernel)
        numbers = torch.randint(-127, 128, dims, dtype=torch.int8, generator=self.drawn)
        scale = (0.5 + torch.rand(outputs, generator=self.drawn)) / (127 * (channels // groups) ** 0.5 * kernel)
        weights = emit(self.graph, "dequantize", {"src": self.held(numbers), "scale": self.held(scale)}, Dequantize(0))
        if groups > 1:
            weights = emit(self.graph, "reshape", {"src": weights}, Reshape((groups, outputs // groups, *dims[1:])))
        bias = self.held(torch.randn(outputs, generator=self.drawn))
        attrs = Conv.make(2, pad_l=kernel // 2, groups=groups)
        return emit(self.graph, "convolution", {"src": value, "weights": weights, "bias": bias}, attrs)


class Limited(Network):
    """The same without roundings: numbers are limited to the range of the integers."""

    def rounded(self, value, zero):
        return emit(self.graph, "eltwise", {"src": value}, Eltwise("clip", -zero * STEP, (255 - zero) * STEP))


def residual_network(signed=False, zero=0, kind=Network):
    net = kind((1, 3, 18, 18), signed)
    value = net.rounded(net.value, 120)
    value = emit(net.graph, "eltwise", {"src": net.convolution(value, 24, 3)}, Eltwise("relu"))
    value = net.rounded(value, zero)
    value = net.rounded(emit(net.graph, "pooling", {"src": value}, Pooling.make("max", (2, 2), 2)), zero)
    wide = net.rounded(net.convolution(value, 48, 1), 101)
    deep = net.rounded(net.convolution(wide, 48, 3, groups=48), zero)
    back = net.rounded(net.convolution(deep, 24, 1), 131)
    total = emit(net.graph, "binary", {"src_0": back, "src_1": value}, Binary("add"))
    net.graph.output(net.rounded(total, 90))
    return net.graph


@pytest.mark.parametrize("policy", ["optimal", "propagate", "naive", "plain"])
@pytest.mark.parametrize(("signed", "zero"), [(False, 0), (False, 40), (True, 0), (True, 128)])
def test_every_policy_means_the_graph(policy, signed, zero):
    graph = residual_network(signed, zero)
    x = torch.randn(1, 3, 18, 18, generator=torch.Generator().manual_seed(1))
    (expected,) = evaluate(graph, {"x": x})
    result = fp.compile(graph, policy=policy, confirm=False)(x)
    assert result.dtype is torch.float32
    steps = ((result - expected) / STEP).round().abs()
    # roundings of equal numbers differ, and the network passes them on
    assert steps.max() <= 3 and (steps > 0).float().mean() < 0.02


def test_a_plan_says_what_it_stores_as_bytes():
    net = fp.compile(residual_network(), confirm=False)
    formatted = net.compilation.formatted
    for node in formatted.nodes():
        for desc, type_ in zip(node.descs, node.results, strict=True):
            assert desc.dtype is type_.dtype
        if str(node.results[0].dtype if node.results else "") in ("u8", "s8") and node.name in formatted.dependents():
            assert "dst" in node.grids, node.label


# ---------------------------------------------------------------- nodes that stay in floats


def stored_types(net):
    return {
        node.name: {str(desc.dtype) for desc in node.descs} for node in net.graph.nodes() if node.op == "convolution"
    }


def test_named_nodes_stay_in_floats():
    graph, options = residual_network(), {"policy": "propagate"}
    free = fp.compile(graph, **options)
    assert any("u8" in types for types in stored_types(free).values())
    for policy in ("optimal", "propagate"):
        none = fp.compile(graph, keep_float=["*"], policy=policy, confirm=False)
        assert {str(desc.dtype) for node in none.graph.nodes() for desc in node.descs} == {"f32"}
    name = next(name for name, types in stored_types(free).items() if "u8" in types)
    one = fp.compile(graph, keep_float=[name], **options)
    read = next(node for node in one.graph.nodes() if node.name == name).choice.operands
    assert {str(read[operand].dtype) for operand in ("src", "weights")} == {"f32"}
    x = torch.randn(1, 3, 18, 18, generator=torch.Generator().manual_seed(1))
    assert 0 < (one(x) - free(x)).abs().max() <= 3 * STEP


@pytest.mark.parametrize("policy", ["optimal", "propagate"])
def test_nodes_in_floats_read_numbers_that_are_not_rounded(policy):
    x = torch.randn(1, 3, 18, 18, generator=torch.Generator().manual_seed(1))
    floats = fp.compile(residual_network(), keep_float=["*"], policy=policy, confirm=False)(x)
    (expected,) = evaluate(residual_network(kind=Limited), {"x": x})
    assert torch.allclose(floats, expected, atol=1e-5)
    assert not torch.allclose(floats, evaluate(residual_network(), {"x": x})[0], atol=STEP / 4)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["nothing_like_it"], "keep_float has 'nothing_like_it', but no quantized node of quantized has such a name"),
        ("conv_1", "must be a list of names of nodes"),
        ([3], "must be a list of names of nodes"),
    ],
)
def test_a_wrong_name_is_an_error(names, message):
    with pytest.raises(OptionError, match=message):
        fp.compile(residual_network(), keep_float=names)


def test_the_reason_of_a_node_in_floats_names_its_cost_in_bytes():
    graph = residual_network()
    options = {"tune": "model", "confirm": False}
    reasons = [node.choice.reason for node in fp.compile(graph, **options).graph.nodes() if node.op == "convolution"]
    stays = [reason for reason in reasons if "stays in floats" in reason]
    assert all("us in bytes" in reason or "no implementation here" in reason for reason in stays)
    kept = fp.compile(graph, keep_float=["*"], **options).graph
    assert all("that are not rounded" in node.choice.reason for node in kept.nodes() if node.op == "convolution")


def test_what_moves_numbers_moves_bytes_and_rounds_behind():
    net = Network((1, 8, 6, 6), signed=False)
    x = net.rounded(net.convolution(net.rounded(net.value, 100), 16, 3), 90)
    wide = emit(net.graph, "resampling", {"src": x}, Resampling("nearest", (12, 12)))
    mixed = emit(net.graph, "shuffle", {"src": wide}, Shuffle(1, 2))
    scale = net.held(torch.tensor(1.7 * STEP))
    inputs = {"scale": scale, "zero_point": net.held(torch.tensor(9, dtype=torch.uint8))}
    stored = emit(net.graph, "quantize", {"src": mixed, **inputs}, Quantize("u8", 0, 255))
    net.graph.output(emit(net.graph, "dequantize", {"src": stored, **inputs}, Dequantize()))
    normal = fp.compile(net.graph, deterministic=True).compilation.normal
    moving = [node for node in normal.nodes() if node.op in ("resampling", "shuffle")]
    assert len(moving) == 2 and all({"src", "dst"} <= node.grids.keys() and not node.post_ops for node in moving)
    numbers = torch.randn(1, 8, 6, 6, generator=torch.Generator().manual_seed(1))
    for policy in ("propagate", "optimal"):
        result = fp.compile(net.graph, policy=policy, confirm=False)(numbers)
        steps = ((result - evaluate(net.graph, {"x": numbers})[0]) / (1.7 * STEP)).round().abs()
        assert steps.max() <= 1 and (steps > 0).float().mean() < 0.02
