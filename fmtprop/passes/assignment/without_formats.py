"""The way back from a formatted graph to a normal one."""

from __future__ import annotations

from fmtprop.ir import Graph, Node, TensorType, Value, result_names
from fmtprop.layout import DataType


def is_format_change(node: Node) -> bool:
    """Return whether a formatted node changes only the format: a reorder that is not in the model."""
    choice = node.choice
    return node.op == "reorder" and choice is not None and node.descs[0].dtype is choice.operands["src"].dtype


def is_storing(node: Node) -> bool:
    """Return whether a formatted node changes only how numbers of a grid are stored: as bytes, or as real numbers."""
    return node.op == "reorder" and node.choice is not None and {"src", "dst"} <= node.grids.keys()


def is_reorder(node: Node) -> bool:
    """Return whether a formatted node is no part of the model: it changes the format, or how a grid is stored."""
    return is_format_change(node) or is_storing(node)


def without_formats(graph: Graph) -> Graph:
    """Return a formatted graph without its formats, choices, and changes of format: a normal graph again.

    Bytes are a format of numbers on a grid, so these are real numbers again.
    """
    normal = graph.copy()
    for node in graph.nodes():
        if is_reorder(node):
            normal.replace_uses(Value(node.name), normal.inputs(node.name)["src"])
            normal.remove(node.name)
    return normal.map_nodes(lambda node: node.with_(descs=(), choice=None, results=_in_reals(node)))


def _in_reals(node: Node) -> tuple[TensorType, ...]:
    if not node.grids or node.is_boundary:
        return node.results
    pairs = zip(result_names(node), node.results, strict=True)
    return tuple(type_ if name not in node.grids else TensorType(type_.dims, DataType.F32) for name, type_ in pairs)
