"""Nesting of concats: a concat that begins with all sources of another concat reads that concat instead.

A dense block joins ``[a, b]``, then ``[a, b, c]``, then ``[a, b, c, d]``: each list begins with the previous one.
Nested concats can all share one buffer: each new tensor is written once and never copied.
"""

from __future__ import annotations

from dataclasses import dataclass

from fmtprop.ir import Attrs, Graph, Node, Value
from fmtprop.layout import DataType
from fmtprop.passes.base import Pass
from fmtprop.passes.editing import bypass


@dataclass(frozen=True)
class NestConcats(Pass):
    """Rewrite ``concat(a, b, c)`` to ``concat(concat(a, b), c)`` if ``concat(a, b)`` exists; merge equal concats.

    Normal graph to normal graph, with bit-equal results. If concats copy, the number of bytes is unchanged. The gain
    is for concats in place: see :class:`fmtprop.runtime.arena.Placement`.
    """

    def run(self, graph: Graph) -> Graph:
        """Return the rewritten graph; the given one if no concat begins with another."""
        known: dict[_Joined, str] = {}
        concats = [node for node in graph.nodes() if node.op == "concat" and not node.post_ops]
        for node in concats:
            known.setdefault(_joined(graph, node, len(graph.inputs(node.name))), node.name)
        # all prefixes are found before any concat is changed
        nested = [(node, *prefix) for node in concats if (prefix := _prefix(graph, node, known)) is not None]
        if not nested:
            return graph
        graph = graph.copy()
        for node, other, length in nested:
            sources = _sources(graph, node)
            if length == len(sources):
                bypass(graph, node, [Value(other)])
            else:
                rest = [Value(other), *sources[length:]]
                graph.set_inputs(node.name, {f"src_{index}": value for index, value in enumerate(rest)})
        return graph


#: attributes, data type of the result, and sources
_Joined = tuple[Attrs, DataType, tuple[Value, ...]]


def _joined(graph: Graph, node: Node, length: int) -> _Joined:
    return node.attrs, node.results[0].dtype, tuple(_sources(graph, node)[:length])


def _sources(graph: Graph, node: Node) -> list[Value]:
    inputs = graph.inputs(node.name)
    return [inputs[f"src_{index}"] for index in range(len(inputs))]


def _prefix(graph: Graph, node: Node, known: dict[_Joined, str]) -> tuple[str, int] | None:
    """Return the concat of the longest beginning of a node's sources, and the number of these sources."""
    for length in range(len(graph.inputs(node.name)), 1, -1):
        other = known.get(_joined(graph, node, length))
        if other is not None and other != node.name:
            return other, length
    return None
