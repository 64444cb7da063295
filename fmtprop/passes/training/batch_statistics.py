"""Gradients of normalizations that read the variance itself, not a function of the inverse deviation."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fmtprop.ir import Graph, Node, Value
from fmtprop.ops import Eltwise, LayerNorm
from fmtprop.ops.batch_norm_training import BatchStatistics
from fmtprop.passes.base import NodePass


@dataclass(frozen=True)
class ReadVariance(NodePass):
    """Give the gradients of a batch or layer normalization the variance that the forward pass wrote.

    PyTorch saves ``(variance + epsilon) ** -0.5`` for the backward pass, and oneDNN reads the variance. So imported
    graphs compute the first from the variance, and the variance from the first: two functions each, of a few numbers.
    The gradient of a layer normalization is imported with an epsilon of 0 and the sum of both; it gets the forward's.

    Requires a well-formed graph without formats. Ensures that no such detour is left.
    """

    def _visit(self, graph: Graph, node: Node) -> None:
        own = graph.inputs(node.name).get("variance")
        if own is None or not isinstance(node.attrs, BatchStatistics | LayerNorm):
            return
        forward = _written(graph, own, node.attrs.epsilon)
        if forward is not None and graph.type_of(forward) == graph.type_of(own):
            graph.replace(replace(node, attrs=graph.node(forward.node).attrs))
            graph.set_input(node.name, "variance", forward)


def _written(graph: Graph, value: Value, subtracted: float) -> Value | None:
    """Return the variance from which a value was computed, by way of its inverse deviation."""
    functions = [Eltwise("pow", 1.0, -2.0), Eltwise("pow", 1.0, -0.5)]
    if subtracted:
        functions.insert(0, Eltwise("linear", 1.0, -subtracted))
    for function in functions:
        source = _before(graph, value, function)
        if source is None:
            return None
        value = source
    statistics = _before(graph, value)
    if statistics is None:
        return None
    forward = graph.node(statistics.node).attrs
    if not isinstance(forward, BatchStatistics | LayerNorm) or subtracted not in (0, forward.epsilon):
        return None
    return _before(graph, value, Eltwise("linear", 1.0, forward.epsilon))


def _before(graph: Graph, value: Value, function: Eltwise | None = None) -> Value | None:
    """Return the source of an element-wise node, reshapes aside; None if it computes another function."""
    node = graph.node(value.node)
    while node.op == "reshape":
        value = graph.inputs(node.name)["src"]
        node = graph.node(value.node)
    if node.op != "eltwise" or node.post_ops or function not in (None, node.attrs):
        return None
    return graph.inputs(node.name)["src"]
