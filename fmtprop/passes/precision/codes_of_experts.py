"""Products of groups of rows with matrices that a model decodes from codes."""

from __future__ import annotations

from dataclasses import dataclass

from fmtprop.ir import Graph, Node
from fmtprop.ops import DecodeNBits, GroupedMatmul, GroupedNBits, Permute, Reshape
from fmtprop.passes.base import NodePass
from fmtprop.passes.editing import bypass, insert


@dataclass(frozen=True)
class CodesOfExperts(NodePass):
    """Let products of groups of rows read the codes of their matrices.

    Requires a well-formed graph. Ensures that no such product reads a decoded matrix [groups * outputs, depth], each
    group's transposed.
    """

    def _visit(self, graph: Graph, node: Node) -> None:
        if not isinstance(node.attrs, GroupedMatmul) or node.post_ops:
            return
        inputs = graph.inputs(node.name)
        groups, depth, outputs = graph.type_of(inputs["weights"]).dims
        made = graph.node(inputs["weights"].node)
        for view in (Permute((0, 2, 1)), Reshape((groups, outputs, depth))):
            if made.attrs != view:
                return
            made = graph.node(graph.inputs(made.name)["src"].node)
        if type(made.attrs) is DecodeNBits:
            attrs = GroupedNBits(made.attrs.bits, made.attrs.group)
            codes = {**graph.inputs(made.name), "src": inputs["src"], "ends": inputs["ends"]}
            bypass(graph, node, [insert(graph, node, attrs, **codes)])
