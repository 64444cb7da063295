"""Constant folding: nodes that depend only on constants are computed once, by the pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fmtprop.errors import GraphError
from fmtprop.ir import Graph, Node, Value
from fmtprop.ir.aliasing import is_view
from fmtprop.ops.evaluate import evaluate_node
from fmtprop.passes.base import NodePass
from fmtprop.passes.editing import bypass, constant, is_constant, new_constant, viewed_constant


@dataclass(frozen=True)
class FoldConstants(NodePass):
    """Replace every node with only constant operands by its results as constants.

    Views of constants become strided tensors that share the original's memory, without a copy. Initialisers are drawn
    only if a folded node reads them.

    Requires a well-formed graph. Ensures that every node except inputs and constants depends on an input of the graph,
    or has no operand.
    """

    def _visit(self, graph: Graph, node: Node) -> None:
        if not _foldable(graph, node):
            return
        inputs = graph.inputs(node.name)
        try:
            with torch.no_grad():
                results = _viewed(graph, node, inputs) if is_view(graph, node.name) else _made(graph, node, inputs)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:  # PyTorch's errors
            raise GraphError(f"{node.label} cannot be computed from its constants: {error}") from error
        bypass(graph, node, results)


def _foldable(graph: Graph, node: Node) -> bool:
    operands = graph.inputs(node.name).values()
    return not node.is_boundary and bool(operands) and all(is_constant(graph, value) for value in operands)


def _viewed(graph: Graph, node: Node, inputs: Mapping[str, Value]) -> list[Value]:
    ((operand, value),) = inputs.items()
    return [viewed_constant(graph, value, lambda src: evaluate_node(node, {operand: src})[0], node, node.origin)]


def _made(graph: Graph, node: Node, inputs: Mapping[str, Value]) -> list[Value]:
    tensors = {name: tensor for name, value in inputs.items() if (tensor := constant(graph, value)) is not None}
    return [new_constant(graph, tensor, node, node.origin) for tensor in evaluate_node(node, tensors)]
