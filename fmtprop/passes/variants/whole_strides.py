"""Deconvolutions whose result is no multiple of their strides, computed a little larger, and the result cut.

oneDNN's kernel for strides runs where each axis of the result is a multiple of its stride. Elsewhere it has the
gradient of a convolution by blocks or by a general product: 1.6 ms where the larger result takes 1.0 (256 to 128
channels, 3x3, stride 2, to 27x27, oneDNN 3.2, AVX-512).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fmtprop.errors import GraphError
from fmtprop.ir import Graph, Node
from fmtprop.ops import Deconv, Slice
from fmtprop.passes.variants.expand import ExpandingPass, Expansion, has_constant_parameters


@dataclass(frozen=True)
class WholeStrides(ExpandingPass):
    """Rewrite deconvolutions."""

    def applies(self, graph: Graph, node: Node) -> bool:
        """Whether a node is such a deconvolution, and no post-op reads a tensor of the result's size."""
        if any(post_op.operand is not None for post_op in node.post_ops) or not _missing(node):
            return False
        return has_constant_parameters(graph, node)

    def replace(self, graph: Graph, out: Graph, node: Node) -> None:
        """Add the larger deconvolution and the slice of its result."""
        attrs, parts, missing = node.attrs, Expansion(graph, out, node), _missing(node)
        if not isinstance(attrs, Deconv) or not missing:
            raise GraphError(f"{node.label} is not a deconvolution whose result is to be made larger")
        pad_r = tuple(pad - more for pad, more in zip(attrs.pad_r, missing, strict=True))
        larger = parts.emit("larger", parts.inputs, replace(attrs, pad_r=pad_r))
        parts.carry_post_ops(larger.node, node.post_ops, parts.inputs)
        dims = node.results[0].dims
        parts.view("", larger, Slice((0,) * len(dims), dims, (1,) * len(dims)))


def _missing(node: Node) -> tuple[int, ...]:
    """Return the elements up to the next multiple of the stride along each axis; nothing for no change."""
    attrs = node.attrs
    if not isinstance(attrs, Deconv) or attrs.groups != 1:
        return ()
    sizes = node.results[0].dims[2:]
    missing = tuple(-size % stride for size, stride in zip(sizes, attrs.strides, strict=True))
    # more is no deconvolution: no window would reach the last elements
    reached = all(pad - more > -stride for pad, more, stride in zip(attrs.pad_r, missing, attrs.strides, strict=True))
    return missing if any(missing) and reached else ()
