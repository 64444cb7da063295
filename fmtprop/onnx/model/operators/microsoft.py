"""Operators of ``com.microsoft`` that exporters and ONNX Runtime's optimiser write, but for attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from fmtprop.onnx.model.operators.attributes import calling, passed_to
from fmtprop.onnx.model.operators.convolution import conv
from fmtprop.onnx.model.operators.indexing import gather
from fmtprop.onnx.model.operators.matrix import gemm
from fmtprop.onnx.model.operators.normalization import layer_normalization
from fmtprop.onnx.model.operators.recurrent import ACTIVATIONS


def _fast_gelu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.gelu(x if bias is None else x + bias, approximate="tanh")


#: the functions that fused nodes may have
_ACTIVATIONS: Final[dict[str, tuple[Callable[..., Any], float, float]]] = {
    **ACTIVATIONS,
    "clip": (lambda low, high: lambda x: torch.clamp(x, low, high), -inf, inf),
}


def _activated(x: Tensor, name: str, parameters: Sequence[float] | None) -> Tensor:
    if not name:
        return x
    if name.lower() not in _ACTIVATIONS:
        raise ValueError(f"activation {name!r} is none of {', '.join(_ACTIVATIONS)}")
    (make, *defaults), given = _ACTIVATIONS[name.lower()], parameters or ()
    result: Tensor = make(*given, *defaults[len(given) :])(x)
    return result


@passed_to(conv)
def _fused_conv(
    x: Tensor,
    w: Tensor,
    b: Tensor | None = None,
    z: Tensor | None = None,
    *,
    activation: str = "",
    activation_params: Sequence[float] | None = None,
    **attributes: Any,
) -> Tensor:
    y = conv(x, w, b, **attributes)
    return _activated(y if z is None else y + z, activation, activation_params)


@passed_to(gemm)
def _fused_gemm(
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    *,
    activation: str = "",
    activation_alpha: float | None = None,
    activation_beta: float | None = None,
    activation_gamma: float | None = None,
    **attributes: Any,
) -> Tensor:
    given = [v for v in (activation_alpha, activation_beta) if v is not None]
    return _activated(gemm(a, b, c, **attributes), activation, given)


def _fused_matmul(
    a: Tensor,
    b: Tensor,
    *,
    alpha: float = 1.0,
    transA: int = 0,
    transB: int = 0,
    transBatchA: int = 0,
    transBatchB: int = 0,
) -> Tensor:
    def turned(x: Tensor, last: int, batch: int) -> Tensor:
        if batch:
            x = x.movedim(0, -2)
        return x.transpose(-1, -2) if last and x.ndim > 1 else x

    product = turned(a, transA, transBatchA) @ turned(b, transB, transBatchB)
    return product if alpha == 1.0 else product * alpha


# ---------------------------------------------------------------- normalizations


def _simplified(x: Tensor, scale: Tensor, axis: int, epsilon: float) -> Tensor:
    axes = list(range(axis % x.ndim, x.ndim))
    if len(axes) == scale.ndim:
        return F.rms_norm(x, scale.shape, scale, epsilon)
    return x * torch.rsqrt(x.square().mean(axes, keepdim=True) + epsilon) * scale


def _simplified_layer_normalization(
    x: Tensor, scale: Tensor, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1, wanted: int
) -> Any:
    y = _simplified(x, scale, axis, epsilon)
    if wanted == 1:
        return y
    axes = list(range(axis % x.ndim, x.ndim))
    return y, torch.rsqrt(x.square().mean(axes, keepdim=True) + epsilon)


def _skipped(x: Tensor, skip: Tensor, bias: Tensor | None) -> Tensor:
    total = x + skip
    return total if bias is None else total + bias


def _skip_layer_normalization(
    x: Tensor,
    skip: Tensor,
    gamma: Tensor,
    beta: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    epsilon: float = 1e-12,
    wanted: int,
) -> Any:
    total = _skipped(x, skip, bias)
    y = layer_normalization(total, gamma, beta, epsilon=epsilon, wanted=1)
    return _with_sum(y, total, wanted)


def _skip_simplified_layer_normalization(
    x: Tensor, skip: Tensor, gamma: Tensor, bias: Tensor | None = None, *, epsilon: float = 1e-12, wanted: int
) -> Any:
    total = _skipped(x, skip, bias)
    return _with_sum(_simplified(total, gamma, -1, epsilon), total, wanted)


def _with_sum(y: Tensor, total: Tensor, wanted: int) -> Any:
    """Return the four results of these operators, without the statistics, which only training reads."""
    return (y, None, None, total)[:wanted] if wanted > 1 else y


def embed_layer_normalization(
    ids: Tensor,
    segments: Tensor | None,
    words: Tensor,
    places: Tensor,
    kinds: Tensor | None,
    gamma: Tensor,
    beta: Tensor,
    mask: Tensor | None = None,
    positions: Tensor | None = None,
    *,
    epsilon: float = 1e-12,
    mask_index_type: int = 0,
    wanted: int,
) -> Any:
    """Add the embeddings of words, places and segments; the second result is the number of ones in each row's mask."""
    at = torch.arange(ids.shape[1]) if positions is None else positions
    total = F.embedding(ids, words) + F.embedding(at, places)
    if segments is not None and kinds is not None:
        total = total + F.embedding(segments, kinds)
    y = layer_normalization(total, gamma, beta, epsilon=epsilon, wanted=1)
    if wanted == 1:
        return y
    counts = torch.zeros(ids.shape[0], dtype=torch.int32) if mask is None else (mask == 1).sum(1).to(torch.int32)
    return (y, counts, total)[:wanted]


