from __future__ import annotations

import pytest
import torch

from fmtprop.errors import ShapeError
from fmtprop.ir.graph import Graph
from fmtprop.ir.types import TensorType
from fmtprop.ops import Shuffle, emit
from fmtprop.ops.shuffle import SHUFFLE
from tests.ops.fake_call import FakeCall, check_import

X = TensorType((2, 6, 4, 5))


@pytest.mark.parametrize("target", ["aten.channel_shuffle.default", "aten.native_channel_shuffle.default"])
@pytest.mark.parametrize("type_", [X, TensorType((2, 6, 4)), X.with_dtype("bf16")])
def test_importer_agrees_with_torch(target, type_):
    assert check_import(target, type_, 3).ops() == ["shuffle"]


def test_integers_are_declined():
    assert FakeCall("aten.channel_shuffle.default", X.with_dtype("s64"), 3).run() is None


def test_reference_is_the_usual_view_transpose_view():
    x = torch.arange(2 * 6 * 4).view(2, 6, 4)
    (dst,) = SHUFFLE.reference(Shuffle(1, 2), {"src": x})
    assert torch.equal(dst, x.view(2, 2, 3, 4).transpose(1, 2).reshape(2, 6, 4))


@pytest.mark.parametrize(
    ("attrs", "message"),
    [
        (lambda: Shuffle(1, 4), "src axis 1 has size 6, which is not divisible by groups 4"),
        (lambda: Shuffle(4, 1), "src has 4 dimensions, so there is no axis 4 to shuffle"),
        (lambda: Shuffle(1, 0), "axis is 1 and groups 0; they must be at least 0 and 1"),
    ],
)
def test_errors(attrs, message):
    graph = Graph()
    x = graph.input("x", X)
    with pytest.raises(ShapeError, match=message):
        emit(graph, "shuffle", {"src": x}, attrs())
