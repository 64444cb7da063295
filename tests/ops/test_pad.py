from __future__ import annotations

import pytest

from fmtprop.errors import ShapeError
from fmtprop.ir.graph import Graph
from fmtprop.ir.node import Value
from fmtprop.ir.types import TensorType
from fmtprop.ops import Pad, emit
from tests.ops.fake_call import FakeCall, check_import

X = TensorType((2, 6, 4, 5))


@pytest.mark.parametrize(
    ("target", "args", "pads"),
    [
        ("aten.constant_pad_nd.default", (X, [1, 2]), ((0, 0, 0, 1), (0, 0, 0, 2))),
        ("aten.constant_pad_nd.default", (X, [0, 1, 2, 3], -1.5), ((0, 0, 2, 0), (0, 0, 3, 1))),
        ("aten.constant_pad_nd.default", (X, [0, 0, 0, 0, 0, 2, 1, 0], 3), ((1, 0, 0, 0), (0, 2, 0, 0))),
        ("aten.pad.default", (X, [1, 0, 0, 4]), ((0, 0, 0, 1), (0, 0, 4, 0))),
        ("aten.pad.default", (X, [1, 1], "constant", 2.0), ((0, 0, 0, 1), (0, 0, 0, 1))),
    ],
)
def test_importers_agree_with_torch(target, args, pads):
    call = check_import(target, *args)
    (node,) = (node for node in call.graph.nodes() if node.op == "pad")
    assert (node.attrs.pads_l, node.attrs.pads_r) == pads


@pytest.mark.parametrize("mode", ["constant", "reflect", "replicate", "circular"])
def test_no_padding_is_the_argument(mode):
    assert FakeCall("aten.constant_pad_nd.default", X, [0, 0, 0, 0]).run() == Value("x0")
    assert FakeCall("aten.pad.default", X, [0, 0, 0, 0], mode).run() == Value("x0")


@pytest.mark.parametrize(
    ("target", "args"),
    [
        ("aten.pad.default", (X, [1, 1, 1, 1], "reflect")),
        ("aten.pad.default", (X, [0, 1, 0, 0], "circular")),
        ("aten.constant_pad_nd.default", (X, [-1, 1])),
        ("aten.constant_pad_nd.default", (X.with_dtype("s64"), [1, 1])),
    ],
)
def test_importers_decline(target, args):
    assert FakeCall(target, *args).run() is None


@pytest.mark.parametrize(
    ("attrs", "message"),
    [
        (lambda: Pad((0, -1), (0, 0)), r"pads_l\[1\] is -1; padding cannot be negative"),
        (lambda: Pad((0, 1), (0, 0)), "must have one entry per axis of src, which has 4"),
    ],
)
def test_errors(attrs, message):
    graph = Graph()
    x = graph.input("x", X)
    with pytest.raises(ShapeError, match=message):
        emit(graph, "pad", {"src": x}, attrs())
