"""Inner products of rows with a zero point become matrix products."""

from __future__ import annotations

import pytest
import torch

from fmtprop.ir.graph import Graph
from fmtprop.ir.grid import Grid
from fmtprop.ir.tensors import tensor_type
from fmtprop.ir.types import TensorType
from fmtprop.ops import FakeQuantize, InnerProduct, emit
from fmtprop.ops.evaluate import evaluate
from fmtprop.passes.precision.shifted_rows import ShiftedRows


def rows(low, dims=(4, 6), with_grid=True):
    graph, drawn = Graph("rows"), torch.Generator().manual_seed(0)
    src = emit(graph, "fake_quantize", {"src": graph.input("x", TensorType(dims))}, FakeQuantize(0.5, low, low + 255))
    weights = torch.randint(-127, 128, (5, *dims[1:]), generator=drawn) * 0.25
    held = graph.constant("w", tensor_type(weights), weights)
    if with_grid:
        graph.replace(graph.node("w").with_(grids={"dst": Grid((0.25,), -128, 127)}))
    bias = torch.randn(5, generator=drawn)
    inputs = {"src": src, "weights": held, "bias": graph.constant("b", tensor_type(bias), bias)}
    graph.output(emit(graph, "inner_product", inputs, InnerProduct()))
    return graph


@pytest.mark.parametrize("dims", [(4, 6), (4, 6, 1, 1)], ids=str)
def test_rows_with_a_zero_point_become_a_matrix_product(dims):
    graph, x = rows(-117, dims), {"x": torch.randn(dims, generator=torch.Generator().manual_seed(1)) * 40}
    rewritten = ShiftedRows().run(graph)
    (product,) = (node for node in rewritten.nodes() if node.op == "matmul")
    assert rewritten.node(rewritten.inputs(product.name)["weights"].node).grids["dst"] == Grid((0.25,), -128, 127)
    torch.testing.assert_close(evaluate(rewritten, x)[0], evaluate(graph, x)[0])


@pytest.mark.parametrize(
    "graph", [rows(0), rows(-128), rows(-117, with_grid=False), rows(-117, (4, 6, 2, 2))], ids=["u8", "s8", "f32", "4d"]
)
def test_other_inner_products_stay(graph):
    assert "matmul" not in {node.op for node in ShiftedRows().run(graph).nodes()}
