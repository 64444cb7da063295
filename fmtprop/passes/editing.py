"""Small steps that several rewrites share: reading constants, replacing a node, finding a value's only reader."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fmtprop.ir.graph import Graph
from fmtprop.ir.node import Attrs, Node, Value
from fmtprop.ir.tensors import materialise, tensor_type

__all__ = ["bypass", "constant", "is_constant", "new_constant", "only_reader", "unused_name"]


def is_constant(graph: Graph, value: Value) -> bool:
    """Return whether a value is a constant of the graph."""
    return graph.node(value.node).op == "constant"


def constant(graph: Graph, value: Value) -> torch.Tensor | None:
    """Return the tensor behind a constant value, None where the value is computed."""
    node = graph.node(value.node)
    return materialise(graph.constants[node.name], node.results[0]) if node.op == "constant" else None


def new_constant(graph: Graph, tensor: torch.Tensor, before: Node, origin: str = "") -> Value:
    """Add a constant right before a node, so that the order of execution stays as it was."""
    node = Node(graph.fresh_name(f"{before.name}_constant"), "constant", Attrs(), (tensor_type(tensor),), origin=origin)
    (value,) = graph.insert(node, {}, before=before.name)
    graph.constants[value.node] = tensor
    return value


def unused_name(stem: str, out: Graph, source: Graph) -> str:
    """Return a name for a new node of a graph in the making that no node of the one it is made from has."""
    while True:
        name = out.fresh_name(stem)
        if name not in source:
            return name


def only_reader(graph: Graph, value: Value) -> Node | None:
    """Return the only node that reads a value, None where there are several, or it reads it twice."""
    return graph.node(graph.readers(value)[0][0]) if graph.reader_count(value) == 1 else None


def bypass(graph: Graph, node: Node, values: Sequence[Value]) -> None:
    """Make the readers of a node's results read other values instead, and remove the node."""
    for index, value in enumerate(values):
        graph.replace_uses(Value(node.name, index), value)
    graph.remove(node.name)
