"""Transforms of a geometry that move no data: permute, reshape, submemory, slice, broadcast.

Owns the rules of which views a format can express. Each function returns a new geometry over the same buffer, or
raises if the format cannot express it. Must not know about data types or buffers.
"""

from __future__ import annotations

from itertools import pairwise
from math import prod

from fmtprop.errors import FormatError, ShapeError
from fmtprop.layout.geometry import Geometry, axis_name, whole_blocks
from fmtprop.layout.tags import InnerBlock


def permute_axes(g: Geometry, permutation: tuple[int, ...]) -> Geometry:
    """Move axis ``i`` to ``permutation[i]`` (oneDNN's convention)."""
    source = inverse_permutation(permutation, len(g.dims))
    blocks = tuple(InnerBlock(permutation[axis], size) for axis, size in g.inner_blocks)
    return Geometry(
        tuple(g.dims[a] for a in source),
        tuple(g.strides[a] for a in source),
        blocks,
        tuple(g.padded_dims[a] for a in source),
        tuple(g.padded_offsets[a] for a in source),
        g.offset0,
    )


def inverse_permutation(permutation: tuple[int, ...], ndim: int) -> tuple[int, ...]:
    """Return the inverse permutation; refuse numbers that are not a permutation of ``0 … ndim-1``."""
    if sorted(permutation) != list(range(ndim)):
        raise ShapeError(f"permutation {permutation} must hold each of 0 to {ndim - 1} exactly once")
    inverse = [0] * ndim
    for i, p in enumerate(permutation):
        inverse[p] = i
    return tuple(inverse)


def check_window(dims: tuple[int, ...], sizes: tuple[int, ...], offsets: tuple[int, ...]) -> None:
    """Refuse a window that does not lie inside a tensor of size `dims`."""
    for name, values in (("submemory dims", sizes), ("submemory offsets", offsets)):
        if len(values) != len(dims):
            raise ShapeError(f"{name} {values} must have one entry per dimension of {dims}")
    for axis, (size, offset, whole) in enumerate(zip(sizes, offsets, dims, strict=True)):
        if size < 0 or offset < 0 or offset + size > whole:
            raise ShapeError(
                f"submemory: {axis_name(axis)}: offset {offset} + size {size} does not lie inside size {whole}"
            )


def submemory(g: Geometry, sizes: tuple[int, ...], offsets: tuple[int, ...]) -> Geometry:
    """Return the window of `sizes` at `offsets`; raise exactly if oneDNN refuses it."""
    check_window(g.dims, sizes, offsets)
    padded, offset0 = [], g.offset0
    for axis, block in enumerate(g.blocks()):
        size, offset = sizes[axis], offsets[axis]
        to_the_end = offset + size == g.dims[axis]
        if offset % block:
            raise FormatError(
                f"submemory: {axis_name(axis)}: offset {offset} must be a multiple of its block {block}; "
                "convert to a plain format first"
            )
        if g.padded_offsets[axis]:
            raise FormatError(f"submemory: {axis_name(axis)} has padding in front ({g.padded_offsets[axis]} elements)")
        if not to_the_end and size % block and size > block:
            raise FormatError(
                f"submemory: {axis_name(axis)}: size {size} ends inside a block of {block}; use a multiple of the block"
            )
        padded.append(g.padded_dims[axis] - offset if to_the_end else size)
        offset0 += offset // block * g.strides[axis]
    return Geometry(sizes, g.strides, g.inner_blocks, tuple(padded), g.padded_offsets, offset0)


def take(g: Geometry, starts: tuple[int, ...], sizes: tuple[int, ...], steps: tuple[int, ...]) -> Geometry:
    """Return the view of every `steps`-th element from `starts`, `sizes` elements per axis."""
    for axis, step in enumerate(steps):
        if step == 1:
            continue
        if step < 1:
            raise FormatError(
                f"slice: {axis_name(axis)}: step {step}: a memory descriptor has no negative strides; copy instead"
            )
        whole_blocks(g, axis, f"slice with step {step}")
        if g.padded_dims[axis] != g.dims[axis]:
            raise FormatError(f"slice with step {step}: {axis_name(axis)} is padded; copy instead")
    reach = tuple((size - 1) * step + 1 if size else 0 for size, step in zip(sizes, steps, strict=True))
    window = submemory(g, reach, starts)
    padded = tuple(n if step > 1 else p for n, p, step in zip(sizes, window.padded_dims, steps, strict=True))
    strides = tuple(s * step for s, step in zip(window.strides, steps, strict=True))
    return window._replace(dims=sizes, padded_dims=padded, strides=strides)


def broadcast_to(g: Geometry, dims: tuple[int, ...]) -> Geometry:
    """Return the view that repeats dimensions of size 1 (stride 0), new dimensions in front, as numpy does."""
    extra = len(dims) - len(g.dims)
    if extra < 0:
        raise ShapeError(f"cannot broadcast dims {g.dims} to {dims}: it has fewer dimensions")
    strides, padded = [0] * extra, list(dims[:extra])
    for axis, (have, want) in enumerate(zip(g.dims, dims[extra:], strict=True)):
        if have == want:
            strides.append(g.strides[axis])
            padded.append(g.padded_dims[axis])
            continue
        if have != 1:
            raise ShapeError(f"cannot broadcast dims {g.dims} to {dims}: {axis_name(axis)} has size {have}, not 1")
        if g.padded_dims[axis] != 1:
            raise FormatError(
                f"cannot broadcast {axis_name(axis)}: its size 1 is padded to {g.padded_dims[axis]}; "
                "convert to a plain format first"
            )
        strides.append(0)
        padded.append(want)
    blocks = tuple(InnerBlock(axis + extra, size) for axis, size in g.inner_blocks)
    return Geometry(dims, tuple(strides), blocks, tuple(padded), (0,) * extra + g.padded_offsets, g.offset0)


