"""How many bytes a graph works on: how far away its data is when a node needs it."""

from __future__ import annotations

from fmtprop.ir.graph import Graph
from fmtprop.ir.node import Node


def weights_nbytes(graph: Graph) -> int:
    """Return the bytes of all constants of a graph: how far away its weights are when a layer needs them."""
    return sum(node.results[0].nbytes for node in graph.nodes() if node.op == "constant")


def activations_nbytes(graph: Graph) -> int:
    """Return the most bytes that a node reads and writes, constants aside."""

    def moved(node: Node) -> int:
        read = {value for value in graph.inputs(node.name).values() if graph.node(value.node).op != "constant"}
        return sum(graph.type_of(value).nbytes for value in read) + sum(type_.nbytes for type_ in node.results)

    return max((moved(node) for node in graph.nodes() if node.op != "constant"), default=0)