# ---------------------------------------------------------------- quantised weights


def _matmul_nbits(
    a: Tensor,
    b: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    groups: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    K: int,
    N: int,
    bits: int = 4,
    block_size: int,
    accuracy_level: int = 0,
    weight_prepacked: int = 0,
) -> Tensor:
    if weight_prepacked:
        raise NotImplementedError("weights that were packed for one CPU")
    if bits not in (2, 4, 8):
        raise NotImplementedError(f"codes of {bits} bits, where 2, 4 and 8 are known,")
    _check_codes(b, scales, zeros, a.shape[-1], K, N, bits, block_size)
    blocks = -(-K // block_size)
    if groups is None and a.dtype in (torch.float32, torch.bfloat16):
        return _by_codes(a, b.reshape(N, -1), scales.reshape(N, blocks).float(), zeros, bias, bits, block_size)
    numbers = _unpacked(b.reshape(N, blocks, -1), bits)[..., :block_size].to(scales.dtype)
    factor = scales.reshape(N, blocks, 1)
    if zeros is None:
        shift = torch.full((1, blocks, 1), float(1 << (bits - 1)), dtype=scales.dtype)
    elif zeros.is_floating_point():
        shift = zeros.reshape(N, blocks, 1)
    else:
        shift = _unpacked(zeros.reshape(N, -1), bits)[:, :blocks].reshape(N, blocks, 1).to(scales.dtype)
    if groups is not None:  # the block of each row of the weights
        numbers = numbers.reshape(N, -1, 1)[:, :K]
        factor, shift = (v.index_select(1, groups.reshape(-1)[:K]) for v in (factor, shift))
    weights = ((numbers - shift) * factor).reshape(N, -1)[:, :K]
    return F.linear(a, weights.to(a.dtype), bias)


def _check_codes(
    b: Tensor, scales: Tensor, zeros: Tensor | None, depth: int, k: int, n: int, bits: int, block: int
) -> None:
    """Check the sizes of a matrix of codes, which the operator gives a second time as attributes."""
    if block < 16 or block & block - 1:
        raise ValueError(f"block_size is {block}, but blocks have 16, 32, 64, … numbers")
    if depth != k:
        raise ValueError(f"K is {k}, but A has rows of {depth} numbers")
    groups = n * -(-k // block)
    needed = {"B": (b, groups * block * bits // 8), "scales": (scales, groups)}
    if zeros is not None:
        nbytes = n * -(-(groups // n) * bits // 8)
        needed["zero_points"] = (zeros, groups if zeros.is_floating_point() else nbytes)
    for name, (tensor, size) in needed.items():
        if tensor.numel() != size:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, but {n} rows of {k} codes of {bits} bits "
                f"in blocks of {block} need {size} elements"
            )


def _by_codes(
    a: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None, bits: int, group: int
) -> Tensor:
    """Return the product as one call; its 8-bit codes have a sign."""
    shift: Tensor | None = None
    if zeros is not None and zeros.is_floating_point():
        shift = zeros.reshape(scales.shape).float()
    elif zeros is not None:
        shift = _unpacked(zeros.reshape(scales.shape[0], -1), bits)[:, : scales.shape[1]].float()
    if bits == 2:  # the kernels' codes have 4 bits: 2 more are a shift of the zero point
        bits, wide = 4, _unpacked(codes, 2)
        codes = torch.bitwise_or(wide[:, 0::2], torch.bitwise_left_shift(wide[:, 1::2], 4))
        shift = torch.full_like(scales, 2.0) if shift is None else shift
    if bits == 8:
        codes = (codes.to(torch.int16) - 128).to(torch.int8)
        shift = None if shift is None else shift - 128.0
    result: Tensor = torch.ops.fmtprop.matmul_nbits(a, codes, scales, shift, bias, bits, group)
    return result


def _gather_block_quantized(
    data: Tensor,
    indices: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    *,
    bits: int = 4,
    block_size: int = 128,
    gather_axis: int = 0,
    quantize_axis: int = 1,
) -> Tensor:
    if gather_axis or quantize_axis % data.ndim != data.ndim - 1 or data.dtype is not torch.uint8:
        raise NotImplementedError("blocks along another axis than the last, or rows along another than the first")
    numbers = _unpacked(gather(data, indices), bits).to(scales.dtype)
    blocks, size = scales.shape[-1], numbers.shape[-1]
    shift: Any = float(1 << (bits - 1))
    if zeros is not None:
        shift = _unpacked(gather(zeros, indices), bits)[..., :blocks].to(scales.dtype)
        shift = shift.repeat_interleave(block_size, -1)[..., :size]
    factor = gather(scales, indices).repeat_interleave(block_size, -1)[..., :size]
    result: Tensor = (numbers - shift) * factor
    return result


def _unpacked(x: Tensor, bits: int) -> Tensor:
    """Return the numbers that are packed in bytes along the last axis, lowest bits first."""
    if bits == 8:
        return x
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    parts = torch.bitwise_right_shift(x.unsqueeze(-1), shifts)
    return torch.bitwise_and(parts, (1 << bits) - 1).flatten(-2)


OPERATORS: Final[dict[str, Callable[..., Any]]] = {
    "Gelu": calling(F.gelu),
    "FusedGelu": calling(F.gelu),
    "BiasGelu": calling(lambda x, bias: F.gelu(x + bias), 2),
    "FastGelu": _fast_gelu,
    "QuickGelu": calling(lambda x, alpha: x * torch.sigmoid(alpha * x), alpha=1.702),
    "FusedConv": _fused_conv,
    "FusedGemm": _fused_gemm,
    "FusedMatMul": _fused_matmul,
    "TransposeMatMul": _fused_matmul,
    "SimplifiedLayerNormalization": _simplified_layer_normalization,
    "SkipLayerNormalization": _skip_layer_normalization,
    "SkipSimplifiedLayerNormalization": _skip_simplified_layer_normalization,
    "EmbedLayerNormalization": embed_layer_normalization,
    "GatherBlockQuantized": _gather_block_quantized,
    "MatMulNBits": _matmul_nbits,
}
