from __future__ import annotations

import math

import pytest
import torch

from fmtprop.errors import ShapeError
from fmtprop.ir.graph import Graph
from fmtprop.ir.types import TensorType
from fmtprop.ops import Binary, emit
from fmtprop.ops.binary import BINARY, FUNCTIONS
from tests.ops.fake_call import FakeCall, check_import, random_tensor

X = TensorType((2, 6, 4, 5))
CHANNELS = TensorType((6, 1, 1))


@pytest.mark.parametrize("alg", FUNCTIONS)
def test_result_is_the_broadcast_in_the_promoted_type(alg):
    types = {"src_0": TensorType((2, 1, 3), "bf16"), "src_1": TensorType((1, 4, 1), "f32")}
    (result,) = BINARY.infer(Binary(alg), types)
    assert result == TensorType((2, 4, 3), "f32")
    (value,) = BINARY.reference(Binary(alg), {name: random_tensor(t, 0.5, 2.0) for name, t in types.items()})
    assert tuple(value.shape) == result.dims
    assert value.dtype == torch.float32


def test_size_one_broadcasts_against_an_empty_axis():
    types = {"src_0": TensorType((0, 3)), "src_1": TensorType((1, 3))}
    assert BINARY.infer(Binary("add"), types)[0].dims == (0, 3)


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        ((2, 3), (2, 4), "src_0 axis 1 has size 3 but src_1 axis 1 has 4; only size 1 broadcasts"),
        ((2, 3), (3,), "src_0 has 2 dimensions but src_1 has 1; give the smaller one leading dimensions"),
    ],
)
def test_errors_name_axis_and_sizes(a, b, message):
    graph = Graph()
    inputs = {"src_0": graph.input("a", TensorType(a)), "src_1": graph.input("b", TensorType(b))}
    with pytest.raises(ShapeError, match=message):
        emit(graph, "binary", inputs, Binary("add"))


def test_unknown_algorithm_lists_the_known():
    with pytest.raises(ShapeError, match="binary has no algorithm 'xor'; it has add, sub"):
        Binary("xor")


IMPORTS = [
    ("aten.add.Tensor", (X, X), ["binary"]),
    ("aten.mul.Tensor", (X, CHANNELS), ["reshape", "binary"]),
    ("aten.mul.Tensor", (CHANNELS, X), ["reshape", "binary"]),
    ("aten.sub.Tensor", (CHANNELS, X), ["reshape", "eltwise", "binary"]),
    ("aten.div.Tensor", (CHANNELS, X), ["reshape", "eltwise", "binary"]),
    ("aten.rsub.Tensor", (X, CHANNELS), ["reshape", "eltwise", "binary"]),
    ("aten.maximum.default", (X, X), ["binary"]),
    ("aten.minimum.default", (CHANNELS, X), ["reshape", "binary"]),
    ("aten.div.Tensor", (X, X), ["binary"]),
    ("aten.add.Tensor", (X, TensorType(())), ["reshape", "binary"]),
    ("aten.add.Tensor", (TensorType((3, 4), "bf16"), TensorType((3, 4), "f32")), ["binary"]),
    # scalars
    ("aten.add.Tensor", (X, 2), ["eltwise"]),
    ("aten.add.Tensor", (X, torch.tensor(2.5)), ["eltwise"]),
    ("aten.add.Tensor", (torch.tensor(2.5), X), ["eltwise"]),
    ("aten.add.Tensor", (CHANNELS, torch.full((1, 1, 1, 1), 2.5)), ["eltwise", "reshape"]),
    ("aten.sub.Tensor", (X, 0.5), ["eltwise"]),
    ("aten.sub.Tensor", (torch.tensor(0.5), X), ["eltwise"]),
    ("aten.rsub.Scalar", (X, 1.0), ["eltwise"]),
    ("aten.mul.Tensor", (X, 3), ["eltwise"]),
    ("aten.mul.Tensor", (TensorType((3, 4), "bf16"), 0.25), ["eltwise"]),
    ("aten.div.Tensor", (X, 4.0), ["eltwise"]),
    ("aten.div.Tensor", (torch.tensor(2.0), X), ["eltwise"]),
    ("aten.maximum.default", (X, torch.tensor(0.0)), ["eltwise"]),
    ("aten.maximum.default", (torch.tensor(0.1), X), ["eltwise"]),
    ("aten.minimum.default", (X, torch.tensor(0.1)), ["eltwise"]),
    ("aten.clamp.Tensor", (X, CHANNELS, X), ["reshape", "binary", "binary"]),
    ("aten.clamp.Tensor", (X, None, torch.tensor(0.5)), ["eltwise"]),
    ("aten.add.Tensor", (TensorType(()), TensorType(())), ["reshape", "reshape", "binary", "reshape"]),
    ("aten.mul.Tensor", (TensorType(()), torch.tensor(0.5)), ["reshape", "eltwise", "reshape"]),
    ("aten.clamp_min.Tensor", (X, X), ["binary"]),
    ("aten.clamp_max.Tensor", (X, CHANNELS), ["reshape", "binary"]),
]


