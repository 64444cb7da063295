"""Single nodes and requests to put to a target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fmtprop.ir.graph import Graph
from fmtprop.ir.node import Attrs, Node, PostOp
from fmtprop.ir.ports import result_names
from fmtprop.ir.types import TensorType
from fmtprop.layout import MemoryDesc
from fmtprop.ops import emit
from fmtprop.ops.convolution import Conv
from fmtprop.passes.target import Candidate, Target
from fmtprop.runtime.plan import Access, Step
from fmtprop.targets.executable import implementation, threads_here


def node_of(op: str, attrs: Attrs, types: Mapping[str, TensorType], post_ops: Sequence[PostOp] = ()) -> Node:
    """Return a node of one op with inferred results."""
    graph = Graph("one")
    value = emit(graph, op, {name: graph.input(name, type_) for name, type_ in types.items()}, attrs)
    return graph.node(value.node).with_(post_ops=tuple(post_ops))


def request(node: Node, formats: Mapping[str, MemoryDesc]) -> dict[str, MemoryDesc]:
    """Return a request: the operands' formats, and `any` for the results that are not among them."""
    results = dict(zip(result_names(node), node.results, strict=True))
    return {**formats, **{n: MemoryDesc.any(t.dims, t.dtype) for n, t in results.items() if n not in formats}}


def chosen(target: Target, node: Node, formats: Mapping[str, MemoryDesc]) -> Node:
    """Return the node as the target's first candidate runs it."""
    candidate: Candidate = next(iter(target.candidates(node, request(node, formats))))
    return node.with_(descs=candidate.results, choice=candidate.choice("first"))


def convolution(
    channels: int = 16, outputs: int = 32, dtype: str = "f32", post_ops: Sequence[PostOp] = ()
) -> tuple[Node, dict[str, MemoryDesc]]:
    """Return a 3×3 convolution and the formats of its operands: all `any`, bias plain."""
    dims = {"src": (2, channels, 10, 10), "weights": (outputs, channels, 3, 3), "bias": (outputs,)}
    types = {name: TensorType(size, dtype if name != "bias" else "f32") for name, size in dims.items()}
    node = node_of("convolution", Conv((1, 1), (0, 0), (1, 1), (1, 1), 1), types, post_ops)
    formats = {name: MemoryDesc.any(type_.dims, type_.dtype) for name, type_ in types.items()}
    return node, {**formats, "bias": MemoryDesc((outputs,), "f32")}


def step_of(node: Node) -> Step:
    """Return the step of a chosen node, without a plan."""
    operands = {name: Access(0, desc) for name, desc in node.choice.operands.items()}
    executable = implementation(node).build(threads_here())
    return Step(node, operands, tuple(Access(0, desc) for desc in node.descs), executable)
