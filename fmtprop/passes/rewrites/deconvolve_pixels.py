"""Deconvolutions of images of one pixel as matrix products."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from fmtprop.ir import Graph, Node
from fmtprop.ops import Deconv, MatMul, Reshape
from fmtprop.passes.base import NodePass
from fmtprop.passes.editing import bypass, constant, insert, is_constant, new_constant, viewed_constant


@dataclass(frozen=True)
class DeconvolvePixels(NodePass):
    """Multiply the channels of one pixel by the weights of all positions of the window.

    Generators and decoders begin with such a layer: [N, I, 1, 1] becomes [N, O, H, W] of the window's size. oneDNN has
    only its slow deconvolutions for it. The product has the same terms; the weights become [I, O·H·W], which is their
    order in a PyTorch module.

    Requires folded constants and normalizations, and a graph before fusion. Ensures that no deconvolution of one group
    with constant weights, without padding and dilation, reads one pixel.
    """

    def _visit(self, graph: Graph, node: Node) -> None:
        attrs = node.attrs
        if not isinstance(attrs, Deconv) or node.post_ops or attrs.groups > 1:
            return
        inputs, dims = graph.inputs(node.name), node.results[0].dims
        if any((*attrs.pad_l, *attrs.pad_r, *attrs.dilates)) or prod(graph.type_of(inputs["src"]).dims[2:]) > 1:
            return
        if not all(is_constant(graph, value) for name, value in inputs.items() if name != "src"):
            return
        images, channels = graph.type_of(inputs["src"]).dims[:2]
        src, origin = insert(graph, node, Reshape((images, channels)), src=inputs["src"]), node.origin
        operands = {"src": src}
        operands["weights"] = viewed_constant(
            graph, inputs["weights"], lambda tensor: tensor.transpose(0, 1).reshape(channels, -1), node, origin
        )
        bias = constant(graph, inputs["bias"]) if "bias" in inputs else None
        if bias is not None:
            repeated = bias.repeat_interleave(prod(dims[2:])).reshape(1, -1)
            operands["bias"] = new_constant(graph, repeated, node, origin)
        product = insert(graph, node, MatMul(), **operands)
        bypass(graph, node, [insert(graph, node, Reshape(dims), src=product)])
