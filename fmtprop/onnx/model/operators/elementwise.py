"""Element-wise operators."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from typing import Any, Final

import torch
import torch.nn.functional as F
from onnx import TensorProto
from torch import Tensor

from fmtprop.onnx.model.elements import TORCH_DTYPES
from fmtprop.onnx.model.operators.attributes import WIDER, calling, widened
from fmtprop.onnx.model.operators.values import NotInTorchError, axis_of, flag, integer, number
from fmtprop.ops.pytorch import prelu_kernel

#: the largest f32 number
_LARGEST: Final = 3.4028234663852886e38


def _div(a: Tensor, b: Tensor) -> Tensor:
    return a / b if a.is_floating_point() else torch.div(a, b, rounding_mode="trunc")


def _mod(a: Tensor, b: Tensor, *, fmod: int = 0) -> Tensor:
    if a.dtype is torch.uint64:
        raise NotInTorchError("uint64")
    wide = WIDER.get(a.dtype, a.dtype)
    return (torch.fmod if fmod else torch.remainder)(a.to(wide), b.to(wide)).to(a.dtype)


def _pow(a: Tensor, b: Tensor) -> Tensor:
    exponent = number(b)
    if isinstance(exponent, int | float) and a.is_floating_point() and a.ndim >= b.ndim:
        return torch.pow(a, exponent)
    if not a.is_floating_point() and b.is_floating_point():
        return torch.pow(a.to(torch.float64), b.to(torch.float64)).to(a.dtype)
    return torch.pow(a.to(WIDER.get(a.dtype, a.dtype)), b.to(WIDER.get(b.dtype, b.dtype))).to(a.dtype)


def _variadic(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    wide = widened(function)

    def variadic(*operands: Tensor) -> Tensor:
        return reduce(wide, operands)

    return variadic


def _mean(*operands: Tensor) -> Tensor:
    return reduce(torch.add, operands) / len(operands)


def _rounding(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: function(x) if x.is_floating_point() else x


def _bit_shift(x: Tensor, y: Tensor, *, direction: str) -> Tensor:
    if x.dtype is torch.uint64:
        return _bit_shift_64(x.view(torch.int64), y.view(torch.int64), direction).view(torch.uint64)
    wide = WIDER.get(x.dtype, x.dtype)
    shift = torch.bitwise_left_shift if direction == "LEFT" else torch.bitwise_right_shift
    return shift(x.to(wide), y.to(wide)).to(x.dtype)


def _bit_shift_64(x: Tensor, y: Tensor, direction: str) -> Tensor:
    """Shift the bits of unsigned numbers that are given as signed ones: to the right, zeros come in, not the sign."""
    if direction == "LEFT":
        return torch.bitwise_left_shift(x, y)
    sign = torch.full_like(x, torch.iinfo(torch.int64).min)
    copies = torch.bitwise_left_shift(torch.bitwise_right_shift(sign, y), 1)
    return torch.bitwise_right_shift(x, y) & ~copies


def _sign(x: Tensor) -> Tensor:
    """Return the signs, NaN for NaN, where PyTorch's function gives 0."""
    return torch.where(x != x, x, torch.sign(x)) if x.is_floating_point() else torch.sign(x)


# ---------------------------------------------------------------- activations


_SELU_ALPHA, _SELU_GAMMA = 1.67326319217681884765625, 1.05070102214813232421875


def _selu(x: Tensor, *, alpha: float = _SELU_ALPHA, gamma: float = _SELU_GAMMA) -> Tensor:
    if math.isclose(alpha, _SELU_ALPHA, rel_tol=1e-6) and math.isclose(gamma, _SELU_GAMMA, rel_tol=1e-6):
        return F.selu(x)
    return gamma * torch.where(x > 0, x, alpha * torch.expm1(x))


def _hard_sigmoid(x: Tensor, *, alpha: float = 0.2, beta: float = 0.5) -> Tensor:
    if math.isclose(alpha, 1 / 6, rel_tol=1e-6) and beta == 0.5:
        return F.hardsigmoid(x)
    return torch.clamp(alpha * x + beta, 0, 1)


def _shrink(x: Tensor, *, lambd: float = 0.5, bias: float = 0.0) -> Tensor:
    wide = x if x.is_floating_point() else x.to(torch.float64)
    result = torch.where(wide < -lambd, wide + bias, torch.where(wide > lambd, wide - bias, torch.zeros_like(wide)))
    return result.to(x.dtype)


