"""Inner products whose zeros are not the byte 0 become matrix products, for which oneDNN has zero points."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from fmtprop.ir import Graph, Node
from fmtprop.ops import InnerProduct, MatMul, Reshape
from fmtprop.passes.base import Pass
from fmtprop.passes.editing import bypass, insert, is_constant, viewed_constant
from fmtprop.passes.precision.mark_grids import grids_of


@dataclass(frozen=True)
class ShiftedRows(Pass):
    """Make a matrix product of each inner product in bytes of which a factor's zero is not the byte 0.

    oneDNN's inner product takes no zero points. A matrix product takes them, and its weights are packed with the sums
    that belong to them.

    Requires folded constants, and no post-ops. Images of several positions stay: their formats are free.
    """

    def run(self, graph: Graph) -> Graph:
        """Return the rewritten graph."""
        found = grids_of(graph)
        if not found:
            return graph
        graph = graph.copy()
        for node in graph.nodes():
            if isinstance(node.attrs, InnerProduct):
                inputs = graph.inputs(node.name)
                src, weights = found.get(inputs["src"]), found.get(inputs["weights"])
                if (
                    src is not None
                    and weights is not None
                    and (src.zero or weights.zero)
                    and prod(graph.type_of(inputs["src"]).dims[2:]) == 1
                ):
                    _rewrite(graph, node)
        graph.remove_dead()
        return graph


def _rewrite(graph: Graph, node: Node) -> None:
    inputs = dict(graph.inputs(node.name))
    if not all(is_constant(graph, inputs[name]) for name in ("weights", "bias") if name in inputs):
        return
    rows = graph.type_of(inputs["src"]).dims[:2]
    if graph.type_of(inputs["src"]).ndim > 2:
        inputs["src"] = insert(graph, node, Reshape(rows), src=inputs["src"])
    views = {"weights": lambda tensor: tensor.flatten(1).t(), "bias": lambda tensor: tensor.reshape(1, -1)}
    for name in views.keys() & inputs.keys():
        origin = graph.node(inputs[name].node).origin
        inputs[name] = viewed_constant(graph, inputs[name], views[name], node, origin)
    bypass(graph, node, [insert(graph, node, MatMul(), **inputs)])
