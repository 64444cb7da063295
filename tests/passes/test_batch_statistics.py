"""Gradients of normalizations read the variance that the forward pass wrote."""

from __future__ import annotations

import pytest

from fmtprop.ir.graph import Graph
from fmtprop.ir.node import Value
from fmtprop.ir.types import TensorType
from fmtprop.ops import Eltwise, emit
from fmtprop.ops.batch_norm_training import BatchStatistics
from fmtprop.ops.normalization import LayerNorm
from fmtprop.ops.view_attrs import Reshape
from fmtprop.passes.training.batch_statistics import ReadVariance


def step(saved_epsilon: float) -> Graph:
    """A normalization and its gradient, with PyTorch's inverse deviation between them."""
    graph = Graph("step")
    src, diff_dst = (graph.input(name, TensorType((2, 4, 3, 3))) for name in ("src", "diff_dst"))
    dst = emit(graph, "batch_normalization_training", {"src": src}, BatchStatistics(1e-3))
    value = Value(dst.node, 2)
    detour = Eltwise("linear", 1.0, saved_epsilon), Eltwise("pow", 1.0, -0.5), Eltwise("pow", 1.0, -2.0)
    for function in (*detour, Eltwise("linear", 1.0, -1e-3)):
        value = emit(graph, "eltwise", {"src": value}, function)
    inputs = {"src": src, "mean": Value(dst.node, 1), "variance": value, "diff_dst": diff_dst}
    graph.output(dst)
    graph.output(emit(graph, "batch_normalization_backward", inputs, BatchStatistics(1e-3)))
    return graph


@pytest.mark.parametrize(("epsilon", "left"), [(1e-3, 0), (1e-5, 4)])
def test_the_detour_is_removed_where_it_is_none(epsilon, left):
    graph = ReadVariance().run(step(epsilon))
    assert graph.count("eltwise") == left
    variance = graph.inputs("bn_back_1")["variance"]
    assert (variance == Value("bn_1", 2)) == (left == 0)


@pytest.mark.parametrize(("power", "left"), [(-0.5, 0), (-1.0, 3)])
def test_a_layer_normalization_gets_the_forwards_epsilon_too(power, left):
    graph = Graph("step")
    src, diff_dst = (graph.input(name, TensorType((2, 3, 8))) for name in ("src", "diff_dst"))
    dst = emit(graph, "layer_normalization_training", {"src": src}, LayerNorm(1e-3))
    above = emit(graph, "eltwise", {"src": Value(dst.node, 2)}, Eltwise("linear", 1.0, 1e-3))
    inverse = emit(graph, "eltwise", {"src": above}, Eltwise("pow", 1.0, power))
    seen = emit(graph, "reshape", {"src": inverse}, Reshape((2, 3, 1)))
    back = emit(graph, "reshape", {"src": seen}, Reshape((2, 3)))
    both = emit(graph, "eltwise", {"src": back}, Eltwise("pow", 1.0, -2.0))
    inputs = {"src": src, "mean": Value(dst.node, 1), "variance": both, "diff_dst": diff_dst}
    gradient = emit(graph, "layer_normalization_backward", inputs, LayerNorm(0.0))
    graph.output(dst)
    graph.output(gradient)
    found = ReadVariance().run(graph)
    assert found.count("eltwise") == left
    assert (found.inputs(gradient.node)["variance"] == Value(dst.node, 2)) == (left == 0)
    assert found.node(gradient.node).attrs == LayerNorm(0.0 if left else 1e-3)
