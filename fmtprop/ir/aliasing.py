"""Which values may share a buffer, and whether a node may overwrite one: the rule behind in-place residual sums.

Views (reshape, permute, slice, expand) are transformations of a descriptor: source and result may lie in one buffer.
"""

from __future__ import annotations

from fmtprop.ir.graph import Graph
from fmtprop.ir.node import Value
from fmtprop.ir.op import Category, opdef

__all__ = ["aliases", "overwrite_hazard", "storage"]


def is_view(graph: Graph, name: str) -> bool:
    """Return whether a node only transforms the descriptor of its source; once assigned, its choice tells."""
    node = graph.node(name)
    if node.is_boundary or opdef(node.op).category is not Category.VIEW:
        return False
    return node.choice is None or node.choice.target == "view"


def storage(graph: Graph, value: Value) -> Value:
    """Return the value whose buffer a value may lie in: itself, unless a chain of views made it."""
    while is_view(graph, value.node):
        value = graph.inputs(value.node)["src"]
    return value


def aliases(graph: Graph, value: Value) -> list[Value]:
    """Return every value that may lie in the same buffer, the buffer's own value first."""
    found = [storage(graph, value)]
    for alias in found:  # grows while it is walked
        found.extend(Value(reader) for reader, _ in graph.readers(alias) if is_view(graph, reader))
    return found


def overwrite_hazard(graph: Graph, value: Value, by: str, operand: str) -> str:
    """Return why a node must not write its result over a value that it reads, or "" where it may.

    The answer depends on the edges alone, never on an order among independent nodes, so that it stays true whatever
    later passes insert.

    Parameters
    ----------
    graph : Graph
        The graph.
    value : Value
        What would be overwritten.
    by : str
        The node that would do so.
    operand : str
        The operand by which it reads the value.
    """
    root = storage(graph, value)
    owner = graph.node(root.node)
    if owner.is_boundary:
        return f"{value} lies in the buffer of {owner.label}"
    if graph.type_of(root).size != graph.type_of(value).size:
        return f"{value} is only a part of {root}, or repeats it"
    before = graph.ancestors(by)
    for alias in aliases(graph, value):
        for reader, key in graph.readers(alias):
            if (reader == by and key == operand) or is_view(graph, reader):
                continue
            if reader == by:
                return f"it reads {alias} as {key} too"
            if reader not in before:
                return f"{graph.node(reader).label} reads {alias} too and need not run before it"
    return ""
