"""The calls that PyTorch's transformer modules make without gradients, as the operators that these calls compute.

``nn.TransformerEncoderLayer`` and ``nn.MultiheadAttention`` in evaluation call one function of PyTorch's that does a
whole layer, and TorchDynamo captures that call. No plan would see the products in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

#: width of all heads and their number, weights and bias of queries, keys and values in one, and of the projection
_Heads = tuple[int, int, Tensor, Tensor, Tensor, Tensor]


def encoder_layer_in_parts(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return ``torch._transformer_encoder_layer_fwd`` as its operators."""

    def call(
        src: Tensor, embed_dim: int, num_heads: int,
        qkv_weight: Tensor, qkv_bias: Tensor, proj_weight: Tensor, proj_bias: Tensor,
        use_gelu: bool, norm_first: bool, eps: float,
        norm_weight_1: Tensor, norm_bias_1: Tensor, norm_weight_2: Tensor, norm_bias_2: Tensor,
        ffn_weight_1: Tensor, ffn_bias_1: Tensor, ffn_weight_2: Tensor, ffn_bias_2: Tensor,
        mask: Tensor | None = None, mask_type: int | None = None,
    ) -> Tensor:  # fmt: skip
        heads = embed_dim, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias
        hidden = None if mask is None else _hidden(mask, mask_type)
        if src.is_nested:
            return function(
                src, *heads, use_gelu, norm_first, eps, norm_weight_1, norm_bias_1, norm_weight_2, norm_bias_2,
                ffn_weight_1, ffn_bias_1, ffn_weight_2, ffn_bias_2, mask, mask_type,
            )  # fmt: skip

        def first_norm(x: Tensor) -> Tensor:
            return F.layer_norm(x, (embed_dim,), norm_weight_1, norm_bias_1, eps)

        def second_norm(x: Tensor) -> Tensor:
            return F.layer_norm(x, (embed_dim,), norm_weight_2, norm_bias_2, eps)

        def feed_forward(x: Tensor) -> Tensor:
            inner = F.linear(x, ffn_weight_1, ffn_bias_1)
            return F.linear(F.gelu(inner) if use_gelu else F.relu(inner), ffn_weight_2, ffn_bias_2)

        if norm_first:
            x = src + _attention((first_norm(src),) * 3, heads, hidden)[0]
            return x + feed_forward(second_norm(x))
        x = first_norm(src + _attention((src, src, src), heads, hidden)[0])
        return second_norm(x + feed_forward(x))

    call.__name__ = call.__qualname__ = function.__name__
    return call


def native_heads_in_parts(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``torch._native_multi_head_attention`` as its operators."""

    def call(
        query: Tensor, key: Tensor, value: Tensor, embed_dim: int, num_head: int,
        qkv_weight: Tensor, qkv_bias: Tensor, proj_weight: Tensor, proj_bias: Tensor, mask: Tensor | None = None,
        need_weights: bool = True, average_attn_weights: bool = True, mask_type: int | None = None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        heads = embed_dim, num_head, qkv_weight, qkv_bias, proj_weight, proj_bias
        if query.is_nested:
            found: tuple[Tensor, Tensor | None] = function(
                query, key, value, *heads, mask, need_weights, average_attn_weights, mask_type
            )
            return found
        hidden = None if mask is None else _hidden(mask, mask_type)
        dst, weights = _attention((query, key, value), heads, hidden, need_weights=need_weights)
        return dst, weights.mean(1) if weights is not None and average_attn_weights else weights

    call.__name__ = call.__qualname__ = function.__name__
    return call


def _hidden(mask: Tensor, mask_type: int | None) -> Tensor:
    """Return which keys no query sees, for all heads: of rows and columns, of each batch's columns (1), or of both."""
    hidden = mask.to(torch.bool)
    return hidden[:, None, None, :] if mask_type == 1 else hidden


def _attention(
    given: tuple[Tensor, ...], layer: _Heads, hidden: Tensor | None, *, need_weights: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return the projected attention of batches of rows, and the weights of all heads where they are needed.

    A query that sees no key has NaN, as in these calls; ``scaled_dot_product_attention`` would return 0.
    """
    embed_dim, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias = layer
    width = embed_dim // num_heads
    q, k, v = (
        F.linear(one, weight, bias).reshape(*one.shape[:2], num_heads, width).transpose(1, 2)
        for one, weight, bias in zip(given, qkv_weight.chunk(3), qkv_bias.chunk(3), strict=True)
    )
    weights = None
    if need_weights or hidden is not None:
        scores = q * width**-0.5 @ k.transpose(-2, -1)
        weights = (scores if hidden is None else scores.masked_fill(hidden, -torch.inf)).softmax(-1)
        heads = weights @ v
    else:
        heads = F.scaled_dot_product_attention(q, k, v)
    return F.linear(heads.transpose(1, 2).flatten(2), proj_weight, proj_bias), weights if need_weights else None
