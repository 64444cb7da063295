"""Removal of nodes that change nothing, and merging of chains of views."""

from __future__ import annotations

from dataclasses import dataclass

from fmtprop.ir import Category, Graph, Node, Value, opdef
from fmtprop.ir.verify import is_identity_view
from fmtprop.ops import Concat, Eltwise, Permute, Reduction, Reshape, Sum
from fmtprop.passes.base import NodePass
from fmtprop.passes.editing import bypass


@dataclass(frozen=True)
class RemoveIdentities(NodePass):
    """Remove identities and merge pairs of views.

    Identities are views without effect, conversions to the same data type, ``linear`` with factor 1 and summand 0,
    sums and concatenations of one tensor, and sums, products, means and extremes along axes of size 1. (Dropout is an
    identity too, but no importer makes a node of it.) A reshape of a reshape becomes one reshape, a permutation of a
    permutation one permutation.

    Requires a well-formed graph without formats. Ensures that none of the above is left.
    """

    def _visit(self, graph: Graph, node: Node) -> None:
        node = _merge(graph, node)
        source = None if node.post_ops or node.is_boundary else _source_of_identity(graph, node)
        if source is not None and graph.type_of(source) == node.results[0]:
            bypass(graph, node, [source])


def _merge(graph: Graph, node: Node) -> Node:
    """Merge a view with the view before it, if both have the same kind, and return it."""
    if not isinstance(node.attrs, Reshape | Permute):
        return node
    first = graph.node(graph.inputs(node.name)["src"].node)
    if first.op != node.op:
        return node
    if isinstance(node.attrs, Permute) and isinstance(first.attrs, Permute):
        inner = first.attrs.order
        node = node.with_(attrs=Permute(tuple(inner[axis] for axis in node.attrs.order)))
        graph.replace(node)
    graph.set_input(node.name, "src", graph.inputs(first.name)["src"])
    return node


def _source_of_identity(graph: Graph, node: Node) -> Value | None:
    """Return the value that a node returns unchanged; None if the node has an effect."""
    inputs = graph.inputs(node.name)
    match node.attrs:
        case Eltwise("linear", 1.0, 0.0):
            return inputs["src"]
        case Sum((1.0,)):
            return inputs["src_0"]
        case Concat() if len(inputs) == 1:
            return inputs["src_0"]
        case Reduction(alg, axes) if not alg.startswith("norm"):  # which are of magnitudes
            dims = graph.type_of(inputs["src"]).dims
            return inputs["src"] if all(dims[axis] == 1 for axis in axes) else None
    if node.op == "reorder":
        return inputs["src"]
    if opdef(node.op).category is Category.VIEW and is_identity_view(graph, node):
        return inputs["src"]
    return None
