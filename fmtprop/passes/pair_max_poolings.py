"""Maximum poolings of which only the gradient reads the indices: both passes become ops with a workspace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fmtprop.ir.graph import Graph
from fmtprop.ir.node import Node, Value
from fmtprop.ops.building import emit, is_native
from fmtprop.ops.host_call import CallOperand, HostCall, arguments_of
from fmtprop.ops.pooling import Pooling, adaptive_attributes, attributes
from fmtprop.ops.workspace import WORKSPACE
from fmtprop.passes.base import NodePass
from fmtprop.passes.editing import bypass

#: PyTorch's pooling with indices -> spatial axes
_POOLINGS = {
    f"aten.{name}.default": axes
    for axes in (2, 3)
    for name in (f"max_pool{axes}d_with_indices", f"adaptive_max_pool{axes}d")
}


@dataclass(frozen=True)
class PairMaxPoolings(NodePass):
    """Replace PyTorch's maximum pooling and its gradient, which pass indices, by oneDNN's, which pass a workspace.

    Notes
    -----
    Requires a well-formed graph without formats. Ensures that indices have other readers than gradients.
    """

    name: ClassVar[str] = "pair-max-poolings"

    def _visit(self, graph: Graph, node: Node) -> None:
        if isinstance(node.attrs, HostCall) and node.attrs.target in _POOLINGS:
            _pair(graph, node, node.attrs)


def _pair(graph: Graph, forward: Node, call: HostCall) -> None:
    src = _operand(graph, forward, "self")
    attrs = _attributes(call, graph.type_of(src).dims)
    readers = [graph.node(name) for name, _ in graph.readers(Value(forward.name, 1))]
    backward = call.target.replace(".default", "_backward.default")
    alone = all(getattr(reader.attrs, "target", "") == backward for reader in readers)
    if attrs is None or not readers or not alone or not is_native(graph.type_of(src)):
        return
    dst = _insert(graph, forward, "pooling_training", attrs, src=src)
    for reader in readers:
        given = {"src": src, WORKSPACE.name: Value(dst.node, 1), "diff_dst": _operand(graph, reader, "grad_output")}
        bypass(graph, reader, [_insert(graph, reader, "pooling_max_backward", attrs, **given)])
    bypass(graph, forward, [dst])


def _attributes(call: HostCall, dims: tuple[int, ...]) -> Pooling | None:
    """Return the pooling of a batch of these dims; None if oneDNN has none."""
    axes, given = _POOLINGS[call.target], arguments_of(call)
    if len(dims) != axes + 2:
        return None
    if "output_size" in given:
        return adaptive_attributes("max", dims[2:], given["output_size"])
    return attributes(given, dims, "max", axes)


def _operand(graph: Graph, node: Node, name: str) -> Value:
    """Return the tensor of a call's argument."""
    assert isinstance(node.attrs, HostCall)
    operand: CallOperand = arguments_of(node.attrs)[name]
    return graph.inputs(node.name)[operand.name]


def _insert(graph: Graph, node: Node, op: str, attrs: Pooling, **inputs: Value) -> Value:
    return emit(graph, op, inputs, attrs, origin=node.origin, before=node.name)
