"""Graphs as Graphviz DOT: reorders stand out, edges carry type and format. Reads a graph at any stage."""

from __future__ import annotations

from collections.abc import Iterable

from fmtprop.ir import Graph, Node, Value
from fmtprop.passes.assignment.formats import describe
from fmtprop.report.sketch import computed, op_with_tail
from fmtprop.system.printable import printable

_STYLES = {
    "input": "shape=ellipse",
    "output": "shape=ellipse",
    "constant": "shape=plain",
    "reorder": 'style=filled fillcolor="orange"',
}


def graph_dot(graph: Graph, title: str = "", *, constants: bool = False) -> str:
    """Return a graph in the DOT language.

    `title`: the heading of the drawing; the graph's name by default.

    >>> from fmtprop.capture import load
    >>> print(graph_dot(load("chain")).splitlines()[0])
    digraph "chain" {
    """
    lines = [f"digraph {_quoted(graph.name)} {{"]
    lines.append(f"  label={_quoted(title or graph.name)}; labelloc=t; node [shape=box];")
    nodes = {node.name: node for node in graph} if constants else computed(graph)
    for node in nodes.values():
        lines.append(f"  {_quoted(node.name)} [label={_quoted(_label(node))}{_style(node)}];")
        for operand, value in graph.inputs(node.name).items():
            if value.node not in nodes:
                continue
            label = _quoted(f"{operand}: {_tensor(graph, value)}")
            lines.append(f"  {_quoted(value.node)} -> {_quoted(node.name)} [label={label}];")
    return "\n".join([*lines, "}"])


def graphs_dot(graphs: Iterable[tuple[str, Graph]], *, constants: bool = False) -> str:
    """Return several graphs, each with its title, as DOT; ``dot`` draws one after the other."""
    return "\n".join(graph_dot(graph, f"{graph.name}, {title}", constants=constants) for title, graph in graphs)


def _label(node: Node) -> str:
    impl = f"\n{node.choice.impl}" if node.choice is not None and not node.is_boundary else ""
    return f"{printable(node.name)}\n{op_with_tail(node)}{impl}"


def _style(node: Node) -> str:
    style = _STYLES.get(node.op)
    return f" {style}" if style is not None else ""


def _tensor(graph: Graph, value: Value) -> str:
    type_ = graph.type_of(value)
    descs = graph.node(value.node).descs
    return f"{type_!r} {describe(descs[value.index])}" if descs else repr(type_)


def _quoted(text: str) -> str:
    r"""Return a DOT string: quotes and backslashes escaped, line breaks as ``\n``."""
    lines = (printable(line).replace("\\", "\\\\").replace('"', '\\"') for line in text.split("\n"))
    return '"' + "\\n".join(lines) + '"'
