"""Addresses: from logical index to position in memory and back, for scalars and for numpy arrays.

Owns the arithmetic of offsets. Must not know about data types or buffers.

The inverse relies on a guarantee of ``geometry.check``: every dimension steps over all faster ones, so the largest
stride is the leading digit of a mixed-radix number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from fmtprop.errors import ShapeError
from fmtprop.layout.geometry import Geometry, axis_name

IntArray = npt.NDArray[np.int64]


def offset(g: Geometry, index: tuple[int, ...]) -> int:
    """Return the position of a logical index, counted in elements from the start of the buffer."""
    if len(index) != len(g.dims):
        raise ShapeError(f"index {index} must have one entry per dimension of {g.dims}")
    for axis, (i, size) in enumerate(zip(index, g.dims, strict=True)):
        if not 0 <= i < size:
            raise ShapeError(f"index {index}: {axis_name(axis)}: {i} is out of range for size {size}")
    return int(_place(g, [i + p for i, p in zip(index, g.padded_offsets, strict=True)]))


def offsets(g: Geometry, indices: npt.ArrayLike) -> IntArray:
    """Return the positions of many logical indices."""
    array = np.asarray(indices)
    if array.shape[-1:] != (len(g.dims),) or not np.issubdtype(array.dtype, np.integer):
        raise ShapeError(
            f"indices must be integers of shape (..., {len(g.dims)}), not {array.dtype} of shape {array.shape}"
        )
    bad = (array < 0) | (array >= np.array(g.dims, dtype=np.int64))
    if bad.any():
        where = tuple(int(i) for i in array[np.nonzero(bad.any(axis=-1))][0])
        raise ShapeError(f"index {where} is out of range for dims {g.dims}")
    digits = [array[..., a].astype(np.int64) + p for a, p in enumerate(g.padded_offsets)]
    return np.asarray(_place(g, digits), dtype=np.int64) + np.zeros(array.shape[:-1], np.int64)


def _place(g: Geometry, digits: list[Any]) -> Any:
    """Return the position of a padded index, digit by digit. Takes integers or arrays."""
    position: Any = g.offset0
    step = 1
    for axis, size in reversed(g.inner_blocks):
        position = position + digits[axis] % size * step
        digits[axis] = digits[axis] // size
        step *= size
    for digit, stride in zip(digits, g.strides, strict=True):
        position = position + digit * stride
    return position


def index_at(g: Geometry, position: int) -> tuple[int, ...] | None:
    """Return the logical index of the element at `position`, or None for padding, gaps and beyond.

    Where a broadcast repeats an element, the index is the first one.
    """
    if not g.offset0 <= position < g.span():
        return None
    index, is_element = _index(g, position - g.offset0, min)
    return tuple(index) if is_element else None


def indices_at(g: Geometry, positions: npt.ArrayLike) -> IntArray:
    """Return the logical indices at many positions."""
    array = np.asarray(positions)
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise ShapeError(f"positions must be integers, not {array.dtype}")
    array = array.astype(np.int64)
    inside = (array >= g.offset0) & (array < g.span())
    digits, is_element = _index(g, np.where(inside, array - g.offset0, 0), np.minimum)
    index = np.empty((*array.shape, len(g.dims)), np.int64)
    for axis, digit in enumerate(digits):
        index[..., axis] = digit
    index[~(inside & is_element)] = -1
    return index


def _index(g: Geometry, rest: Any, smaller: Callable[[Any, int], Any]) -> tuple[list[Any], Any]:
    """Return the index that :func:`_place` maps to `rest`, and whether an element is there; for integers or arrays."""
    digits, counts = [rest * 0 for _ in g.dims], g.outer_counts()
    for axis in sorted(range(len(counts)), key=g.strides.__getitem__, reverse=True):
        if counts[axis] > 1 and g.strides[axis]:
            digits[axis] = smaller(rest // g.strides[axis], counts[axis] - 1)
            rest = rest - digits[axis] * g.strides[axis]
    step = g.block_elements()
    is_element = rest < step
    for axis, size in g.inner_blocks:
        step //= size
        digits[axis] = digits[axis] * size + rest // step
        rest = rest % step
    for axis, size in enumerate(g.dims):
        digits[axis] = digits[axis] - g.padded_offsets[axis]
        is_element &= (digits[axis] >= 0) & (digits[axis] < size)
    return digits, is_element
