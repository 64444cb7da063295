"""Graphs as text, one line for each node, and as JSON. Reads a graph at any stage, decides nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from fmtprop.ir import Graph, Node
from fmtprop.ir.file import spell_floats
from fmtprop.ir.networkx_form import plain_node
from fmtprop.passes.assignment.formats import describe
from fmtprop.report.sketch import op_with_tail
from fmtprop.system.printable import aligned, printable


def graph_text(graph: Graph, title: str = "") -> str:
    """Return a graph as text.

    Result: a heading, then one line per node in topological order: name, op with its post-ops, operands, result types,
    and, once they are chosen, formats, implementation and reason.

    >>> from fmtprop.capture import load
    >>> print(graph_text(load("chain")).splitlines()[0])
    chain: 7 nodes; 1 convolution, 1 relu, 1 pooling
    """
    heading = printable(f"{graph.name}{', ' if title else ''}{title}: {len(graph)} nodes")
    counts = ", ".join(f"{count} {op}" for op, count in op_counts(graph).most_common())
    return "\n".join([f"{heading}; {counts}" if counts else heading, *aligned([_row(graph, n) for n in graph])])


def graphs_text(graphs: Iterable[tuple[str, Graph]]) -> str:
    """Return a graph's history, each state with its title; for an unchanged state, only the heading."""
    parts: list[str] = []
    before = ""
    for title, graph in graphs:
        heading, _, body = graph_text(graph, title).partition("\n")
        parts.append(f"{heading}\n{body}" if body != before else f"{heading} (unchanged)")
        before = body
    return "\n\n".join(parts)


def _row(graph: Graph, node: Node) -> tuple[str, ...]:
    reads = ", ".join(str(value) for value in graph.inputs(node.name).values())
    types = ", ".join(map(repr, node.results))
    row = (node.name, op_with_tail(node), reads, types)
    if node.choice is None:
        return row
    formats = ", ".join(map(describe, node.descs))
    impl = "" if node.is_boundary else node.choice.impl
    return (*row, formats, impl, node.choice.reason)


def op_counts(graph: Graph) -> Counter[str]:
    """Return the number of nodes of each op, without boundary nodes."""
    return Counter(op_with_tail(node) for node in graph if not node.is_boundary)


# ---------------------------------------------------------------- JSON


def graph_data(graph: Graph, costs: Mapping[str, float] | None = None) -> dict[str, Any]:
    """Return a graph as JSON-ready data, with formats and choices, but without constants' data.

    Result: ``name`` and ``nodes``, each as in a graph file, with ``formats`` (of the results), ``target``, ``impl``,
    ``reads`` (format of each operand) and ``reason`` once formats are chosen; ``cost_seconds`` if there are costs.
    """
    return {"name": graph.name, "nodes": [_node_data(graph, node, costs or {}) for node in graph]}


def _node_data(graph: Graph, node: Node, costs: Mapping[str, float]) -> dict[str, Any]:
    inputs = {operand: [value.node, value.index] for operand, value in graph.inputs(node.name).items()}
    plain: dict[str, Any] = spell_floats(plain_node(node))
    del plain["descs"], plain["choice"]
    data = {"name": node.name, "inputs": inputs, **plain}
    if node.choice is not None:
        data |= {
            "formats": [describe(desc) for desc in node.descs],
            "target": node.choice.target,
            "impl": node.choice.impl,
            "reads": {operand: describe(desc) for operand, desc in node.choice.operands.items()},
            "reason": node.choice.reason,
        }
    if node.name in costs:
        data["cost_seconds"] = costs[node.name]
    return data


# ---------------------------------------------------------------- many graphs
