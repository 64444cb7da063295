"""A function behind a batch normalization in training becomes a part of it, with its gradient."""

from __future__ import annotations

import pytest

from fmtprop.ir.graph import Graph
from fmtprop.ir.node import Value
from fmtprop.ir.types import TensorType
from fmtprop.ops import Eltwise, emit
from fmtprop.ops.batch_norm_training import BatchStatistics
from fmtprop.ops.eltwise_backward import EltwiseGradient
from fmtprop.passes.variants.norm_with_function import NormWithFunction

RELU, CLIP = Eltwise("relu"), Eltwise("clip", 0.0, 6.0)


def step(function: Eltwise, *, by_result: bool = False, second_reader: bool = False, epsilon: float = 1e-3) -> Graph:
    """A normalization, a function behind it, and the gradients of both."""
    graph = Graph("step")
    src, diff_dst = (graph.input(name, TensorType((2, 16, 3, 3))) for name in ("src", "diff_dst"))
    scale, shift = (graph.input(name, TensorType((16,))) for name in ("scale", "shift"))
    vectors = {"scale": scale, "shift": shift}
    norm = emit(graph, "batch_normalization_training", {"src": src, **vectors}, BatchStatistics(1e-3))
    dst = emit(graph, "eltwise", {"src": norm}, function)
    gradient = EltwiseGradient(function.alg, function.alpha, function.beta)
    inputs = {"src": dst if by_result else norm, "diff_dst": diff_dst}
    diff = emit(graph, "eltwise_backward", inputs, gradient)
    inputs = {"src": src, "mean": Value(norm.node, 1), "variance": Value(norm.node, 2), "scale": scale}
    back = emit(graph, "batch_normalization_backward", {**inputs, "diff_dst": diff}, BatchStatistics(epsilon))
    graph.output(dst)
    graph.output(back)
    if second_reader:
        graph.output(norm)
    return graph


@pytest.mark.parametrize(("function", "by_result"), [(RELU, True), (RELU, False), (CLIP, False)])
def test_both_are_fused(function, by_result):
    graph = NormWithFunction().run(step(function, by_result=by_result))
    assert graph.count("eltwise") == graph.count("eltwise_backward") == 0
    expected = BatchStatistics(1e-3, function.alg, function.alpha, function.beta)
    assert graph.node("bn_1").attrs == graph.node("bn_back_1").attrs == expected
    assert graph.inputs("bn_back_1")["shift"] == Value("shift")
    assert graph.inputs("bn_back_1")["diff_dst"] == Value("diff_dst")


def test_a_gradient_by_the_result_stays_if_it_has_another_normalization():
    graph = NormWithFunction().run(step(RELU, by_result=True, epsilon=1e-5))
    assert (graph.count("eltwise"), graph.count("eltwise_backward")) == (0, 1)
    assert graph.node("bn_back_1").attrs == BatchStatistics(1e-5)


@pytest.mark.parametrize(
    ("function", "how"),
    [
        (CLIP, {"second_reader": True}),
        (CLIP, {"epsilon": 1e-5}),
        (Eltwise("relu", 0.1), {}),
        (Eltwise("swish", 1.0), {}),
    ],
)
def test_nothing_is_fused_that_others_read_or_that_is_another_function(function, how):
    graph = step(function, **how)
    assert NormWithFunction().run(graph) is graph
