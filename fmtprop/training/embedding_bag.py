"""Embedding bags of captured graphs as one call: PyTorch declares other shapes of the tensors that its call saves.

The gradient runs PyTorch's forward call once more, which is short against a gradient of the whole table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

#: PyTorch's modes; its operator takes their places here
_MODES = ("sum", "mean", "max")


def whole_embedding_bag(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return PyTorch's function as one call; itself where it is another one of this name."""
    if function is not F.embedding_bag:
        return function

    def call(
        input: Tensor, weight: Tensor, offsets: Tensor | None = None, max_norm: float | None = None,
        norm_type: float = 2.0, scale_grad_by_freq: bool = False, mode: str = "mean", sparse: bool = False,
        per_sample_weights: Tensor | None = None, include_last_offset: bool = False, padding_idx: int | None = None,
    ) -> Any:  # fmt: skip
        # it changes the table, has sparse gradients, or gets invalid arguments, of which PyTorch has the error
        if max_norm is not None or sparse or mode not in _MODES or (offsets is None) != (input.ndim == 2):
            return function(
                input, weight, offsets, max_norm, norm_type, scale_grad_by_freq, mode, sparse, per_sample_weights,
                include_last_offset, padding_idx,
            )  # fmt: skip
        if offsets is None:
            offsets = torch.arange(0, input.numel(), input.shape[1], dtype=input.dtype)
            input = input.flatten()
        factors = None if per_sample_weights is None else per_sample_weights.flatten()
        how = scale_grad_by_freq, _MODES.index(mode), include_last_offset, padding_idx
        return _bag(weight, input, offsets, factors, *how)

    call.__name__ = call.__qualname__ = function.__name__
    return call


def _run(weight: Tensor, indices: Tensor, offsets: Tensor, factors: Tensor | None, *how: Any) -> Tensor:
    by_frequency, mode, has_last, padding = how
    given = weight, indices, offsets, by_frequency, mode, False, factors, has_last, padding
    dst: Tensor = torch.embedding_bag(*given)[0]
    return dst


@torch.library.custom_op("fmtprop::embedding_bag", mutates_args=())
def _bag(
    weight: Tensor, indices: Tensor, offsets: Tensor, factors: Tensor | None, by_frequency: bool, mode: int,
    has_last: bool, padding: int | None,
) -> Tensor:  # fmt: skip
    return _run(weight, indices, offsets, factors, by_frequency, mode, has_last, padding)


@_bag.register_fake
def _(
    weight: Tensor, indices: Tensor, offsets: Tensor, factors: Tensor | None, by_frequency: bool, mode: int,
    has_last: bool, padding: int | None,
) -> Tensor:  # fmt: skip
    return weight.new_empty((offsets.shape[0] - has_last, weight.shape[1]))


@torch.library.custom_op("fmtprop::embedding_bag_backward", mutates_args=())
def _bag_backward(
    diff_dst: Tensor, weight: Tensor, indices: Tensor, offsets: Tensor, factors: Tensor | None, by_frequency: bool,
    mode: int, has_last: bool, padding: int | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    with torch.enable_grad(), torch.inference_mode(False):
        table, own = (None if one is None else one.detach().requires_grad_() for one in (weight, factors))
        assert table is not None
        dst = _run(table, indices, offsets, own, by_frequency, mode, has_last, padding)
        found = torch.autograd.grad(dst, [table] if own is None else [table, own], diff_dst)
    return found[0], weight.new_empty(0) if own is None else found[1]


@_bag_backward.register_fake
def _(
    diff_dst: Tensor, weight: Tensor, indices: Tensor, offsets: Tensor, factors: Tensor | None, by_frequency: bool,
    mode: int, has_last: bool, padding: int | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return torch.empty_like(weight), weight.new_empty(0) if factors is None else torch.empty_like(factors)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.how = inputs[4:]


def _differentiate(ctx: Any, diff_dst: Tensor) -> Any:
    factors = ctx.saved_tensors[3]
    diff_weight, diff_factors = _bag_backward(diff_dst, *ctx.saved_tensors, *ctx.how)
    return diff_weight, None, None, None if factors is None else diff_factors, None, None, None, None


_bag.register_autograd(_differentiate, setup_context=_save)
