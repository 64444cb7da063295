"""Nodes that read numbers without roundings."""

from __future__ import annotations

import pytest
import torch

from fmtprop.errors import OptionError
from fmtprop.ir.graph import Graph
from fmtprop.ir.types import TensorType
from fmtprop.ops import Concat, Eltwise, FakeQuantize, MatMul, Permute, Pooling, emit
from fmtprop.ops.evaluate import evaluate
from fmtprop.passes.precision.keep_float import KeepFloat, quantized_nodes

ROUNDING = FakeQuantize(0.5, -10, 10)


def behind(view):
    """Return a graph of two readers of a rounded tensor, behind an op that keeps its numbers."""
    graph = Graph("two")
    x = graph.input("x", TensorType((1, 2, 4, 4)))
    rounded = view(graph, emit(graph, "fake_quantize", {"src": x}, ROUNDING))
    graph.output(emit(graph, "eltwise", {"src": rounded}, Eltwise("tanh"), name="one", origin="head.0"))
    graph.output(emit(graph, "eltwise", {"src": rounded}, Eltwise("tanh"), name="other"))
    return graph


VIEWS = {
    "nothing": lambda graph, value: value,
    "a permutation": lambda graph, value: emit(graph, "permute", {"src": value}, Permute((0, 2, 3, 1))),
    "a maximum": lambda graph, value: emit(graph, "pooling", {"src": value}, Pooling.make("max", (2, 2), 2)),
    "a concat": lambda graph, value: emit(graph, "concat", {"src_0": value, "src_1": value}, Concat(1)),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("pattern", ["one", "head.*"])
def test_a_named_node_reads_numbers_of_the_same_range_without_rounding(view, pattern):
    graph = behind(view)
    x = torch.linspace(-7, 7, 32).reshape(1, 2, 4, 4)
    one, other = evaluate(KeepFloat((pattern,)).run(graph), {"x": x})
    limited = Graph("limited")
    value = emit(limited, "eltwise", {"src": limited.input("x", TensorType(x.shape))}, Eltwise("clip", -5.0, 5.0))
    limited.output(emit(limited, "eltwise", {"src": view(limited, value)}, Eltwise("tanh")))
    assert torch.equal(one, evaluate(limited, {"x": x})[0])
    assert torch.equal(other, evaluate(graph, {"x": x})[1])
    assert not torch.equal(one, other)


def test_a_node_that_passes_numbers_on_is_none_that_is_quantized():
    graph = behind(VIEWS["a maximum"])
    assert [node.name for node in quantized_nodes(graph)] == ["one", "other"]
    with pytest.raises(OptionError, match=r"keep_float has 'max_1', but no quantized node of two .*: one, other$"):
        KeepFloat(("max_1",)).run(graph)


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_names_stay_where_no_other_node_reads_the_rounding(view):
    graph = behind(view)
    kept = KeepFloat(("*",)).run(graph)
    assert [node.name for node in kept.nodes()] == [node.name for node in graph.nodes()]
    assert not kept.count("fake_quantize")


def test_an_output_and_both_operands_of_a_product_may_be_rounded():
    graph = Graph("product")
    x = emit(graph, "fake_quantize", {"src": graph.input("x", TensorType((3, 3)))}, ROUNDING)
    graph.output(
        emit(graph, "fake_quantize", {"src": emit(graph, "matmul", {"src": x, "weights": x}, MatMul())}, ROUNDING)
    )
    assert [node.op for node in quantized_nodes(graph)] == ["matmul", "output"]
    kept = KeepFloat(("*",)).run(graph)
    assert not kept.count("fake_quantize")
    numbers = torch.full((3, 3), 0.7)
    assert torch.allclose(evaluate(kept, {"x": numbers})[0], numbers @ numbers)
