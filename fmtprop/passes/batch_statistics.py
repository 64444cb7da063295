"""Gradients of batch normalization that read the variance itself, not a function of the inverse deviation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fmtprop.ir.graph import Graph
from fmtprop.ir.node import Value
from fmtprop.ops.batch_norm_training import BatchStatistics
from fmtprop.ops.eltwise import Eltwise

__all__ = ["ReadVariance"]


@dataclass(frozen=True)
class ReadVariance:
    """Give the gradients of a batch normalization the variance that the forward pass wrote.

    PyTorch saves ``(variance + epsilon) ** -0.5`` for the backward pass, and oneDNN reads the variance. So imported
    graphs compute the first from the variance, and the variance from the first: two functions each, of a few numbers.

    Notes
    -----
    Requires a well-formed graph without formats. Ensures that no such detour is left.
    """

    name: ClassVar[str] = "read-variance"

    def run(self, graph: Graph) -> Graph:
        """Return the graph without detours."""
        graph = graph.copy()
        for node in graph.nodes():
            if not isinstance(node.attrs, BatchStatistics) or "variance" not in graph.inputs(node.name):
                continue
            variance = _written(graph, graph.inputs(node.name)["variance"], node.attrs.epsilon)
            if variance is not None:
                graph.set_input(node.name, "variance", variance)
        graph.remove_dead()
        return graph


def _written(graph: Graph, value: Value, epsilon: float) -> Value | None:
    """Return the variance from which a value was computed, by way of its inverse deviation."""
    detour = Eltwise("linear", 1.0, -epsilon), Eltwise("pow", 1.0, -2.0), Eltwise("pow", 1.0, -0.5)
    for function in (*detour, Eltwise("linear", 1.0, epsilon)):
        node = graph.node(value.node)
        if node.attrs != function or node.post_ops:
            return None
        value = graph.inputs(node.name)["src"]
    return value
