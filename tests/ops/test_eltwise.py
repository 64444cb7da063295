from __future__ import annotations

import math

import pytest
import torch

from fmtprop.errors import ShapeError
from fmtprop.ir.types import TensorType
from fmtprop.ops.eltwise import ELTWISE, FUNCTIONS, Eltwise, operator
from fmtprop.ops.eltwise_backward import ELTWISE_BACKWARD, EltwiseGradient
from tests.ops.fake_call import FakeCall, check_import, random_tensor

X = TensorType((2, 3, 4))


@pytest.mark.parametrize(
    ("target", "args"),
    [
        ("aten.relu.default", ()),
        ("aten.leaky_relu.default", (0.2,)),
        ("aten.threshold.default", (0, 0)),
        ("aten.tanh.default", ()),
        ("aten.sigmoid.default", ()),
        ("aten.log_sigmoid.default", ()),
        ("aten.silu.default", ()),
        ("aten.mish.default", ()),
        ("aten.gelu.default", ()),
        ("aten.exp.default", ()),
        ("aten.abs.default", ()),
        ("aten.square.default", ()),
        ("aten.neg.default", ()),
        ("aten.round.default", ()),
        ("aten.elu.default", (0.5,)),
        ("aten.celu.default", ()),
        ("aten.softplus.default", ()),
        ("aten.softplus.default", (2,)),
        ("aten.hardsigmoid.default", ()),
        ("aten.hardswish.default", ()),
        ("aten.relu6.default", ()),
        ("aten.hardtanh.default", (-1, 2)),
        ("aten.clamp.default", (-0.5, 0.5)),
        ("aten.clamp.default", (-0.5,)),
        ("aten.clamp.default", (0,)),
        ("aten.clamp_min.default", (-1,)),
        ("aten.clamp_max.default", (1.5,)),
        ("aten.pow.Tensor_Scalar", (2,)),
        ("aten.pow.Tensor_Scalar", (3,)),
        ("aten.pow.Tensor_Scalar", (-1,)),
        ("aten.reciprocal.default", ()),
    ],
)
@pytest.mark.parametrize("type_", [X, TensorType((5,)), X.with_dtype("bf16")])
def test_importers_agree_with_torch(target, args, type_):
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if type_.dtype.value == "bf16" else {}
    assert check_import(target, type_, *args, low=-4.0, high=4.0, **tolerance).ops() == ["eltwise"]


@pytest.mark.parametrize(
    ("target", "args"),
    [
        ("aten.log.default", ()),
        ("aten.sqrt.default", ()),
        ("aten.rsqrt.default", ()),
        ("aten.pow.Tensor_Scalar", (0.5,)),
    ],
)
def test_importers_of_positive_arguments(target, args):
    assert check_import(target, X, *args, low=0.1, high=4.0).ops() == ["eltwise"]


def test_gelu_by_tanh():
    call = check_import("aten.gelu.default", X, approximate="tanh")
    assert call.graph.nodes()[-1].attrs == Eltwise("gelu_tanh")


@pytest.mark.parametrize("target", ["aten.log2.default", "aten.log10.default"])
@pytest.mark.parametrize("type_", [X, X.with_dtype("bf16")])
def test_logarithms_of_other_bases_take_two_functions(target, type_):
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if type_.dtype.value == "bf16" else {}
    assert check_import(target, type_, low=1e-6, high=40.0, **tolerance).ops() == ["eltwise", "eltwise"]


@pytest.mark.parametrize("alpha", [1.5, 2.0])
def test_celu_scales_before_and_after(alpha):
    assert check_import("aten.celu.default", X, alpha, low=-6.0, high=2.0).ops() == ["eltwise"] * 3


def test_a_scaled_elu_takes_two_functions():
    assert check_import("aten.elu.default", X, 1.67, 1.05, low=-3.0).ops() == ["eltwise", "eltwise"]


@pytest.mark.parametrize("alg", ["relu", "clip"])
def test_clamp_at_zero_is_relu(alg):
    call = check_import("aten.clamp.default", X, 0.0 if alg == "relu" else 0.1)
    assert call.graph.nodes()[-1].attrs.alg == alg


INTS = TensorType((2, 3), "s64")


@pytest.mark.parametrize(
    ("target", "args"),
    [
        ("aten.relu.default", (INTS,)),
        ("aten.neg.default", (INTS,)),
        ("aten.sigmoid.default", (INTS,)),
        ("aten.exp.default", (X.with_dtype("f64"),)),
        ("aten.relu.default", (TensorType(()),)),
        ("aten.threshold.default", (X, 0.5, 0.0)),
        ("aten.celu.default", (X, 0.5)),
        ("aten.celu.default", (X, -2.0)),
        ("aten.celu.default", (X, math.inf)),
        ("aten.elu.default", (X, 1.0, 1.0, 2.0)),
        ("aten.softplus.default", (X, 1.0, 10.0)),
        ("aten.clamp.default", (X, 2.0, 1.0)),
        ("aten.clamp.default", (X, math.nan)),
        ("aten.pow.Tensor_Tensor", (X, X)),
        ("aten.sin.default", (X,)),
    ],
)
def test_importers_decline(target, args):
    assert FakeCall(target, *args).run() is None


