"""Attention of captured graphs, in the form that is fast.

Short attention in bf16 is two products and a softmax where gradients are needed: PyTorch's own gradient recomputes the
weights of all keys, and takes longer in bf16 than in f32. The same holds for f16. Attention of other than four axes
gets four: of others, PyTorch makes parts whose softmax gives 0 for a row of -inf alone, and computes narrow ones in
f32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fmtprop import dnnl


def attention_in_parts(function: Callable[..., Tensor], lowered: bool) -> Callable[..., Tensor]:
    """Return PyTorch's function: of four axes, or in parts where these are products in bf16 and need gradients."""
    for_the_kernel = _for_the_kernel(function)

    def call(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        given = query, key, value
        is_plain = attn_mask is None and dropout_p == 0 and not is_causal
        if not is_plain or not _is_narrow(given, lowered) or not _is_short(given) or not _has_gradients(given):
            return for_the_kernel(*given, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        # scaled queries: a factor of the weights would be a step of its own in the backward pass
        scaled = query * (query.shape[-1] ** -0.5 if scale is None else scale)
        return (scaled @ key.transpose(-2, -1)).softmax(-1) @ value

    call.__name__ = call.__qualname__ = function.__name__
    return call


def _for_the_kernel(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return attention that calls PyTorch's with a batch and heads, as PyTorch has a kernel for these alone.

    Without heads, all matrices are heads. Of several axes before the matrices, the innermost one in memory has the
    heads, the others are the batch: so [batch, windows, heads, rows, width], made of [batch, windows, rows, heads,
    width], is a view. The kernel wants a mask with two or four axes, and values as wide as keys: narrower ones get
    zeros, as those of multi-head latent attention. PyTorch's parts give a contiguous result, so this one is, too.
    """

    def call(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *how: Any, **named: Any) -> Tensor:
        ndim, given, sizes = query.ndim, (query, key, value), query.shape[:-2]
        alike = all(one.ndim == ndim and one.shape[:-2] == sizes for one in given)
        if ndim == 4:
            if value.ndim == 4 and (missing := query.shape[-1] - value.shape[-1]) > 0:
                wide = call(query, key, F.pad(value, (0, missing)), mask, *how, **named)
                return wide[..., :-missing].contiguous()
            if mask is not None and mask.ndim == 3:
                return function(*given, mask[None], *how, **named).contiguous()
            return function(*given, mask, *how, **named)
        if ndim == 2 or not alike or named["enable_gqa"] or (mask is not None and mask.ndim > ndim):
            return function(*given, mask, *how, **named)
        if ndim == 3:
            masks = mask if mask is None or mask.ndim < 3 else mask[None]
            return call(query[None], key[None], value[None], masks, *how, **named)[0].contiguous()
        heads = min(range(ndim - 2), key=query.stride)

        def batched(tensor: Tensor) -> Tensor:
            return tensor.movedim(heads, -3).flatten(0, -4)

        if mask is not None and mask.ndim > 2:
            mask = batched(mask.expand(*sizes, *mask.shape[-2:]))
        found = call(*map(batched, given), mask, *how, **named)
        return found.reshape(*sizes[:heads], *sizes[heads + 1 :], *found.shape[1:]).movedim(-3, heads).contiguous()

    return call


def heads_in_parts(function: Callable[..., Any], lowered: bool) -> Callable[..., Any]:
    """Return ``torch.nn.functional.multi_head_attention_forward`` with attention of :func:`attention_in_parts`."""
    whole = F.scaled_dot_product_attention
    in_parts = attention_in_parts(whole, lowered)

    def call(*args: Any, **kwargs: Any) -> Any:
        F.scaled_dot_product_attention = in_parts  # a mode for functions would not reach calls inside of a function
        try:
            return function(*args, **kwargs)
        finally:
            F.scaled_dot_product_attention = whole

    call.__name__ = call.__qualname__ = function.__name__
    return call


def _is_narrow(given: tuple[Tensor, ...], lowered: bool) -> bool:
    """Return whether the products are in bf16: under autocast, by the plan's precision, or by their operands."""
    if not dnnl.supports("bf16"):
        return False
    if torch.is_autocast_enabled("cpu"):
        return torch.get_autocast_dtype("cpu") is torch.bfloat16
    return all(one.dtype is torch.bfloat16 or (lowered and one.dtype is torch.float32) for one in given)


def _is_short(given: tuple[Tensor, ...]) -> bool:
    """Return whether each query and key has its own head, and their weights are no more numbers than they and dst."""
    sizes: list[Any] = [size for one in given for size in one.shape]
    if any(one.ndim != 4 for one in given) or not all(isinstance(size, int) for size in sizes):
        return False
    query, key, value = (tuple(one.shape) for one in given)
    fits = query[:2] == key[:2] == value[:2] and query[3] == key[3] and key[2] == value[2]
    rows, columns = query[2], key[2]
    return fits and 0 < rows * columns <= (rows + columns) * (query[3] + value[3])


def _has_gradients(given: tuple[Tensor, ...]) -> bool:
    return torch.is_grad_enabled() and any(one.requires_grad for one in given)
