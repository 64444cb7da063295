"""Absorption of a flattening into the inner product after it."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import ClassVar

from fmtprop.ir.graph import Graph
from fmtprop.ir.node import Node
from fmtprop.passes.base import NodePass
from fmtprop.passes.editing import is_constant, viewed_constant


@dataclass(frozen=True)
class AbsorbFlatten(NodePass):
    """Make inner products read [N, C, H, W] instead of its flattened form [N, C·H·W].

    The constant weights become [O, C, H, W] without a copy. Then the activations can keep their producer's format: a
    blocked or channels-last tensor cannot be flattened without a reorder, but oneDNN packs the weights to match it.

    Requires folded constants. Ensures that no inner product with constant weights reads a reshape that keeps the
    first axis and merges the rest.
    """

    name: ClassVar[str] = "absorb-flatten"

    def _visit(self, graph: Graph, node: Node) -> None:
        if node.op != "inner_product":
            return
        inputs = graph.inputs(node.name)
        flat, weights = graph.node(inputs["src"].node), graph.type_of(inputs["weights"])
        if flat.op != "reshape" or not is_constant(graph, inputs["weights"]) or weights.ndim != 2:
            return
        source = graph.inputs(flat.name)["src"]
        dims = graph.type_of(source).dims
        # without images, other reshapes keep their number too
        if not 3 <= len(dims) <= 5 or flat.results[0].dims != (dims[0], prod(dims[1:])):
            return
        shape = (weights.dims[0], *dims[1:])
        origin = graph.node(inputs["weights"].node).origin
        shaped = viewed_constant(graph, inputs["weights"], lambda tensor: tensor.reshape(shape), node, origin)
        graph.set_inputs(node.name, {**inputs, "src": source, "weights": shaped})
