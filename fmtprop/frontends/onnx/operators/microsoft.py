"""Operators of ``com.microsoft`` that exporters and ONNX Runtime's optimiser write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from fmtprop.frontends.onnx.operators.convolution import conv
from fmtprop.frontends.onnx.operators.matrix import gemm
from fmtprop.frontends.onnx.operators.normalization import layer_normalization
from fmtprop.frontends.onnx.operators.values import ints


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x)


def _bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias)


def _fast_gelu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.gelu(x if bias is None else x + bias, approximate="tanh")


def _quick_gelu(x: Tensor, *, alpha: float = 1.702) -> Tensor:
    return x * torch.sigmoid(alpha * x)


_ACTIVATIONS: Final[dict[str, Callable[..., Tensor]]] = {
    "Relu": F.relu,
    "Sigmoid": torch.sigmoid,
    "Tanh": torch.tanh,
    "LeakyRelu": lambda x, alpha=0.01: F.leaky_relu(x, alpha),
    "Clip": lambda x, low, high: torch.clamp(x, low, high),
    "HardSigmoid": lambda x, alpha=0.2, beta=0.5: torch.clamp(alpha * x + beta, 0, 1),
    "Elu": lambda x, alpha=1.0: F.elu(x, alpha),
    "Softplus": F.softplus,
    "Softsign": F.softsign,
    "ThresholdedRelu": lambda x, alpha=1.0: torch.where(x > alpha, x, 0.0),
}


def _activated(x: Tensor, name: str, parameters: Sequence[float] | None) -> Tensor:
    if not name:
        return x
    if name not in _ACTIVATIONS:
        raise ValueError(f"activation {name!r} is none of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name](x, *(parameters or ()))


def _fused_conv(
    x: Tensor,
    w: Tensor,
    b: Tensor | None = None,
    z: Tensor | None = None,
    *,
    activation: str = "",
    activation_params: Sequence[float] | None = None,
    auto_pad: str = "NOTSET",
    dilations: Sequence[int] | None = None,
    group: int = 1,
    kernel_shape: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Tensor:
    y = conv(
        x, w, b, auto_pad=auto_pad, dilations=dilations, group=group, kernel_shape=kernel_shape, pads=pads,
        strides=strides,
    )  # fmt: skip
    return _activated(y if z is None else y + z, activation, activation_params)


def _fused_gemm(
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    *,
    activation: str = "",
    activation_alpha: float | None = None,
    activation_beta: float | None = None,
    activation_gamma: float | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,
    transB: int = 0,
) -> Tensor:
    given = [v for v in (activation_alpha, activation_beta) if v is not None]
    return _activated(gemm(a, b, c, alpha=alpha, beta=beta, transA=transA, transB=transB), activation, given)


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


# ---------------------------------------------------------------- attention


def _heads(x: Tensor, count: int) -> Tensor:
    """Return (batch, heads, length, size) of (batch, length, heads * size)."""
    if x.ndim == 4:
        return x
    return x.reshape(x.shape[0], x.shape[1], count, -1).transpose(1, 2)


def _joined(x: Tensor) -> Tensor:
    return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], -1)


def _key_mask(mask: Tensor | None, batch: int, keys: int, value: float) -> Tensor | None:
    """Return the summand of scores for a mask of lengths (batch,), of keys (batch, keys), or of scores."""
    if mask is None:
        return None
    if mask.ndim == 1:
        if mask.shape[0] not in (batch, 2 * batch):
            raise NotImplementedError("a mask of lengths and offsets")
        places = torch.arange(keys).reshape(1, -1)
        allowed = places < mask[:batch].reshape(-1, 1)
        if mask.shape[0] > batch:  # the ends are followed by the starts
            allowed = allowed & (places >= mask[batch:].reshape(-1, 1))
    else:
        allowed = mask != 0
    wide = allowed.reshape(batch, *[1] * (4 - allowed.ndim), *allowed.shape[1:])
    return torch.where(wide, 0.0, value)


def _causal(queries: int, keys: int) -> Tensor:
    """Return the mask of keys that each query may see; the last key is at the last query's position."""
    return torch.arange(keys).reshape(1, -1) <= torch.arange(queries).reshape(-1, 1) + (keys - queries)


def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float | None) -> Tensor:
    if causal:
        allowed = _causal(q.shape[2], k.shape[2])
        bias = allowed if bias is None else torch.where(allowed, bias, -torch.inf)
    if bias is not None and bias.dtype is not torch.bool:
        bias = bias.to(q.dtype)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale or None)


def _softmax_with_sink(scores: Tensor, sink: Tensor) -> Tensor:
    """Return the softmax of each row with one more score, the sink, and without the sink's share."""
    column = sink.to(scores.dtype).expand(*scores.shape[:-1], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1]


