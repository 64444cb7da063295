"""Sums and products with one constant number become linear functions."""

from __future__ import annotations

import pytest
import torch

from fmtprop.ir.graph import Graph
from fmtprop.ir.tensors import tensor_type
from fmtprop.ir.types import TensorType
from fmtprop.ops import Binary, Eltwise, emit
from fmtprop.ops.evaluate import evaluate
from fmtprop.passes.rewrites.single_numbers import SingleNumbers

DIMS = (2, 3, 5)


def with_number(alg, number, dims=(1, 1, 1), dtype="f32"):
    graph = Graph(alg)
    data = torch.full(dims, number).to({"f32": torch.float32, "bf16": torch.bfloat16}[dtype])
    inputs = {"src_0": graph.input("x", TensorType(DIMS, dtype)), "src_1": graph.constant("c", tensor_type(data), data)}
    graph.output(emit(graph, "binary", inputs, Binary(alg)))
    return graph


@pytest.mark.parametrize(
    ("alg", "function"),
    [("add", Eltwise("linear", 1.0, 0.5)), ("sub", Eltwise("linear", 1.0, -0.5)), ("mul", Eltwise("linear", 0.5))],
)
def test_a_single_number_is_an_attribute(alg, function):
    graph = with_number(alg, 0.5)
    found = SingleNumbers().run(graph)
    assert [node.attrs for node in found.nodes() if node.op in ("binary", "eltwise")] == [function]
    x = {"x": torch.randn(DIMS)}
    assert torch.equal(evaluate(found, x)[0], evaluate(graph, x)[0])


@pytest.mark.parametrize(
    "graph",
    [
        with_number("div", 3.0),
        with_number("mul", torch.inf),
        with_number("add", torch.nan),
        with_number("mul", 2.0, (1, 1, 5)),
        with_number("mul", 2.0, dtype="bf16"),
    ],
    ids=["division", "inf", "nan", "row", "bf16"],
)
def test_others_stay(graph):
    assert "binary" in [node.op for node in SingleNumbers().run(graph).nodes()]
