from __future__ import annotations

import math

import pytest
import torch

from fmtprop.errors import GraphError, ShapeError
from fmtprop.ir.graph import Graph
from fmtprop.ir.types import TensorType
from fmtprop.ops import Sum, emit
from fmtprop.ops.sum import SUM

X = TensorType((2, 3))


def test_sources_are_scaled_and_promoted():
    tensors = {"src_0": torch.ones(2, 3, dtype=torch.bfloat16), "src_1": torch.full((2, 3), 3.0)}
    (result,) = SUM.infer(Sum((2.0, -0.5)), {"src_0": X.with_dtype("bf16"), "src_1": X})
    assert result == X
    (total,) = SUM.reference(Sum((2.0, -0.5)), tensors)
    torch.testing.assert_close(total, torch.full((2, 3), 0.5))


def test_low_precision_sources_accumulate_in_f32():
    # In bf16 alone 256 + 1 is 256, twice over.
    values = [torch.tensor([v], dtype=torch.bfloat16) for v in (256.0, 1.0, 1.0)]
    (total,) = SUM.reference(Sum((1.0,) * 3), {f"src_{i}": v for i, v in enumerate(values)})
    assert total.item() == 258
    assert total.dtype == torch.bfloat16


def test_ten_sources_keep_their_order():
    tensors = {f"src_{i}": torch.full((1,), float(i)) for i in reversed(range(11))}
    (total,) = SUM.reference(Sum((0.0,) * 10 + (1.0,)), tensors)
    assert total.item() == 10


@pytest.mark.parametrize(
    ("dims", "scales", "message"),
    [
        ([(2, 3), (2, 1)], (1.0, 1.0), r"src_1 has dimensions \(2, 1\) but src_0 has \(2, 3\); sum does not broadcast"),
        ([(2, 3), (2, 3)], (1.0,), "sum has 2 sources but 1 scales"),
    ],
)
def test_shape_errors(dims, scales, message):
    graph = Graph()
    inputs = {f"src_{i}": graph.input(f"x{i}", TensorType(d)) for i, d in enumerate(dims)}
    with pytest.raises(ShapeError, match=message):
        emit(graph, "sum", inputs, Sum(scales))


def test_scales_are_finite():
    with pytest.raises(ShapeError, match=r"scales\[1\] is inf; a scale must be finite"):
        Sum((1.0, math.inf))


def test_a_gap_in_the_numbering_is_named():
    graph = Graph()
    x = graph.input("x", X)
    with pytest.raises(ShapeError, match="numbered from 0 without gaps"):
        emit(graph, "sum", {"src_0": x, "src_2": x}, Sum((1.0, 1.0)))


def test_no_source_at_all():
    with pytest.raises(GraphError, match="op sum needs operand 'src'"):
        emit(Graph(), "sum", {}, Sum(()))
