"""Requests for operands and results as bytes of their grids, beside those for real numbers.

Which node can compute so, its op declares (:class:`~fmtprop.ir.facets.Bytes`); whether there is an implementation, the
target knows.
"""

from __future__ import annotations

from collections.abc import Iterator

from fmtprop.ir import Bytes, Node, opdef, result_names
from fmtprop.layout import DataType, MemoryDesc
from fmtprop.passes.target import Request

_BYTES = (DataType.S8, DataType.U8)


def in_reals(node: Node, request: Request) -> Request:
    """Return a request in which no operand and no result is stored as bytes of a grid."""
    if not node.grids:
        return request
    return {name: _real(node, name, desc) for name, desc in request.items()}


def in_bytes(node: Node, request: Request) -> Iterator[Request]:
    """Yield the requests in which a node reads bytes: with a result of bytes, if it has a grid, and of real numbers."""
    grids = {name: node.grids[name] for name in request if name in node.grids}
    kind, names = opdef(node.op).numbers.bytes(node.attrs), result_names(node)
    if not grids or kind is Bytes.NEVER:
        return
    request = in_reals(node, request)
    stored = {name: request[name].with_dtype(grid.stored) for name, grid in grids.items()}
    read = {name: desc for name, desc in stored.items() if name not in names}
    if kind is Bytes.MULTIPLIED and {"src", "weights"} <= read.keys():
        yield {**request, **stored}
        if len(stored) > len(read):
            yield {**request, **read}
    elif kind in (Bytes.MOVED, Bytes.COMBINED, Bytes.TABULATED) and stored.keys() == request.keys():
        yield stored
    elif kind in (Bytes.CONVERTED, Bytes.NORMALIZED):
        if len(stored) > len(read):
            yield {**request, **{name: desc for name, desc in stored.items() if name in names}}
        if read:
            yield {**request, **stored}
            if kind is Bytes.NORMALIZED and len(stored) > len(read):
                yield {**request, **read}


def _real(node: Node, name: str, desc: MemoryDesc) -> MemoryDesc:
    return desc.with_dtype(DataType.F32) if name in node.grids and desc.dtype in _BYTES else desc