@pytest.mark.parametrize(("target", "args", "ops"), IMPORTS)
def test_importers_agree_with_torch(target, args, ops):
    assert sorted(check_import(target, *args, low=0.1).ops()) == sorted(ops)


@pytest.mark.parametrize(
    ("target", "args", "ops"),
    [
        ("aten.add.Tensor", (X, X), ["sum"]),
        ("aten.sub.Tensor", (X, X), ["sum"]),
        ("aten.add.Tensor", (X, CHANNELS), ["reshape", "eltwise", "binary"]),
        ("aten.sub.Tensor", (CHANNELS, X), ["reshape", "eltwise", "eltwise", "binary"]),
        ("aten.rsub.Tensor", (X, X), ["sum"]),
        ("aten.add.Tensor", (X, 3), ["eltwise"]),
        ("aten.sub.Tensor", (X, 3), ["eltwise"]),
        ("aten.sub.Tensor", (torch.tensor(3.0), X), ["eltwise"]),
        ("aten.add.Tensor", (torch.tensor(3.0), X), ["eltwise"]),
    ],
)
def test_alpha_scales_the_second_operand(target, args, ops):
    assert sorted(check_import(target, *args, alpha=0.25).ops()) == sorted(ops)


INTS = TensorType((2, 3), "s64")


@pytest.mark.parametrize(
    ("target", "args", "kwargs"),
    [
        ("aten.add.Tensor", (INTS, INTS), {}),
        ("aten.add.Tensor", (INTS, 1), {}),
        ("aten.mul.Tensor", (INTS, 0.5), {}),
        ("aten.mul.Tensor", (X, TensorType((5,), "s64")), {}),
        ("aten.mul.Tensor", (TensorType((2, 3), "f64"), 2.0), {}),
        ("aten.div.Tensor_mode", (X, X), {"rounding_mode": "floor"}),
        ("aten.div.Tensor", (X, 0.0), {}),
        ("aten.mul.Tensor", (X, math.inf), {}),
        ("aten.mul.Tensor", (X, 1e300), {}),
        ("aten.mul.Tensor", (TensorType((3, 1)), TensorType((1, 4))), {}),
        ("aten.mul.Tensor", (TensorType((2, 3), "bf16"), torch.ones(1)), {}),
        ("aten.mul.Tensor", (TensorType((2, 3), "bf16"), TensorType(())), {}),
        ("aten.eq.Tensor", (X, X), {}),
        ("aten.clamp.Tensor", (CHANNELS, X), {}),
        ("aten.clamp.Tensor", (INTS, INTS), {}),
    ],
)
def test_importers_decline(target, args, kwargs):
    assert FakeCall(target, *args, **kwargs).run() is None


def test_the_whole_operand_comes_first():
    # oneDNN's fast code broadcasts src_1 only.
    call = FakeCall("aten.mul.Tensor", CHANNELS, X)
    inputs = call.graph.inputs(call.run().node)
    assert call.type(inputs["src_0"]).dims == X.dims
