"""Convolution as a sum of matrix products, one for each position of the kernel: the reference of checks.

PyTorch runs convolutions with its own copy of oneDNN: a check would depend on the checked library, and would leave the
copy's code, kernels and packed weights in memory. These products need only the memory of one more source.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from math import prod

import torch
import torch.nn.functional as F

from fmtprop.ops.convolution import Conv
from fmtprop.ops.window import torch_padding, window_count


def convolve(attrs: Conv, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Evaluate a convolution, as its op's reference does.

    `tensors`: ``src`` [N, C, ...], ``weights`` [O, C, ...] or [G, O/G, C/G, ...], and maybe ``bias`` [O]. Result: dst
    [N, O, ...] in the data type of src: sums are taken in f32 at least, and rounded once.
    """
    src, weights, bias = tensors["src"], tensors["weights"], tensors.get("bias")
    wide, spatial = torch.promote_types(src.dtype, torch.float32), len(attrs.strides)
    kernel = weights.shape[-spatial:]
    # [positions, G, O/G, C/G]
    factors = weights.to(wide).reshape(attrs.groups, -1, src.shape[1] // attrs.groups, prod(kernel)).movedim(3, 0)
    factors = factors.contiguous()
    places = list(product(*map(range, kernel)))
    sizes = window_count(src.shape[2:], kernel, attrs.strides, attrs.dilates, attrs.pad_l, attrs.pad_r)
    start = torch.zeros(1, dtype=wide) if bias is None else bias.to(wide)
    dst = src.new_empty(len(src), factors.shape[1] * factors.shape[2], *sizes)
    for image, result in zip(src, dst, strict=True):  # one image at a time stays in cache
        padded = F.pad(image.to(wide), torch_padding(attrs.pad_l, attrs.pad_r))
        total = start.reshape(-1, 1).repeat(dst.shape[1] // len(start), prod(sizes))
        total = total.reshape(*factors.shape[1:3], prod(sizes))
        _accumulate(total, factors, [padded[_window(attrs, place, sizes)] for place in places])
        result.copy_(total.reshape(result.shape))
    return (dst,)


def _accumulate(total: torch.Tensor, factors: torch.Tensor, windows: Sequence[torch.Tensor]) -> None:
    """Add the products of each kernel position to [G, O/G, L], for L output positions."""
    places, groups, made, read = factors.shape
    count = max(1, made // read)  # products at a time: as many as read no more bytes than the result has
    for first in range(0, places, count):
        weights = _joined(factors[first : first + count].unbind(), 2)
        rows = _joined([window.reshape(groups, read, total.shape[2]) for window in windows[first : first + count]], 1)
        if made == read == 1:
            total.addcmul_(weights, rows)
        else:
            total.baddbmm_(weights, rows)


def _joined(parts: Sequence[torch.Tensor], axis: int) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts), axis)


def _window(attrs: Conv, place: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    """Return the part of [C, ...] that a kernel position reads."""
    starts = [at * (dilate + 1) for at, dilate in zip(place, attrs.dilates, strict=True)]
    ranges = zip(starts, sizes, attrs.strides, strict=True)
    return (slice(None), *(slice(start, start + (size - 1) * stride + 1, stride) for start, size, stride in ranges))
