"""Requests for operands and results as bytes of their grids, beside those for real numbers.

Which node can compute so, its op declares (:class:`~fmtprop.ir.facets.Bytes`); whether there is an implementation, the
target knows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fmtprop.ir import Bytes, Node, opdef, result_names, sources
from fmtprop.layout import DataType, MemoryDesc
from fmtprop.passes.target import Candidate, Request, Setting

#: begins the reason of a node of a quantized model that computes with real numbers
IN_FLOATS = "stays in floats: "

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


def why_in_floats(node: Node, candidate: Candidate, setting: Setting, in_bytes: Sequence[float] | None = None) -> str:
    """Return why a node of a quantized model computes with real numbers; nothing for any other node.

    `in_bytes`: costs of all ways to compute it with bytes, in seconds; None if a policy asks for its formats alone.
    """
    is_quantized = bool(node.grids.keys() & candidate.operands.keys())
    if node.is_boundary or not is_quantized or candidate.target == "view" or reads_bytes(candidate):
        return ""
    if not setting.in_bytes:
        return f"; {IN_FLOATS}this target computes nothing in bytes"
    if not node.grids.keys() & set(sources(node, candidate.operands)):
        return f"; {IN_FLOATS}it reads numbers that are not rounded"
    if in_bytes is None:
        return f"; {IN_FLOATS}no implementation computes with its bytes in the formats that the policy asks for"
    if not in_bytes:
        return f"; {IN_FLOATS}no implementation here computes with its bytes"
    return f"; {IN_FLOATS}{min(in_bytes) * 1e6:.0f} us in bytes, and changes of type around it"


def reads_bytes(candidate: Candidate) -> bool:
    """Return whether a way to run a node reads bytes of a grid."""
    return any(desc.dtype in _BYTES for desc in candidate.operands.values())


def _real(node: Node, name: str, desc: MemoryDesc) -> MemoryDesc:
    return desc.with_dtype(DataType.F32) if name in node.grids and desc.dtype in _BYTES else desc
