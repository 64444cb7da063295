"""Graphs as text, one line for each node, and as JSON. Reads a graph at any stage, decides nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fmtprop.ir.file import spell_floats
from fmtprop.ir.graph import Graph
from fmtprop.ir.networkx_form import plain_node
from fmtprop.ir.node import Node
from fmtprop.passes.assignment.formats import describe
from fmtprop.report.model import op_with_tail
from fmtprop.system.printable import printable


def graph_text(graph: Graph, title: str = "") -> str:
    """Return a graph as text.

    Returns
    -------
    str
        A heading, then one line per node in topological order: name, op with its post-ops, operands, result types,
        and, once they are chosen, formats, implementation and reason.

    Examples
    --------
    >>> from fmtprop.frontends import load
    >>> print(graph_text(load("chain")).splitlines()[0])
    chain: 7 nodes; 1 convolution, 1 relu, 1 pooling
    """
    heading = printable(f"{graph.name}{', ' if title else ''}{title}: {len(graph)} nodes")
    counts = ", ".join(f"{count} {op}" for op, count in op_counts(graph).most_common())
    return "\n".join([f"{heading}; {counts}" if counts else heading, *_aligned([_row(graph, n) for n in graph])])


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


def _aligned(rows: Sequence[tuple[str, ...]], gap: str = "  ") -> list[str]:
    """Pad all columns but the last to the width of their longest cell."""
    rows = [tuple(map(printable, row)) for row in rows]
    widths = [max(map(len, column)) for column in _columns(rows)]
    lines = (gap.join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)) for row in rows)
    return [line.rstrip() for line in lines]


def _columns(rows: Sequence[tuple[str, ...]]) -> Iterable[list[str]]:
    length = max(map(len, rows), default=0)
    return ([row[i] for row in rows if i < len(row)] for i in range(length))


def op_counts(graph: Graph) -> Counter[str]:
    """Return the number of nodes of each op, without boundary nodes."""
    return Counter(op_with_tail(node) for node in graph if not node.is_boundary)


# ---------------------------------------------------------------- JSON


def graph_data(graph: Graph, costs: Mapping[str, float] | None = None) -> dict[str, Any]:
    """Return a graph as JSON-ready data, with formats and choices, but without constants' data.

    Returns
    -------
    dict
        ``name`` and ``nodes``, each as in a graph file, with ``formats`` (of the results), ``target``, ``impl``,
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


def catalogue_data(graphs: Iterable[Graph]) -> list[dict[str, Any]]:
    """Return name, inputs, number of parameters and ops of each graph as JSON-ready data."""
    return [
        {
            "name": graph.name,
            "inputs": {node.name: repr(node.results[0]) for node in graph.input_nodes},
            "parameters": sum(node.results[0].size for node in graph if node.op == "constant"),
            "ops": dict(op_counts(graph).most_common()),
        }
        for graph in graphs
    ]


def catalogue_text(graphs: Iterable[Graph]) -> str:
    """Return one line for each graph: name, inputs, parameters, ops."""
    head = ("name", "inputs", "parameters", "ops")
    rows = [
        (
            row["name"],
            " ".join(row["inputs"].values()),
            f"{row['parameters'] / 1e6:.2f} M",
            ", ".join(f"{count} {op}" for op, count in row["ops"].items()),
        )
        for row in catalogue_data(graphs)
    ]
    return "\n".join(_aligned([head, *rows]))
