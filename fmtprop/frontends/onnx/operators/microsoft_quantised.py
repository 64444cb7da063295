"""Quantised operators of ``com.microsoft``, as ONNX Runtime's quantiser writes them (``QOperator``).

Sums and products of integers are exact. All else is computed on dequantised numbers. Each result is rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from fmtprop.frontends.onnx.operators.attributes import passed_to
from fmtprop.frontends.onnx.operators.convolution import average_pool
from fmtprop.frontends.onnx.operators.microsoft import embed_layer_normalization
from fmtprop.frontends.onnx.operators.quantised import (
    dequantize_linear,
    dynamic_quantize_linear,
    matmul_exact,
    requantised,
    saturated,
)
from fmtprop.frontends.onnx.operators.recurrent import lstm


def _quantised(y: Tensor, scale: Tensor | None, zero: Tensor | None, like: Tensor) -> Tensor:
    """Return numbers as integers of the zero point's type, or of an operand's type without a zero point."""
    shift = None if zero is None else zero.to(torch.float32)
    return saturated(y if scale is None else y / scale, shift, like.dtype if zero is None else zero.dtype)


def _whole(x: Tensor, zero: Tensor | None) -> Tensor:
    """Return integers minus their zero point, in a type in which their sums and products are exact."""
    wide = x.to(torch.int64)
    return wide if zero is None else wide - zero.to(torch.int64)


def _on_numbers(function: Callable[..., Tensor], operands: int = 1) -> Callable[..., Tensor]:
    """Return the operator on quantised numbers; each operand, and the result, has a scale and perhaps a zero point."""

    @passed_to(function)
    def operator(*tensors: Any, **attributes: Any) -> Tensor:
        if not 3 * operands < len(tensors) <= 3 * operands + 2:
            raise TypeError(f"it takes {operands} quantised operands and the result's scale and zero point")
        numbers = [dequantize_linear(*tensors[3 * place : 3 * place + 3]) for place in range(operands)]
        y_scale, y_zero = (*tensors[3 * operands :], None)[:2]
        return _quantised(function(*numbers, **attributes), y_scale, y_zero, tensors[0])

    return operator


def _mul(
    a: Tensor,
    a_scale: Tensor,
    a_zero: Tensor | None,
    b: Tensor,
    b_scale: Tensor,
    b_zero: Tensor | None,
    y_scale: Tensor,
    y_zero: Tensor | None = None,
) -> Tensor:
    products = (_whole(a, a_zero) * _whole(b, b_zero)).to(torch.float32)
    return _quantised(products * (a_scale * b_scale / y_scale), None, y_zero, a)


def _softmax(x: Tensor, *, axis: int = -1, opset: int) -> Tensor:
    # before opset 13, the axis and all later ones are one
    rows = x.flatten(axis % x.ndim) if opset < 13 else x
    return rows.softmax(-1 if opset < 13 else axis).reshape(x.shape)


def _concat(y_scale: Tensor, y_zero: Tensor, *parts: Tensor, axis: int) -> Tensor:
    numbers = [dequantize_linear(*parts[first : first + 3]) for first in range(0, len(parts), 3)]
    return _quantised(torch.cat(numbers, axis), y_scale, y_zero, parts[0])


@passed_to(average_pool)
def _average_pool(x: Tensor, *, channels_last: int = 0, **attributes: Any) -> Tensor:
    y = average_pool(x.movedim(-1, 1) if channels_last else x, **attributes)
    return y.movedim(1, -1) if channels_last else y


def _global_average_pool(
    x: Tensor,
    x_scale: Tensor,
    x_zero: Tensor | None,
    y_scale: Tensor,
    y_zero: Tensor | None = None,
    *,
    channels_last: int = 0,
) -> Tensor:
    axes = list(range(1, x.ndim - 1)) if channels_last else list(range(2, x.ndim))
    sums = _whole(x, x_zero).sum(axes, keepdim=True)
    return _quantised(sums.to(torch.float32) * (x_scale / (y_scale * (x.numel() // sums.numel()))), None, y_zero, x)


def _where(
    condition: Tensor,
    x: Tensor,
    x_scale: Tensor,
    x_zero: Tensor,
    y: Tensor,
    y_scale: Tensor,
    y_zero: Tensor,
    z_scale: Tensor,
    z_zero: Tensor,
) -> Tensor:
    chosen = torch.where(condition, dequantize_linear(x, x_scale, x_zero), dequantize_linear(y, y_scale, y_zero))
    return _quantised(chosen, z_scale, z_zero, x)


def _embed(
    ids: Tensor,
    segments: Tensor | None,
    words: Tensor,
    places: Tensor,
    kinds: Tensor | None,
    gamma: Tensor,
    beta: Tensor,
    mask: Tensor | None,
    *scales_and_zeros: Tensor | None,
    epsilon: float = 1e-12,
    wanted: int,
) -> Any:
    tables = zip((words, places, kinds, gamma, beta), scales_and_zeros[:5], scales_and_zeros[5:], strict=True)
    floats: list[Any] = [None if t is None or s is None else dequantize_linear(t, s, zero) for t, s, zero in tables]
    wide = dict(zip(("words", "places", "kinds", "gamma", "beta"), floats, strict=True))
    return embed_layer_normalization(ids, segments, **wide, mask=mask, epsilon=epsilon, wanted=wanted)


# ---------------------------------------------------------------- products


def _gemm(
    a: Tensor,
    a_scale: Tensor,
    a_zero: Tensor | None,
    b: Tensor,
    b_scale: Tensor,
    b_zero: Tensor | None,
    c: Tensor | None = None,
    y_scale: Tensor | None = None,
    y_zero: Tensor | None = None,
    *,
    alpha: float = 1.0,
    transA: int = 0,
    transB: int = 0,
) -> Tensor:
    sums = matmul_exact(a.t() if transA else a, a_zero, b.t() if transB else b, b_zero)
    if c is not None:
        sums = sums.to(torch.float64) + c.to(torch.float64)
    factor = a_scale * b_scale * alpha
    if y_scale is None:
        return sums.to(torch.float32) * factor
    return requantised(sums, factor, y_scale, torch.zeros((), dtype=a.dtype) if y_zero is None else y_zero)


def matmul_integer_to_float(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    a_zero: Tensor | None = None,
    b_zero: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Return the matrix product of quantised numbers as floats."""
    y = matmul_exact(a, a_zero, b, b_zero).to(torch.float32) * (a_scale * b_scale)
    return y if bias is None else y + bias


