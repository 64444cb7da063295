"""Factors of channels before a pointwise convolution, moved from its source to its smaller weights.

A squeeze-and-excitation block multiplies a whole activation by one number per channel, and the convolution after it
sums over channels: ``conv(x * s, w) = conv(x, w * s)``. The factors change in every run, so every run scales the
weights; in the wide, early layers of a network these are a hundred times fewer numbers.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from fmtprop.errors import GraphError
from fmtprop.ir import Graph, Node, Value
from fmtprop.layout import DataType, MemoryDesc
from fmtprop.ops import Binary, Conv, Permute, Reshape
from fmtprop.passes.editing import only_reader
from fmtprop.passes.variants.expand import ExpandingPass, Expansion

#: least elements of the source over those of the weights: scaled weights are packed in every run, which must pay
_FEWER_RATIO = 4


class ScaleWeights(ExpandingPass):
    """Scale the weights of a pointwise convolution instead of its source's channels if this is much less work.

    Normal graph to normal graph. Results differ by rounding. Weights are scaled in the order [C, O], in which a matrix
    product reads them without a copy: see :meth:`pins`.
    """

    def run(self, graph: Graph) -> Graph:
        """Return the rewritten graph."""
        out = super().run(graph)
        if out is not graph:
            out.remove_dead()
        return out

    def pins(self, graph: Graph) -> dict[str, MemoryDesc]:
        """Return the format of a rewritten graph's scaled f32 weights, by ``"node.weights"``.

        Kernels with packed weights would need a reorder in every run, and are not faster. In narrower types they are
        twice as fast: their instructions multiply pairs of channels, which only packed weights have next to each
        other.
        """
        found = {}
        for node in self.eligible(graph):
            type_ = graph.type_of(graph.inputs(node.name)["weights"])
            if type_.dtype is not DataType.F32:
                continue
            outputs, channels, *window = type_.dims
            strides = (1, outputs, *(outputs * channels for _ in window))
            found[f"{node.name}.weights"] = MemoryDesc(type_.dims, type_.dtype, strides=strides)
        return found

    def applies(self, graph: Graph, node: Node) -> bool:
        """Whether a node is a convolution with a scaled source that has no other reader."""
        return _scaled_source(graph, node) is not None

    def replace(self, graph: Graph, out: Graph, node: Node) -> None:
        """Add the convolution with scaled weights."""
        found, parts = _scaled_source(graph, node), Expansion(graph, out, node)
        if found is None:
            raise GraphError(f"{node.label} reads no scaled source")
        weights = parts.inputs["weights"]
        outputs, channels, *window = graph.type_of(weights).dims
        rows = parts.view("rows", weights, Reshape((outputs, channels)))
        columns = parts.view("columns", rows, Permute((1, 0)))
        factors = parts.view("factors", found.factors, Reshape((channels, 1)))
        scaled = parts.emit("scaled", {"src_0": columns, "src_1": factors}, Binary("mul"))
        back = parts.view("back", scaled, Permute((1, 0)))
        shaped = parts.view("weights", back, Reshape((outputs, channels, *window)))
        out.add(node, {**parts.inputs, "src": found.source, "weights": shaped})


class _Scaled(NamedTuple):
    source: Value
    factors: Value


def _scaled_source(graph: Graph, node: Node) -> _Scaled | None:
    """Return the factors of a convolution's source; None if the convolution is not rewritten."""
    if not _is_pointwise(graph, node):
        return None
    inputs = graph.inputs(node.name)
    product, weights = graph.node(inputs["src"].node), graph.type_of(inputs["weights"])
    if product.attrs != Binary("mul") or product.post_ops or only_reader(graph, inputs["src"]) != node:
        return None
    (type_,) = product.results
    channels = type_.with_dims((1, type_.dims[1], *(1,) * (type_.ndim - 2)))
    if weights.dtype is not type_.dtype or prod(weights.dims) * _FEWER_RATIO > prod(type_.dims):
        return None
    if inputs["weights"].node in graph.dependents():  # the weights are already computed in every run
        return None
    sources = graph.inputs(product.name)
    for source, factors in ((sources["src_0"], sources["src_1"]), (sources["src_1"], sources["src_0"])):
        if graph.type_of(source) == type_ and graph.type_of(factors) == channels:
            return _Scaled(source, factors)
    return None


def _is_pointwise(graph: Graph, node: Node) -> bool:
    attrs = node.attrs
    if node.op != "convolution" or not isinstance(attrs, Conv) or attrs.groups != 1:
        return False
    window = graph.type_of(graph.inputs(node.name)["weights"]).dims[2:]
    return {*window, *attrs.strides} == {1} and not any((*attrs.pad_l, *attrs.pad_r))
