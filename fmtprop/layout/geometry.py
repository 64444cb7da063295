"""Geometry of a blocked or plain layout: the numbers that place a logical tensor in memory.

Owns the fields of oneDNN's blocking descriptor, their validation, and their conversion to and from tags. Must not know
about data types, buffers or the public descriptor class.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import prod
from operator import index
from typing import NamedTuple

from fmtprop.errors import FormatError, ShapeError
from fmtprop.layout.tags import LETTERS, MAX_NDIMS, FormatTag, InnerBlock, format_tag

INT64_MAX = 2**63 - 1


class Geometry(NamedTuple):
    """Position of every element of a logical tensor, in elements.

    ``dnnl_memory_desc_query`` in oneapi/dnnl/dnnl.h; SPEC M3, M4.
    """

    dims: tuple[int, ...]
    #: elements between neighbouring *outer* blocks along each axis (oneDNN's convention); the ordinary stride if the
    #: axis is not blocked
    strides: tuple[int, ...]
    inner_blocks: tuple[InnerBlock, ...]
    padded_dims: tuple[int, ...]
    #: index in the padded tensor of logical index 0, per axis
    padded_offsets: tuple[int, ...]
    #: position of padded index (0, …, 0)
    offset0: int

    def blocks(self) -> tuple[int, ...]:
        """Return the product of the inner blocks of every axis."""
        if not self.inner_blocks:
            return (1,) * len(self.dims)
        blocks = [1] * len(self.dims)
        for axis, size in self.inner_blocks:
            blocks[axis] *= size
        return tuple(blocks)

    def outer_counts(self) -> tuple[int, ...]:
        """Return the number of outer blocks along every axis (an incomplete last block counts)."""
        if not self.inner_blocks:
            return self.padded_dims
        return tuple(-(-p // b) for p, b in zip(self.padded_dims, self.blocks(), strict=True))

    def block_elements(self) -> int:
        """Return the number of elements of one whole inner block."""
        return prod(size for _, size in self.inner_blocks)

    def span(self) -> int:
        """Return the highest position in use, padding included, plus one; 0 for an empty tensor."""
        if 0 in self.dims:
            return 0
        if not self.inner_blocks:
            return self.offset0 + 1 + sum([(n - 1) * s for n, s in zip(self.padded_dims, self.strides, strict=True)])
        outer = sum((n - 1) * s for n, s in zip(self.outer_counts(), self.strides, strict=True))
        return self.offset0 + outer + self.block_elements()

    def onednn_elements(self) -> int:
        """Return the storage size in elements as ``dnnl_memory_desc_get_size`` computes it, ignoring offset0."""
        if 0 in self.dims:
            return 0
        size = 0
        for padded, block, stride in zip(self.padded_dims, self.blocks(), self.strides, strict=True):
            count = padded // block
            size = max(size, 1 if count == 1 else count * stride)
        return self.block_elements() if size <= 1 and self.inner_blocks else size


def axis_name(axis: int) -> str:
    """Name an axis in a message: ``"axis 1 (b)"``."""
    return f"axis {axis} ({LETTERS[axis]})"


def check_dims(dims: Iterable[int], label: str = "dims") -> tuple[int, ...]:
    """Return `dims` as a tuple of Python integers."""
    try:
        result = tuple(dims)
    except TypeError:
        raise ShapeError(f"{label} must be a sequence of integers, not {dims!r}") from None
    if len(result) > MAX_NDIMS:
        raise ShapeError(f"{label} has {len(result)} entries; at most {MAX_NDIMS} dimensions are supported")
    for axis, size in enumerate(result):
        if type(size) is int and 0 <= size <= INT64_MAX:
            continue
        try:
            as_int = size.__index__()
        except AttributeError:
            raise ShapeError(f"{label}[{axis}] is {size!r}; {label} must be integers") from None
        if not 0 <= as_int <= INT64_MAX:
            raise ShapeError(f"{label}[{axis}] is {as_int}; {label} must lie between 0 and 2**63 - 1")
        result = (*result[:axis], as_int, *result[axis + 1 :])
    return result


def integers(values: Iterable[int], label: str) -> tuple[int, ...]:
    """Return `values` as a tuple of Python integers (numpy's would overflow)."""
    try:
        return tuple(index(value) for value in values)
    except TypeError:
        raise ShapeError(f"{label} must be a sequence of integers, not {values!r}") from None


def integer(value: int, label: str) -> int:
    """Return `value` as a Python integer."""
    try:
        return index(value)
    except TypeError:
        raise ShapeError(f"{label} must be an integer, not {value!r}") from None


def dense_strides(counts: Sequence[int], order: Sequence[int], innermost: int = 1) -> tuple[int, ...]:
    """Return dense strides for sizes `counts` laid out in `order` (outermost first).

    A size of 0 counts as 1, as in oneDNN, so an empty tensor keeps its order.
    """
    strides = [0] * len(counts)
    stride = innermost
    for axis in reversed(order):
        strides[axis] = stride
        stride *= counts[axis] or 1
    return tuple(strides)


def from_tag(dims: tuple[int, ...], tag: FormatTag, offset0: int = 0) -> Geometry:
    """Return the dense geometry of `dims` in the format `tag`.

    SPEC M6; ``fill_blocked`` in oneDNN's src/common/memory_desc_wrapper.cpp.
    """
    if len(tag.order) != len(dims):
        raise ShapeError(f"format tag '{tag}' names {tag.ndim} dimensions, but dims {dims} has {len(dims)}")
    zeros = (0,) * len(dims)
    if not tag.inner_blocks:
        return Geometry(dims, dense_strides(dims, tag.order), (), dims, zeros, offset0)
    counts, padded, innermost = list(dims), list(dims), 1
    for axis, block in tag.blocked_axes:
        counts[axis] = -(-dims[axis] // block)
        padded[axis] = counts[axis] * block
        innermost *= block
    strides = dense_strides(counts, tag.order, innermost)
    return Geometry(dims, strides, tag.inner_blocks, tuple(padded), zeros, offset0)


def find_tag(geometry: Geometry) -> str | None:
    """Return the abstract tag that gives exactly this geometry, or None."""
    if geometry.offset0 or any(geometry.padded_offsets) or not geometry.dims:
        return None
    tag = FormatTag(axis_order(geometry), geometry.inner_blocks, LETTERS[: len(geometry.dims)])
    dense = from_tag(geometry.dims, tag)
    if dense.padded_dims != geometry.padded_dims:
        return None
    free = _free_axes(geometry)
    if any(d != s for a, (d, s) in enumerate(zip(dense.strides, geometry.strides, strict=True)) if a not in free):
        return None
    return format_tag(tag.order, tag.inner_blocks)


def axis_order(geometry: Geometry) -> tuple[int, ...]:
    """Return the axes by stride, outermost first.

    The stride of a dimension of size 1 does not matter, so several orders may fit; such a dimension stands right after
    its logical predecessor (``abcd`` rather than ``acdb`` where b has size 1).
    """
    counts, strides, free = geometry.outer_counts(), geometry.strides, _free_axes(geometry)
    # Two strides are equal if one of the dimensions has a single block or is empty: it lies inside the other.
    order = sorted(set(range(len(counts))) - set(free), key=lambda a: (-strides[a], -counts[a], a))
    for axis in free:
        order.insert(order.index(axis - 1) + 1 if axis else 0, axis)
    return tuple(order)


def _free_axes(geometry: Geometry) -> list[int]:
    return [
        a
        for a, (size, padded) in enumerate(zip(geometry.dims, geometry.padded_dims, strict=True))
        if size == 1 == padded
    ]


def check(geometry: Geometry, *, regular: bool) -> None:
    """Refuse a geometry that is inconsistent or puts two elements in one place.

    `regular`: True to demand SPEC M3, the rule of oneDNN's own descriptors. False to accept every layout in which each
    dimension steps over all faster ones, as in every view of a regular layout.
    """
    ndim = len(geometry.dims)
    for name in ("strides", "padded_dims", "padded_offsets"):
        if len(getattr(geometry, name)) != ndim:
            raise ShapeError(
                f"{name} {getattr(geometry, name)} must have one entry per dimension of dims {geometry.dims}"
            )
    if geometry.offset0 < 0:
        raise ShapeError(f"offset0 is {geometry.offset0}; it must not be negative")
    for axis, size in geometry.inner_blocks:
        if not 0 <= axis < ndim:
            raise ShapeError(f"inner block of axis {axis}: dims {geometry.dims} has axes 0 to {ndim - 1}")
        if size < 2:
            raise ShapeError(f"inner block of {axis_name(axis)} has size {size}; it must be at least 2")
    _check_padding(geometry)
    if 0 not in geometry.padded_dims:
        _check_overlap(geometry, regular)


def _check_padding(g: Geometry) -> None:
    for axis, block in enumerate(g.blocks()):
        size, padded, start = g.dims[axis], g.padded_dims[axis], g.padded_offsets[axis]
        if start + size > padded:
            raise ShapeError(
                f"{axis_name(axis)}: padded size {padded} is smaller than padded offset {start} + size {size}"
            )
        # A submemory may end inside its parent's block; then it has no padding of its own.
        if padded % block and not (padded == size and start == 0):
            raise ShapeError(
                f"{axis_name(axis)}: padded size {padded} must be a multiple of its blocks' product {block}"
            )


def _check_overlap(g: Geometry, regular: bool) -> None:
    counts, strides = g.outer_counts(), g.strides
    inner = g.block_elements()
    moving = sorted((a for a in range(len(counts)) if counts[a] > 1 and strides[a]), key=lambda a: strides[a])
    for axis in moving:
        if strides[axis] < inner:
            raise ShapeError(
                f"strides {strides}: {axis_name(axis)} has stride {strides[axis]}, but the inner blocks fill "
                f"{inner} elements; its neighbouring blocks overlap"
            )
    reach = inner
    for faster, slower in pairwise(moving):
        reach += strides[faster] * (counts[faster] - 1)
        need = max(strides[faster] * counts[faster], reach) if regular else reach
        if strides[slower] < need:
            raise ShapeError(_overlap_message(g, faster, slower, need))


def _overlap_message(g: Geometry, faster: int, slower: int, need: int) -> str:
    unit = "blocks" if g.inner_blocks else "elements"
    return (
        f"strides {g.strides} with dims {g.dims}: {axis_name(slower)} and {axis_name(faster)} overlap: "
        f"{axis_name(faster)} has {g.outer_counts()[faster]} {unit} {g.strides[faster]} apart, so {axis_name(slower)} "
        f"must step over at least {need} elements, not {g.strides[slower]} (use stride 0 to broadcast)"
    )


def is_regular(geometry: Geometry) -> bool:
    """Return whether the geometry satisfies SPEC M3, the rule of descriptors that oneDNN creates."""
    try:
        check(geometry, regular=True)
    except ShapeError:
        return False
    return True


def storage_bytes(geometry: Geometry, itemsize: int, elements: int | None = None) -> int:
    """Return the bytes of storage from the buffer's start.

    The value of ``dnnl_memory_desc_get_size``, or the end of the last position in use if that is larger (oneDNN gives 0
    for a submemory, and too little if all strides of dimensions larger than 1 are 0).
    """
    if 0 in geometry.dims:
        elements = 0
    elif elements is None:
        span = geometry.span()
        elements = span if geometry.offset0 else max(geometry.onednn_elements(), span)
    if max(elements, max(geometry.strides, default=0)) * itemsize > INT64_MAX:
        raise ShapeError(
            f"dims {geometry.dims} with strides {geometry.strides} reach beyond 2**63 bytes of {itemsize}-byte elements"
        )
    return elements * itemsize


def whole_blocks(geometry: Geometry, axis: int, label: str) -> None:
    """Refuse an operation on a blocked axis; `label` names it in the message."""
    for block in geometry.inner_blocks:
        if block.axis == axis:
            raise FormatError(
                f"{label}: {axis_name(axis)} of dims {geometry.dims} is blocked by {block.size}; "
                "convert to a plain format first"
            )


def make(
    dims: tuple[int, ...],
    strides: Iterable[int] | None,
    inner_blocks: Iterable[tuple[int, int]],
    padded_dims: Iterable[int] | None,
    padded_offsets: Iterable[int] | None,
    offset0: int,
) -> Geometry:
    """Make a geometry. Defaults: padding to whole blocks, no padded offsets, dense row-major outer dimensions."""
    blocks = tuple(InnerBlock(*check_dims(block, "inner block")) for block in inner_blocks)
    block_of = [1] * len(dims)
    for axis, size in blocks:
        if axis < len(dims):
            block_of[axis] *= max(size, 1)
    if padded_dims is None:
        padded = tuple(-(-d // b) * b for d, b in zip(dims, block_of, strict=True))
    else:
        padded = check_dims(padded_dims, "padded_dims")
    starts = (0,) * len(dims) if padded_offsets is None else check_dims(padded_offsets, "padded_offsets")
    if strides is None:
        counts = [-(-p // b) for p, b in zip(padded, block_of, strict=True)] if len(padded) == len(dims) else dims
        steps = dense_strides(counts, range(len(dims)), prod(size for _, size in blocks))
    else:
        steps = check_dims(strides, "strides")
    return Geometry(dims, steps, blocks, padded, starts, check_dims((offset0,), "offset0")[0])
