"""Quantised operators of ``com.microsoft``, as ONNX Runtime's quantiser writes them (``QOperator``).

Each is an operator on the real numbers for which integers stand; its result is rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from fmtprop.onnx.model.operators.attributes import passed_to
from fmtprop.onnx.model.operators.convolution import average_pool, global_average_pool
from fmtprop.onnx.model.operators.matrix import gemm
from fmtprop.onnx.model.operators.microsoft import embed_layer_normalization
from fmtprop.onnx.model.operators.quantised import (
    dynamic_quantize_linear,
    integers,
    matrices,
    qlinear_conv,
    reals,
    sum_of_products,
)
from fmtprop.onnx.model.operators.recurrent import lstm
from fmtprop.onnx.model.operators.values import data, is_known, known


def _on_numbers(function: Callable[..., Tensor], operands: int = 1) -> Callable[..., Tensor]:
    """Return the operator on quantised numbers; each operand, and the result, has a scale and perhaps a zero point."""

    @passed_to(function)
    def operator(*tensors: Any, **attributes: Any) -> Tensor:
        if not 3 * operands < len(tensors) <= 3 * operands + 2:
            raise TypeError(f"it takes {operands} quantised operands and the result's scale and zero point")
        operand = (tensors[3 * place : 3 * place + 3] for place in range(operands))
        numbers = [reals(x, scale, zero) for x, scale, zero in operand]
        y_scale, y_zero = (*tensors[3 * operands :], None)[:2]
        return integers(function(*numbers, **attributes), y_scale, y_zero, tensors[0].dtype)

    return operator


def _softmax(x: Tensor, *, axis: int = -1, opset: int) -> Tensor:
    # before opset 13, the axis and all later ones are one
    rows = x.flatten(axis % x.ndim) if opset < 13 else x
    return rows.softmax(-1 if opset < 13 else axis).reshape(x.shape)


def _concat(y_scale: Tensor, y_zero: Tensor, *parts: Tensor, axis: int) -> Tensor:
    numbers = list(map(reals, parts[::3], parts[1::3], parts[2::3]))
    return integers(torch.cat(numbers, axis), y_scale, y_zero, parts[0].dtype)


def _channels_first(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return an operator on images that may also get their channels innermost."""

    @passed_to(function)
    def operator(x: Tensor, *rest: Any, channels_last: int = 0, **attributes: Any) -> Tensor:
        y = function(x.movedim(-1, 1) if channels_last else x, *rest, **attributes)
        return y.movedim(1, -1) if channels_last else y

    return operator


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
    chosen = torch.where(condition, reals(x, x_scale, x_zero), reals(y, y_scale, y_zero))
    return integers(chosen, z_scale, z_zero, x.dtype)


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
    floats: list[Any] = [None if t is None or s is None else reals(t, s, zero) for t, s, zero in tables]
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
    bias = None if c is None else c.to(torch.float32) * (a_scale * b_scale).to(torch.float32)
    numbers = reals(a, a_scale, a_zero), reals(b, b_scale, b_zero, 0 if transB else 1)
    y = gemm(*numbers, bias, alpha=alpha, beta=alpha, transA=transA, transB=transB)
    return y if y_scale is None else integers(y, y_scale, y_zero, a.dtype)


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
    y = sum_of_products(torch.matmul, *matrices(a, a_scale, a_zero, b, b_scale, b_zero))
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
    is_usual = lengths is None and peepholes is None and _is_usual(**attributes)
    if is_usual and r.dtype is torch.int8 and r.shape[1] % _BLOCK == 0 and _is_centred(r_zero) and is_known(w_scale):
        scales, bias = known(data(w_scale, "W_scale")), None if b is None else b.reshape(len(b), 2, -1).sum(1)
        numbers, scale, zero = dynamic_quantize_linear(x.flatten(0, 1))  # one product of all rows
        from_x = []
        for k, codes in enumerate(w):
            of_direction = scales[k], zero, None if w_zero is None else w_zero[k], None if bias is None else bias[k]
            from_x.append(matmul_integer_to_float(numbers, codes, scale, *of_direction).reshape(*x.shape[:2], -1))
        return _by_layers(from_x, r, r_scale, initial_h, initial_c, attributes.get("direction", "forward"))
    whole, scale = _rounded(x)
    tensors = (
        _of_directions(w, w_scale, w_zero),
        _of_directions(r, r_scale, r_zero),
        b,
        lengths,
        initial_h,
        initial_c,
        peepholes,
    )
    return lstm(whole * scale, *tensors, _rounded, **attributes)


