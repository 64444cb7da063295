"""Products of batches whose axes were merged for the product alone get these axes back."""

from __future__ import annotations

from dataclasses import dataclass

from fmtprop.ir import Graph, Node, Value
from fmtprop.ops import MatMul, Reshape
from fmtprop.passes.base import NodePass
from fmtprop.passes.editing import bypass, insert, only_reader


@dataclass(frozen=True)
class UnmergeBatches(NodePass):
    """Move a reshape that merges batch axes from the operands of a product behind it, where it undoes another one.

    PyTorch traces ``q @ k`` of [batch, heads, rows, width] as ``bmm`` of [batch * heads, rows, width], between
    reshapes. With four axes, oneDNN reads views of heads as they lie in memory, and nothing stands between the
    parts of attention.

    Requires merged reshapes. Ensures that the operands of a product of three axes are no batches that were merged, or
    its result is not split like them.
    """

    def _visit(self, graph: Graph, node: Node) -> None:
        if not isinstance(node.attrs, MatMul) or node.post_ops:
            return
        inputs, product = graph.inputs(node.name), node.results[0].dims
        reader = only_reader(graph, Value(node.name))
        if inputs.keys() != {"src", "weights"} or reader is None or not isinstance(reader.attrs, Reshape):
            return
        lead, matrix = reader.results[0].dims[:-2], reader.results[0].dims[-2:]
        if len(product) != 3 or len(lead) < 2 or matrix != product[1:]:
            return
        merged = {name: graph.node(value.node) for name, value in inputs.items()}
        if not all(isinstance(reshape.attrs, Reshape) for reshape in merged.values()):
            return
        operands = {name: graph.inputs(reshape.name)["src"] for name, reshape in merged.items()}
        split = {name: (*lead, *reshape.results[0].dims[1:]) for name, reshape in merged.items()}
        others = [name for name, value in operands.items() if graph.type_of(value).dims != split[name]]
        if len(others) == len(operands):
            return
        for name in others:  # its source had other axes: it was reshaped twice
            operands[name] = insert(graph, node, Reshape(split[name]), src=operands[name])
        bypass(graph, reader, [insert(graph, node, node.attrs, **operands)])
