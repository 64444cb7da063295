"""The formatted graph of a plan with data for its constants, which the plan's packed forms still have.

Packing may have consumed a constant: products of it are left. Then these products are the graph's constants.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from fmtprop.errors import PlanError
from fmtprop.ir import Attrs, Choice, Graph, Grid, Node, Value
from fmtprop.ir.deferred import Deferred
from fmtprop.layout import MemoryDesc
from fmtprop.passes.assignment.without_formats import is_storing, without_formats
from fmtprop.runtime.weights import PackedForms, origin_of
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
    in_bytes = _in_bytes(formatted, known)
    known |= in_bytes.keys()
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
            value = Value(node.name)
            make = weights.reader(value)
            if value in in_bytes:
                stored, grid = in_bytes[value]
                make = partial(_reals, weights.reader(stored), grid)
            strides = MemoryDesc(type_.dims, type_.dtype).strides
            graph.constants[node.name] = Deferred(type_, strides, make, fresh=True)
    return graph


def _in_bytes(formatted: Graph, known: set[Value]) -> dict[Value, tuple[Value, Grid]]:
    """Return the constants that are packed as bytes alone: the bytes, and the grid whose numbers they stand for."""
    found = {}
    for node in formatted.nodes():
        if is_storing(node) and Value(node.name) in known:
            source = origin_of(formatted, formatted.inputs(node.name)["src"])
            if source not in known and formatted.node(source.node).op == "constant":
                found[source] = Value(node.name), node.grids["dst"]
    return found


def _reals(read: Callable[[], torch.Tensor], grid: Grid) -> torch.Tensor:
    return (read().float() - grid.zero) * torch.tensor(grid.scales).reshape(grid.shape)


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
