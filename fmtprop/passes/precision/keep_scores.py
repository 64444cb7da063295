"""Scores stay f32 between a product and its softmax."""

from __future__ import annotations

from dataclasses import replace

from fmtprop.ir import Graph, Node, Value
from fmtprop.layout import DataType
from fmtprop.ops import Binary, Eltwise, Softmax
from fmtprop.passes.base import NodePass
from fmtprop.passes.editing import own_producer, way_from_compute


class KeepScores(NodePass):
    """Make softmax read the accumulators of a product in a narrow type, and write this type itself.

    The exponential makes a relative error of the rounded score itself: a score of 64 is rounded by up to 0.25 in bf16,
    so its weight is off by a quarter.

    Requires and returns a normal graph.
    """

    def _visit(self, graph: Graph, node: Node) -> None:
        narrow = node.results[0].dtype if node.results else None
        if not isinstance(node.attrs, Softmax) or node.op != "softmax" or narrow not in (DataType.BF16, DataType.F16):
            return
        path = _way_from_product(graph, graph.inputs(node.name)["src"])
        for one in path:
            graph.replace(one.with_(results=(one.results[0].with_dtype(DataType.F32),)))
        if path:
            graph.replace(node.with_(attrs=replace(node.attrs, dtype=narrow.value)))


def _way_from_product(graph: Graph, value: Value) -> list[Node]:
    """Return the nodes from a product to its scores, none of which is read elsewhere: factors, masks and views."""
    node = own_producer(graph, value)
    if node is None or not isinstance(node.attrs, Binary | Eltwise):
        return way_from_compute(graph, value)
    sources = (value for name, value in graph.inputs(node.name).items() if name not in node.tail)
    ways = (_way_from_product(graph, source) for source in sources)
    return next(([node, *way] for way in ways if way), [])
