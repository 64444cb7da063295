"""Normalizations and softmax with the rounding behind them as one node, of bytes and to bytes."""

from __future__ import annotations

import pytest
import torch

import fmtprop as fp
from fmtprop.ir.graph import Graph
from fmtprop.ir.node import Value
from fmtprop.ir.tensors import tensor_type
from fmtprop.ir.types import TensorType
from fmtprop.jit import unavailable
from fmtprop.layout import DataType, MemoryDesc
from fmtprop.ops import FakeQuantize, LayerNorm, Pooling, RmsNorm, Softmax, emit
from fmtprop.ops.evaluate import evaluate
from fmtprop.passes.precision.mark_grids import MarkGrids
from fmtprop.passes.variants.rounded import rounded
from fmtprop.targets import OneDnnTarget

DIMS = (2, 9, 49)
NORMS = {"layer_normalization": LayerNorm(), "rms_normalization": RmsNorm(), "softmax": Softmax(2)}
GRIDS = {"u8": (0.05, 0, 255), "s8": (0.03, -128, 127), "shifted": (0.04, -117, 138)}


def quantized(op, read, made, extra_reader=False, exact=False):
    graph = Graph(op)
    src = graph.input("x", TensorType(DIMS))
    if read:
        src = emit(graph, "fake_quantize", {"src": src}, FakeQuantize(*GRIDS[read]))
    inputs = {"src": src}
    if op != "softmax":
        vector = torch.linspace(-1, 2, DIMS[-1])
        inputs["scale"] = graph.constant("scale", tensor_type(vector), vector)
    norm = emit(graph, op, inputs, NORMS[op])
    if exact:
        graph.replace(graph.node(norm.node).with_(exact=True))
    scale, low, high = GRIDS[made]
    graph.output(
        emit(graph, "fake_quantize", {"src": norm}, FakeQuantize(scale / (8 if op == "softmax" else 1), low, high))
    )
    if extra_reader:
        graph.output(norm)
    return MarkGrids().run(graph)


def last(graph):
    return graph.node(graph.inputs(graph.output_nodes[0].name)["src"].node)


@pytest.mark.parametrize("op", NORMS)
def test_a_normalization_and_its_rounding_are_one_node(op):
    graph = quantized(op, "shifted", "u8")
    found = rounded(graph, last(graph))
    assert found is not None and found.node.op == op and len(found.covers) == 2
    assert {*found.node.grids} == {"src", "dst"} and [one.op for one in found.node.post_ops] == ["fake_quantize"]


@pytest.mark.parametrize("case", ["extra_reader", "exact"])
def test_what_others_read_and_what_keeps_nan_stays(case):
    graph = quantized("softmax", "u8", "u8", **{case: True})
    assert rounded(graph, last(graph)) is None


@pytest.mark.skipif(bool(unavailable()), reason="no kernels run here")
@pytest.mark.parametrize("read", [None, *GRIDS])
@pytest.mark.parametrize("op", NORMS)
def test_kernels_read_and_write_bytes_and_reals(op, read):
    graph = quantized(op, read, "u8")
    found = rounded(graph, last(graph))
    types = [DataType.F32] if read is None else [DataType.F32, DataType.S8 if read == "s8" else DataType.U8]
    for src in types:
        for dst in (DataType.F32, DataType.U8):
            request = {name: MemoryDesc(graph.type_of(value).dims, "f32") for name, value in found.inputs.items()}
            request |= {"src": MemoryDesc(DIMS, src), "dst": MemoryDesc(DIMS, dst)}
            assert [
                c.results[0].dtype for c in OneDnnTarget().candidates(found.node, request) if c.target == "jit"
            ] == [dst]


@pytest.mark.parametrize("made", GRIDS)
@pytest.mark.parametrize("read", [None, *GRIDS])
@pytest.mark.parametrize("op", NORMS)
def test_plans_mean_the_graph(op, read, made):
    graph = quantized(op, read, made)
    x = torch.randn(DIMS, generator=torch.Generator().manual_seed(0)) * 3
    net = fp.compile(graph, confirm=False)
    (expected,) = evaluate(graph, {"x": x})
    steps = (net(x) - expected).abs() / graph.node(last(graph).name).grids["dst"].scale
    assert steps.max() <= 1.01 and (steps > 0.5).float().mean() <= 1e-3
    assert not net.compilation.dropped and not net.compilation.wrong


@pytest.mark.parametrize("read", ["u8", "s8", "shifted"])
def test_averages_of_bytes(read):
    graph = Graph("average")
    src = emit(graph, "fake_quantize", {"src": graph.input("x", TensorType((2, 33, 7, 5)))}, FakeQuantize(*GRIDS[read]))
    mean = emit(graph, "pooling", {"src": src}, Pooling.make("avg_include_padding", (7, 5)))
    graph.output(emit(graph, "fake_quantize", {"src": mean}, FakeQuantize(0.01, -100, 155)))
    x = torch.randn((2, 33, 7, 5), generator=torch.Generator().manual_seed(0)) * 3
    net = fp.compile(graph, confirm=False)
    assert ((net(x) - evaluate(graph, {"x": x})[0]).abs() <= 0.0101).all() and not net.compilation.wrong
    channels_last = MemoryDesc((2, 33, 7, 5), "u8", tag="acdb")
    (pooling,) = [node for node in net.compilation.normal.nodes() if node.op == "pooling"]
    request = {"src": channels_last.with_dtype(pooling.grids["src"].stored), "dst": MemoryDesc.any((2, 33, 1, 1), "u8")}
    if not unavailable():
        assert [one.impl.partition(":")[0] for one in OneDnnTarget().candidates(pooling, request)] == ["average_bytes"]


def test_a_quantized_block_runs_by_kernels_without_another_rounding():
    if unavailable():
        pytest.skip("no kernels run here")
    graph = quantized("layer_normalization", "shifted", "u8")
    net = fp.compile(graph, deterministic=True)
    (norm,) = [node for node in net.compilation.formatted.nodes() if node.op == "layer_normalization"]
    assert norm.choice.target == "jit" and Value(norm.name) == Value(last(graph).name)
