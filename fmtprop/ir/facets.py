"""Facets of an op for passes and costs: positions of its products, its cost, the slices of a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from fmtprop.ir.node import Attrs

Dims = tuple[int, ...]


@dataclass(frozen=True)
class Linear:
    """Where the products are that an op sums, of its ``src`` and its ``weights``, or of the gradients of these."""

    #: ``(dims of src, of weights, of dst) -> products``
    products: Callable[[Dims, Dims, Dims], float]
    #: whether the outputs lie along the last axis of weights, of dst and of a bias of the rank of dst. Otherwise they
    #: lie along the first axis of weights (behind one of groups, where weights have an axis more than src), along axis
    #: 1 of dst and in a bias of one axis.
    by_columns: bool = False
    #: whether weights are a window that slides over src, perhaps in groups of channels
    windowed: bool = False
    #: whether the window slides over dst: each number of src is added to all places of a window
    transposed: bool = False
    #: the operand or result of the op that has the dims of src, of weights and of dst: the gradient by an operand sums
    #: as many products, but other ones
    roles: tuple[str, str, str] = ("src", "weights", "dst")

    def output_axis(self, ndim: int) -> int:
        """Return the axis of dst along which the outputs lie; dst has `ndim` axes."""
        return ndim - 1 if self.by_columns else 1

    def bias_dims(self, outputs: int, ndim: int) -> Dims:
        """Return the dims of a bias with a number for each output, where dst has `ndim` axes."""
        return (*(1,) * (ndim - 1), outputs) if self.by_columns else (outputs,)

    def factor_dims(self, weights: Dims, ndim: int) -> Dims:
        """Return the dims in which a number for each output multiplies weights, where dst has `ndim` axes."""
        if self.by_columns:
            return (*(1,) * (len(weights) - 1), weights[-1])
        head = 2 if self.channels_per_group(weights, ndim) else 1
        return (*weights[:head], *(1,) * (len(weights) - head))

    def channels_per_group(self, weights: Dims, ndim: int) -> int:
        """Return the source's channels in each group; 0 where weights have no groups (dst has `ndim` axes)."""
        return weights[2] if self.windowed and len(weights) > ndim else 0


def _one(attrs: Any, gathered: float) -> float:
    return 1.0


def _none(attrs: Any) -> float:
    return 0.0


@dataclass(frozen=True)
class Cost:
    """Costs of an op without its products, for the model of :mod:`fmtprop.tuning.roofline`."""

    #: ``(attrs, elements of src for one of dst) -> operations for an element of dst``
    operations: Callable[[Any, float], float] = _one
    #: ``attrs -> places that PyTorch's operator reads, one after another, for an element of dst``; 0 without a window
    window: Callable[[Any], float] = _none
    #: share of the copying bandwidth at which oneDNN's kernels move the op's bytes. Medians over the layers of the
    #: built-in convolutional networks, with one thread on AVX2.
    pace: float = 1.0
    #: the same of PyTorch's operator. Measured on [1, 64, 64, 64] with 2 threads (Xeon with AMX, torch 2.13): 1.4 to
    #: 0.5 of simple element-wise ones, 0.15 to 0.3 of those that take several passes. Less is declared where oneDNN has
    #: generated code, which is not slower.
    pytorch: float = 0.3
    #: part of that where the channels are innermost, of an operator that is written for rows
    across: float = 1.0
    #: ``attrs -> operations of PyTorch's operator for an element of dst``, if they take longer than its bytes; or 0
    by_pytorch: Callable[[Any], float] = _none
    #: factor of `operations` where the channels are not innermost, if oneDNN's code gathers number by number there
    gathers: float = 1.0


class Reads(Enum):
    """Formats on which PyTorch's operator works as they are.

    It copies others number by number: that takes 23 ms where the operator takes 0.5 and a reorder 2 (group
    normalization of [1, 512, 3199] with channels innermost, torch 2.13).
    """

    #: any strides
    ANY = "any"
    #: row-major
    ROWS = "rows"
    #: row-major, and channels-last in PyTorch's sense: of rank 4 and 5
    ROWS_OR_CHANNELS_LAST = "rows or channels-last"


class Bytes(Enum):
    """What an op's primitive does with numbers of a grid that are stored as bytes (:class:`~fmtprop.ir.grid.Grid`)."""

    #: it computes with real numbers only
    NEVER = "never"
    #: each result is one of the sources' numbers, so it needs no scale
    MOVED = "moved"
    #: it sums products of bytes, and scales the sums
    MULTIPLIED = "multiplied"
    #: it converts bytes to reals and back
    CONVERTED = "converted"
    #: it computes with the numbers of two sources, and rounds
    COMBINED = "combined"
    #: it looks each byte up, so no scale is left
    TABULATED = "tabulated"
    #: it computes with the numbers of one source, and rounds if its result is on a grid
    NORMALIZED = "normalized"


def each_image(attrs: Attrs, batch: int, images: int) -> Attrs | None:
    """Return the attributes as they are: the op treats images one by one."""
    return attrs


def each_image_across_axis(attrs: Any, batch: int, images: int) -> Attrs | None:
    """Return the attributes of an op that works along an axis, as they are; None where that is the batch."""
    found: Attrs | None = attrs if attrs.axis > 0 else None
    return found
