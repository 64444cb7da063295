"""Operators on quantised numbers, with exact sums of integers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from fmtprop.frontends.onnx.elements import TORCH_DTYPES
from fmtprop.frontends.onnx.operators.attributes import passed_to
from fmtprop.frontends.onnx.operators.convolution import conv
from fmtprop.frontends.onnx.operators.values import NotInTorchError, axis_of

#: operators that stay calls on constants: that numbers lie on a grid is known from them
KEEPING: Final = frozenset({"DequantizeLinear"})

_QUANTISED: Final = (torch.uint8, torch.int8, torch.uint16, torch.int16)
#: those that the op of this project has, with a scale and a zero point for all numbers or for each index of an axis
_BYTES: Final = (torch.uint8, torch.int8)


def _along(v: Tensor, x: Tensor, axis: int, block_size: int) -> Tensor:
    """Return a scale or zero point in a shape that broadcasts to the tensor: one for all, per axis, or per block."""
    if v.numel() == 1 and v.ndim <= 1:
        return v.reshape([1] * x.ndim)
    axis = axis_of(axis, x.ndim)
    if v.ndim == 1 and not block_size:
        return v.reshape([-1 if i == axis else 1 for i in range(x.ndim)])
    if v.ndim != x.ndim or not block_size:
        raise ValueError(f"scales of shape {tuple(v.shape)} for a tensor of shape {tuple(x.shape)}")
    return v.repeat_interleave(block_size, axis).narrow(axis, 0, x.shape[axis])


def saturated(x: Tensor, zero: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return numbers as integers: rounded, shifted by the zero point, and clamped to the type's range."""
    limits = torch.iinfo(dtype)
    rounded = torch.round(x)
    shifted = rounded if zero is None else rounded + zero.to(x.dtype)
    return torch.clamp(shifted, limits.min, limits.max).to(torch.int32).to(dtype)


def _quantize_linear(
    x: Tensor,
    scale: Tensor,
    zero: Tensor | None = None,
    *,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: int = 0,
    precision: int = 0,
    saturate: int = 1,
) -> Tensor:
    if output_dtype and output_dtype not in TORCH_DTYPES:
        raise NotInTorchError("an element type that PyTorch does not compute with")
    dtype = zero.dtype if zero is not None else TORCH_DTYPES[output_dtype] if output_dtype else torch.uint8
    if dtype not in _QUANTISED:
        raise NotInTorchError(str(dtype))
    if precision and TORCH_DTYPES[precision] != x.dtype:
        raise NotInTorchError("a precision of its own")
    if dtype in _BYTES and not block_size and x.dtype == scale.dtype == torch.float32 and precision == 0:
        limits = torch.iinfo(dtype)
        places = (axis_of(axis, x.ndim) if scale.numel() > 1 else 0, limits.min, limits.max)
        return torch.ops.fmtprop.quantize(x, scale, zero, *places, dtype)  # type: ignore[no-any-return]
    wide = x if x.is_floating_point() else x.to(scale.dtype)
    quotient = wide / _along(scale, x, axis, block_size).to(wide.dtype)
    shift = None if zero is None else _along(zero, x, axis, block_size).to(torch.float32)
    return saturated(quotient.to(torch.float32), shift, dtype)


def dequantize_linear(
    x: Tensor,
    scale: Tensor,
    zero: Tensor | None = None,
    *,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: int = 0,
) -> Tensor:
    """Return dequantised integers."""
    if output_dtype and TORCH_DTYPES.get(output_dtype) != scale.dtype:
        raise NotInTorchError("a result of another type than the scale's")
    if x.dtype in _BYTES and not block_size and scale.dtype is torch.float32:
        axis = axis_of(axis, x.ndim) if scale.numel() > 1 else 0
        return torch.ops.fmtprop.dequantize(x, scale, zero, axis)  # type: ignore[no-any-return]
    if x.dtype is torch.uint16:
        x = x.to(torch.int32)
    numbers = x.to(torch.float32)
    if zero is not None:
        shift = zero.to(torch.int32) if zero.dtype is torch.uint16 else zero
        numbers = numbers - _along(shift.to(torch.float32), x, axis, block_size)
    return (numbers * _along(scale, x, axis, block_size).to(torch.float32)).to(scale.dtype)


