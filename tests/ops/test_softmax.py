from __future__ import annotations

import pytest
import torch

from fmtprop.errors import ShapeError
from fmtprop.ir.graph import Graph
from fmtprop.ir.types import TensorType
from fmtprop.ops import Softmax, emit
from tests.ops.fake_call import FakeCall, check_import

X, NARROW, INTS = TensorType((2, 3, 4)), TensorType((2, 3, 4), "bf16"), TensorType((2, 3), "s64")


@pytest.mark.parametrize(
    ("target", "args", "ops"),
    [
        ("aten.softmax.int", (X, -1), ["softmax"]),
        ("aten.softmax.int", (NARROW, 1), ["softmax"]),
        ("aten.softmax.int", (NARROW, 1, torch.float32), ["reorder", "softmax"]),
        ("aten.log_softmax.int", (X, 0), ["softmax"]),
        ("aten._softmax.default", (X, 2, False), ["softmax"]),
        ("aten._log_softmax.default", (X, -2, False), ["softmax"]),
        ("aten.special_log_softmax.default", (X, 1), ["softmax"]),
    ],
)
def test_importers_agree_with_torch(target, args, ops):
    assert check_import(target, *args).ops() == ops


@pytest.mark.parametrize(
    ("target", "args"),
    [
        ("aten.softmax.int", (INTS, 1, torch.float32)),
        ("aten.softmax.int", (TensorType((2, 3), "f64"), 1)),
        ("aten.softmax.int", (TensorType(()), 0)),
    ],
)
def test_importers_decline(target, args):
    assert FakeCall(target, *args).run() is None


@pytest.mark.parametrize(
    ("attrs", "message"),
    [
        (lambda: Softmax(3), "src has 3 dimensions, so there is no axis 3 for softmax"),
        (lambda: Softmax(-1), "axis is -1; count it from the front"),
        (lambda: Softmax(1, "fast"), "softmax has no algorithm 'fast'; it has accurate, log"),
    ],
)
def test_errors(attrs, message):
    graph = Graph()
    x = graph.input("x", X)
    with pytest.raises(ShapeError, match=message):
        emit(graph, "softmax", {"src": x}, attrs())
