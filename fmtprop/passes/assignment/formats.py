"""Formats to try for a tensor, independent of any library."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from fmtprop.errors import FmtpropError
from fmtprop.layout import DataType, MemoryDesc
from fmtprop.layout.tags import LETTERS

#: planning asks for the same formats again and again, and compares them: comparing an object with itself is fast
_kept = lru_cache(maxsize=4096)


def describe(desc: MemoryDesc) -> str:
    """Return a short name of a format for messages: its tag, or the whole descriptor if it has none."""
    return f"{desc.dtype}:{desc.tag}" if desc.tag is not None else str(desc)


@_kept
def plain(desc: MemoryDesc) -> MemoryDesc:
    """Return the dense row-major descriptor of the same dimensions and data type."""
    return MemoryDesc(desc.dims, desc.dtype)


@_kept
def unspecified(desc: MemoryDesc) -> MemoryDesc:
    """Return the `any` descriptor of the same dimensions and data type."""
    return MemoryDesc.any(desc.dims, desc.dtype)


@_kept
def channels_last(desc: MemoryDesc) -> MemoryDesc:
    """Return the dense descriptor with axis 1 innermost (``acdb`` for rank 4); plain below rank 3."""
    if desc.ndim < 3:
        return plain(desc)
    letters = LETTERS[: desc.ndim]
    return MemoryDesc(desc.dims, desc.dtype, tag=letters[0] + letters[2:] + letters[1])


@_kept
def by_columns(desc: MemoryDesc) -> MemoryDesc:
    """Return the dense descriptor of a matrix, or of several, in which the numbers of a column follow one another."""
    order = (*range(desc.ndim - 2), desc.ndim - 1, desc.ndim - 2)
    return MemoryDesc(tuple(desc.dims[axis] for axis in order), desc.dtype).transpose(order)


@_kept
def channel_blocked(desc: MemoryDesc, block: int) -> MemoryDesc:
    """Return the descriptor with axis 1 blocked (``aBcd16b`` for rank 4); plain below rank 3."""
    if desc.ndim < 3:
        return plain(desc)
    letters = LETTERS[: desc.ndim]
    return MemoryDesc(desc.dims, desc.dtype, tag=f"{letters[0]}B{letters[2:]}{block}b")


def even_step(axes: Sequence[tuple[int, int]]) -> int | None:
    """Return the step of axes taken as one, 0 for no axes; None if its elements do not follow one another evenly.

    >>> even_step([(2, 12), (3, 4)]), even_step([(2, 16), (3, 4)])
    (4, None)
    """
    expected = step = axes[-1][1] if axes else 0
    for size, stride in reversed(axes):
        if stride != expected:
            return None
        expected *= size
    return step


def dense(desc: MemoryDesc) -> MemoryDesc:
    """Return the dense descriptor with the same order of axes and blocks, such as a strided slice without its gaps."""
    if desc.kind != "blocked" or desc.is_packed:
        return desc
    tag = desc.tag
    if tag is not None:
        return MemoryDesc(desc.dims, desc.dtype, tag=tag)
    order = sorted(range(desc.ndim), key=lambda axis: (-desc.strides[axis], axis))
    strides, step = [0] * desc.ndim, 1
    for axis in reversed(order):
        strides[axis] = step
        step *= desc.dims[axis]
    return MemoryDesc(desc.dims, desc.dtype, strides=tuple(strides))


def like(desc: MemoryDesc, other: MemoryDesc) -> MemoryDesc | None:
    """Return ``desc``'s tensor in the format of ``other`` (same rank), or None if this is not possible."""
    if other.kind != "blocked" or desc.ndim != other.ndim:
        return None
    if desc.dims == other.dims:
        return dense(other).with_dtype(desc.dtype)
    tag = other.at_start().tag
    if tag is None:
        return None
    try:
        return MemoryDesc(desc.dims, desc.dtype, tag=tag)
    except FmtpropError:
        return None


def usual(desc: MemoryDesc) -> list[MemoryDesc]:
    """Return the four usual formats, to try if the obvious one has no good implementation."""
    found = [channels_last(desc), channel_blocked(desc, 16), channel_blocked(desc, 8), plain(desc)]
    return list(dict.fromkeys(found))


@_kept
def worth_trying(dims: tuple[int, ...], dtype: DataType, blocks: tuple[int, ...]) -> tuple[MemoryDesc, ...]:
    """Return the formats to try for a tensor: channels-last, blocked along its channels, row-major."""
    row_major = MemoryDesc(dims, dtype)
    if not 3 <= len(dims) <= 5 or 0 in dims:
        return (row_major,)
    blocked = [channel_blocked(row_major, block) for block in blocks if dims[1] > block // 2]
    return tuple(dict.fromkeys([channels_last(row_major), *blocked, row_major]))
