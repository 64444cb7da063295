"""Residual sums that must not overwrite their operand, or whose factors may be bytes, become additions."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fmtprop.ir import Graph, Node, PostOp
from fmtprop.ir.aliasing import overwrite_hazard
from fmtprop.ops import Binary, Sum
from fmtprop.passes.base import Pass


@dataclass(frozen=True)
class ReleaseSums(Pass):
    """Turn ``sum`` post-ops into ``binary`` additions if their operand must not be overwritten, or has another format.

    A rewrite of a normal graph can give tensors new readers (a convolution that reads a factor's source itself). Then
    rule V9 may be broken; this pass restores it. Products of bytes have another
    data type or scale than the operand. A graph that obeys the rule is returned unchanged.
    """

    def run(self, graph: Graph) -> Graph:
        """Return the rewritten graph; the same object if all sums may stay."""
        found = {node.name: tail for node in graph.nodes() if (tail := _tail(graph, node)) != node.post_ops}
        if not found:
            return graph
        return graph.map_nodes(lambda node: replace(node, post_ops=found.get(node.name, node.post_ops)))


def _tail(graph: Graph, node: Node) -> tuple[PostOp, ...]:
    is_quantized = {"src", "weights"} <= node.grids.keys()
    return tuple(
        _released(post_op) if _is_sum(post_op) and (is_quantized or _is_hazard(graph, node, post_op)) else post_op
        for post_op in node.post_ops
    )


def _is_sum(post_op: PostOp) -> bool:
    return post_op.attrs == Sum((1.0,))


def _is_hazard(graph: Graph, node: Node, post_op: PostOp) -> bool:
    (operand,) = post_op.operands
    return bool(overwrite_hazard(graph, graph.inputs(node.name)[operand], node.name, operand))


def _released(post_op: PostOp) -> PostOp:
    return replace(post_op, op="binary", attrs=Binary("add"))
