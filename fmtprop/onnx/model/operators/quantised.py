"""Operators on quantised numbers, as those on the real numbers for which the integers stand, between two roundings."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from fmtprop.onnx.model.elements import TORCH_DTYPES
from fmtprop.onnx.model.operators.attributes import passed_to
from fmtprop.onnx.model.operators.convolution import conv
from fmtprop.onnx.model.operators.values import NotInTorchError, axis_of, is_known

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


def quantize_linear(
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
    """Return numbers as integers of the zero point's type."""
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
    numbers, scale, zero = torch.ops.fmtprop.dynamic_quantize(x)
    return numbers.to(torch.uint8), scale, zero.to(torch.uint8)


# ---------------------------------------------------------------- sums of products


class Quantised(NamedTuple):
    """An operand of a sum of products."""

    x: Tensor
    #: `scale`, `zero`: one for all, or one for each index of `axis`
    scale: Tensor
    zero: Tensor | None
    axis: int
    #: shape of ones that have the same sums of products as ones in x's shape
    ones: Sequence[int]

    def factor(self, v: Tensor) -> Tensor:
        """Return scales or zero points in a shape in which they multiply the sums."""
        wide = v.to(torch.float32)
        return wide if v.numel() == 1 or v.ndim > 1 else _along(wide, self.x, self.axis, 0)


def sum_of_products(function: Callable[[Tensor, Tensor], Tensor], a: Quantised, b: Quantised) -> Tensor:
    """Return a bilinear function of the numbers for which integers stand.

    A scale that only a run knows is multiplied with the sums, and the part of such a zero point is subtracted from
    them, so that the operand itself lies on a grid that is known.
    """
    for one, other in ((a, b), (b, a)):

        def again(changed: Quantised, one: Quantised = one, other: Quantised = other) -> Tensor:
            return sum_of_products(function, *((changed, other) if one is a else (other, changed)))

        if not is_known(one.scale):
            return again(one._replace(scale=torch.ones(()))) * one.factor(one.scale)
        if one.zero is not None and not is_known(one.zero):
            shape = one.ones if one.scale.numel() == 1 else one.x.shape
            ones = one._replace(x=torch.ones(list(shape), dtype=torch.uint8), zero=None)
            return again(one._replace(zero=None)) - again(ones) * one.factor(one.zero)
    return function(*(reals(one.x, one.scale, one.zero, one.axis) for one in (a, b)))


def reals(x: Tensor, scale: Tensor, zero: Tensor | None = None, axis: int = 0) -> Tensor:
    """Return the numbers (f32) for which integers stand; scales may also have a shape that broadcasts."""
    scale = scale.to(torch.float32)
    if zero is not None and zero.ndim <= 1 and scale.ndim <= 1 and zero.numel() != scale.numel():
        count = max(zero.numel(), scale.numel())
        scale, zero = (v.reshape(1).expand(count) if v.numel() == 1 else v for v in (scale, zero))
    if max(scale.ndim, 0 if zero is None else zero.ndim) <= 1:
        return dequantize_linear(x, scale, zero, axis=axis)
    numbers = x.to(torch.float32)
    return (numbers if zero is None else numbers - zero.to(torch.float32)) * scale


