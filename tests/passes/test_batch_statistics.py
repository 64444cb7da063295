"""Gradients of batch normalization read the variance that the forward pass wrote."""

from __future__ import annotations

import pytest

from fmtprop.ir.graph import Graph
from fmtprop.ir.node import Value
from fmtprop.ir.types import TensorType
from fmtprop.ops import Eltwise, emit
from fmtprop.ops.batch_norm_training import BatchStatistics
from fmtprop.passes.batch_statistics import ReadVariance


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
