"""Attention by a kernel of our own: which formats it reads and writes, and its tensors as it sees them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import inf

from fmtprop.ir import Node
from fmtprop.jit import StandaloneKernel
from fmtprop.jit.attention import AttentionKernel, Tensor, lanes_for
from fmtprop.jit.attention_rows import AttentionRowsKernel
from fmtprop.jit.attention_tiles import AttentionTilesKernel
from fmtprop.layout import MemoryDesc
from fmtprop.ops.attention import Attention
from fmtprop.ops.building import operand_list
from fmtprop.passes.assignment.formats import by_columns, plain
from fmtprop.passes.target import Request

_Way = tuple[StandaloneKernel, Request, tuple[MemoryDesc]]

#: more queries of a head are treated in vectors
_MOST_QUERIES = 16


def attention_kernels(node: Node, request: Request) -> Iterator[_Way]:
    """Yield the kernels, the formats that each reads, and the one that it writes.

    Operands that a kernel cannot read as they are asked for get a format that it can read: the caller knows the cost of
    the reorder.
    """
    attrs = node.attrs
    assert isinstance(attrs, Attention)
    coded = {name for name in request if f"{name}_scales" in request}
    if len({desc.dtype for name, desc in request.items() if name not in coded}) != 1:
        return
    yield from _of_few_queries(attrs, request, is_exact=node.exact)
    if "past_key" not in request and not attrs.blanks and not coded:
        yield from _of_blocks(attrs, request)


def _of_few_queries(attrs: Attention, request: Request, *, is_exact: bool) -> Iterator[_Way]:
    """Yield the kernel that reads keys and values once for all queries that share them."""
    batch, asked = request["dst"].dims[:-2], request["dst"]
    (queries, depth), width = request["src"].dims[-2:], asked.dims[-1]
    dst = _heads_inside(asked) if asked.kind == "any" else asked
    if attrs.limit is not None or attrs.lowest != -inf or queries > _MOST_QUERIES:
        return
    if not _has_rows(dst, -1) or dst.has_broadcast:
        return
    by_column = ("key", "past_key", "key_scales", "past_key_scales")
    read = {name: _with_rows(desc, -2 if name in by_column else -1) for name, desc in request.items() if name != "dst"}
    places = {name: _tensor(desc, -1 if name in by_column else -2) for name, desc in read.items()}
    places["dst"] = _tensor(dst, -2)
    for name, place in places.items():  # the queries of a head are the last axis of its batch
        desc = {**read, "dst": dst}[name]
        follows = name in ("src", "dst") or (name.startswith("mask") and desc.dims[-2] > 1)
        places[name] = replace(place, batch=(*place.batch, desc.strides[-2] * desc.dtype.nbytes if follows else 0))
    keys = tuple(request[name].dims[-1] if name in request else 0 for name in ("past_key", "key"))
    kernel = AttentionRowsKernel(
        (*batch, queries), depth, width, (keys[0], keys[1]), attrs.scale, tuple(sorted(places.items())), asked.dtype,
        blanks=attrs.blanks, is_exact=is_exact,
    )  # fmt: skip
    yield kernel, read, (dst,)


def _of_blocks(attrs: Attention, request: Request) -> Iterator[_Way]:
    """Yield the kernel that treats tiles of queries where the machine has tiles, or else vectors of queries."""
    batch = request["dst"].dims[:-2]
    (queries, depth), (keys, width) = request["src"].dims[-2:], request["value"].dims[-2:]
    if not batch:
        return
    read = {name: _with_rows(request[name], -1) for name in ("src", "value")}
    read["key"] = _with_rows(request["key"], -2)
    asked, dtype = request["dst"], request["dst"].dtype
    dst = _heads_inside(asked) if asked.kind == "any" else asked
    if not _has_rows(dst, -1) or dst.has_broadcast:
        return

    def made(kind: type[AttentionKernel], masks: Iterable[Tensor]) -> AttentionKernel:
        return kind(
            *(batch, queries, keys, depth, width, attrs.scale, attrs.limit, attrs.lowest),
            src=_tensor(read["src"], -2),
            key=_tensor(read["key"], -1),
            value=_tensor(read["value"], -2),
            dst=_tensor(dst, -2),
            masks=tuple(masks),
            dtype=dtype,
        )

    given = operand_list("mask", request)
    masks = [_with_rows(mask, -1) for mask in given]
    kernel = made(AttentionTilesKernel, (_tensor(mask, None if mask.dims[-2] == 1 else -2) for mask in masks))
    if not kernel.is_offered:
        masks = [_mask(mask, lanes_for(width, dtype)) for mask in given]
        kernel = made(AttentionKernel, (_tensor(mask, -1 if mask.is_plain else None) for mask in masks))
    read |= {f"mask_{number}": mask for number, mask in enumerate(masks)}
    yield kernel, {name: read[name] for name in request if name != "dst"}, (dst,)


def _with_rows(desc: MemoryDesc, axis: int) -> MemoryDesc:
    """Return a format in which the numbers along one of the last two axes follow one another: the given one if so."""
    if _has_rows(desc, axis):
        return desc
    return plain(desc) if axis == -1 else by_columns(desc)


def _has_rows(desc: MemoryDesc, axis: int) -> bool:
    return desc.kind == "blocked" and desc.is_plain and (desc.strides[axis] == 1 or desc.dims[axis] == 1)


def _heads_inside(desc: MemoryDesc) -> MemoryDesc:
    """Return the format from which the rows of all heads, side by side, are a view."""
    if desc.ndim < 4:
        return plain(desc)
    *outer, heads, rows, width = range(desc.ndim)
    order = (*outer, rows, heads, width)
    return MemoryDesc(tuple(desc.dims[axis] for axis in order), desc.dtype).transpose(order)


def _mask(desc: MemoryDesc, lanes: int) -> MemoryDesc:
    """Return the format of a mask: vectors of queries, or row-major if it is the same for all queries."""
    if desc.dims[-2] == 1:
        return _with_rows(desc, -1)
    letters = [chr(ord("a") + axis) for axis in range(desc.ndim)]
    blocked = letters[-2]
    letters[-2] = blocked.upper()
    return MemoryDesc(desc.dims, desc.dtype, tag=f"{''.join(letters)}{lanes}{blocked}")


def _tensor(desc: MemoryDesc, row: int | None) -> Tensor:
    size = desc.dtype.nbytes
    steps = [0 if count == 1 else stride * size for count, stride in zip(desc.dims, desc.strides, strict=True)]
    return Tensor(tuple(steps[:-2]), 0 if row is None else desc.strides[row] * size)