def integers(y: Tensor, scale: Tensor, zero: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return numbers quantised to a type; scales and zero points may also have a shape that broadcasts."""
    zero = torch.zeros(scale.shape, dtype=dtype) if zero is None else zero
    if scale.ndim <= 1:
        return quantize_linear(y, scale.to(torch.float32), zero)
    return saturated(y / scale.to(torch.float32), zero, dtype)


def _exact(terms: int) -> torch.dtype:
    """Return a floating type in which a sum of ``terms`` products of 9-bit numbers is exact."""
    return torch.float32 if terms * 255 * 255 < 2**24 else torch.float64


def _whole(x: Tensor, zero: Tensor | None, axis: int, dtype: torch.dtype) -> Tensor:
    """Return integers minus their zero point."""
    if zero is None:
        return x.to(dtype)
    return x.to(dtype) - (zero if zero.ndim > 1 else _along(zero, x, axis, 0)).to(dtype)


def matrices(
    a: Tensor, a_scale: Tensor, a_zero: Tensor | None, b: Tensor, b_scale: Tensor, b_zero: Tensor | None
) -> tuple[Quantised, Quantised]:
    """Return the operands of a matrix product; scales may vary along the rows of the first, the columns of the last."""
    rows, columns = max(a.ndim - 2, 0), b.ndim - 1
    depth = a.shape[-1]
    return (
        Quantised(a, a_scale, a_zero, rows, [*[1] * (a.ndim - 1), depth]),
        Quantised(b, b_scale, b_zero, columns, [depth, *[1] * (b.ndim > 1)]),
    )


def _matmul_integer(
    a: Tensor, b: Tensor, a_zero: Tensor | None = None, b_zero: Tensor | None = None, *, rounded: bool
) -> Tensor:
    one = torch.ones(())
    if rounded:
        return sum_of_products(torch.matmul, *matrices(a, one, a_zero, b, one, b_zero))
    dtype = _exact(a.shape[-1])
    sums = _whole(a, a_zero, max(a.ndim - 2, 0), dtype) @ _whole(b, b_zero, b.ndim - 1, dtype)
    return sums.to(torch.int32)


@passed_to(conv)
def _conv_integer(
    x: Tensor,
    w: Tensor,
    x_zero: Tensor | None = None,
    w_zero: Tensor | None = None,
    *,
    rounded: bool,
    **attributes: Any,
) -> Tensor:
    one = torch.ones(())
    if rounded and (w_zero is None or is_known(w_zero)):
        operands = Quantised(x, one, x_zero, 1, [1, *x.shape[1:]]), Quantised(w, one, w_zero, 0, w.shape)
        return sum_of_products(lambda x, w: conv(x, w, **attributes), *operands)
    dtype = _exact(math.prod(w.shape[1:]))
    return conv(_whole(x, x_zero, 1, dtype), _whole(w, w_zero, 0, dtype), **attributes).to(torch.int32)


def _check_types(**zeros: Tensor) -> None:
    for name, zero in zeros.items():
        if isinstance(zero, Tensor) and zero.dtype.itemsize != 1:
            raise ValueError(f"{name} is {zero.dtype}, but must be of 8 bits, as the numbers are")
        if not isinstance(zero, Tensor) or zero.dtype not in _BYTES:
            raise NotInTorchError("other types than int8 and uint8")


def _check_lengths(outputs: int, **vectors: Tensor) -> None:
    for name, vector in vectors.items():
        if vector.ndim > 1 or vector.numel() not in (1, outputs):
            allowed = "one number" if outputs == 1 else f"one number, or one for each of {outputs} outputs"
            raise ValueError(f"{name} has shape {tuple(vector.shape)}, but must be {allowed}")


@passed_to(conv)
def qlinear_conv(
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
    """Return the convolution of quantised images, quantised."""
    _check_types(x_zero_point=x_zero, w_zero_point=w_zero, y_zero_point=y_zero)
    _check_lengths(w.shape[0], w_scale=w_scale, w_zero_point=w_zero)
    _check_lengths(1, x_scale=x_scale, x_zero_point=x_zero, y_scale=y_scale, y_zero_point=y_zero)
    if b is not None and b.shape != w.shape[:1]:
        raise ValueError(f"B has shape {tuple(b.shape)}, but there are {w.shape[0]} outputs")
    bias = None if b is None else b.to(torch.float32) * (x_scale * w_scale).to(torch.float32)
    y = conv(reals(x, x_scale, x_zero), reals(w, w_scale, w_zero), bias, **attributes)
    return integers(y, y_scale, y_zero, y_zero.dtype)


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
    _check_types(a_zero_point=a_zero, b_zero_point=b_zero, y_zero_point=y_zero)
    operands = matrices(a, a_scale, a_zero, b, b_scale, b_zero)
    return integers(sum_of_products(torch.matmul, *operands), y_scale, y_zero, y_zero.dtype)


OPERATORS: Final[dict[str, Callable[..., Any]]] = {
    "QuantizeLinear": quantize_linear,
    "DequantizeLinear": dequantize_linear,
    "DynamicQuantizeLinear": dynamic_quantize_linear,
    "MatMulInteger": _matmul_integer,
    "ConvInteger": _conv_integer,
    "QLinearConv": qlinear_conv,
    "QLinearMatMul": _qlinear_matmul,
}