def _sum_of(*terms: Tensor | None) -> Tensor | None:
    given = [term for term in terms if term is not None]
    return sum(given[1:], given[0]) if given else None


def _attention(
    x: Tensor,
    weights: Tensor,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    past: Tensor | None = None,
    attention_bias: Tensor | None = None,
    past_length: Tensor | None = None,
    *,
    num_heads: int,
    do_rotary: int = 0,
    mask_filter_value: float = -10000.0,
    past_present_share_buffer: int = 0,
    qkv_hidden_sizes: Sequence[int] | None = None,
    rotary_embedding_dim: int = 0,
    scale: float = 0.0,
    unidirectional: int = 0,
    wanted: int,
) -> Any:
    if do_rotary or past_present_share_buffer:
        raise NotImplementedError("rotary positions or a shared buffer of past keys")
    sizes = list(qkv_hidden_sizes or [weights.shape[1] // 3] * 3)
    q, k, v = (_heads(part, num_heads) for part in torch.split(F.linear(x, weights.t(), bias), sizes, -1))
    if past is not None:
        k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
    added = _sum_of(_key_mask(mask, x.shape[0], k.shape[2], mask_filter_value), attention_bias)
    y = _joined(_attend(q, k, v, added, bool(unidirectional), scale))
    return (y, torch.stack([k, v])) if wanted > 1 else y


def _multi_head_attention(
    q: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    attention_bias: Tensor | None = None,
    past_k: Tensor | None = None,
    past_v: Tensor | None = None,
    past_length: Tensor | None = None,
    cache_indirection: Tensor | None = None,
    *,
    num_heads: int,
    mask_filter_value: float = -10000.0,
    scale: float = 0.0,
    unidirectional: int = 0,
    wanted: int,
) -> Any:
    if k is None or v is None or q.ndim != 3 or past_length is not None or cache_indirection is not None:
        raise NotImplementedError("packed keys and values, or a shared buffer of past keys")
    if bias is not None:
        parts = torch.split(bias, [q.shape[-1], bias.shape[0] - q.shape[-1] - v.shape[-1], v.shape[-1]])
        q, k, v = q + parts[0], k + parts[1] if k.ndim == 3 else k, v + parts[2] if v.ndim == 3 else v
    q, k, v = (_heads(part, num_heads) for part in (q, k, v))
    if past_k is not None and past_v is not None:
        k, v = torch.cat([past_k, k], 2), torch.cat([past_v, v], 2)
    added = _sum_of(_key_mask(mask, q.shape[0], k.shape[2], mask_filter_value), attention_bias)
    y = _joined(_attend(q, k, v, added, bool(unidirectional), scale))
    return (y, k, v)[:wanted] if wanted > 1 else y


def _angles(places: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return F.embedding(places, cos).unsqueeze(1), F.embedding(places, sin).unsqueeze(1)


def _rotated(x: Tensor, angles: tuple[Tensor, Tensor], interleaved: bool) -> Tensor:
    """Turn pairs of numbers by angles; x is (batch, heads, length, size), cos and sin (batch, 1, length, pairs)."""
    cos, sin = angles
    turned = 2 * cos.shape[-1]
    rest = x[..., turned:]
    part = x[..., :turned]
    if interleaved:
        a, b = part[..., 0::2], part[..., 1::2]
        y = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    else:
        a, b = part.chunk(2, -1)
        y = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    return torch.cat([y, rest], -1) if rest.shape[-1] else y


def _rotary_embedding(
    x: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: int = 0,
    is_packed_batching: int = 0,
    num_heads: int = 0,
    rotary_embedding_dim: int = 0,
    scale: float = 1.0,
) -> Tensor:
    if is_packed_batching or scale != 1.0:
        raise NotImplementedError("packed batches, or a scale")
    turned = rotary_embedding_dim or 2 * cos.shape[-1]
    wide = x if x.ndim == 4 else _heads(x, num_heads or x.shape[-1] // turned)
    length = wide.shape[2]
    places = positions.reshape(-1, 1) + torch.arange(length) if positions.numel() == 1 else positions
    angles = _angles(places, cos, sin)
    y = _rotated(wide, angles, bool(interleaved))
    return y if x.ndim == 4 else _joined(y)


def _group_query_attention(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    past_k: Tensor | None,
    past_v: Tensor | None,
    lengths: Tensor,
    total: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    positions: Tensor | None = None,
    attention_bias: Tensor | None = None,
    sink: Tensor | None = None,
    *,
    num_heads: int,
    kv_num_heads: int,
    do_rotary: int = 0,
    local_window_size: int = -1,
    rotary_interleaved: int = 0,
    scale: float = 0.0,
    smooth_softmax: int = 0,
    softcap: float = 0.0,
    wanted: int,
) -> Any:
    if k is None or v is None:
        each = q.shape[-1] // (num_heads + 2 * kv_num_heads)
        q, k, v = torch.split(q, [num_heads * each, kv_num_heads * each, kv_num_heads * each], -1)
    q, k, v = _heads(q, num_heads), _heads(k, kv_num_heads), _heads(v, kv_num_heads)
    batch, _, length, _ = q.shape
    before = past_k.shape[2] if past_k is not None else 0
    if ints(total, "total_sequence_length")[0] != before + length:
        raise NotImplementedError("a buffer of past keys that is longer than the past")
    # the buffer is the past of every row only if all rows have its length
    if any(n + 1 != before + length for n in ints(lengths, "seqlens_k")):
        raise NotImplementedError("rows of unequal lengths")
    if do_rotary:
        if cos is None or sin is None:
            raise ValueError("do_rotary needs cos_cache and sin_cache")
        places = (
            torch.arange(before, before + length).reshape(1, -1).expand(batch, -1) if positions is None else positions
        )
        angles = _angles(places, cos, sin)
        q, k = (_rotated(x, angles, bool(rotary_interleaved)) for x in (q, k))
    if past_k is not None and past_v is not None:
        k, v = torch.cat([past_k, k], 2), torch.cat([past_v, v], 2)
    repeat = num_heads // kv_num_heads
    wide_k, wide_v = (x.repeat_interleave(repeat, 1) if repeat > 1 else x for x in (k, v))
    if not (softcap or smooth_softmax or sink is not None):
        allowed = _near(length, k.shape[2], local_window_size)
        added = allowed if attention_bias is None else torch.where(allowed, attention_bias, -torch.inf)
        y = _joined(_attend(q, wide_k, wide_v, added, False, scale))
        return (y, k, v)[:wanted] if wanted > 1 else y
    scores = q @ wide_k.transpose(-1, -2) * (scale or q.shape[-1] ** -0.5)
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if attention_bias is not None:
        scores = scores + attention_bias
    scores = torch.where(_near(length, k.shape[2], local_window_size), scores, -torch.inf)
    extra = torch.zeros(1) if sink is None else sink.reshape(1, -1, 1, 1)
    shares = _softmax_with_sink(scores, extra) if smooth_softmax or sink is not None else scores.softmax(-1)
    y = _joined(shares @ wide_v)
    return (y, k, v)[:wanted] if wanted > 1 else y


def _near(queries: int, keys: int, window: int) -> Tensor:
    """Return the mask of keys that each query may see: up to its own position, and only the last ``window`` of them."""
    allowed = _causal(queries, keys)
    if window < 0:
        return allowed
    distance = torch.arange(queries).reshape(-1, 1) + (keys - queries) - torch.arange(keys).reshape(1, -1)
    return allowed & (distance < window)


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
    if groups is not None or weight_prepacked or bits not in (2, 4, 8):
        raise NotImplementedError(f"weights of {bits} bits in another order")
    blocks = -(-K // block_size)
    numbers = _unpacked(b.reshape(N, blocks, -1), bits)[..., :block_size].to(scales.dtype)
    if zeros is None:
        shift: Any = float(1 << (bits - 1))
    elif zeros.is_floating_point():
        shift = zeros.reshape(N, blocks, 1)
    else:
        shift = _unpacked(zeros.reshape(N, -1), bits)[:, :blocks].reshape(N, blocks, 1).to(scales.dtype)
    weights = ((numbers - shift) * scales.reshape(N, blocks, 1)).reshape(N, -1)[:, :K]
    return F.linear(a, weights.to(a.dtype), bias)


def _unpacked(x: Tensor, bits: int) -> Tensor:
    """Return the numbers that are packed in bytes along the last axis, lowest bits first."""
    if bits == 8:
        return x
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    parts = torch.bitwise_right_shift(x.unsqueeze(-1), shifts)
    return torch.bitwise_and(parts, (1 << bits) - 1).flatten(-2)


OPERATORS: Final[dict[str, Callable[..., Any]]] = {
    "Gelu": _gelu,
    "FusedGelu": _gelu,
    "BiasGelu": _bias_gelu,
    "FastGelu": _fast_gelu,
    "QuickGelu": _quick_gelu,
    "FusedConv": _fused_conv,
    "FusedGemm": _fused_gemm,
    "FusedMatMul": _fused_matmul,
    "TransposeMatMul": _fused_matmul,
    "SimplifiedLayerNormalization": _simplified_layer_normalization,
    "SkipLayerNormalization": _skip_layer_normalization,
    "SkipSimplifiedLayerNormalization": _skip_simplified_layer_normalization,
    "Attention": _attention,
    "MultiHeadAttention": _multi_head_attention,
    "RotaryEmbedding": _rotary_embedding,
    "GroupQueryAttention": _group_query_attention,
    "MatMulNBits": _matmul_nbits,
}
