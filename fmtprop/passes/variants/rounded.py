"""Fusion of a rounding into the normalization before it, as one node that may store bytes.

Owns the pairs. Must not know whether there is a kernel for both: the target has candidates, or none.
"""

from __future__ import annotations

from fmtprop.ir import Bytes, Graph, Node, PostOp, opdef
from fmtprop.ops.quantization import FakeQuantize
from fmtprop.passes.editing import only_reader
from fmtprop.passes.variants.depthwise_fusion import Fused


def rounded(graph: Graph, node: Node) -> Fused | None:
    """Return one node for a normalization and the rounding that alone reads it; None if the two are no such pair."""
    if not isinstance(node.attrs, FakeQuantize) or node.post_ops or node.exact or "dst" not in node.grids:
        return None
    source = graph.inputs(node.name)["src"]
    norm = graph.node(source.node)
    if (
        norm.is_boundary
        or norm.post_ops
        or norm.exact
        or opdef(norm.op).numbers.bytes(norm.attrs) is not Bytes.NORMALIZED
    ):
        return None
    if only_reader(graph, source) is None or norm.results != node.results:
        return None
    tail = (PostOp(node.op, node.attrs, None, node.origin),)
    both = norm.with_(name=node.name, post_ops=tail, grids={**norm.grids, "dst": node.grids["dst"]})
    return Fused(both, graph.inputs(norm.name), (norm.name, node.name))
