"""Rules for values that share a buffer, and for a node that overwrites one (in-place residual sums).

Views (reshape, permute, slice, expand) transform a descriptor: source and result may share a buffer. For a concat in
place, the sources lie in the result's buffer. A node never overwrites one of these; the plan copies it first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from fmtprop.ir.node import Node, Value
from fmtprop.ir.op import Category, opdef
from fmtprop.layout import MemoryDesc

if TYPE_CHECKING:
    from fmtprop.ir.graph import Graph


def is_view(graph: Graph, name: str) -> bool:
    """Return whether a node only transforms its source's descriptor; after format assignment, its choice decides."""
    node = graph.node(name)
    if node.is_boundary or opdef(node.op).category is not Category.VIEW:
        return False
    return node.choice is None or node.choice.target == "view"


def is_in_place(node: Node) -> bool:
    """Return whether a formatted node moves no data because its sources lie in its result (concat)."""
    return (
        not node.is_boundary
        and node.choice is not None
        and node.choice.target == "view"
        and opdef(node.op).parts is not None
    )


def parts_of(graph: Graph, node: Node) -> Mapping[str, MemoryDesc] | None:
    """Return each operand's part of the result of a node in place; None if the format has no dense parts."""
    rule = opdef(node.op).parts
    if rule is None:
        return None
    types = {name: graph.type_of(value) for name, value in graph.inputs(node.name).items()}
    return rule(node.attrs, node.descs[0], types)


def storage(graph: Graph, value: Value) -> Value:
    """Return the owner of a value's buffer: the value itself, or the source of a chain of views."""
    while is_view(graph, value.node):
        value = graph.inputs(value.node)["src"]
    return value


def aliases(graph: Graph, value: Value) -> list[Value]:
    """Return all values that may lie in the same buffer, the buffer's owner first."""
    found = [storage(graph, value)]
    for alias in found:  # the list grows during the loop
        found.extend(Value(reader) for reader, _ in graph.reading(alias) if is_view(graph, reader))
    return found


def overwrite_hazard(graph: Graph, value: Value, by: str, operand: str) -> str:
    """Return the reason why a node must not overwrite a value that it reads, or "" if it may.

    The answer depends only on edges, never on the order of independent nodes, so it stays valid after later passes. A
    part of a buffer may be overwritten if no node reads that part later.
    """
    root = storage(graph, value)
    owner = graph.node(root.node)
    if owner.is_boundary:
        return f"{value} lies in the buffer of {owner.label}"
    if graph.type_of(root).size < graph.type_of(value).size:
        return f"{value} repeats {root}"
    others: dict[str, Value] = {}
    for alias in aliases(graph, value):
        for reader, key in graph.reading(alias):
            if (reader == by and key == operand) or is_view(graph, reader):
                continue
            if reader == by:
                return f"it reads {alias} as {key} too"
            others.setdefault(reader, alias)
    missing = graph.missing_before(by, others) if others else ()
    for reader, alias in others.items():
        if reader in missing:
            return f"{graph.node(reader).label} reads {alias} too and need not run before it"
    return ""
