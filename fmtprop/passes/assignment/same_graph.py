"""The formatted graph of an earlier process for the same graph: its nodes in its order, with all its choices.

The earlier graph is advice: what is computed comes from the new graph. Each operand must be the tensor that the new
graph has there, through changes of format that lose nothing else.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from fmtprop.errors import FormatError, PassError
from fmtprop.ir import Graph, Node, Value, result_names
from fmtprop.ir.tensors import row_major_bytes
from fmtprop.layout import MemoryDesc
from fmtprop.ops.reorder import Reorder
from fmtprop.passes.assignment.assign import as_stored, desc_of_constant
from fmtprop.passes.assignment.formats import plain
from fmtprop.passes.assignment.identities import Identities, rounded
from fmtprop.passes.assignment.same_choices import Fusion, fusion_for, kind_of
from fmtprop.passes.base import Pass

#: most elements of a constant that is known by its numbers: parts of equal nodes share matrices of filtering
_SMALL = 4096


@dataclass(frozen=True)
class SameGraph(Pass):
    """Give a normal graph the formatted graph that another process made of it.

    Requires a normal graph, returns a formatted one, in which each choice's handle is an identity. It raises PassError
    where the formatted graph is not one of this graph.
    """

    #: the formatted graph of the other process
    formatted: Graph
    #: format of graph inputs and outputs by node name
    boundary: Mapping[str, MemoryDesc]
    #: replacements of several nodes by one that an assignment may have chosen
    fusions: Sequence[Fusion] = ()

    def run(self, graph: Graph) -> Graph:
        """Return the formatted graph."""
        try:
            return _Repeating(self, graph).run()
        except FormatError as error:
            raise PassError(f"pass {self.name}: {error}") from error


class _Repeating:
    def __init__(self, spec: SameGraph, graph: Graph) -> None:
        self.spec, self.graph, self.formatted = spec, graph, spec.formatted
        self.out = Graph(graph.name, graph.structure)
        #: what the numbers of a value are: a value of the normal graph, or what computes them of small constants
        self.wanted = _numbers_of(graph)
        self.made: dict[Value, Hashable] = {}
        #: node of the other graph -> its name in this one, if that is the name of a copy there
        self.names: dict[str, str] = {}
        #: change of format in the other graph -> nodes that read its result at last, and their operands
        self.readers: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
        for node in reversed(list(self.formatted.nodes())):
            for name, value in self.formatted.inputs(node.name).items():
                is_change = node.op == "reorder"
                self.readers[value.node] += self.readers[node.name] if is_change else [(node.name, name)]
                if is_change and node.name in graph and value.node not in graph:
                    self.names[value.node] = node.name

    def run(self) -> Graph:
        for node in self.formatted.nodes():
            if node.op == "reorder":  # conversions of the normal graph are combined with changes of format
                self._change(node)
            else:
                self._add(node)
        mine = [one.name for one in (*self.graph.input_nodes, *self.graph.output_nodes)]
        if mine != [one.name for one in (*self.out.input_nodes, *self.out.output_nodes)]:
            self._refuse("it has other inputs or outputs")
        return self.out

    def _node(self, other: Node) -> tuple[Node, Mapping[str, Value]]:
        """Return the new graph's node, and its operands there."""
        name = self.names.get(other.name, other.name)
        if name not in self.graph:
            self._refuse(f"{other.label} is not in the graph")
        node = self.graph.node(name)
        if kind_of(node) == kind_of(other):
            return node, self.graph.inputs(node.name)
        fusion = fusion_for(self.graph, node, self.formatted, self.spec.fusions)
        if fusion is None:
            self._refuse(f"{node.label} is another node there")
        return fusion[0], fusion[1]

    def _add(self, other: Node) -> None:
        node, operands = self._node(other)
        inputs = self.formatted.inputs(other.name)
        read = dict(other.choice.operands) if other.choice is not None else {}
        if not _is_run(other) or not operands.keys() == inputs.keys() == read.keys():
            self._refuse(f"{node.label} has other operands")
        for name, value in inputs.items():
            if self.made.get(value) != self.wanted.get(operands[name]):
                self._refuse(f"{node.label} reads another tensor as {name}")
            if read[name].dtype is not self.graph.type_of(operands[name]).dtype and name not in node.grids:
                self._refuse(f"{node.label} reads {name} in another data type")
        names = ("dst",) if node.is_boundary else result_names(node)
        if len(other.descs) != len(node.results):
            self._refuse(f"{node.label} has other results")
        for name, desc, type_ in zip(names, other.descs, node.results, strict=False):
            if desc.dims != type_.dims or (desc.dtype is not type_.dtype and name not in node.grids):
                self._refuse(f"{node.label} writes {name} in another type")
        self._check_boundary(node, other)
        node = as_stored(node, other.descs).with_(name=other.name, descs=other.descs, choice=other.choice)
        if other.name in self.names:
            node = node.with_(grids={})  # the copy has them
        name = self.names.get(other.name, other.name)
        for value in self.out.add(node, inputs):
            self.made[value] = self.wanted.get(Value(name, value.index), value)

    def _check_boundary(self, node: Node, other: Node) -> None:
        if not node.is_boundary:
            return
        if node.op == "output":
            desc = self.out.desc_of(self.formatted.inputs(other.name)["src"])
            expected = self.spec.boundary.get(node.name, plain(desc))
        elif node.op == "input":
            desc = other.descs[0]
            expected = self.spec.boundary.get(node.name, MemoryDesc(node.results[0].dims, node.results[0].dtype))
        else:
            data = self.graph.constants[node.name]
            desc, expected = other.descs[0], desc_of_constant(node, data)
            self.out.constants[node.name] = data
        if desc != expected:
            self._refuse(f"{node.label} is {expected} here, {desc} there")

    def _change(self, other: Node) -> None:
        """Add a change of format or data type, as its reader asks for it."""
        inputs = self.formatted.inputs(other.name)
        if list(inputs) != ["src"] or len(other.descs) != 1 or not _is_run(other):
            self._refuse(f"{other.label} changes no format")
        source, grids = inputs["src"], {}
        have, wanted = self.out.desc_of(source), other.descs[0]
        readers = [(self._node(self.formatted.node(name))[0], operand) for name, operand in self.readers[other.name]]
        if other.grids:
            own = [self.graph.node(other.name).grids.get("dst")] if other.name in self.graph else []
            found = [grid for grid in (*own, *(node.grids.get(name) for node, name in readers)) if grid is not None]
            grids = {name: found[0] for name in other.grids} if found else {}
        is_cast = wanted.dtype is not have.dtype and not grids
        origin = (readers[0][0].origin if readers else "") or self.out.node(source.node).origin
        node = Node(other.name, "reorder", Reorder(wanted.dtype.value if is_cast else ""), other.results, origin=origin)
        self.out.add(node.with_(grids=grids, descs=other.descs, choice=other.choice), {"src": source})
        sides = (("src", have.dtype), ("dst", wanted.dtype))
        is_exact = all(dtype.is_floating or name in grids for name, dtype in sides) and bool(grids)
        are_reals = have.dtype.is_floating and wanted.dtype.is_floating
        numbers = self.made[source]
        keeps = is_exact and not are_reals
        self.made[Value(other.name)] = numbers if keeps else rounded(numbers, have.dtype, wanted.dtype)

    def _refuse(self, why: str) -> NoReturn:
        raise PassError(f"pass {self.spec.name}: {why}: the formatted graph is of another graph")


def _is_run(other: Node) -> bool:
    """Return whether a node of another process tells how it ran: by an implementation, or without one."""
    choice = other.choice
    return choice is not None and (choice.target in ("boundary", "view") or choice.handle is not None)


def _numbers_of(graph: Graph) -> dict[Value, Hashable]:
    """Return what the numbers of each value are, so that equal ones of two graphs are found."""
    found: dict[Value, Hashable] = {}
    fixed = Identities(graph, _small)
    for node in graph.nodes():
        if node.op == "reorder":
            source = graph.inputs(node.name)["src"]
            found[Value(node.name)] = rounded(found[source], graph.type_of(source).dtype, node.results[0].dtype)
            continue
        for index in range(len(node.results)):
            value = Value(node.name, index)
            found[value] = fixed.of(value) or value
    return found


def _small(data: Any) -> Hashable | None:
    """Return the numbers of a constant of few that is at hand; None for others."""
    if not isinstance(data, torch.Tensor) or data.numel() > _SMALL:
        return None
    return tuple(data.shape), data.dtype, row_major_bytes(data).numpy().tobytes()
