"""The ways to run each node of a normal graph, with costs, as the solver's problem.

Must not know a library, or how ways are found.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from fmtprop.ir import Category, Graph, Node, Role, Value, opdef, port
from fmtprop.layout import FormatKind, MemoryDesc
from fmtprop.passes.assignment.formats import plain
from fmtprop.passes.optimal.composition import COMPOSED
from fmtprop.passes.optimal.problem import Alternative, Format, Problem, Reorder, Tensor
from fmtprop.passes.target import Candidate, Costs

#: targets of candidates that cost nothing, or have known costs
_UNPRICED = ("view", "boundary", COMPOSED)


@dataclass(frozen=True)
class Way:
    """One way to run one node, or a fused pair as one: the payload of an alternative."""

    #: the node of the normal graph, or the fused one
    node: Node
    inputs: Mapping[str, Value]
    candidate: Candidate
    #: the nodes of the normal graph that it executes, itself last
    covers: tuple[str, ...]

    @property
    def is_composed(self) -> bool:
        """Whether it runs the node as several."""
        return self.candidate.target == COMPOSED


@dataclass
class Enumeration:
    """The ways to run each node, before they have costs."""

    graph: Graph
    #: by node name, for all nodes that depend on an input; those of a fused pair are with its last node
    ways: dict[str, list[Way]] = field(default_factory=dict)
    #: formats in which each tensor may be written or read
    formats: dict[Value, list[MemoryDesc]] = field(default_factory=dict)
    #: the intermediate format if no single reorder exists
    detours: dict[tuple[MemoryDesc, MemoryDesc], MemoryDesc] = field(default_factory=dict)
    _reorders: dict[Value, list[tuple[MemoryDesc, MemoryDesc]]] | None = None

    def __iter__(self) -> Iterator[Way]:
        for ways in self.ways.values():
            yield from ways

    def offer(self, name: str, candidate: Candidate) -> None:
        """Add a way to run a node of the graph."""
        self._reorders = None
        node, inputs = self.graph.node(name), self.graph.inputs(name)
        self.ways[name].append(Way(node, inputs, candidate, (name,)))
        results = {Value(name, index): desc for index, desc in enumerate(candidate.results)}
        for value, desc in ({inputs[key]: desc for key, desc in candidate.operands.items()} | results).items():
            if value in self.formats and desc not in self.formats[value]:
                self.formats[value].append(desc)

    def reorders(self) -> dict[Value, list[tuple[MemoryDesc, MemoryDesc]]]:
        """Return, for each tensor, the possible changes of format: from any format to one that is read.

        Ask for them when all ways are known; only :meth:`offer` may add more.
        """
        if self._reorders is None:
            self._reorders = self._find_reorders()
        return self._reorders

    def _find_reorders(self) -> dict[Value, list[tuple[MemoryDesc, MemoryDesc]]]:
        wanted: dict[Value, set[MemoryDesc]] = {}
        asked: set[tuple[Value, MemoryDesc]] = set()  # formats of the caller and of weights, which may have gaps
        for way in self:
            node = way.node
            for operand, value in way.inputs.items():
                if value not in self.formats:
                    continue  # a constant
                desc = way.candidate.operands[operand]
                wanted.setdefault(value, set()).add(desc)
                if node.op == "output" or port(node, operand).role is Role.PARAMETER:
                    asked.add((value, desc))
        found = {}
        for value, formats in self.formats.items():
            read = wanted.get(value, set())
            targets = [
                desc
                for desc in formats
                if desc in read and (desc.is_dense or desc.kind is FormatKind.OPAQUE or (value, desc) in asked)
            ]
            found[value] = [(src, dst) for dst in targets for src in formats if src != dst]
        return found

    def steps(self, src: MemoryDesc, dst: MemoryDesc) -> list[tuple[MemoryDesc, MemoryDesc]]:
        """Return the reorders that a change of format takes: one, or two with a detour."""
        middle = self.detours.get((src, dst))
        return [(src, dst)] if middle is None else [(src, middle), (middle, dst)]

    def work(self) -> list[tuple[Node, Candidate]]:
        """Return each node with each of its candidates that has a cost."""
        return [(way.node, way.candidate) for way in self if way.candidate.target not in _UNPRICED]

    def problem(self, costs: Costs) -> Problem:
        """Return the problem with the costs of all alternatives and reorders."""
        alternatives = []
        for way in self:
            priced = replace(way, candidate=replace(way.candidate, cost=self._cost(way.node, way.candidate, costs)))
            reads: dict[Tensor, tuple[Format, ...]] = {}
            for operand, value in way.inputs.items():
                if value in self.formats:
                    reads[value] = tuple(dict.fromkeys((*reads.get(value, ()), way.candidate.operands[operand])))
            results = enumerate(way.candidate.results)
            writes: dict[Tensor, Format] = {Value(way.node.name, index): desc for index, desc in results}
            alternatives.append(Alternative(way.covers, reads, writes, priced.candidate.cost, priced))
        reorders: dict[Tensor, dict[Reorder, float]] = {}
        for value, pairs in self.reorders().items():
            prices = {pair: [costs.reorder(*step) for step in self.steps(*pair)] for pair in pairs}
            reorders[value] = {pair: sum(filter(None, some)) for pair, some in prices.items() if None not in some}
        return Problem(tuple(self.ways), tuple(alternatives), reorders)

    def _cost(self, node: Node, candidate: Candidate, costs: Costs) -> float:
        if candidate.target in ("boundary", COMPOSED):
            return candidate.cost
        if candidate.target != "view":
            return costs.node(node, candidate)
        if node.op != "concat":
            return 0.0
        # in place: sources that their producers cannot write there are copied
        inputs = self.graph.inputs(node.name)
        total = 0.0
        for operand, value in inputs.items():
            if not _written_in_place(self.graph, node, operand, value, self.formats):
                desc = candidate.operands[operand]
                total += costs.reorder(desc, plain(desc) if not desc.is_plain else _other(desc)) or 0.0
        return total


def _other(desc: MemoryDesc) -> MemoryDesc:
    """Return another dense format of a tensor: the cost of a copy is close to that of a change of format."""
    reversed_axes = tuple(range(desc.ndim))[::-1]
    return MemoryDesc(tuple(desc.dims[a] for a in reversed_axes), desc.dtype).transpose(reversed_axes)


def _written_in_place(graph: Graph, concat: Node, operand: str, value: Value, computed: Mapping[Value, object]) -> bool:
    """Whether the producer of a concat's source can write it to its position."""
    producer = graph.node(value.node)
    if value not in computed or producer.is_boundary or opdef(producer.op).category is Category.VIEW:
        return False
    claims = [(name, key) for name, key in graph.readers(value) if graph.node(name).op == "concat"]
    return claims[0] == (concat.name, operand)
