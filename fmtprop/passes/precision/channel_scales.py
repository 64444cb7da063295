"""Roundings with a scale for each channel, as NNCF and OpenVINO make of the sources of depthwise convolutions.

``x`` rounded to multiples of ``s`` is ``x · t / s`` rounded to multiples of ``t``, times ``s / t``. A depthwise
convolution's outputs read one channel each, so there the factor is one of its weights: bytes need no other scale than
``t``. It is a power of two, so nothing is rounded otherwise, and as large as the scales are, so factors are about 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fmtprop.ir import Graph, Node, Value, linear_of
from fmtprop.ir.deferred import SMALL_NBYTES, Deferred
from fmtprop.ir.tensors import materialise
from fmtprop.layout import DataType, MemoryDesc
from fmtprop.ops import Binary, Conv, Dequantize, FakeQuantize, Quantize
from fmtprop.ops.quantization import along
from fmtprop.passes.base import NodePass
from fmtprop.passes.editing import bypass, insert, is_constant, new_constant, scaled_grid
from fmtprop.passes.precision.mark_grids import scales_and_zeros


@dataclass(frozen=True)
class ChannelScales(NodePass):
    """Make a rounding to one scale, between a quotient and a factor, of each pair with several scales.

    Their zero points are all the same. The factor is one of the weights where a depthwise convolution reads it.

    Requires folded constants. Runs after normalizations are folded: a quotient is none of the weights before it, whose
    grid it would change.
    """

    def _visit(self, graph: Graph, node: Node) -> None:
        if not isinstance(node.attrs, Dequantize):
            return
        quantize = graph.node(graph.inputs(node.name)["src"].node)
        if not isinstance(quantize.attrs, Quantize) or quantize.attrs.axis != node.attrs.axis:
            return
        source = graph.inputs(quantize.name)["src"]
        given, read = scales_and_zeros(graph, quantize), scales_and_zeros(graph, node)
        if given is None or read is None or graph.type_of(source).dtype is not DataType.F32:
            return
        if any(not torch.equal(one, other) for one, other in zip(given, read, strict=True)):
            return
        (scales, zeros), (low, high) = given, (quantize.attrs.low, quantize.attrs.high)
        zero = int(zeros[0])
        if not (zeros == zero).all() or not low <= zero <= high or high - low > 255:
            return
        one = 2.0 ** float(scales.log2().mean().round())
        factors = along(scales / one, torch.empty(node.results[0].dims, device="meta"), node.attrs.axis).contiguous()
        quotients = insert(
            graph, node, Binary("div"), src_0=source, src_1=new_constant(graph, factors, node, node.origin)
        )
        rounded = insert(graph, node, FakeQuantize(one, low - zero, high - zero), src=quotients)
        for name, _ in graph.readers(Value(node.name)):
            _scale_weights(graph, graph.node(name), Value(node.name), rounded, factors)
        if graph.readers(Value(node.name)):
            again = new_constant(graph, factors, node, node.origin)
            bypass(graph, node, [insert(graph, node, Binary("mul"), src_0=rounded, src_1=again)])


def _scale_weights(graph: Graph, reader: Node, value: Value, rounded: Value, factors: torch.Tensor) -> None:
    """Let a depthwise convolution read numbers of one scale, and give the factor of each channel to its weights."""
    linear, inputs = linear_of(reader), graph.inputs(reader.name)
    if linear is None or not isinstance(reader.attrs, Conv) or inputs.get("src") != value:
        return
    type_ = graph.type_of(inputs["weights"])
    if linear.channels_per_group(type_.dims, reader.results[0].ndim) != 1 or not is_constant(graph, inputs["weights"]):
        return
    if factors.shape[1] != type_.dims[0] or not type_.dtype.is_floating:
        return  # they vary along another axis
    source = graph.node(inputs["weights"].node)
    data, groups = graph.constants[source.name], factors.reshape(-1, *(1,) * (type_.ndim - 1))

    def scaled() -> torch.Tensor:
        return materialise(data, type_) * groups

    grid = scaled_grid(source.grids["dst"], groups) if source.grids else None
    strides = MemoryDesc(type_.dims, type_.dtype).strides
    made = scaled() if type_.nbytes <= SMALL_NBYTES else Deferred(type_, strides, scaled, fresh=True)
    weights = new_constant(graph, made, reader, source.origin, grid)
    graph.set_inputs(reader.name, {**inputs, "src": rounded, "weights": weights})
