"""Graphs in notebooks: a row for each node."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import TYPE_CHECKING

from fmtprop.ir.node import Node
from fmtprop.system.printable import printable

if TYPE_CHECKING:
    from fmtprop.ir.graph import Graph

_HEAD = "<tr><th>node</th><th>op</th><th>reads</th><th>gives</th></tr>"


def notebook(graph: Graph) -> str:
    """Return a graph's nodes as an HTML table that scrolls by itself, without constants."""
    rows = "".join(_row(graph, node) for node in graph.nodes() if node.op != "constant")
    return (
        f'<p>{_text(repr(graph))}</p><div style="overflow: auto; max-height: 40em"><table>{_HEAD}{rows}</table></div>'
    )


def _row(graph: Graph, node: Node) -> str:
    op = "+".join((node.op, *(post_op.op for post_op in node.post_ops)))
    reads = ", ".join(f"{operand}: {value.node}" for operand, value in graph.inputs(node.name).items())
    return f"<tr>{_cells((node.name, op, reads, ', '.join(map(repr, node.results))))}</tr>"


def _cells(texts: Iterable[str]) -> str:
    return "".join(f"<td>{_text(text)}</td>" for text in texts)


def _text(text: str) -> str:
    return escape(printable(text))