#: states of which the layer's kernel computes several at a time; without it, the steps of any LSTM are faster
_BLOCK: Final = 16


def _is_usual(
    *,
    activations: Sequence[str] | None = None,
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    input_forget: int = 0,
    layout: int = 0,
    **_parameters_of_other_activations: object,
) -> bool:
    """Return whether a layer has the functions that its op has."""
    names = [name.lower() for name in activations or ()]
    is_plain = names == ["sigmoid", "tanh", "tanh"] * (len(names) // 3)
    return is_plain and clip is None and not input_forget and not layout and direction in _DIRECTIONS


#: direction -> whether each layer goes from the end
_DIRECTIONS: Final = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}


def _is_centred(zeros: Tensor | None) -> bool:
    return zeros is None or (is_known(zeros) and not bool(zeros.any()))


def _by_layers(
    from_x: Sequence[Tensor], r: Tensor, r_scale: Tensor, h: Tensor | None, c: Tensor | None, direction: str
) -> tuple[Tensor, ...]:
    """Compute each direction as one layer."""
    zeros = from_x[0].new_zeros((from_x[0].shape[1], r.shape[1]))
    found = []
    symmetric = is_known(r) and not bool((r == -128).any())
    for k, reverse in enumerate(_DIRECTIONS[direction]):
        codes = r[k].transpose(0, 1)
        scales, sums = r_scale[k].reshape(-1).expand(codes.shape[0]), codes.sum(1, dtype=torch.int32)
        states = (zeros if one is None else one[k] for one in (h, c))
        found.append(torch.ops.fmtprop.lstm_bytes(from_x[k], *states, codes, scales, sums, reverse, symmetric))
    return torch.stack([y for y, *_ in found], 1), *(torch.stack(last) for last in list(zip(*found, strict=True))[1:])


def _of_directions(weights: Tensor, scales: Tensor, zeros: Tensor | None) -> list[Tensor]:
    """Return the matrix (gates * hidden, input) of each direction, from integers (direction, input, gates * hidden).

    There is a scale for each direction, or for each of its rows.
    """
    found = []
    for k in range(len(weights)):
        zero = None if zeros is None else zeros[k]
        found.append(reals(weights[k], scales[k], zero, 1).transpose(0, 1))
    return found


def _rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the whole numbers to which 8 bits round a tensor, and their scale, which may be multiplied with sums."""
    numbers, scale, zero = torch.ops.fmtprop.dynamic_quantize(x)
    return numbers - zero, scale


OPERATORS: Final[dict[str, Callable[..., Any]]] = {
    "QLinearAdd": _on_numbers(lambda a, b: a + b, 2),
    "QLinearMul": _on_numbers(lambda a, b: a * b, 2),
    "QLinearSigmoid": _on_numbers(lambda x: torch.sigmoid(x)),
    "QLinearLeakyRelu": _on_numbers(lambda x, *, alpha=0.01: F.leaky_relu(x, alpha)),
    "QLinearSoftmax": _on_numbers(_softmax),
    "QLinearConcat": _concat,
    "QLinearWhere": _where,
    "QLinearConv": _channels_first(qlinear_conv),
    "QLinearAveragePool": _on_numbers(_channels_first(average_pool)),
    "QLinearGlobalAveragePool": _on_numbers(_channels_first(global_average_pool)),
    "QEmbedLayerNormalization": _embed,
    "QGemm": _gemm,
    "MatMulIntegerToFloat": matmul_integer_to_float,
    "DynamicQuantizeMatMul": _dynamic_quantize_matmul,
    "DynamicQuantizeLSTM": _dynamic_quantize_lstm,
}
