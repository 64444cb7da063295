"""Products of tensors that are quantized by their own range and dequantized again, as PyTorch's PT2E writes them.

The scale, which only a run knows, is multiplied with the sums of the integers' products, and the part of the zero point
is subtracted from them: so the product may be one of bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fmtprop.ir import Graph, Node, Value
from fmtprop.layout import DataType
from fmtprop.ops import Binary, Dequantize, DynamicQuantize, InnerProduct, MatMul, Quantize, Reshape
from fmtprop.ops.host_call import HostCall, arguments_of
from fmtprop.passes.base import Pass
from fmtprop.passes.editing import bypass, insert, new_constant, shown

#: call that finds scale and zero point -> whether the zero point is 0
_RANGES = {
    "quantized_decomposed.choose_qparams.tensor": False,
    "quantized_decomposed.choose_qparams_symmetric.tensor": True,
}


@dataclass(frozen=True)
class DynamicPairs(Pass):
    """Let products of matrices read the integers themselves.

    Runs before :class:`~fmtprop.passes.precision.pair_quantization.PairQuantization`, which finds the grid of the
    weights. Other readers stay.
    """

    def run(self, graph: Graph) -> Graph:
        """Return the rewritten graph."""
        ranges = [node for node in graph.nodes() if isinstance(node.attrs, HostCall) and node.attrs.target in _RANGES]
        if not ranges:
            return graph
        graph = graph.copy()
        for node in ranges:
            (src,) = graph.inputs(node.name).values()
            for name, _ in graph.reading(src):
                _rewrite(graph, node, graph.node(name))
        graph.remove_dead()
        return graph


def _rewrite(graph: Graph, found: Node, quantize: Node) -> None:
    """Replace the products of a tensor that a node quantizes by the found scale and zero point."""
    attrs, parameters = quantize.attrs, {"scale": Value(found.name), "zero_point": Value(found.name, 1)}
    if not isinstance(attrs, Quantize) or not isinstance(found.attrs, HostCall):
        return
    inputs, given = graph.inputs(quantize.name), arguments_of(found.attrs)
    limits, src, symmetric = (given["quant_min"], given["quant_max"]), inputs["src"], _RANGES[found.attrs.target]
    if {**inputs} != {"src": src, **parameters} or limits != (attrs.low, attrs.high) or not graph.type_of(src).size:
        return
    if graph.type_of(src).dtype is not DataType.F32 or not attrs.low <= 0 <= attrs.high <= attrs.low + 255:
        return
    if symmetric and attrs.low >= 0:
        return  # its zero point is 128
    divisor = (attrs.high - attrs.low) / (1 + symmetric)
    made = DynamicQuantize(attrs.low, attrs.high, divisor, float(given["eps"]), symmetric, whole=True, multiplies=True)
    for name, _ in graph.reading(Value(quantize.name)):
        node = graph.node(name)
        if isinstance(node.attrs, Dequantize) and graph.inputs(name) == {"src": Value(quantize.name), **parameters}:
            _read_integers(graph, Value(name), insert(graph, quantize, made, src=src))


def _read_integers(graph: Graph, real: Value, whole: Value) -> None:
    """Let the products that read real numbers, perhaps in another shape, read whole ones; these have the scale."""
    for name, operand in graph.reading(real):
        node = graph.node(name)
        if isinstance(node.attrs, Reshape):
            _read_integers(graph, Value(name), insert(graph, node, node.attrs, src=whole))
        elif isinstance(node.attrs, InnerProduct | MatMul) and operand == "src" and not node.post_ops:
            _multiply(graph, node, whole)


def _multiply(graph: Graph, node: Node, whole: Value) -> None:
    """Replace a product of real numbers by one of whole numbers."""
    inputs, ones = dict(graph.inputs(node.name)), (1,) * node.results[0].ndim
    bias, dims, quantize = inputs.pop("bias", None), graph.type_of(whole).dims, shown(graph, whole)
    scale, zero = (insert(graph, node, Reshape(ones), src=Value(quantize.name, index)) for index in (1, 2))
    value = insert(graph, node, node.attrs, **{**inputs, "src": whole})
    if isinstance(quantize.attrs, DynamicQuantize) and not quantize.attrs.symmetric:
        row = (1, *dims[1:]) if isinstance(node.attrs, InnerProduct) else (*ones[1:], dims[-1])
        same = new_constant(graph, torch.ones(row), node, node.origin)
        sums = insert(graph, node, node.attrs, **{**inputs, "src": same})
        part = insert(graph, node, Binary("mul"), src_0=sums, src_1=zero)
        value = insert(graph, node, Binary("sub"), src_0=value, src_1=part)
    value = insert(graph, node, Binary("mul"), src_0=value, src_1=scale)
    if bias is not None:
        if graph.type_of(bias).ndim < len(ones):
            bias = insert(graph, node, Reshape((*ones[1:], graph.type_of(bias).size)), src=bias)
        value = insert(graph, node, Binary("add"), src_0=value, src_1=bias)
    bypass(graph, node, [value])