def _prelu(x: Tensor, slope: Tensor) -> Tensor:
    if not x.is_floating_point() or slope.ndim > x.ndim:
        return torch.where(x < 0, x * slope, x)
    if slope.numel() == 1:
        return F.prelu(x, slope.reshape(1))
    return prelu_kernel(x, slope.reshape((1,) * (x.ndim - slope.ndim) + slope.shape))


def _swish(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    return F.silu(x) if alpha == 1.0 else x * torch.sigmoid(alpha * x)


def _swiglu(a: Tensor, b: Tensor, *, alpha: float = 1.0) -> Tensor:
    return _swish(a, alpha=alpha) * b


def _clip(x: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
    if low is None and high is None:
        return x
    if x.dtype in WIDER:
        wide = (None if bound is None else bound.to(torch.int64) for bound in (low, high))
        return _clip(x.to(torch.int64), *wide).to(x.dtype)
    if x.dtype is torch.uint64:
        raise NotInTorchError("uint64")
    bounds = [None if bound is None else number(bound) for bound in (low, high)]
    if any(isinstance(bound, Tensor) for bound in bounds):
        bounds = [low, high]
    return torch.clamp(x, *bounds)


# ---------------------------------------------------------------- types and tests


def _cast(x: Tensor, *, to: int, saturate: int = 1, round_mode: str = "up", rounded: bool) -> Tensor:
    if to not in TORCH_DTYPES:
        if to not in TensorProto.DataType.values():
            raise ValueError(f"to is {to}, which is no element type of ONNX")
        raise NotInTorchError("an element type that PyTorch does not compute with")
    dtype = TORCH_DTYPES[to]
    if rounded and x.dtype is torch.float32 and dtype is torch.int32:
        return torch.trunc(x)
    if dtype is torch.bool:
        return x != 0
    if x.is_floating_point() and not dtype.is_floating_point and not dtype.is_complex and dtype is not torch.int64:
        return x.to(torch.int64).to(dtype)  # numbers beyond the range wrap as in numpy
    return x.to(dtype)


def _cast_like(x: Tensor, like: Tensor, *, saturate: int = 1, round_mode: str = "up") -> Tensor:
    if not isinstance(like, Tensor):
        raise NotInTorchError("an element type that PyTorch does not compute with")
    return x != 0 if like.dtype is torch.bool else x.to(like.dtype)


def _bit_cast(x: Tensor, *, to: int) -> Tensor:
    if to not in TORCH_DTYPES:
        raise NotInTorchError("an element type that PyTorch does not compute with")
    if TORCH_DTYPES[to].itemsize != x.dtype.itemsize:
        raise ValueError(f"BitCast joins or parts no elements: {x.dtype} to {TORCH_DTYPES[to]}")
    return x.view(TORCH_DTYPES[to])


def _is_inf(x: Tensor, *, detect_negative: int = 1, detect_positive: int = 1) -> Tensor:
    if detect_negative and detect_positive:
        return torch.isinf(x)
    if detect_positive:
        return torch.isposinf(x)
    return torch.isneginf(x) if detect_negative else torch.zeros_like(x, dtype=torch.bool)


def _dropout(
    x: Tensor, ratio: Tensor | None = None, training: Tensor | None = None, *, seed: int = 0, wanted: int
) -> Any:
    if training is not None and flag(training, "training_mode") and (ratio is None or number(ratio) != 0):
        raise NotImplementedError("training mode, which draws random numbers (export the model for inference),")
    return (x, torch.ones_like(x, dtype=torch.bool)) if wanted > 1 else x


def _dropout_by_attributes(x: Tensor, *, ratio: float = 0.5, wanted: int) -> Any:
    return (x, torch.ones_like(x, dtype=torch.bool)) if wanted > 1 else x


# ---------------------------------------------------------------- along an axis


_SOFTMAX: Final = calling(lambda x, axis: F.softmax(x, axis_of(axis, x.ndim)), axis=-1)
_LOG_SOFTMAX: Final = calling(lambda x, axis: F.log_softmax(x, axis_of(axis, x.ndim)), axis=-1)


def _hardmax(x: Tensor, *, axis: int = -1) -> Tensor:
    n = x.shape[axis]
    shape = [1] * x.ndim
    shape[axis] = n
    return (torch.arange(n).reshape(shape) == x.argmax(axis, keepdim=True)).to(x.dtype)


def _flattened(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the function's definition before opset 13, over the given axis and all later ones."""

    def flat(x: Tensor, *, axis: int = 1) -> Tensor:
        axis = axis_of(axis, x.ndim)
        if axis == x.ndim - 1:
            return function(x, axis=-1)
        return function(x.reshape(*x.shape[:axis], -1), axis=-1).reshape(x.shape)

    return flat


def _cumulative(function: Callable[..., Tensor], neutral: int) -> Callable[..., Tensor]:
    def cumulative(x: Tensor, axis: Tensor, *, exclusive: int = 0, reverse: int = 0) -> Tensor:
        dim = axis_of(integer(axis, "axis"), x.ndim)
        turned = x.flip(dim) if reverse else x
        if exclusive and x.shape[dim]:
            first = torch.full_like(turned.narrow(dim, 0, 1), neutral)
            turned = torch.cat([first, turned.narrow(dim, 0, x.shape[dim] - 1)], dim)
        result = function(turned, dim, dtype=x.dtype)
        return result.flip(dim) if reverse else result

    return cumulative


_UNARY: Final[dict[str, Callable[..., Tensor]]] = {
    "Acos": torch.acos, "Acosh": torch.acosh, "Asin": torch.asin, "Asinh": torch.asinh,
    "Atan": torch.atan, "Atanh": torch.atanh, "Cos": torch.cos, "Cosh": torch.cosh, "Erf": torch.erf,
    "Exp": torch.exp, "Log": torch.log, "Reciprocal": torch.reciprocal, "Relu": F.relu, "Sigmoid": torch.sigmoid,
    "Sin": torch.sin, "Sinh": torch.sinh, "Softsign": F.softsign, "Sqrt": torch.sqrt,
    "Tan": torch.tan, "Tanh": torch.tanh, "Not": torch.logical_not,
    "HardSwish": F.hardswish, "Mish": F.mish, "IsNaN": torch.isnan, "Neg": torch.neg,
}  # fmt: skip
_BINARY: Final[dict[str, Callable[..., Tensor]]] = {
    "Add": torch.add, "Sub": torch.sub, "Mul": torch.mul, "Div": _div, "And": torch.logical_and,
    "Or": torch.logical_or, "Xor": torch.logical_xor, "Equal": torch.eq, "Greater": torch.gt, "Less": torch.lt,
    "GreaterOrEqual": torch.ge, "LessOrEqual": torch.le, "BitwiseAnd": torch.bitwise_and,
    "BitwiseOr": torch.bitwise_or, "BitwiseXor": torch.bitwise_xor,
}  # fmt: skip

OPERATORS: Final[dict[str, Callable[..., Any]]] = {
    **{name: calling(function) for name, function in _UNARY.items()},
    "Abs": calling(widened(torch.abs)),
    "Sign": calling(widened(_sign)),
    "BitwiseNot": calling(widened(torch.bitwise_not)),
    **{name: calling(widened(function), 2) for name, function in _BINARY.items()},
    "Ceil": _rounding(torch.ceil),
    "Floor": _rounding(torch.floor),
    "Round": _rounding(torch.round),
    "Mod": _mod,
    "Pow": _pow,
    "BitShift": _bit_shift,
    "Sum": _variadic(torch.add),
    "Max": _variadic(torch.maximum),
    "Min": _variadic(torch.minimum),
    "Mean": _mean,
    "Elu": calling(F.elu, alpha=1.0),
    "Celu": calling(F.celu, alpha=1.0),
    "Selu": _selu,
    "LeakyRelu": calling(F.leaky_relu, alpha=0.01),
    "HardSigmoid": _hard_sigmoid,
    "ThresholdedRelu": calling(lambda x, alpha: torch.where(x > alpha, x, torch.zeros_like(x)), alpha=1.0),
    "Shrink": _shrink,
    "PRelu": widened(_prelu),
    "Softplus": calling(F.softplus),
    "Gelu": calling(lambda x, approximate: F.gelu(x, approximate=approximate), approximate="none"),
    "Swish": _swish,
    "SwiGLU": _swiglu,
    "Clip": calling(torch.clamp, min=-_LARGEST, max=_LARGEST),
    "Clip-11": _clip,
    "Cast": _cast,
    "CastLike": _cast_like,
    "BitCast": _bit_cast,
    "IsInf": _is_inf,
    "Where": calling(torch.where, 3),
    "Identity": calling(lambda x: x),
    "Dropout": _dropout_by_attributes,
    "Dropout-12": _dropout,
    "Softmax": _flattened(_SOFTMAX),
    "Softmax-13": _SOFTMAX,
    "LogSoftmax": _flattened(_LOG_SOFTMAX),
    "LogSoftmax-13": _LOG_SOFTMAX,
    "Hardmax": _flattened(_hardmax),
    "Hardmax-13": _hardmax,
    "CumSum": widened(_cumulative(torch.cumsum, 0)),
    "CumProd": widened(_cumulative(torch.cumprod, 1)),
}
