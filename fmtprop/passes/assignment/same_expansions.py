"""The nodes of a graph that ran as several for another shape of the model, written as several again.

Knows only names and types: the parts of node ``conv`` are ``conv.weights``, ``conv.tiles``, ….
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import replace

from fmtprop.ir.graph import Graph
from fmtprop.ir.node import Node, Value
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
    # a constant that a plan has packed already is named behind one of this graph, and is no part of an expansion
    owners = {node.name: found[node.name] for node in graph.nodes() if node.name in found and node.name in formatted}
    if not owners:
        return graph
    forms = list(dict.fromkeys(form for rewrite in rewrites for form in rewrite.forms()))
    varying = formatted.dependents([node.name for node in formatted.input_nodes])
    expanded: dict[str, Graph] = {}
    #: rewrite, node without its name -> the first such node
    alike: dict[object, str] = {}
    for name, parts in owners.items():
        known = _products([*parts, formatted.node(name)], formatted, varying)
        for form in forms:
            if known and form.applies(graph, graph.node(name)):
                first = alike.get((form, _nameless(graph, name))) if form.is_by_types else None
                tried = _expanded(graph, name, form) if first is None else _renamed(expanded[first], graph, first, name)
                if _products(tried.nodes(), tried, varying) == known:
                    expanded[name] = tried
                    alike.setdefault((form, _nameless(graph, name)), name)
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


def _nameless(graph: Graph, name: str) -> object:
    """Return a node without its name, and what an expansion may know of its operands."""
    node, inputs = graph.node(name), graph.inputs(name)
    places = {value: place for place, value in enumerate(inputs.values())}
    operands = [(key, graph.type_of(v), graph.node(v.node).op == "constant", places[v]) for key, v in inputs.items()]
    tail = tuple((one.op, one.attrs, *one.operands) for one in node.post_ops)
    return node.op, node.attrs, tail, node.exact, frozenset(node.grids.items()), node.results, tuple(operands)


def _renamed(expanded: Graph, graph: Graph, first: str, name: str) -> Graph:
    """Return the nodes for one, as another node's that is the same but for names."""
    out, node = Graph(graph.name, graph.structure), graph.node(name)
    before, now = graph.inputs(first), graph.inputs(name)
    values = {value: now[key] for key, value in before.items()}
    origins = {one.origin: other.origin for one, other in zip(graph.node(first).post_ops, node.post_ops, strict=True)}
    for value in now.values():
        if value.node not in out:
            out.add(graph.node(value.node), {})
    producers = {value.node for value in values}
    for one in expanded.nodes():
        if one.name in producers:
            continue
        tail = tuple(replace(post_op, origin=origins[post_op.origin]) for post_op in one.post_ops)
        new = one.with_(name=name + one.name.removeprefix(first), origin=node.origin, post_ops=tail)
        inputs = {key: values[value] for key, value in expanded.inputs(one.name).items()}
        for index, value in enumerate(out.add(new.agreeing_with(one.agreed), inputs)):
            values[Value(one.name, index)] = value
        if one.op == "constant":
            out.constants[new.name] = expanded.constants[one.name]
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