def dynamic_quantize_linear(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return numbers quantised to bytes, and the scale and the zero point of their range."""
    low = torch.clamp(x.amin(), max=0.0)
    high = torch.clamp(x.amax(), min=0.0)
    scale = (high - low) / 255
    safe = torch.where(scale == 0, torch.ones_like(scale), scale)
    zero = torch.clamp(torch.round(-low / safe), 0, 255)
    y = torch.clamp(torch.round(x / safe) + zero, 0, 255)
    return y.to(torch.uint8), scale, zero.to(torch.uint8)


# ---------------------------------------------------------------- sums of products


def _exact(terms: int) -> torch.dtype:
    """Return a floating type in which a sum of ``terms`` products of 9-bit numbers is exact."""
    return torch.float32 if terms * 255 * 255 < 2**24 else torch.float64


def _shifted(x: Tensor, zero: Tensor | None, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    wide = x.to(dtype)
    return wide if zero is None else wide - zero.to(dtype).reshape(shape if zero.numel() > 1 else [1] * x.ndim)


def matmul_exact(a: Tensor, a_zero: Tensor | None, b: Tensor, b_zero: Tensor | None) -> Tensor:
    """Return the exact matrix product of integers minus their zero points."""
    dtype = _exact(a.shape[-1])
    rows = [*([1] * (a.ndim - 2)), -1, 1] if a_zero is not None and a_zero.ndim == 1 else _shape_of(a_zero)
    columns = [*([1] * (b.ndim - 2)), 1, -1] if b_zero is not None and b_zero.ndim == 1 else _shape_of(b_zero)
    return _shifted(a, a_zero, rows, dtype) @ _shifted(b, b_zero, columns, dtype)


def _shape_of(x: Tensor | None) -> list[int]:
    return [] if x is None else list(x.shape)


def _matmul_integer(a: Tensor, b: Tensor, a_zero: Tensor | None = None, b_zero: Tensor | None = None) -> Tensor:
    return matmul_exact(a, a_zero, b, b_zero).to(torch.int32)


def _conv_exact(x: Tensor, x_zero: Tensor | None, w: Tensor, w_zero: Tensor | None, **attributes: Any) -> Tensor:
    dtype = _exact(math.prod(w.shape[1:]))
    per_channel = [-1, *[1] * (w.ndim - 1)]
    return conv(_shifted(x, x_zero, [1] * x.ndim, dtype), _shifted(w, w_zero, per_channel, dtype), **attributes)


@passed_to(conv)
def _conv_integer(
    x: Tensor, w: Tensor, x_zero: Tensor | None = None, w_zero: Tensor | None = None, **attributes: Any
) -> Tensor:
    return _conv_exact(x, x_zero, w, w_zero, **attributes).to(torch.int32)


def requantised(sums: Tensor, factor: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Return sums scaled, and quantised to the zero point's type."""
    return saturated(sums.to(torch.float32) * (factor / scale.to(torch.float32)), zero.to(torch.float32), zero.dtype)


def _check_types(*zeros: Tensor) -> None:
    for zero in zeros:
        if not isinstance(zero, Tensor) or zero.dtype not in (torch.uint8, torch.int8):
            raise NotInTorchError("other types than int8 and uint8")


@passed_to(conv)
def _qlinear_conv(
    x: Tensor,
    x_scale: Tensor,
    x_zero: Tensor,
    w: Tensor,
    w_scale: Tensor,
    w_zero: Tensor,
    y_scale: Tensor,
    y_zero: Tensor,
    b: Tensor | None = None,
    **attributes: Any,
) -> Tensor:
    _check_types(x_zero, w_zero, y_zero)
    sums = _conv_exact(x, x_zero, w, w_zero, **attributes)
    per_channel = [1, -1, *[1] * (w.ndim - 2)]
    if b is not None:
        sums = sums.to(torch.float64) + b.to(torch.float64).reshape(per_channel)
    return requantised(sums, (x_scale * w_scale).reshape(per_channel), y_scale, y_zero)


def _qlinear_matmul(
    a: Tensor,
    a_scale: Tensor,
    a_zero: Tensor,
    b: Tensor,
    b_scale: Tensor,
    b_zero: Tensor,
    y_scale: Tensor,
    y_zero: Tensor,
) -> Tensor:
    _check_types(a_zero, b_zero, y_zero)
    rows = a_scale.reshape(-1, 1) if a_scale.ndim == 1 and a_scale.numel() > 1 else a_scale
    factor = rows.to(torch.float32) * b_scale.to(torch.float32)
    return requantised(matmul_exact(a, a_zero, b, b_zero), factor, y_scale, y_zero)


OPERATORS: Final[dict[str, Callable[..., Any]]] = {
    "QuantizeLinear": _quantize_linear,
    "DequantizeLinear": dequantize_linear,
    "DynamicQuantizeLinear": dynamic_quantize_linear,
    "MatMulInteger": _matmul_integer,
    "ConvInteger": _conv_integer,
    "QLinearConv": _qlinear_conv,
    "QLinearMatMul": _qlinear_matmul,
}
