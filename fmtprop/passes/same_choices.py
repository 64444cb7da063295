"""The formats and implementations of a graph for another graph that differs only in sizes.

A model has a graph for each shape of its inputs. Owns the transfer of one graph's choices to another; asks a target
only whether it can do the same, and decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

from fmtprop.errors import FormatError, PassError
from fmtprop.ir.graph import Graph
from fmtprop.ir.node import Choice, Node, Value
from fmtprop.ir.op import opdef
from fmtprop.ir.ports import result_names
from fmtprop.ir.types import TensorType
from fmtprop.layout import MemoryDesc
from fmtprop.passes.assign import desc_of_constant
from fmtprop.passes.formats import describe, like, plain, unspecified
from fmtprop.passes.target import Candidate, Costs, Request, Setting, can_be_read

#: from the last of several nodes to one node that replaces them, its operands, and their names
Fusion = Callable[[Graph, Node], "tuple[Node, dict[str, Value], tuple[str, ...]] | None"]


@dataclass(frozen=True)
class SameChoices:
    """Assign the formats and implementations of another shape's graph.

    Parameters
    ----------
    formatted : Graph
        The formatted graph of another shape.
    setting : Setting
        Who runs the graph.
    costs : Costs
        Costs that reports show.
    fusions : sequence of callable
        Replacements of several nodes by one that an assignment may have chosen.

    Notes
    -----
    Requires a normal graph, returns a formatted one. It raises PassError where the graphs differ in more than sizes, or
    where a choice is impossible for the new sizes.
    """

    name: ClassVar[str] = "same-choices"

    formatted: Graph
    setting: Setting
    costs: Costs
    fusions: Sequence[Fusion] = ()

    def run(self, graph: Graph) -> Graph:
        """Return the formatted graph."""
        try:
            return _Transfer(self, graph).run()
        except FormatError as error:
            raise PassError(f"pass {self.name}: {error}") from error


def _origin(graph: Graph, value: Value) -> Value:
    """Return the value before all changes of format and data type."""
    while graph.node(value.node).op == "reorder":
        value = graph.inputs(value.node)["src"]
    return value


class _Transfer:
    def __init__(self, spec: SameChoices, graph: Graph) -> None:
        self.spec, self.setting, self.source = spec, spec.setting, graph
        self.out = Graph(graph.name, graph.structure)
        #: node without its name, request, choice -> the answer to equal nodes
        self._known: dict[object, Candidate] = {}

    def run(self) -> Graph:
        formatted = self.spec.formatted
        for mine, others in (
            (self.source.input_nodes, formatted.input_nodes),
            (self.source.output_nodes, formatted.output_nodes),
        ):
            if [node.name for node in mine] != [node.name for node in others]:
                raise PassError(f"graph {self.source.name} has other inputs or outputs than the other shape's")
        for node in formatted.nodes():
            self._visit(node)
        return self.out

    def _visit(self, other: Node) -> None:
        inputs = self.spec.formatted.inputs(other.name)
        given = {name: self.out.desc_of(value) for name, value in inputs.items()}
        if other.choice is None:
            raise PassError(f"{other.label} has no choice")
        if other.is_boundary:
            self._add_boundary(other, other.choice, inputs, given)
            return
        node = self._counterpart(other, inputs, given)
        if other.choice.target != "view":
            candidate = self._same(node, other, other.choice, given)
            choice = replace(candidate.choice("as for another shape"), cost=self._cost(node, candidate))
            self.out.add(node.with_(descs=candidate.results, choice=choice), inputs)
            return
        rule = opdef(node.op).view
        if other.choice.impl != "view" or rule is None:
            raise PassError(f"{node.label} depends on its neighbours: {other.choice.impl}")
        desc = rule(node.attrs, given["src"], node.results[0])
        if not can_be_read(desc, self.setting.target, self.setting.fallback):
            raise PassError(f"{node.label}: {describe(desc)} cannot be read")
        self.out.add(node.with_(descs=(desc,), choice=replace(other.choice, operands=given)), inputs)

    def _add_boundary(self, other: Node, choice: Choice, inputs: Mapping[str, Value], given: Request) -> None:
        if other.name not in self.source or self.source.node(other.name).op != other.op:
            raise PassError(f"{other.label} is not in the graph")
        self._check_origins(other, inputs, self.source.inputs(other.name))
        node, boundary = self.source.node(other.name), self.setting.boundary
        descs: tuple[MemoryDesc, ...] = ()
        if node.op == "input":
            descs = (boundary.get(node.name, MemoryDesc(node.results[0].dims, node.results[0].dtype)),)
        elif node.op == "constant":
            self.out.constants[node.name] = self.source.constants[node.name]
            descs = (desc_of_constant(node, self.source.constants[node.name]),)
        elif given["src"] != boundary.get(node.name, plain(given["src"])):
            raise PassError(f"{node.label} reads {describe(given['src'])}")
        self.out.add(node.with_(descs=descs, choice=replace(choice, operands=dict(given))), inputs)

    def _counterpart(self, other: Node, inputs: Mapping[str, Value], given: Request) -> Node:
        """Return the node of this graph that a node of the other formatted graph stands for."""
        if other.name not in self.source:
            if other.op != "reorder":
                raise PassError(f"{other.label} is a part of a node that runs as several")
            return other.with_(results=(TensorType(given["src"].dims, other.results[0].dtype),))
        node = self.source.node(other.name)
        found = [(node, self.source.inputs(node.name))]
        fusions = () if node.is_boundary else self.spec.fusions
        found += [(pair[0], pair[1]) for fusion in fusions if (pair := fusion(self.source, node)) is not None]
        for one, operands in found:
            same = (one.op, *(post_op.op for post_op in one.post_ops)) == (other.op, *(p.op for p in other.post_ops))
            if same and operands.keys() == inputs.keys():
                self._check_origins(other, inputs, operands)
                return one
        raise PassError(f"{node.label} is not {other.op} with operands {', '.join(inputs)}")

    def _check_origins(self, other: Node, inputs: Mapping[str, Value], operands: Mapping[str, Value]) -> None:
        """Refuse a node that reads the results of other nodes here."""
        for name, value in inputs.items():
            if _origin(self.spec.formatted, value) != _origin(self.source, operands[name]):
                raise PassError(f"{other.label}.{name} is {operands[name]} here, {value} in the other shape's graph")

    def _same(self, node: Node, other: Node, choice: Choice, given: Request) -> Candidate:
        """Return the same way to run a node."""
        wanted = tuple(_moved(desc, type_) for desc, type_ in zip(other.descs, node.results, strict=True))
        tail = tuple((post_op.op, post_op.attrs, post_op.operands) for post_op in node.post_ops)
        operands = tuple(given.items())
        key = node.op, node.attrs, tail, node.exact, node.results, operands, wanted, choice.target, choice.impl
        if key not in self._known:
            self._known[key] = self._asked(node, choice, given, wanted)
        return self._known[key]

    def _asked(self, node: Node, choice: Choice, given: Request, wanted: tuple[MemoryDesc, ...]) -> Candidate:
        target = self.setting.fallback if choice.target == self.setting.fallback.name else self.setting.target
        names = result_names(node)
        # some implementations take only the formats of results that they choose themselves
        for results in (wanted, tuple(map(unspecified, wanted))):
            for candidate in target.candidates(node, {**given, **dict(zip(names, results, strict=True))}):
                # a target's format never includes the beginning of a slice
                reads = all(candidate.operands[name] in (desc, desc.at_start()) for name, desc in given.items())
                if reads and candidate.results == wanted and _is_alike(node, candidate, choice):
                    return replace(candidate, operands=dict(given))
        raise PassError(f"{node.label}: {choice.impl} cannot write {', '.join(map(describe, wanted))}")

    def _cost(self, node: Node, candidate: Candidate) -> float:
        if node.op != "reorder" or candidate.results[0].dtype is not candidate.operands["src"].dtype:
            return self.spec.costs.node(node, candidate)
        return self.spec.costs.reorder(candidate.operands["src"], candidate.results[0]) or 0.0


@lru_cache(maxsize=4096)
def _moved(desc: MemoryDesc, type_: TensorType) -> MemoryDesc:
    """Return a format for another size of the tensor."""
    if desc.dims == type_.dims:
        return desc
    moved = like(MemoryDesc(type_.dims, type_.dtype), desc)
    if moved is None:
        raise PassError(f"format {describe(desc)} has no form for {type_.dims}")
    return moved


def _is_alike(node: Node, candidate: Candidate, choice: Choice) -> bool:
    """Return whether a candidate is the chosen implementation; for a change of format, any optimized one is."""
    if node.op == "reorder":
        return not candidate.is_ref
    return (candidate.target, candidate.impl) == (choice.target, choice.impl)
