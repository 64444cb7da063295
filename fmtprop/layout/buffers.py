"""Data in memory: conversion between a logical numpy array and the flat buffer of a descriptor.

Owns :func:`pack`, :func:`unpack` and :func:`convert`, the reference of every reorder. Must not know about oneDNN.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from fmtprop.errors import ShapeError
from fmtprop.layout.desc import MemoryDesc
from fmtprop.layout.dtypes import cast
from fmtprop.layout.geometry import Geometry, axis_name

Array = npt.NDArray[Any]


def unpack(buffer: npt.ArrayLike, md: MemoryDesc) -> Array:
    """Return the logical array that lies in a flat buffer.

    Parameters
    ----------
    buffer : array_like
        1-D buffer of ``md.dtype.numpy_dtype`` elements (bf16: uint16 bits), or raw bytes (``bytes`` or uint8). It
        reaches at least to the last position in use.
    md : MemoryDesc
        The layout of the tensor in the buffer.

    Returns
    -------
    numpy.ndarray, shape ``md.dims``
        A row-major copy.

    Raises
    ------
    ShapeError
        The buffer is too short, has another data type, or cannot be read by numpy.
    FormatError
        The format is any or opaque.

    Examples
    --------
    >>> unpack(np.array(list("ADBECF"), dtype="S1").view(np.uint8), MemoryDesc((2, 3), "u8", tag="ba")).tobytes()
    b'ABCDEF'
    """
    blocks = _blocked_view(_flat(buffer, md, "unpack"), md)
    rounded = _rounded_dims(md.geometry)
    out = np.empty(rounded, md.dtype.numpy_dtype)
    _split(out, md.geometry)[...] = blocks
    return out if rounded == md.dims else np.ascontiguousarray(out[_inside(md.geometry)])


def pack(array: npt.ArrayLike, md: MemoryDesc, out: Array | None = None) -> Array:
    """Write a logical array into a flat buffer; padding and gaps of a new buffer are zero.

    Parameters
    ----------
    array : array_like, shape ``md.dims``
        Elements of ``md.dtype.numpy_dtype`` (bf16: uint16 bits).
    md : MemoryDesc
        The layout to write.
    out : numpy.ndarray, optional
        1-D buffer to write into, elements or raw bytes; positions outside the tensor and its padding keep their values
        (so that submemories can fill a common buffer). Default: a new buffer of ``md.nbytes``.

    Returns
    -------
    numpy.ndarray, 1-D
        The buffer, in elements (`out` itself when given).

    Raises
    ------
    ShapeError
        Shapes, data types or sizes do not fit, elements that share a position (broadcast) differ, `out` cannot be
        written to, or numpy cannot read the array.
    FormatError
        The format is any or opaque.
    """
    g = md.geometry
    values = as_array(array, "pack")
    if values.shape != md.dims:
        raise ShapeError(f"pack: the array has shape {values.shape}, the descriptor {md} has dims {md.dims}")
    if values.dtype != md.dtype.numpy_dtype:
        raise ShapeError(
            f"pack: the array has dtype {values.dtype}, the descriptor {md} stores {md.dtype.numpy_dtype}; "
            "convert it first (fmtprop.layout.cast)"
        )
    _check_repeats(values, g)
    if out is None:
        flat = result = np.zeros(md.nbytes // md.dtype.nbytes, md.dtype.numpy_dtype)
    else:
        flat, result = _destination(out, md), out
    blocks = _blocked_view(flat, md)
    rounded = _rounded_dims(g)
    if rounded != md.dims:
        padded = np.zeros(rounded, md.dtype.numpy_dtype)
        if rounded != g.padded_dims:
            _split(padded, g)[...] = blocks  # a submemory inside a block: the rest belongs to the parent
            padded[tuple(slice(0, p) for p in g.padded_dims)] = 0
        padded[_inside(g)] = values
        values = padded
    blocks[...] = _split(np.ascontiguousarray(values), g)
    return result


def convert(buffer: npt.ArrayLike, src: MemoryDesc, dst: MemoryDesc) -> Array:
    """Reorder a buffer from the layout `src` to the layout `dst`: the reference of every reorder.

    `src`, `dst`: same dims; where the data types differ, elements are rounded and saturated as oneDNN does. Raises
    FormatError if a format is any or opaque, or a NaN would have to become an integer.

    >>> convert(np.arange(6, dtype=np.float32), MemoryDesc((2, 3)), MemoryDesc((2, 3), tag="ba"))
    array([0., 3., 1., 4., 2., 5.], dtype=float32)
    """
    if src.dims != dst.dims:
        raise ShapeError(f"convert: src dims {src.dims} and dst dims {dst.dims} differ")
    return pack(cast(unpack(buffer, src), src.dtype, dst.dtype), dst)


def as_array(values: npt.ArrayLike, label: str) -> Array:
    """Return `values` as a numpy array."""
    try:
        return np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:  # torch raises the last one
        raise ShapeError(
            f"{label}: numpy cannot read this {type(values).__name__} ({error}); give a numpy array, which holds bf16 "
            "as uint16 bits: tensor.view(torch.int16).numpy().view(numpy.uint16)"
        ) from error


def _destination(out: npt.ArrayLike, md: MemoryDesc) -> Array:
    """Return the buffer as elements of `md`; refuse a buffer that cannot be written to."""
    flat = _flat(out, md, "pack")
    if not flat.flags.writeable or isinstance(out, (list, tuple)):  # numpy copies these two
        raise ShapeError(f"pack: out is a {type(out).__name__} that cannot be written to; give a writeable numpy array")
    return flat


def _flat(buffer: npt.ArrayLike, md: MemoryDesc, label: str) -> Array:
    """Return the buffer as elements of `md`; refuse one that is too short or of another type."""
    # numpy reads bytes as one string
    flat = np.frombuffer(buffer, np.uint8) if isinstance(buffer, bytes) else as_array(buffer, label)
    wanted = md.dtype.numpy_dtype
    if flat.ndim != 1:
        raise ShapeError(f"{label}: the buffer of {md} must be 1-D, not of shape {flat.shape}")
    if flat.dtype != wanted:
        if flat.dtype != np.uint8 or flat.nbytes % wanted.itemsize:
            raise ShapeError(
                f"{label}: the buffer has dtype {flat.dtype}, {md} stores {wanted} (or raw bytes as uint8)"
            )
        if not flat.flags.c_contiguous:
            raise ShapeError(
                f"{label}: raw bytes must be contiguous, not {flat.strides[0]} bytes apart; copy them first"
            )
        flat = flat.view(wanted)
    if flat.size < md.geometry.span():
        raise ShapeError(
            f"{label}: the buffer has {flat.size} elements ({flat.nbytes} bytes), {md} reaches to element "
            f"{md.geometry.span()}; allocate {md.nbytes} bytes"
        )
    return flat


def _rounded_dims(g: Geometry) -> tuple[int, ...]:
    """Return the sizes rounded up to whole blocks: padded_dims, unless a submemory ends inside a block."""
    return tuple(n * b for n, b in zip(g.outer_counts(), g.blocks(), strict=True))


def _inside(g: Geometry) -> tuple[slice, ...]:
    return tuple(slice(p, p + d) for p, d in zip(g.padded_offsets, g.dims, strict=True))


def _digit_order(g: Geometry) -> tuple[list[int], list[int]]:
    """Return the physical dimensions (outer counts, then inner blocks) and their order when split by axis."""
    ndim = len(g.dims)
    shape = [*g.outer_counts(), *(size for _, size in g.inner_blocks)]
    order = []
    for axis in range(ndim):
        order.append(axis)
        order += [ndim + k for k, block in enumerate(g.inner_blocks) if block.axis == axis]
    return shape, order


def _split(array: Array, g: Geometry) -> Array:
    """View a row-major array of rounded dims as outer blocks, then inner blocks."""
    shape, order = _digit_order(g)
    inverse = np.argsort(order)
    split: Array = array.reshape([shape[k] for k in order]).transpose(inverse)
    return split


def _blocked_view(flat: Array, md: MemoryDesc) -> Array:
    """View a flat buffer as outer blocks, then inner blocks."""
    g, itemsize = md.geometry, flat.strides[0] if flat.size else md.dtype.nbytes
    shape, _ = _digit_order(g)
    steps, step = [], 1
    for _, size in reversed(g.inner_blocks):
        steps.append(step)
        step *= size
    strides = [*g.strides, *reversed(steps)]
    if 0 in g.dims:
        return np.empty(shape, flat.dtype)
    return as_strided(flat[g.offset0 :], shape, [s * itemsize for s in strides])


def _check_repeats(values: Array, g: Geometry) -> None:
    """Refuse elements that share one position (stride 0) but differ."""
    bits = values.view(f"V{values.itemsize}") if values.size else values
    for axis, (stride, count) in enumerate(zip(g.strides, g.outer_counts(), strict=True)):
        if stride == 0 and count > 1 and values.size and not (bits == bits.take([0], axis)).all():
            raise ShapeError(
                f"pack: {axis_name(axis)} has stride 0: its elements share one position, but they differ in the array"
            )
