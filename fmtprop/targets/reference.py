"""The reference target: any op, by its plain PyTorch meaning, on strided formats.

It is what the others are checked against, and where an op runs that oneDNN does not have.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fmtprop.ir.node import Node
from fmtprop.layout import DataType, MemoryDesc
from fmtprop.passes.formats import plain, worth_trying
from fmtprop.passes.target import Candidate, Request

#: bytes per second that a PyTorch copy moves; only the order of costs matters
_BANDWIDTH = 5e9


class ReferenceTarget:
    """Runs a node by its op's reference on torch tensors over the plan's own buffers."""

    name = "reference"

    def candidates(self, node: Node, request: Request) -> Iterable[Candidate]:
        """Yield the one way: every operand as asked where it is strided, else row-major."""
        formats = {name: _strided(desc) for name, desc in request.items()}
        names = [name for name in formats if name in _results_of(node)]
        results = tuple(formats[name] for name in names)
        if any(results[i] != request[name] and request[name].kind != "any" for i, name in enumerate(names)):
            return
        operands = {name: desc for name, desc in formats.items() if name not in names}
        if node.op == "reorder" and operands["src"] != request["src"]:
            return
        cost = sum(desc.nbytes for desc in formats.values()) / _BANDWIDTH
        yield Candidate(self.name, "torch", operands, results, cost)

    def reorder_cost(self, src: MemoryDesc, dst: MemoryDesc) -> float | None:
        """Return the time of a strided copy; None for blocked or opaque formats."""
        if not (src.is_plain and dst.is_plain):
            return None
        return 0.0 if src == dst else (src.nbytes + dst.nbytes) / _BANDWIDTH

    def formats(self, dims: tuple[int, ...], dtype: DataType) -> Sequence[MemoryDesc]:
        """Return the strided formats that PyTorch knows: row-major and channels-last."""
        return worth_trying(dims, dtype, ())


def _strided(desc: MemoryDesc) -> MemoryDesc:
    return desc if desc.is_plain else plain(desc)


def _results_of(node: Node) -> set[str]:
    if len(node.results) == 1:
        return {"dst"}
    return {"dst", *(f"dst_{index}" for index in range(len(node.results)))}
