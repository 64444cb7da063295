"""Kernels that copy, put or add up rows of a table by their indices."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from fmtprop.ir import Node, opdef
from fmtprop.jit import BagKernel, GatherKernel, PutKernel
from fmtprop.ops.building import normalised_axis
from fmtprop.ops.embedding_bag import EmbeddingBag
from fmtprop.ops.host_call import HostCall, arguments_of
from fmtprop.passes.assignment.formats import plain
from fmtprop.passes.target import Request
from fmtprop.targets.as_rows import INDICES, Way, is_in_rows

#: the call of PyTorch that puts rows into a tensor
_PUT = "aten.index_copy.default"

#: calls of PyTorch that may copy rows of a table
_EMBEDDING, _SELECT, _INDEX = "aten.embedding.default", "aten.index_select.default", "aten.index.Tensor"


def copied_rows(node: Node, attrs: HostCall, request: Request) -> Iterator[Way]:
    """Yield the kernel where each row of the table lies side by side; indices and result are row-major."""
    if not _copies_rows(attrs):
        return
    formats = {name: plain(desc) if desc.kind == "any" else desc for name, desc in request.items()}
    table, indices, dst = (formats[name] for name in ("src_0", "src_1", "dst"))
    if not is_in_rows(table) or indices.dtype not in INDICES:
        return
    if table.strides[1:] != plain(table).strides[1:] or not table.ndim:
        return
    if indices.at_start() != plain(indices) or dst.at_start() != plain(dst):
        return
    nbytes = table.dtype.nbytes
    kernel = GatherKernel(
        *(prod(indices.dims), table.dims[0], prod(table.dims[1:]) * nbytes, table.strides[0] * nbytes),
        index_nbytes=indices.dtype.nbytes,
        from_end=attrs.target == _INDEX,
    )
    yield kernel, {"src_0": table, "src_1": indices}, (dst,)


def _copies_rows(attrs: HostCall) -> bool:
    """Return whether a call copies what its first operand has at each index, along the first axis."""
    if attrs.target not in (_EMBEDDING, _SELECT, _INDEX):
        return False
    given = arguments_of(attrs)
    if attrs.target == _SELECT:
        return bool(given["dim"] == 0) and given["self"] != given["index"]
    if attrs.target == _INDEX:
        first, *others = given["indices"]
        return first is not None and first != given["self"] and others == [None] * len(others)
    return True


def put_rows(node: Node, attrs: HostCall, request: Request) -> Iterator[Way]:
    """Yield the kernel for row-major tensors; the rows may lie anywhere."""
    if attrs.target != _PUT:
        return
    given = arguments_of(attrs)
    whole, index, rows = (given[name].name for name in ("self", "index", "source"))
    if opdef("aten").pytorch.changed(attrs) is None or (whole, index, rows) != ("src_0", "src_1", "src_2"):
        return  # complex numbers, or a tensor into itself
    formats = {name: plain(desc) if desc.kind == "any" else desc for name, desc in request.items()}
    dst, indices, source = formats["dst"], formats[index], formats[rows]
    axis = normalised_axis(given["dim"], dst.ndim)
    own, sizes = plain(dst), dst.dims[axis + 1 :]
    if any(desc.at_start() != own for desc in (formats[whole], dst)) or indices.dtype not in INDICES:
        return
    if not is_in_rows(source) or indices.at_start() != plain(indices):
        return
    if any(
        n > 1 and a != b for n, a, b in zip(sizes, source.strides[axis + 1 :], own.strides[axis + 1 :], strict=True)
    ):
        source = plain(source)
    nbytes = dst.dtype.nbytes
    kernel = PutKernel(
        *(prod(indices.dims), dst.dims[axis], prod(sizes) * nbytes),
        tuple((n, step * nbytes) for n, step in zip(dst.dims[:axis], source.strides, strict=False)),
        *(source.strides[axis] * nbytes, indices.dtype.nbytes),
    )
    yield kernel, {whole: formats[whole], index: indices, rows: source}, (dst,)


def bags(node: Node, attrs: EmbeddingBag, request: Request) -> Iterator[Way]:
    """Yield the kernel where each row of the table lies side by side; all else is row-major."""
    formats = {name: plain(desc) if desc.kind == "any" else desc for name, desc in request.items()}
    table, indices, offsets, dst = (formats[name] for name in ("table", "indices", "offsets", "dst"))
    others = [desc for name, desc in formats.items() if name != "table"]
    if not is_in_rows(table) or (table.dims[1] > 1 and table.strides[1] != 1) or table.dtype != dst.dtype:
        return
    if any(desc.at_start() != plain(desc) for desc in others):
        return
    kernel = BagKernel(
        count=indices.dims[0],
        starts=offsets.dims[0],
        limit=table.dims[0],
        columns=table.dims[1],
        pitch_nbytes=table.strides[0] * table.dtype.nbytes,
        index_nbytes=indices.dtype.nbytes,
        dtype=table.dtype,
        mode=attrs.mode,
        padding=attrs.padding,
        has_last=attrs.has_last,
        has_factors="factors" in request,
    )
    yield kernel, {name: desc for name, desc in formats.items() if name != "dst"}, (dst,)
