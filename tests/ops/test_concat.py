from __future__ import annotations

import pytest
import torch

from fmtprop.errors import ShapeError
from fmtprop.ir.graph import Graph
from fmtprop.ir.node import Value
from fmtprop.ir.types import TensorType
from fmtprop.ops import Concat, emit
from tests.ops.fake_call import FakeCall, check_import

LARGE = TensorType((16, 16, 1))
X, Y = TensorType((2, 6, 4)), TensorType((2, 3, 4))


@pytest.mark.parametrize(
    ("target", "args", "ops"),
    [
        ("aten.cat.default", ([X, Y], 1), ["concat"]),
        ("aten.cat.default", ([X, Y, X], -2), ["concat"]),
        ("aten.cat.default", ([X] * 12,), ["concat"]),
        ("aten.concat.default", ([X, X],), ["concat"]),
        ("aten.stack.default", ([X, X], -1), ["reshape", "reshape", "concat"]),
        ("aten.stack.default", ([X, X, X], 1), ["reshape"] * 3 + ["concat"]),
        ("aten.stack.default", ([X],), ["reshape"]),
        ("aten.stack.default", ([LARGE, LARGE], -1), ["reshape"] * 4 + ["concat", "permute"]),
        ("aten.cat.default", ([LARGE, LARGE, LARGE], 2), ["reshape"] * 3 + ["concat", "permute"]),
        ("aten.cat.default", ([LARGE, LARGE], 1), ["concat"]),
        ("aten.roll.default", (X, [2], [1]), ["slice", "slice", "concat"]),
        ("aten.roll.default", (X, [-7], [-2]), ["slice", "slice", "concat"]),
        ("aten.roll.default", (X, [-1, 3], [1, 2]), ["slice"] * 4 + ["concat"] * 2),
        ("aten.roll.default", (X, [1, 2], [1, 1]), ["slice"] * 4 + ["concat"] * 2),
    ],
)
def test_importers_agree_with_torch(target, args, ops):
    assert sorted(check_import(target, *args).ops()) == sorted(ops)


def test_a_roll_by_the_whole_axis_is_the_tensor():
    assert FakeCall("aten.roll.default", X, [6, 0], [1, 0]).run() == Value("x0")


def test_one_tensor_is_itself():
    assert FakeCall("aten.cat.default", [X]).run() == Value("x0")


INTS = TensorType((2, 3), "s64")
EMPTY = TensorType((0,))


def test_empty_tensors_are_skipped():
    assert FakeCall("aten.cat.default", [EMPTY, X]).run() == Value("x1")
    assert FakeCall("aten.cat.default", [INTS, INTS.with_dims((0, 3))]).run() == Value("x0")
    assert check_import("aten.cat.default", [EMPTY, X, EMPTY, X], 1).ops() == ["concat"]


@pytest.mark.parametrize(
    ("target", "args"),
    [
        ("aten.cat.default", ([INTS, INTS],)),
        ("aten.cat.default", ([X, X.with_dtype("bf16")],)),
        ("aten.cat.default", ([X, TensorType((0,), "f64")],)),
        ("aten.stack.default", ([INTS, INTS],)),
        ("aten.roll.default", (X, [1])),
        ("aten.roll.default", (INTS, [1], [0])),
        ("aten.stack.default", ([TensorType(()), TensorType(())],)),
    ],
)
def test_importers_decline(target, args):
    assert FakeCall(target, *args).run() is None


@pytest.mark.parametrize(
    ("dims", "axis", "message"),
    [
        ([(2, 3), (4, 3)], 1, "src_1 axis 0 has size 4 but src_0 axis 0 has 2; only axis 1 may differ"),
        ([(2, 3), (2, 3, 1)], 1, "src_1 has 3 dimensions but src_0 has 2"),
        ([(2, 3), (2, 3)], 2, "src_0 has 2 dimensions, so there is no axis 2"),
        ([(2, 3), (2, 3)], -1, "axis is -1; count it from the front"),
    ],
)
def test_errors(dims, axis, message):
    graph = Graph()
    inputs = {f"src_{i}": graph.input(f"x{i}", TensorType(d)) for i, d in enumerate(dims)}
    with pytest.raises(ShapeError, match=message):
        emit(graph, "concat", inputs, Concat(axis))


def test_reference_takes_integers():
    from fmtprop.ops.concat import CONCAT

    (joined,) = CONCAT.reference(Concat(0), {"src_0": torch.tensor([1]), "src_1": torch.tensor([2, 3])})
    assert joined.tolist() == [1, 2, 3]