def reshape(g: Geometry, dims: tuple[int, ...]) -> Geometry:
    """Return the geometry of the same elements in row-major logical order under other dims.

    Axes are matched from the last one, in minimal groups of equal volume. A group of one old and one new axis keeps
    its blocks. Any other group must be dense, ordered and neither blocked nor padded.

    ``dnnl_memory_desc_reshape`` in oneapi/dnnl/dnnl.h.
    """
    if prod(d or 1 for d in g.dims) != prod(d or 1 for d in dims) or (0 in g.dims) != (0 in dims):
        raise ShapeError(f"cannot reshape dims {g.dims} ({prod(g.dims)} elements) to {dims} ({prod(dims)} elements)")
    return _Reshape(g, dims).run()


class _Reshape:
    """One reshape in progress: the output arrays, filled from the last axis to the first."""

    def __init__(self, g: Geometry, dims: tuple[int, ...]) -> None:
        self.g, self.dims = g, dims
        self.strides, self.padded = [0] * len(dims), list(dims)
        self.padded_offsets = [0] * len(dims)
        self.moved: dict[int, int] = {}  # old axis -> new axis, for axes that keep their blocks

    def run(self) -> Geometry:
        i, o = len(self.g.dims), len(self.dims)
        while i or o:
            i, o = self._step(i, o)
        blocks = tuple(InnerBlock(self.moved[axis], size) for axis, size in self.g.inner_blocks)
        return Geometry(
            self.dims, tuple(self.strides), blocks, tuple(self.padded), tuple(self.padded_offsets), self.g.offset0
        )

    def _step(self, i: int, o: int) -> tuple[int, int]:
        """Match the last group of axes before `i` and `o`; return its first axes."""
        g = self.g
        if i and g.dims[i - 1] == 1:
            # A submemory inside a block has no padding, but its blocks must not be dropped (oneDNN v3.2 drops them).
            if g.padded_dims[i - 1] == 1 and all(axis != i - 1 for axis, _ in g.inner_blocks):
                return i - 1, o
            if o and self.dims[o - 1] == 1:
                return self._keep(i - 1, o - 1)
            raise FormatError(
                f"cannot reshape dims {g.dims} to {self.dims}: {axis_name(i - 1)} of size 1 is blocked by "
                f"{g.blocks()[i - 1]} (or padded to {g.padded_dims[i - 1]}) and cannot be dropped; "
                "convert to a plain format first"
            )
        if o and self.dims[o - 1] == 1:
            return self._insert_one(i, o - 1)
        first_i, first_o = self._group(i, o)
        if first_i + 1 == i and first_o + 1 == o:
            return self._keep(first_i, first_o)
        return self._rearrange(first_i, i, first_o, o)

    def _group(self, i: int, o: int) -> tuple[int, int]:
        """Return the first axes of the smallest groups of equal volume that end before `i` and `o`."""
        first_i, first_o, have, want = i - 1, o - 1, 1, 1
        if i and o:
            have, want = self.g.dims[first_i], self.dims[first_o]
            while have != want:
                if have < want and first_i:
                    first_i -= 1
                    have *= self.g.dims[first_i]
                elif want < have and first_o:
                    first_o -= 1
                    want *= self.dims[first_o]
                else:
                    break
        if not (i and o) or have != want or (have == 0 and (first_i + 1 < i or first_o + 1 < o)):
            raise ShapeError(
                f"cannot reshape dims {self.g.dims} to {self.dims}: a dimension of size 0 must stay as it is"
            )
        return first_i, first_o

    def _keep(self, i: int, o: int) -> tuple[int, int]:
        self.strides[o] = self.g.strides[i]
        self.padded[o] = self.g.padded_dims[i]
        self.padded_offsets[o] = self.g.padded_offsets[i]
        self.moved[i] = o
        return i, o

    def _insert_one(self, i: int, o: int) -> tuple[int, int]:
        # The stride of a dimension of size 1 never matters; this one keeps the order readable.
        g = self.g
        self.strides[o] = g.block_elements() if i == len(g.dims) else g.strides[i] * g.outer_counts()[i]
        return i, o

    def _rearrange(self, i: int, i_end: int, o: int, o_end: int) -> tuple[int, int]:
        g, label = self.g, f"cannot reshape dims {self.g.dims} to {self.dims}"
        for axis in range(i, i_end):
            whole_blocks(g, axis, label)
            if g.padded_dims[axis] != g.dims[axis]:
                raise FormatError(f"{label}: {axis_name(axis)} is padded to {g.padded_dims[axis]}")
        long = [axis for axis in range(i, i_end) if g.dims[axis] != 1]  # the stride of the others never matters
        for before, axis in pairwise(long):
            if g.dims[axis] * g.strides[axis] != g.strides[before]:
                raise FormatError(
                    f"{label}: {axis_name(before)} and {axis_name(axis)} do not follow each other in memory "
                    f"(strides {g.strides[before]} and {g.strides[axis]}); convert to a row-major format first"
                )
        stride = g.strides[i_end - 1]
        for axis in range(o_end - 1, o - 1, -1):
            self.strides[axis] = stride
            stride *= self.dims[axis]
        return i, o
