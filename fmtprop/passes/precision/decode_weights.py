"""Products of many rows with a matrix of codes: the matrix is decoded in each run, in front of an ordinary product."""

from __future__ import annotations

from dataclasses import dataclass

from fmtprop.ir import Graph, Node
from fmtprop.layout import DataType
from fmtprop.ops import DecodeNBits, GroupedNBits, MatMul, MatMulNBits, Permute, Reorder, Reshape
from fmtprop.passes.base import NodePass
from fmtprop.passes.editing import bypass, insert, widened
from fmtprop.passes.target import Target, is_optimized


@dataclass(frozen=True)
class DecodeWeights(NodePass):
    """Decode the matrix of a product for which the target has no kernel, such as one of many rows.

    The decoded matrix lives in the arena from its making to its only reader, so memory holds one at a time. Products
    of f16, for which there is no kernel of codes, are computed in f32.

    Requires a normal graph. Ensures that the target has code for each product with codes that is left.
    """

    #: the executing target; without one, every matrix is decoded
    target: Target | None = None
    dtype: DataType = DataType.F32

    def _visit(self, graph: Graph, node: Node) -> None:
        attrs = node.attrs
        if type(attrs) not in (MatMulNBits, GroupedNBits):
            return
        node = _in_f32(graph, node)
        if type(attrs) is not MatMulNBits or self._has_kernel(graph, node):
            return
        inputs = graph.inputs(node.name)
        src = graph.type_of(inputs["src"])
        if src.ndim < 2 or src.dims[-1] == 0:
            return
        dtype = DataType.BF16 if DataType.BF16 in (self.dtype, src.dtype) else DataType.F32
        codes = {name: inputs.pop(name) for name in ("weights", "scales", "zero_points") if name in inputs}
        decoding = DecodeNBits(attrs.bits, attrs.group, src.dims[-1], dtype.value)
        matrix = insert(graph, node, decoding, **codes)
        inputs["weights"] = insert(graph, node, Permute((1, 0)), src=matrix)
        if dtype is not src.dtype:
            inputs["src"] = insert(graph, node, Reorder(dtype.value), src=inputs["src"])
        if "bias" in inputs:
            row = (*(1,) * (src.ndim - 1), node.results[0].dims[-1])
            inputs["bias"] = insert(graph, node, Reshape(row), src=inputs["bias"])
        product = node.with_(name=graph.fresh_name("matmul"), op="matmul", attrs=MatMul())
        bypass(graph, node, graph.insert(product, inputs, before=node.name))

    def _has_kernel(self, graph: Graph, node: Node) -> bool:
        types = {name: graph.type_of(value) for name, value in graph.inputs(node.name).items()}
        return self.target is not None and is_optimized(self.target, node, types)


def _in_f32(graph: Graph, node: Node) -> Node:
    """Return the node, or one in f32 that took its place if it has f16."""
    inputs, dst = graph.inputs(node.name), node.results[0]
    types = {name: graph.type_of(value).dtype for name, value in inputs.items()}
    if DataType.F16 not in (dst.dtype, *types.values()):
        return node
    wide = node.with_(name=graph.fresh_name(node.name), results=(dst.with_dtype(DataType.F32),))
    inputs = {n: widened(graph, v, node) if types[n] is DataType.F16 else v for n, v in inputs.items()}
    value = graph.insert(wide, inputs, before=node.name)[0]
    if dst.dtype is DataType.F16:
        value = insert(graph, node, Reorder(DataType.F16.value), src=value)
    bypass(graph, node, [value])
    return graph.node(wide.name)
