"""Nodes that the quantizer should have left out: they read numbers that are not rounded."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from fmtprop.errors import OptionError
from fmtprop.ir import Graph, Node, Value
from fmtprop.ops import Eltwise, FakeQuantize, Quantize
from fmtprop.passes.base import Pass
from fmtprop.passes.editing import insert
from fmtprop.passes.precision.mark_grids import keeps_numbers
from fmtprop.passes.target import is_named

#: nodes that an error lists
_NAMED = 8


@dataclass(frozen=True)
class KeepFloat(Pass):
    """Take the roundings away that some nodes read, also those behind views, maxima and concats.

    Their limits stay: numbers outside are the nearest limit.

    Requires a well-formed graph without formats, after :class:`PairQuantization`. Other readers of a rounding keep it,
    and constants stay as the file has them.
    """

    #: names or origins of the nodes, with ``*`` for any text
    patterns: tuple[str, ...]

    def run(self, graph: Graph) -> Graph:
        """Return the rewritten graph."""
        graph = graph.copy()
        quantized = quantized_nodes(graph)
        self._check(graph.name, quantized)
        named = [node.name for node in quantized if is_named(node, self.patterns)]
        for node in graph.nodes():
            if isinstance(node.attrs, FakeQuantize) and _is_read_by(graph, node, named):
                graph.replace(Node(node.name, "eltwise", limits(node.attrs), node.results, origin=node.origin))
        unrounded = _Unrounded(graph)
        for name in named:
            inputs = graph.inputs(name)
            graph.set_inputs(name, {operand: unrounded.of(value) for operand, value in inputs.items()})
        graph.remove_dead()
        return graph

    def _check(self, model: str, nodes: list[Node]) -> None:
        for pattern in self.patterns:
            if not any(is_named(node, [pattern]) for node in nodes):
                known = ", ".join(node.name for node in nodes[:_NAMED]) + (", …" if len(nodes) > _NAMED else "")
                raise OptionError(
                    f"keep_float has {pattern!r}, but no quantized node of {model} has such a name or origin; "
                    f"quantized nodes: {known or 'none'}"
                )


def quantized_nodes(graph: Graph) -> list[Node]:
    """Return the nodes, outputs among them, that read rounded numbers and do more than pass them on."""
    rounded: set[Value] = set()
    found = []
    for node in graph.nodes():
        if node.op in ("input", "constant"):
            continue
        sources = graph.inputs(node.name)
        if isinstance(node.attrs, FakeQuantize):
            rounded.add(Value(node.name))
        elif rounded.intersection(sources.values()) and not isinstance(node.attrs, Quantize):
            if node.op != "output" and keeps_numbers(node):
                rounded.update(Value(node.name, index) for index in range(len(node.results)))
            else:
                found.append(node)
    return found


def limits(rounding: FakeQuantize) -> Eltwise:
    """Return the limits of a rounding: quantizers leave out a ReLU or a clip with the same ones."""
    return Eltwise("clip", rounding.low * rounding.scale, rounding.high * rounding.scale)


def _is_read_by(graph: Graph, node: Node, names: Collection[str]) -> bool:
    """Return whether only some nodes read a node's result, perhaps behind nodes that pass numbers on."""
    readers = (graph.node(name) for name, _ in graph.readers(Value(node.name)))
    return all(
        one.name in names or (not one.is_boundary and keeps_numbers(one) and _is_read_by(graph, one, names))
        for one in readers
    )


class _Unrounded:
    """The values of a graph without the roundings that they pass on, made once for all readers."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._made: dict[Value, Value] = {}

    def of(self, value: Value) -> Value:
        """Return a value without roundings."""
        if value not in self._made:
            self._made[value] = self._new(value)
        return self._made[value]

    def _new(self, value: Value) -> Value:
        node = self.graph.node(value.node)
        if node.is_boundary or value.index:
            return value
        attrs, sources = node.attrs, self.graph.inputs(node.name)
        if not (isinstance(attrs, FakeQuantize) or keeps_numbers(node)):
            return value
        parts = {name: self.of(one) for name, one in sources.items()}
        if isinstance(attrs, FakeQuantize):
            return insert(self.graph, node, limits(attrs), **parts)
        return value if parts == sources else insert(self.graph, node, attrs, **parts)
