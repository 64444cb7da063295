"""Batch normalization as the depthwise convolution with a window of one that it is.

``(x - mean) / sqrt(variance + epsilon) * scale + shift`` is a factor and a summand for each channel. oneDNN has more
kernels for depthwise convolutions than for batch normalization, in more formats; on AVX2 the best takes half the time.
The factors are made by nodes that depend on constants alone, so once, by PyTorch's own formula.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

import torch

from fmtprop.errors import GraphError
from fmtprop.ir.graph import Graph
from fmtprop.ir.node import Node
from fmtprop.ops.binary import Binary
from fmtprop.ops.convolution import Conv
from fmtprop.ops.eltwise import Eltwise
from fmtprop.ops.normalization import BatchNorm
from fmtprop.ops.view_attrs import Reshape
from fmtprop.passes.editing import constant
from fmtprop.passes.expand import Expansion, expand, is_plain_arithmetic

__all__ = ["NormAsConvolution"]


@dataclass(frozen=True)
class NormAsConvolution:
    """Rewrite batch normalizations with constant statistics, those given by name.

    Parameters
    ----------
    names : collection of str, optional
        Nodes to rewrite; by default all that can be.

    Notes
    -----
    Normal graph to normal graph; a graph without such nodes comes back as it is. The convolution has the
    normalization's name. Whether it pays depends on the machine: it is for a policy that compares.
    """

    name: ClassVar[str] = "norm-as-convolution"

    names: Collection[str] | None = None

    def run(self, graph: Graph) -> Graph:
        """Return the rewritten graph; the same object where nothing is to be rewritten."""
        return expand(graph, {node.name for node in self.eligible(graph)}, _replace)

    def eligible(self, graph: Graph) -> list[Node]:
        """Return the nodes that are rewritten, in order."""
        nodes = graph.nodes() if self.names is None else [graph.node(name) for name in self.names]
        return [node for node in nodes if _is_depthwise(graph, node)]


def _is_depthwise(graph: Graph, node: Node) -> bool:
    return (
        node.op == "batch_normalization"
        and 3 <= node.results[0].ndim <= 5
        and node.results[0].dims[1] > 1  # of one channel it is an ordinary convolution
        and is_plain_arithmetic(graph, node)
        and _is_finite(graph, node)
    )


def _is_finite(graph: Graph, node: Node) -> bool:
    """Whether factors and summands are numbers: elsewhere only the normalization itself gives what it should."""
    inputs, attrs = graph.inputs(node.name), node.attrs
    vectors = {name: constant(graph, value) for name, value in inputs.items() if name != "src"}
    factor = torch.rsqrt(torch.as_tensor(vectors["variance"]) + getattr(attrs, "epsilon", 0.0))
    for name in ("scale", "mean"):
        tensor = vectors.get(name)
        factor = factor if tensor is None else factor * tensor
        if not factor.isfinite().all():
            return False
    return True


def _replace(graph: Graph, out: Graph, node: Node) -> None:
    attrs, parts = node.attrs, Expansion(graph, out, node)
    if not isinstance(attrs, BatchNorm):
        raise GraphError(f"{node.label} is no batch normalization")
    inputs, channels, spatial = parts.inputs, node.results[0].dims[1], node.results[0].ndim - 2
    variance = parts.emit("eltwise", "variance", {"src": inputs["variance"]}, Eltwise("linear", 1.0, attrs.epsilon))
    deviation = parts.emit("eltwise", "deviation", {"src": variance}, Eltwise("sqrt"))
    scale = inputs["scale"] if "scale" in inputs else parts.constant("scale", torch.ones(channels))
    factor = parts.emit("binary", "factor", {"src_0": scale, "src_1": deviation}, Binary("div"))
    product = parts.emit("binary", "mean", {"src_0": inputs["mean"], "src_1": factor}, Binary("mul"))
    shift = inputs["shift"] if "shift" in inputs else parts.constant("shift", torch.zeros(channels))
    summand = parts.emit("binary", "summand", {"src_0": shift, "src_1": product}, Binary("sub"))
    weights = parts.view("weights", factor, Reshape((channels, 1, 1, *(1,) * spatial)))
    zeros, ones = (0,) * spatial, (1,) * spatial
    window = Conv(ones, zeros, zeros, zeros, channels)
    parts.emit("convolution", "", {"src": inputs["src"], "weights": weights, "bias": summand}, window)
    parts.carry_post_ops(node.name)
