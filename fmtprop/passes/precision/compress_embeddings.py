"""Tables of embeddings as 4- or 8-bit codes, which heads that share a table read, too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fmtprop.ir import Graph, Node, Value
from fmtprop.ir.tensors import materialise
from fmtprop.ops import GatherNBits, HostCall, InnerProduct, MatMul, MatMulNBits, Permute, Reorder
from fmtprop.ops.host_call import arguments_of
from fmtprop.passes.base import NodePass
from fmtprop.passes.editing import bypass, insert, is_constant
from fmtprop.passes.precision.compress_weights import coded, group_of, is_finite, may_multiply_codes, multiply_codes

#: PyTorch's call of an embedding
_EMBEDDING = "aten.embedding.default"


@dataclass(frozen=True)
class CompressEmbeddings(NodePass):
    """Replace embeddings by rows of codes, each number of a table rounded to the nearest code.

    Products with the same table, such as a head's, read its codes, too. Which tables have codes, and their groups, is
    as of the matrices of :class:`~fmtprop.passes.precision.compress_weights.CompressWeights`.

    Requires a well-formed graph before constants are folded, which would part a table from its transposition. Ensures
    that no embedding reads a large finite table as floating numbers, if its rows are whole groups.
    """

    bits: int = 8

    def _visit(self, graph: Graph, node: Node) -> None:
        table = _table(graph, node)
        if table is None:
            return
        type_, data = graph.type_of(table), graph.constants[table.node]
        group = group_of(*type_.dims)
        if group is None or not is_finite(materialise(data, type_)):
            return
        codes = coded(graph, node, lambda: materialise(data, type_), type_.dims, self.bits, group)
        for reader in list(_readers(graph, table)):
            inputs = graph.inputs(reader.name)
            if isinstance(reader.attrs, HostCall):
                indices = inputs[arguments_of(reader.attrs)["indices"].name]
                attrs = GatherNBits(self.bits, group, type_.dims[1], type_.dtype.value)
                bypass(graph, reader, [insert(graph, reader, attrs, **codes, indices=indices)])
            elif may_multiply_codes(graph, reader, type_.dims[0]):
                multiply_codes(graph, reader, {**inputs, **codes}, MatMulNBits(self.bits, group))


def _table(graph: Graph, node: Node) -> Value | None:
    """Return the constant matrix of which an embedding reads rows; None of other nodes."""
    if not isinstance(node.attrs, HostCall) or node.attrs.target != _EMBEDDING:
        return None
    table = graph.inputs(node.name)[arguments_of(node.attrs)["weight"].name]
    type_ = graph.type_of(table)
    return table if is_constant(graph, table) and type_.ndim == 2 and type_.dtype.is_floating else None


def _readers(graph: Graph, table: Value, *, is_turned: bool = False) -> Iterator[Node]:
    """Yield the embeddings with a table, and the products with it as a matrix [outputs, depth], in any data type."""
    product = MatMul if is_turned else InnerProduct
    for name, operand in graph.readers(table):
        node = graph.node(name)
        if isinstance(node.attrs, Reorder):
            yield from _readers(graph, Value(name), is_turned=is_turned)
        elif node.attrs == Permute((1, 0)):
            yield from _readers(graph, Value(name), is_turned=not is_turned)
        elif (isinstance(node.attrs, product) and operand == "weights") or _table(graph, node) == table:
            yield node