def _dynamic_quantize_matmul(
    a: Tensor, b: Tensor, b_scale: Tensor, b_zero: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    numbers, scale, zero = dynamic_quantize_linear(a)
    return matmul_integer_to_float(numbers, b, scale, b_scale, zero, b_zero, bias)


@passed_to(lstm)
def _dynamic_quantize_lstm(
    x: Tensor,
    w: Tensor,
    r: Tensor,
    b: Tensor | None,
    lengths: Tensor | None,
    initial_h: Tensor | None,
    initial_c: Tensor | None,
    peepholes: Tensor | None,
    w_scale: Tensor,
    w_zero: Tensor | None,
    r_scale: Tensor,
    r_zero: Tensor | None = None,
    **attributes: Any,
) -> tuple[Tensor, ...]:
    """Compute an LSTM with integer weights, and with inputs and states rounded to 8 bits."""
    weights, recurrent = _of_directions(w, w_scale, w_zero), _of_directions(r, r_scale, r_zero)
    tensors = (weights, recurrent, b, lengths, initial_h, initial_c, peepholes)
    return lstm(_rounded(x), *tensors, _rounded, **attributes)


def _of_directions(weights: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    """Return weights (direction, gates * hidden, input) of integers with the last two axes exchanged.

    There is a scale for each direction, or for each of its rows.
    """
    rows = (weights.shape[0], 1, -1)
    numbers = weights.to(torch.float32) if zero is None else _whole(weights, zero.reshape(rows)).to(torch.float32)
    return (numbers * scale.reshape(rows)).transpose(1, 2)


def _rounded(x: Tensor) -> Tensor:
    return dequantize_linear(*dynamic_quantize_linear(x))


OPERATORS: Final[dict[str, Callable[..., Any]]] = {
    "QLinearAdd": _on_numbers(lambda a, b: a + b, 2),
    "QLinearMul": _mul,
    "QLinearSigmoid": _on_numbers(lambda x: torch.sigmoid(x)),
    "QLinearLeakyRelu": _on_numbers(lambda x, *, alpha=0.01: F.leaky_relu(x, alpha)),
    "QLinearSoftmax": _on_numbers(_softmax),
    "QLinearConcat": _concat,
    "QLinearWhere": _where,
    "QLinearAveragePool": _on_numbers(_average_pool),
    "QLinearGlobalAveragePool": _global_average_pool,
    "QEmbedLayerNormalization": _embed,
    "QGemm": _gemm,
    "MatMulIntegerToFloat": matmul_integer_to_float,
    "DynamicQuantizeMatMul": _dynamic_quantize_matmul,
    "DynamicQuantizeLSTM": _dynamic_quantize_lstm,
}
