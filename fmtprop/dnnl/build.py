"""Create a native descriptor from the fields of a MemoryDesc.

oneDNN can create plain layouts (strides), dense blocked layouts (tag) and regions of them (submemory). Every other
layout is created as a region of a dense parent; the parent's sizes follow from the ratios of neighbouring strides. The
fields of the result are compared with the MemoryDesc. Must not know the result's owner.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref
from math import prod

from fmtprop.dnnl import _abi
from fmtprop.dnnl.enums import data_type
from fmtprop.dnnl.fields import query_fields
from fmtprop.dnnl.library import lib, raise_status
from fmtprop.dnnl.sizes import int64_array
from fmtprop.errors import DnnlError, FormatError, ShapeError
from fmtprop.layout import FormatKind, MemoryDesc
from fmtprop.layout.geometry import INT64_MAX
from fmtprop.layout.tags import LETTERS

_TAG_ANY = 1


def create(desc: MemoryDesc) -> _abi.dnnl_memory_desc_t:
    """Return a new native descriptor; the caller becomes its owner.

    Raises ShapeError if a size does not fit in 63 bits: oneDNN would accept it and allocate a wrong size, and
    FormatError if oneDNN's API cannot create this layout.
    """
    _check_sizes(desc)
    if desc.kind is FormatKind.ANY:
        return _create_any(desc)
    blocks = _blocks(desc)
    if desc.tag is not None:
        # By the tag, dimensions of size 1 get the strides that oneDNN's implementations compare with.
        pointer = _create_dense(desc.dims, desc, _usual_tag(desc))
    elif not desc.inner_blocks and desc.padded_dims == desc.dims and desc.offset0 == 0:
        pointer = _create_strided(desc)
    else:
        pointer = _create_region(desc, blocks)
    _check_result(desc, pointer)
    return pointer


def _check_sizes(desc: MemoryDesc) -> None:
    if not desc.dims:
        raise FormatError(f"desc {desc}: oneDNN has no tensors of 0 dimensions; reshape the scalar to dims (1,)")
    elements = prod(desc.dims)
    nbytes = 0 if desc.kind is FormatKind.ANY else desc.nbytes
    if max(elements * 8, nbytes) > INT64_MAX:
        raise ShapeError(f"desc {desc}: {elements} elements do not fit in 64 bits of address; split the tensor")


def _usual_tag(desc: MemoryDesc) -> str:
    """Return the tag by which implementations know a dense layout: of those that fit, channels-last is named so.

    An image of one row in channels-last is ``adbc`` too, but by this tag its axis of size 1 has another stride, and no
    kernel takes it.
    """
    tag, letters = str(desc.tag), LETTERS[: len(desc.dims)]
    if 1 not in desc.dims[2:] or desc.inner_blocks or tag == letters:
        return tag
    channels_last = letters[0] + letters[2:] + letters[1]
    return channels_last if MemoryDesc(desc.dims, desc.dtype, tag=channels_last) == desc else tag


def _create_any(desc: MemoryDesc) -> _abi.dnnl_memory_desc_t:
    out = _abi.dnnl_memory_desc_t()
    dims = int64_array(desc.dims, "dims")
    status = lib().memory_desc_create_with_tag(byref(out), len(desc.dims), dims, data_type(desc.dtype), _TAG_ANY)
    raise_status("dnnl_memory_desc_create_with_tag", status, f"{desc}")
    return out


def _create_strided(desc: MemoryDesc) -> _abi.dnnl_memory_desc_t:
    out = _abi.dnnl_memory_desc_t()
    arrays = int64_array(desc.dims, "dims"), int64_array(_canonical_strides(desc), "strides")
    status = lib().memory_desc_create_with_strides(
        byref(out), len(desc.dims), arrays[0], data_type(desc.dtype), arrays[1]
    )
    raise_status("dnnl_memory_desc_create_with_strides", status, f"{desc}")
    return out


def _canonical_strides(desc: MemoryDesc) -> tuple[int, ...]:
    """Return the strides, with a dense neighbour's stride for dimensions of size 1 (such a stride has no effect)."""
    strides = list(desc.strides)
    for axis in reversed(range(len(strides))):
        if desc.dims[axis] == 1:
            inside = axis + 1 < len(strides)
            strides[axis] = strides[axis + 1] * max(desc.dims[axis + 1], 1) if inside else 1
    return tuple(strides)


def _create_dense(dims: Sequence[int], desc: MemoryDesc, tag: str) -> _abi.dnnl_memory_desc_t:
    out = _abi.dnnl_memory_desc_t()
    array = int64_array(dims, "dims")
    dtype = data_type(desc.dtype)
    status = lib().memory_desc_create_with_string_tag(byref(out), len(dims), array, dtype, tag.encode())
    raise_status("dnnl_memory_desc_create_with_string_tag", status, f"{desc}, tag {tag}")
    return out


