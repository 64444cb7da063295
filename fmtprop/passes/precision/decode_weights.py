"""Products of many rows with a matrix of codes: the matrix is decoded in each run, in front of an ordinary product."""

from __future__ import annotations

from dataclasses import dataclass

from fmtprop.ir import Graph, Node
from fmtprop.layout import DataType
from fmtprop.ops import DecodeNBits, MatMul, MatMulNBits, Permute, Reorder, Reshape
from fmtprop.passes.base import NodePass
from fmtprop.passes.editing import bypass, insert
from fmtprop.passes.target import Target, is_optimized


@dataclass(frozen=True)
class DecodeWeights(NodePass):
    """Decode the matrix of a product for which the target has no kernel, such as one of many rows.

    The decoded matrix lives in the arena from its making to its only reader, so memory holds one at a time.

    Requires a normal graph. Ensures that the target has code for each product with codes that is left.
    """

    #: the executing target; without one, every matrix is decoded
    target: Target | None = None
    dtype: DataType = DataType.F32

    def _visit(self, graph: Graph, node: Node) -> None:
        attrs = node.attrs
        if type(attrs) is not MatMulNBits or self._has_kernel(graph, node):
            return
        inputs = graph.inputs(node.name)
        src = graph.type_of(inputs["src"])
        if src.ndim < 2 or src.dims[-1] == 0:
            return
        dtype = self.dtype if src.dtype is DataType.F32 else src.dtype
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
