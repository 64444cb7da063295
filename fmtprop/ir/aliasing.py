"""Which values may share a buffer, and whether a node may overwrite one: the rule behind in-place residual sums.

Views (reshape, permute, slice, expand) are transformations of a descriptor: source and result may lie in one buffer.
A concat in place is the other way round: its sources lie in the buffer of its result. What a node overwrites is never
one of those; the plan copies it first.
"""

from __future__ import annotations

from collections.abc import Mapping

from fmtprop.ir.graph import Graph
from fmtprop.ir.node import Node, Value
from fmtprop.ir.op import Category, opdef
from fmtprop.layout import MemoryDesc

__all__ = ["aliases", "is_in_place", "is_view", "overwrite_hazard", "parts_of", "storage"]


def is_view(graph: Graph, name: str) -> bool:
    """Return whether a node only transforms the descriptor of its source; once assigned, its choice tells."""
    node = graph.node(name)
    if node.is_boundary or opdef(node.op).category is not Category.VIEW:
        return False
    return node.choice is None or node.choice.target == "view"


def is_in_place(node: Node) -> bool:
    """Return whether a formatted node moves no data because its sources lie within its result (concat)."""
    return (
        not node.is_boundary
        and node.choice is not None
        and node.choice.target == "view"
        and opdef(node.op).parts is not None
    )


def parts_of(graph: Graph, node: Node) -> Mapping[str, MemoryDesc] | None:
    """Return where in the result of a node in place each operand lies; None where its format has no dense parts."""
    rule = opdef(node.op).parts
    if rule is None:
        return None
    types = {name: graph.type_of(value) for name, value in graph.inputs(node.name).items()}
    return rule(node.attrs, node.descs[0], types)


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
    later passes insert. A part of a buffer may be overwritten: what nobody reads any more is not missed.

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
    if graph.type_of(root).size < graph.type_of(value).size:
        return f"{value} repeats {root}"
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
