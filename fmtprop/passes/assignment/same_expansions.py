"""The nodes of a graph that ran as several for another shape of the model, written as several again.

Knows only names and types: the parts of node ``conv`` are ``conv.weights``, ``conv.tiles``, ….
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from fmtprop.ir.graph import Graph
from fmtprop.passes.variants.expand import ExpandingPass


def expand_alike(graph: Graph, formatted: Graph, rewrites: Iterable[ExpandingPass]) -> Graph:
    """Return a graph with the expansions that another shape's formatted graph has.

    `formatted`: the formatted graph of another shape.
    """
    names = {_owner(node.name) for node in formatted.nodes() if node.name not in graph and node.op != "reorder"}
    left = [node.name for node in graph.nodes() if node.name in names]
    for rewrite in rewrites:
        able = [name for name in left if rewrite.applies(graph, graph.node(name))]
        if not able:
            continue
        tried = replace(rewrite, names=able).run(graph)
        same = [name for name in able if _is_same(tried, formatted, name)]
        if same:
            graph = tried if same == able else replace(rewrite, names=same).run(graph)
            left = [name for name in left if name not in same]
    return graph


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _is_same(graph: Graph, formatted: Graph, name: str) -> bool:
    """Whether a node has the other graph's parts: the last has its op, and those on weights have its sizes."""
    if graph.node(name).op != formatted.node(name).op:
        return False
    varying = graph.dependents([node.name for node in graph.input_nodes])
    parts = [node for node in graph.nodes(graph.ancestors(name)) if _owner(node.name) == name]
    known = [node for node in parts if node.name in formatted]
    return any(known) and all(
        node.results == formatted.node(node.name).results for node in known if node.name not in varying
    )
