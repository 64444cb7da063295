"""The way back from a formatted graph to a normal one."""

from __future__ import annotations

from fmtprop.ir.graph import Graph
from fmtprop.ir.node import Node, Value


def is_format_change(node: Node) -> bool:
    """Return whether a formatted node changes only the format: a reorder that is not in the model."""
    choice = node.choice
    return node.op == "reorder" and choice is not None and node.descs[0].dtype is choice.operands["src"].dtype


def without_formats(graph: Graph) -> Graph:
    """Return a formatted graph without its formats, choices, and changes of format: a normal graph again."""
    normal = graph.copy()
    for node in graph.nodes():
        if is_format_change(node):
            normal.replace_uses(Value(node.name), normal.inputs(node.name)["src"])
            normal.remove(node.name)
    return normal.map_nodes(lambda node: node.with_(descs=(), choice=None))