def _create_region(desc: MemoryDesc, blocks: Sequence[int]) -> _abi.dnnl_memory_desc_t:
    """Create the layout as a region of a dense parent.

    The stride of an axis of one block has no effect. Implementations know a format by it, so it stays if it can; the
    other order has such axes inside all others.
    """
    usual = sorted(range(len(desc.dims)), key=lambda axis: (-desc.strides[axis], axis))
    free = [axis for axis in usual if desc.padded_dims[axis] == blocks[axis]]
    try:
        return _create_in_order(desc, blocks, usual, [axis for axis in usual[-1:] if axis in free])
    except (FormatError, DnnlError):
        inside = [axis for axis in usual if axis not in free]
        inside += sorted(free, key=lambda axis: _needs_border(desc, axis))
        if inside == usual:
            raise
        return _create_in_order(desc, blocks, inside, free)


def _create_in_order(
    desc: MemoryDesc, blocks: Sequence[int], order: Sequence[int], free: Sequence[int]
) -> _abi.dnnl_memory_desc_t:
    """Create the region with a parent that has its axes in this order; the strides of free axes may be any."""
    strides = [_innermost(desc) if axis in free else stride for axis, stride in enumerate(desc.strides)]
    counts, offsets = _parent(desc, blocks, order, strides)
    dims = [
        desc.dims[axis] + offsets[axis] if _needs_border(desc, axis) else counts[axis] * blocks[axis]
        for axis in range(len(desc.dims))
    ]
    parent = _create_dense(dims, desc, _tag(desc, order))
    try:
        out = _abi.dnnl_memory_desc_t()
        arrays = int64_array(desc.dims, "dims"), int64_array(offsets, "offsets")
        status = lib().memory_desc_create_submemory(byref(out), parent, *arrays)
        raise_status("dnnl_memory_desc_create_submemory", status, f"{desc} in a parent of dims {dims}, at {offsets}")
        return out
    finally:
        lib().memory_desc_destroy(parent)


def _parent(
    desc: MemoryDesc, blocks: Sequence[int], order: Sequence[int], strides: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Return the parent's number of blocks per axis, and the region's start in it, in elements."""
    counts = [-(-padded // block) for padded, block in zip(desc.padded_dims, blocks, strict=True)]
    offsets = [0] * len(counts)
    rest, outside = desc.offset0, None
    for axis in order:
        stride = strides[axis]
        if outside is not None:
            # The next larger stride, divided by this one, is the parent's size along this axis.
            counts[axis], remainder = divmod(strides[outside], stride) if stride else (0, 1)
            if remainder:
                raise FormatError(
                    f"desc {desc}: oneDNN can create blocked layouts only as regions of a dense one, but stride "
                    f"{strides[outside]} is not a multiple of stride {stride}; reorder to a dense format first"
                )
        steps, rest = divmod(rest, stride) if stride else (0, rest)
        offsets[axis] = steps * blocks[axis]
        if outside is None:
            counts[axis] += steps
        outside = axis
    innermost = _innermost(desc)
    if rest or (outside is not None and strides[outside] != innermost):
        raise FormatError(
            f"desc {desc}: oneDNN can create blocked layouts only as regions of a dense one, but offset0 "
            f"{desc.offset0} or the smallest stride is not a multiple of the inner block of {innermost}; "
            "reorder to a dense format first"
        )
    return counts, offsets


def _innermost(desc: MemoryDesc) -> int:
    return prod(size for _, size in desc.inner_blocks)


def _needs_border(desc: MemoryDesc, axis: int) -> bool:
    """Return whether the region is padded: oneDNN pads a region only at the parent's border."""
    return desc.padded_dims[axis] != desc.dims[axis]


def _tag(desc: MemoryDesc, order: Sequence[int]) -> str:
    blocked = {axis for axis, _ in desc.inner_blocks}
    outer = "".join(LETTERS[axis].upper() if axis in blocked else LETTERS[axis] for axis in order)
    return outer + "".join(f"{size}{LETTERS[axis]}" for axis, size in desc.inner_blocks)


def _blocks(desc: MemoryDesc) -> list[int]:
    blocks = [1] * len(desc.dims)
    for axis, size in desc.inner_blocks:
        blocks[axis] *= size
    return blocks


def _check_result(desc: MemoryDesc, pointer: _abi.dnnl_memory_desc_t) -> None:
    """Destroy and refuse a native descriptor that differs from the MemoryDesc."""
    got = query_fields(pointer)
    strides_agree = all(
        have == want or padded == block
        for have, want, padded, block in zip(got.strides, desc.strides, desc.padded_dims, _blocks(desc), strict=True)
    )
    same = (
        strides_agree
        and got.padded_dims == desc.padded_dims
        and got.padded_offsets == desc.padded_offsets
        and got.inner_blocks == tuple((axis, size) for axis, size in desc.inner_blocks)
        and got.offset0 == desc.offset0
    )
    if not same:
        lib().memory_desc_destroy(pointer)
        raise FormatError(f"desc {desc}: oneDNN's API cannot create this layout (it gives {got}); reorder it first")
