"""The nodes of a graph that ran as several for another shape of the model, written as several again.

Knows only names and types: the parts of node ``conv`` are ``conv.weights``, ``conv.tiles``, ….
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable

from fmtprop.ir.graph import Graph
from fmtprop.ir.node import Node
from fmtprop.ir.op import Category, opdef
from fmtprop.ir.types import TensorType
from fmtprop.passes.variants.expand import ExpandingPass


def expand_alike(graph: Graph, formatted: Graph, rewrites: Iterable[ExpandingPass]) -> Graph:
    """Return a graph with the expansions that another shape's formatted graph has.

    `formatted`: the formatted graph of another shape.
    """
    found = defaultdict(list)
    for node in formatted.nodes():
        if node.name not in graph and node.op != "reorder":
            found[_owner(node.name)].append(node)
    owners = {node.name: found[node.name] for node in graph.nodes() if node.name in found}
    if not owners:
        return graph
    forms = list(dict.fromkeys(form for rewrite in rewrites for form in rewrite.forms()))
    varying = formatted.dependents([node.name for node in formatted.input_nodes])
    expanded = {}
    for name, parts in owners.items():
        known = _products([*parts, formatted.node(name)], formatted, varying)
        for form in forms:
            if known and form.applies(graph, graph.node(name)):
                tried = _expanded(graph, name, form)
                if _products(tried.nodes(), tried, varying) == known:
                    expanded[name] = tried
                    forms.sort(key=lambda one: one is not form)  # most nodes have the same
                    break
    return _with(graph, expanded) if expanded else graph


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _expanded(graph: Graph, name: str, rewrite: ExpandingPass) -> Graph:
    """Return the several nodes for one, with its operands' producers as they are."""
    out = Graph(graph.name, graph.structure)
    for value in graph.inputs(name).values():
        if value.node not in out:
            out.add(graph.node(value.node), {})
    rewrite.replace(graph, out, graph.node(name))
    return out


def _products(
    nodes: Iterable[Node], graph: Graph, varying: Collection[str]
) -> dict[str, tuple[str, TensorType | None]]:
    """Return the op of each compute-intensive node, and the type of its weights where these are constant."""
    found = {}
    for node in nodes:
        inputs = {} if node.is_boundary or opdef(node.op).category is not Category.COMPUTE else graph.inputs(node.name)
        if inputs:
            weights = inputs.get("weights")
            is_constant = weights is not None and weights.node not in varying
            found[node.name] = node.op, graph.type_of(weights) if weights is not None and is_constant else None
    return found


def _with(graph: Graph, expanded: dict[str, Graph]) -> Graph:
    """Return a graph with several nodes in place of some."""
    out = Graph(graph.name, graph.structure)
    for node in graph.nodes():
        source = expanded.get(node.name, graph)
        for one in source.nodes() if node.name in expanded else (node,):
            if one.name in out:
                continue  # an operand's producer
            if one.name == node.name and "dst" in node.grids and not one.grids:
                one = one.with_(grids={"dst": node.grids["dst"]})  # as where an expansion is chosen
            out.add(one, source.inputs(one.name))
            if one.op == "constant":
                out.constants[one.name] = source.constants[one.name]
    return out
