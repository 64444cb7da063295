"""Batch normalization as an equivalent depthwise convolution with a window of one.

``(x - mean) / sqrt(variance + epsilon) * scale + shift`` is a factor and a summand per channel. oneDNN has more
kernels for depthwise convolutions than for batch normalization, in more formats; on AVX2 the best takes half the time.
The factors are made once, by nodes on constants, with PyTorch's formula.
"""

from __future__ import annotations

import torch

from fmtprop.errors import GraphError
from fmtprop.ir import Graph, Node
from fmtprop.ops import BatchNorm, Binary, Conv, Eltwise, Reshape
from fmtprop.passes.rewrites.fold_batch_norm import batch_norm_affine
from fmtprop.passes.variants.expand import ExpandingPass, Expansion, has_constant_parameters, is_f32

#: a convolution rounds its product before it adds the summand of about the same size: with a mean of 1000 deviations,
#: errors are 3.4 times those of PyTorch's fused operations. Networks have means of a few deviations
_LARGEST_SUMMAND = 100.0


class NormAsConvolution(ExpandingPass):
    """Rewrite batch normalizations with constant statistics."""

    def applies(self, graph: Graph, node: Node) -> bool:
        """Whether a node is a batch normalization with finite factors and moderate summands."""
        if not (
            isinstance(node.attrs, BatchNorm)
            and 3 <= node.results[0].ndim <= 5
            and node.results[0].dims[1] > 1  # with one channel it would be an ordinary convolution
            and is_f32(graph, node)
            and has_constant_parameters(graph, node)
        ):
            return False
        affine = batch_norm_affine(graph, node.attrs, graph.inputs(node.name))
        # otherwise only the normalization itself gives the right result
        if affine is None or not all(bool(vector.float().isfinite().all()) for vector in affine):
            return False
        return float(affine[1].abs().max()) <= _LARGEST_SUMMAND

    def replace(self, graph: Graph, out: Graph, node: Node) -> None:
        """Add the convolution and the nodes that make its factors."""
        attrs, parts = node.attrs, Expansion(graph, out, node)
        if not isinstance(attrs, BatchNorm):
            raise GraphError(f"{node.label} is not a batch normalization")
        inputs, channels, spatial = parts.inputs, node.results[0].dims[1], node.results[0].ndim - 2
        variance = parts.emit("variance", {"src": inputs["variance"]}, Eltwise("linear", 1.0, attrs.epsilon))
        deviation = parts.emit("deviation", {"src": variance}, Eltwise("sqrt"))
        scale = inputs["scale"] if "scale" in inputs else parts.constant("scale", torch.ones(channels))
        factor = parts.emit("factor", {"src_0": scale, "src_1": deviation}, Binary("div"))
        product = parts.emit("mean", {"src_0": inputs["mean"], "src_1": factor}, Binary("mul"))
        shift = inputs["shift"] if "shift" in inputs else parts.constant("shift", torch.zeros(channels))
        summand = parts.emit("summand", {"src_0": shift, "src_1": product}, Binary("sub"))
        weights = parts.view("weights", factor, Reshape((channels, 1, 1, *(1,) * spatial)))
        zeros, ones = (0,) * spatial, (1,) * spatial
        window = Conv(ones, zeros, zeros, zeros, channels)
        parts.emit("", {"src": inputs["src"], "weights": weights, "bias": summand}, window)
        parts.carry_post_ops(node.name, node.post_ops, inputs)
