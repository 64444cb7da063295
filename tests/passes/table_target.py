"""A target that answers from a table: exact, and without any CPU's opinion."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from fmtprop.ir.node import Choice, Node
from fmtprop.ir.op import Category, opdef
from fmtprop.ir.ports import result_names, sources
from fmtprop.layout import MemoryDesc
from fmtprop.passes.assignment.formats import worth_trying
from fmtprop.passes.target import Candidate, Request, of_name


@dataclass
class TableTarget:
    """Compute ops want the tag that ``wants`` gives for their name (or op); all else follows its source.

    ``ref`` names (node or op, tag) pairs that have only a reference implementation, ``missing`` those that have none.
    """

    wants: Mapping[str, str] = field(default_factory=dict)
    ref: frozenset[tuple[str, str]] = frozenset()
    missing: frozenset[tuple[str, str]] = frozenset()
    name: str = "table"
    asked: list[tuple[str, Request]] = field(default_factory=list)

    def candidates(self, node: Node, request: Request) -> Iterator[Candidate]:
        self.asked.append((node.name, dict(request)))
        if node.op == "reorder":
            yield Candidate(self.name, "copy", {"src": request["src"]}, (request["dst"],))
            return
        tag = self._tag(node, request)
        if tag is None or (node.name, tag) in self.missing or (node.op, tag) in self.missing:
            return
        chosen = {name: self._fill(node, desc, tag) for name, desc in request.items()}
        results = tuple(chosen.pop(name) for name in result_names(node))
        is_ref = (node.name, tag) in self.ref or (node.op, tag) in self.ref
        yield Candidate(self.name, "ref" if is_ref else "jit", chosen, results, 0.0, is_ref)

    def named(self, node: Node, request: Request, choice: Choice) -> Iterator[Candidate]:
        return of_name(self.candidates(node, request), choice)

    def reorder_cost(self, src: MemoryDesc, dst: MemoryDesc) -> float | None:
        return 0.0 if src == dst else float(src.nbytes + dst.nbytes)

    def formats(self, dims, dtype):
        return worth_trying(dims, dtype, (8,))

    def _tag(self, node: Node, request: Request) -> str | None:
        declaration = opdef(node.op)
        activations = [request[name] for name in sources(node, request)]
        given = [desc.tag for desc in activations if desc.kind != "any"]
        if given:
            return given[0] if len(set(given)) == 1 else None
        assert declaration.category is Category.COMPUTE, f"{node.name} was asked `any` without a source format"
        rank = activations[0].ndim
        return self.wants.get(node.name, self.wants.get(node.op, "abcdef"[:rank]))

    def _fill(self, node: Node, desc: MemoryDesc, tag: str) -> MemoryDesc:
        if desc.kind != "any":
            return desc
        whole = desc.ndim == node.results[0].ndim
        return MemoryDesc(desc.dims, desc.dtype, tag=tag if whole else None)
