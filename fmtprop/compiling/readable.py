"""The formatted graph of a plan with data for its constants, which the plan's packed forms still have.

Packing may have consumed a constant: products of it are left. Then these products are the graph's constants.
"""

from __future__ import annotations

from fmtprop.errors import PlanError
from fmtprop.ir.deferred import Deferred
from fmtprop.ir.graph import Graph
from fmtprop.ir.node import Attrs, Choice, Node, Value
from fmtprop.layout import MemoryDesc
from fmtprop.passes.assignment.without_formats import without_formats
from fmtprop.runtime.weights import PackedForms
from fmtprop.targets.executable import implementation


def with_constants(formatted: Graph, weights: PackedForms) -> Graph:
    """Return a graph with constants that are read from packed forms when they are needed."""
    graph, known = formatted.copy(), weights.origins()
    computed = graph.dependents()
    for node in graph.nodes():
        value = Value(node.name)
        if node.op != "constant" and node.name not in computed and value in known and _is_consumed(graph, node, known):
            _replace(graph, node)
    graph.remove_dead()
    for node in graph.nodes():
        if node.op == "constant":
            make = weights.reader(Value(node.name))
            graph.constants[node.name] = Deferred(node.results[0], node.descs[0].strides, make, fresh=True)
    return graph


def graph_inside(formatted: Graph, weights: PackedForms) -> Graph:
    """Return the normal graph that a formatted one was made of, to plan it again, with constants read on request.

    Nodes that run as several stay so, and products of constants that packing consumed are constants.
    """
    graph, known = without_formats(formatted), weights.origins()
    computed = graph.dependents()
    for node in graph.nodes():
        value = Value(node.name)
        is_product = node.op != "constant" and node.name not in computed and len(node.results) == 1
        if is_product and value in known and _is_consumed(graph, node, known):
            graph.set_inputs(node.name, {})
            graph.replace(Node(node.name, "constant", Attrs(), node.results, origin=node.origin))
    graph.remove_dead()
    for node in graph.nodes():
        if node.op == "constant":
            (type_,) = node.results
            make = weights.reader(Value(node.name))
            strides = MemoryDesc(type_.dims, type_.dtype).strides
            graph.constants[node.name] = Deferred(type_, strides, make, fresh=True)
    return graph


def _is_consumed(graph: Graph, node: Node, known: set[Value]) -> bool:
    """Return whether a node needs a constant that no packed form has."""
    above = (graph.node(name) for name in graph.ancestors(node.name))
    return any(one.op == "constant" and Value(one.name) not in known for one in above)


def _replace(graph: Graph, node: Node) -> None:
    """Put a constant in a node's place, in row-major order where only reorders read it."""
    if len(node.results) != 1:
        return
    value, dense = Value(node.name), MemoryDesc(node.results[0].dims, node.results[0].dtype)
    readers = [graph.node(name) for name, _ in graph.readers(value)]
    if node.descs[0] != dense and any(reader.op != "reorder" for reader in readers):
        return
    for reader in readers:
        if reader.op == "reorder" and node.descs[0] != dense:
            graph.replace(reader.with_(choice=_from(reader, dense)))
    graph.set_inputs(node.name, {})
    stored = Choice("boundary", "constant", {}, "read from its packed form")
    graph.replace(Node(node.name, "constant", Attrs(), node.results, descs=(dense,), choice=stored, origin=node.origin))


def _from(reorder: Node, src: MemoryDesc) -> Choice:
    """Return the choice of a formatted reorder that reads another format: its primitive is another one."""
    target = implementation(reorder).target()
    for candidate in target.candidates(reorder, {"src": src, "dst": reorder.descs[0]}):
        return candidate.choice("its source is read from a packed form")
    raise PlanError(f"{reorder.label}: {target.name} cannot convert {src} to {reorder.descs[0]}")
