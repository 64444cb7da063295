"""Attention of ``com.microsoft``: with masks, earlier keys and values, grouped heads and rotary positions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from fmtprop.onnx.model.operators.attributes import passed_to
from fmtprop.onnx.model.operators.microsoft_quantised import matmul_integer_to_float
from fmtprop.onnx.model.operators.values import integer, ints, is_known


def _heads(x: Tensor, count: int) -> Tensor:
    """Return (batch, heads, length, size) of (batch, length, heads * size)."""
    if x.ndim == 4:
        return x
    return x.reshape(x.shape[0], x.shape[1], count, x.shape[2] // count).transpose(1, 2)


def _joined(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


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


def _attended(
    parts: Sequence[Tensor],
    mask: Tensor | None,
    past: Tensor | None,
    attention_bias: Tensor | None = None,
    *,
    num_heads: int,
    do_rotary: int = 0,
    mask_filter_value: float = -10000.0,
    past_present_share_buffer: int = 0,
    scale: float = 0.0,
    unidirectional: int = 0,
    wanted: int,
) -> Any:
    """Return the attention of projected queries, keys and values, and the keys and values if they are wanted."""
    if do_rotary or past_present_share_buffer:
        raise NotImplementedError("rotary positions or a shared buffer of past keys")
    q, k, v = (_heads(part, num_heads) for part in parts)
    if past is not None:
        k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
    added = _sum_of(_key_mask(mask, q.shape[0], k.shape[2], mask_filter_value), attention_bias)
    y = _joined(_attend(q, k, v, added, unidirectional == 1, scale))
    return (y, torch.stack([k, v])) if wanted > 1 else y


@passed_to(_attended)
def _attention(
    x: Tensor,
    weights: Tensor,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    past: Tensor | None = None,
    attention_bias: Tensor | None = None,
    past_length: Tensor | None = None,
    *,
    qkv_hidden_sizes: Sequence[int] | None = None,
    rotary_embedding_dim: int = 0,
    **attributes: Any,
) -> Any:
    sizes = list(qkv_hidden_sizes or [weights.shape[1] // 3] * 3)
    parts = torch.split(F.linear(x, weights.t(), bias), sizes, -1)
    return _attended(parts, mask, past, attention_bias, **attributes)


@passed_to(_attended)
def _quantised_attention(
    x: Tensor,
    weights: Tensor,
    bias: Tensor,
    x_scale: Tensor,
    weights_scale: Tensor,
    mask: Tensor | None = None,
    x_zero: Tensor | None = None,
    weights_zero: Tensor | None = None,
    past: Tensor | None = None,
    **attributes: Any,
) -> Any:
    projected = matmul_integer_to_float(x, weights, x_scale, weights_scale, x_zero, weights_zero, bias)
    return _attended(projected.chunk(3, -1), mask, past, **attributes)


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
    y = _joined(_attend(q, k, v, added, unidirectional == 1, scale))
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
    turned = 2 * cos.shape[-1]
    if rotary_embedding_dim not in (0, turned):
        raise ValueError(f"rotary_embedding_dim is {rotary_embedding_dim}, but the angles are for {turned} numbers")
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
    keys = integer(total, "total_sequence_length")
    first = _first_places(lengths, keys, length, before)
    if do_rotary:
        if cos is None or sin is None:
            raise ValueError("do_rotary needs cos_cache and sin_cache")
        places = (
            (torch.arange(length) + first).reshape(-1, length).expand(batch, -1) if positions is None else positions
        )
        angles = _angles(places, cos, sin)
        q, k = (_rotated(x, angles, bool(rotary_interleaved)) for x in (q, k))
    k, v = (_with_past(past, x, first, max(before, keys)) for past, x in ((past_k, k), (past_v, v)))
    repeat = num_heads // kv_num_heads
    seen_k, seen_v = (x[:, :, :keys] if x.shape[2] > keys else x for x in (k, v))
    wide_k, wide_v = (x.repeat_interleave(repeat, 1) if repeat > 1 else x for x in (seen_k, seen_v))
    allowed = _near(first, length, keys, local_window_size)
    if not (softcap > 0 or smooth_softmax or sink is not None):
        added = allowed if attention_bias is None else torch.where(allowed, attention_bias, -torch.inf)
        y = _joined(_attend(q, wide_k, wide_v, added, False, scale))
        return (y, k, v)[:wanted] if wanted > 1 else y
    scores = q @ wide_k.transpose(-1, -2) * (scale or q.shape[-1] ** -0.5)
    if softcap > 0:
        scores = torch.tanh(scores / softcap) * softcap
    if attention_bias is not None:
        scores = scores + attention_bias
    scores = torch.where(allowed, scores, -torch.inf)
    extra = torch.zeros(1) if sink is None else sink.reshape(1, -1, 1, 1)
    shares = _softmax_with_sink(scores, extra) if smooth_softmax or sink is not None else scores.softmax(-1)
    y = _joined(shares @ wide_v)
    return (y, k, v)[:wanted] if wanted > 1 else y


def _first_places(lengths: Tensor, keys: int, length: int, before: int) -> Any:
    """Return the place of the first new token in each row, (batch, 1); one number if it is known to be that of all.

    ``lengths`` are ``seqlens_k``: the number of a row's earlier and new tokens, minus one. A prompt begins at 0.
    """
    if length == keys:
        return 0
    if before == 0:
        raise ValueError(f"total_sequence_length is {keys} for {length} tokens, but there are no past keys")
    if is_known(lengths):
        found = set(ints(lengths, "seqlens_k"))
        if len(found) == 1:
            return found.pop() + 1 - length
    return lengths.reshape(-1, 1) + (1 - length)


def _with_past(past: Tensor | None, new: Tensor, first: Any, size: int) -> Tensor:
    """Return a buffer of ``size`` places with the past, and from the place ``first`` of each row on the new keys."""
    length = new.shape[2]
    if not isinstance(first, Tensor):
        parts = [new] if past is None or not first else [past[:, :, :first], new]
        if first + length < size:
            parts.append(new.new_zeros([*new.shape[:2], size - first - length, new.shape[3]]))
        return torch.cat(parts, 2) if len(parts) > 1 else new
    old = new.new_zeros(new.shape) if past is None else past
    offset = (torch.arange(size) - first).reshape(-1, 1, size, 1)
    if length > 1:
        new = new.gather(2, offset.clamp(0, length - 1).expand(-1, new.shape[1], -1, new.shape[3]))
    later = torch.where(offset < length, new, torch.zeros(()))
    return torch.where(offset < 0, F.pad(old, [0, 0, 0, size - old.shape[2]]), later)


def _near(first: Any, queries: int, keys: int, window: int) -> Tensor:
    """Return the mask of keys that each query may see: up to its own place, and only the last ``window`` of them."""
    at = first.reshape(-1, 1, 1, 1) if isinstance(first, Tensor) else first
    distance = torch.arange(queries).reshape(-1, 1) + at - torch.arange(keys).reshape(1, -1)
    return distance >= 0 if window < 0 else (distance >= 0) & (distance < window)


OPERATORS: Final[dict[str, Callable[..., Any]]] = {
    "Attention": _attention,
    "QAttention": _quantised_attention,
    "MultiHeadAttention": _multi_head_attention,
    "RotaryEmbedding": _rotary_embedding,
    "GroupQueryAttention": _group_query_attention,
}