@pytest.mark.parametrize("sample", list(ELTWISE.samples()), ids=lambda sample: sample.name)
def test_references_keep_shape_and_type(sample):
    for dtype in ("f32", "bf16"):
        type_ = sample.types["src"].with_dtype(dtype)
        (dst,) = ELTWISE.reference(sample.attrs, {"src": random_tensor(type_, sample.low, sample.high)})
        assert dst.dtype == random_tensor(type_).dtype
        assert ELTWISE.infer(sample.attrs, {"src": type_}) == (type_,)
        assert torch.isfinite(dst).all()


def test_every_algorithm_has_a_sample():
    assert {sample.attrs.alg for sample in ELTWISE.samples()} == set(FUNCTIONS)


def test_unknown_algorithm_lists_the_known():
    with pytest.raises(ShapeError, match="eltwise has no algorithm 'sin'; it has relu, tanh"):
        Eltwise("sin")


@pytest.mark.parametrize("bound", [torch.finfo(torch.float32).min, -math.inf, -1.0])
def test_bounds_that_a_data_type_does_not_have_are_its_own(bound):
    """Masks of attention are the largest number of f32, which PyTorch does not take as a bound of bf16."""
    src, dst = torch.tensor([-math.inf, -2.0, 3.0], dtype=torch.bfloat16), torch.empty(3, dtype=torch.bfloat16)
    clip = Eltwise("clip", bound, torch.finfo(torch.float32).max)
    limits = torch.finfo(torch.bfloat16)
    expected = src.clamp(bound if bound == -math.inf else max(bound, limits.min), limits.max)
    assert torch.equal(ELTWISE.reference(clip, {"src": src})[0], expected)
    ELTWISE.pytorch.operator(clip, {"src": src}, [dst])()
    assert torch.equal(dst, expected)


@pytest.mark.parametrize(
    "attrs",
    [
        *(Eltwise("soft_relu", 2.0), Eltwise("soft_relu", -1.0), Eltwise("mish"), Eltwise("gelu_tanh")),
        *(Eltwise(alg, 1 / 6, 0.5) for alg in ("hardsigmoid", "hardswish")),
    ],
    ids=str,
)
def test_one_operator_of_pytorch_computes_a_function(attrs):
    x = torch.tensor([-math.inf, -90.0, -25.0, -4.0, -2.9, -0.1, 0.0, 0.3, 2.9, 4.0, 25.0, 90.0, math.inf, math.nan])
    dst = torch.empty_like(x)
    run = operator(attrs, {"src": x}, [dst])
    assert run is not None
    run()
    torch.testing.assert_close(dst, FUNCTIONS[attrs.alg](x, attrs.alpha, attrs.beta), equal_nan=True)


def test_hard_functions_of_other_constants_have_no_operator():
    assert operator(Eltwise("hardswish", 0.2, 0.5), {"src": torch.ones(3)}, [torch.empty(3)]) is None


@pytest.mark.parametrize(
    "attrs",
    [
        *(EltwiseGradient("gelu_erf"), EltwiseGradient("gelu_tanh"), EltwiseGradient("swish", 1.0)),
        *(EltwiseGradient(alg, by_result=True) for alg in ("tanh", "logistic")),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_operator_of_pytorch_computes_a_gradient(attrs, dtype):
    x = torch.tensor([-25.0, -4.0, -0.9, -0.1, 0.0, 0.3, 0.9, 4.0, 25.0, math.nan], dtype=dtype)
    tensors = {attrs.reads: x, "diff_dst": torch.linspace(-2, 2, 10, dtype=dtype)}
    (expected,) = ELTWISE_BACKWARD.reference(attrs, tensors)
    run = ELTWISE_BACKWARD.pytorch.operator(attrs, tensors, [tensors["diff_dst"]])  # in place
    assert run is not None
    run()
    torch.testing.assert_close(tensors["diff_dst"], expected, equal_nan=True)


def test_gradients_without_an_operator():
    tensors = {"src": torch.ones(3), "dst": torch.ones(3), "diff_dst": torch.ones(3)}
    for attrs in (EltwiseGradient("swish", 2.0), EltwiseGradient("tanh"), EltwiseGradient("mish")):
        assert ELTWISE_BACKWARD.pytorch.operator(attrs, tensors, [torch.empty(3)]) is None
