"""Capabilities of the installed PyTorch with mkldnn tensors, from its dispatcher and its operators."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from fmtprop.layout import DataType
from fmtprop.ops.pytorch import computes_in_bf16, computes_in_f16, convolve, convolve_and_add, has_kernel_for

_CHANNELS = 8


@lru_cache(maxsize=256)
def has_kernel(operator: str, key: str = "MkldnnCPU") -> bool:
    """Return whether an operator has its own kernel for a dispatch key.

    `operator`: with namespace and overload: ``"aten::add.Tensor"``. `key`: ``"MkldnnCPU"`` for mkldnn tensors,
    ``"CPU"`` for dense ones.

    >>> has_kernel("aten::relu"), has_kernel("aten::cat")
    (True, False)
    """
    try:
        return bool(has_kernel_for(operator, key))
    except RuntimeError:  # there is no operator with that name
        return False


@lru_cache(maxsize=8)
def computes_in(dtype: DataType) -> bool:
    """Return whether PyTorch's oneDNN computes in a data type on this CPU."""
    if dtype is DataType.F32:
        return bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
    question = {DataType.BF16: computes_in_bf16, DataType.F16: computes_in_f16}.get(dtype)
    try:
        return question is not None and question()
    except AttributeError:  # PyTorch without oneDNN has no such question
        return False


@lru_cache(maxsize=256)
def accepts_unary(attr: str, scalars: tuple[float, ...], algorithm: str, *, after_add: bool) -> bool:
    """Return whether a convolution can apply an element-wise function itself, by running a small one."""
    src = torch.zeros((1, _CHANNELS, 2, 2), device="cpu").to(memory_format=torch.channels_last)
    weights = torch.zeros((_CHANNELS, _CHANNELS, 1, 1), device="cpu")
    window: tuple[Sequence[int], ...] = ([0, 0], [1, 1], [1, 1])
    try:
        with torch.no_grad():
            if after_add:
                convolve_and_add(src, src, weights, None, *window, 1, "add", None, attr, list(scalars), algorithm)
            else:
                convolve(src, weights, None, *window, 1, attr, list(scalars), algorithm)
    except RuntimeError:  # "Fusion behavior undefined"
        return False
    return True
