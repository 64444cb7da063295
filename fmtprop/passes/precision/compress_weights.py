"""Weights of products as 4- or 8-bit codes, rounded to the nearest code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fmtprop.ir import Graph, Node, TensorType, Value
from fmtprop.ir.deferred import Deferred
from fmtprop.ir.tensors import materialise
from fmtprop.layout import DataType
from fmtprop.ops import GroupedMatmul, GroupedNBits, InnerProduct, MatMul, Reshape
from fmtprop.ops.matmul_nbits import CODES, MatMulNBits, encoded, row_blocks
from fmtprop.passes.base import NodePass
from fmtprop.passes.editing import bypass, insert, is_constant, new_constant

#: bits of a code by the name that users give
BITS = {"int8": 8, "int4": 4}

#: codes that share a scale, the largest that divides a row: with 128, scales add 1/16 to the bytes of 4-bit codes
_GROUPS = (128, 64, 32)

#: fewest numbers of a matrix: smaller ones are in cache, where fewer bits save nothing
LEAST_SIZE = 1 << 14


@dataclass(frozen=True)
class CompressWeights(NodePass):
    """Replace products with large constant matrices by products with codes.

    A matrix with an infinity or NaN stays as it is, and so does one whose rows are no whole groups. The codes are made
    when they are packed, one matrix after another, so that memory never holds all of a model twice.

    Requires a normal graph. Ensures that no product of rows with a large finite matrix reads it as floating numbers, if
    its rows are whole groups.
    """

    bits: int = 8

    def _visit(self, graph: Graph, node: Node) -> None:
        found = _experts_of(graph, node) if isinstance(node.attrs, GroupedMatmul) else _rows_of(graph, node)
        if found is None:
            return
        read, outputs, depth = found
        group = group_of(outputs, depth)
        if group is None or not is_finite(read()):
            return
        codes = coded(graph, node, read, (outputs, depth), self.bits, group)
        inputs = {**graph.inputs(node.name), **codes}
        if isinstance(node.attrs, GroupedMatmul):
            bypass(graph, node, [insert(graph, node, GroupedNBits(self.bits, group), **inputs)])
        else:
            multiply_codes(graph, node, inputs, MatMulNBits(self.bits, group))


def group_of(outputs: int, depth: int) -> int | None:
    """Return the neighbours of a row that share a scale; None for a matrix that has no codes."""
    return next((size for size in _GROUPS if depth % size == 0), None) if outputs * depth >= LEAST_SIZE else None


def is_finite(matrix: torch.Tensor) -> bool:
    """Return whether a matrix has neither an infinity nor NaN."""
    return all(bool(matrix[block].float().sum().isfinite()) for block in row_blocks(*matrix.shape))


def coded(
    graph: Graph, before: Node, read: Callable[[], torch.Tensor], dims: tuple[int, ...], bits: int, group: int
) -> dict[str, Value]:
    """Add the codes and scales of a matrix right before a node; they are made of its numbers when they are packed."""
    outputs, depth = dims

    def add(index: int, type_: TensorType) -> Value:
        made = Deferred(type_, (type_.dims[1], 1), lambda: encoded(read(), bits, group)[index].contiguous(), fresh=True)
        return new_constant(graph, made, before, before.origin)

    weights = add(0, TensorType((outputs, depth * bits // 8), CODES[bits][0]))
    return {"weights": weights, "scales": add(1, TensorType((outputs, depth // group)))}


def may_multiply_codes(graph: Graph, node: Node, outputs: int) -> bool:
    """Return whether a product has a form with codes: of f32 and narrower numbers, and with one bias for an output."""
    inputs = graph.inputs(node.name)
    is_wide = graph.type_of(inputs["src"]).dtype is DataType.F64
    return (
        not is_wide
        and node.results[0].size > 0
        and ("bias" not in inputs or graph.type_of(inputs["bias"]).size == outputs)
    )


def multiply_codes(graph: Graph, node: Node, inputs: dict[str, Value], attrs: MatMulNBits) -> None:
    """Replace a product by one with codes, which are among the inputs.

    `inputs`: the product's inputs, with codes as its weights, and with scales; src and bias may be shaped anew.
    """
    src, outputs = graph.type_of(inputs["src"]), graph.type_of(inputs["weights"]).dims[0]
    if isinstance(node.attrs, InnerProduct) and src.ndim > 2:
        inputs["src"] = insert(graph, node, Reshape((src.dims[0], src.size // src.dims[0])), src=inputs["src"])
    if "bias" in inputs and graph.type_of(inputs["bias"]).ndim != 1:
        inputs["bias"] = insert(graph, node, Reshape((outputs,)), src=inputs["bias"])
    product = node.with_(name=graph.fresh_name("fc"), op="matmul_nbits", attrs=attrs)
    bypass(graph, node, graph.insert(product, inputs, before=node.name))


def _experts_of(graph: Graph, node: Node) -> tuple[Callable[[], torch.Tensor], int, int] | None:
    """Return what makes the matrix [groups * outputs, depth] of products of groups with a constant, and its dims."""
    weights = graph.inputs(node.name)["weights"]
    type_ = graph.type_of(weights)
    if not is_constant(graph, weights) or not type_.dtype.is_floating or type_.dtype is DataType.F64 or node.post_ops:
        return None
    groups, depth, outputs = type_.dims
    data: Any = graph.constants[weights.node]
    return lambda: materialise(data, type_).transpose(1, 2).reshape(-1, depth), groups * outputs, depth


def _rows_of(graph: Graph, node: Node) -> tuple[Callable[[], torch.Tensor], int, int] | None:
    """Return what makes the matrix [outputs, depth] of a product with a constant, and its dims; None of other nodes."""
    if not isinstance(node.attrs, InnerProduct | MatMul):
        return None
    inputs = graph.inputs(node.name)
    weights = inputs["weights"]
    type_ = graph.type_of(weights)
    by_columns = isinstance(node.attrs, MatMul)
    if not is_constant(graph, weights) or not type_.dtype.is_floating or (by_columns and type_.ndim != 2):
        return None
    outputs = type_.dims[1] if by_columns else type_.dims[0]
    if not may_multiply_codes(graph, node, outputs):
        return None
    data: Any = graph.constants[weights.node]

    def read() -> torch.Tensor:
        matrix = materialise(data, type_)
        return matrix.t() if by_columns else matrix.flatten(1)

    return read, outputs, type_.size // outputs
