"""Arithmetic of sliding windows, shared by convolution, deconvolution and pooling.

Owns the sizes and the checks of strides, dilation and padding in oneDNN's sense (a dilation of 0 is dense). Must not
know tensors or graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from fmtprop.errors import ShapeError


def check_window(op: str, strides: Sequence[int], **others: Sequence[int]) -> None:
    """Check that stride, dilation and padding are given for the same 1 to 3 axes and in range.

    `strides`: one per spatial axis, at least 1. `**others`: attributes of the same length, by name; each at least 0.
    """
    if not 1 <= len(strides) <= 3:
        raise ShapeError(f"{op} has 1 to 3 spatial axes, but strides={tuple(strides)} has {len(strides)}")
    for name, values in {"strides": strides, **others}.items():
        if len(values) != len(strides):
            raise ShapeError(f"{op} strides={tuple(strides)} and {name}={tuple(values)} must have the same length")
        low = 1 if name in ("strides", "kernel") else 0
        for axis, value in enumerate(values):
            if value < low:
                raise ShapeError(f"{op} {name}[{axis}] is {value}, but must be at least {low}")


def products(each: Sequence[int], channels: int, weights: Sequence[int]) -> float:
    """Return the number of products: each element has one for each tap and channel of its group."""
    grouped = len(weights) > len(each)
    return prod(each) * max(channels / weights[0] if grouped else channels, 1.0) * prod(weights[2 + grouped :])


def extent(kernel: int, dilate: int) -> int:
    """Return the number of positions that a dilated window covers.

    >>> extent(3, 0), extent(3, 1)
    (3, 5)
    """
    return (kernel - 1) * (dilate + 1) + 1


def window_count(
    src: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int],
    dilates: Sequence[int],
    pad_l: Sequence[int],
    pad_r: Sequence[int],
) -> tuple[int, ...]:
    """Return the number of window positions along each spatial axis.

    >>> window_count((224, 224), (7, 7), (2, 2), (0, 0), (3, 3), (3, 3))
    (112, 112)
    """
    counts = []
    for axis, size in enumerate(src):
        padded, covered = size + pad_l[axis] + pad_r[axis], extent(kernel[axis], dilates[axis])
        if padded < covered:
            raise ShapeError(
                f"src axis {axis + 2} has {size} elements and padding {pad_l[axis]}+{pad_r[axis]}, but the window "
                f"covers {covered} (kernel={kernel[axis]}, dilates={dilates[axis]})"
            )
        counts.append((padded - covered) // strides[axis] + 1)
    return tuple(counts)


def same_padding(kernel: int, dilate: int) -> tuple[int, int]:
    """Return the padding on both sides that keeps the size at stride 1; an odd remainder goes right, as in PyTorch.

    >>> same_padding(3, 0), same_padding(4, 0)
    ((1, 1), (1, 2))
    """
    total = extent(kernel, dilate) - 1
    return total // 2, total - total // 2


def torch_padding(pad_l: Sequence[int], pad_r: Sequence[int]) -> list[int]:
    """Return the padding in the form of ``torch.nn.functional.pad``: pairs, last axis first.

    >>> torch_padding((1, 2), (3, 4))
    [2, 4, 1, 3]
    """
    return [pad for pair in zip(reversed(pad_l), reversed(pad_r), strict=True) for pad in pair]
