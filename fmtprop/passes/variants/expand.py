"""Base of rewrites that replace one node by several nodes with the same result."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from fmtprop.ir import Attrs, Graph, Node, PostOp, Role, Value, ports, post_op_operand
from fmtprop.ir.op import op_of, opdef
from fmtprop.ir.tensors import tensor_type
from fmtprop.layout import DataType
from fmtprop.ops import Binary, Permute, Reshape, Slice, emit
from fmtprop.passes.base import Pass
from fmtprop.passes.editing import unused_name


class Expansion:
    """The nodes that replace one node; the last of them has that node's name.

    `graph`, `out`: the node's graph, and the graph to which the replacement is added.
    """

    def __init__(self, graph: Graph, out: Graph, node: Node) -> None:
        self.graph, self.out, self.node = graph, out, node
        self.inputs = graph.inputs(node.name)

    def emit(self, part: str, inputs: Mapping[str, Value], attrs: Attrs) -> Value:
        """Add a node of the op that has such attributes."""
        return emit(self.out, op_of(attrs), inputs, attrs, name=self.name(part), origin=self.node.origin)

    def view(self, part: str, source: Value, attrs: Reshape | Permute | Slice) -> Value:
        """Add a view."""
        return self.emit(part, {"src": source}, attrs)

    def constant(self, part: str, tensor: torch.Tensor) -> Value:
        """Add a constant."""
        node = Node(self.name(f"{part}_factors"), "constant", Attrs(), (tensor_type(tensor),), origin=self.node.origin)
        (value,) = self.out.add(node, {})
        self.out.constants[node.name] = tensor
        return value

    def carry_post_ops(self, name: str, post_ops: Sequence[PostOp], operands: Mapping[str, Value]) -> None:
        """Give one of the nodes post-ops; a sum becomes an addition, since its operand may have other readers."""
        tail = [replace(p, op="binary", attrs=Binary("add")) if p.op == "sum" else p for p in post_ops]
        named = [replace(p, operand=p.operand and post_op_operand(number)) for number, p in enumerate(tail)]
        added = {new.operand: operands[old.operand] for old, new in zip(tail, named, strict=True) if old.operand}
        self.out.replace(self.out.node(name).with_(post_ops=tuple(named), exact=self.node.exact))
        self.out.set_inputs(name, {**self.out.inputs(name), **{key: value for key, value in added.items() if key}})

    def name(self, part: str) -> str:
        """Return the name of a part; the last part, with an empty name, has the node's name for its readers."""
        name = f"{self.node.name}.{part}" if part else self.node.name
        taken = part and (name in self.out or name in self.graph)
        return unused_name(name, self.out, self.graph) if taken else name


@dataclass(frozen=True)
class ExpandingPass(Pass):
    """Rewrite nodes to several nodes with the same result; a subclass defines which nodes, and how.

    Normal graph to normal graph; a graph without such nodes is returned unchanged. The last node of a replacement has
    the replaced node's name. The gain depends on the machine, so a policy must compare costs.
    """

    #: whether a replacement depends on a node and the types of its operands alone, but for names
    is_by_types: ClassVar[bool] = False

    #: nodes to rewrite. Default: all eligible ones.
    names: Collection[str] | None = None

    def run(self, graph: Graph) -> Graph:
        """Return the rewritten graph; the same object if there is nothing to rewrite."""
        rewritten = {node.name for node in self.eligible(graph)}
        if not rewritten:
            return graph
        out = Graph(graph.name, graph.structure)
        for node in graph.nodes():
            if node.name in rewritten:
                self.replace(graph, out, node)
                continue
            out.add(node, graph.inputs(node.name))
            if node.op == "constant":
                out.constants[node.name] = graph.constants[node.name]
        return out

    def eligible(self, graph: Graph) -> list[Node]:
        """Return the nodes to rewrite, in order."""
        nodes = graph.nodes() if self.names is None else [graph.node(name) for name in self.names]
        return [node for node in nodes if self.applies(graph, node)]

    def growth(self, graph: Graph, node: Node) -> float:
        """Return the expected rounding error of the replacement over that of the node."""
        return 1.0

    def forms(self) -> tuple[ExpandingPass, ...]:
        """Return the passes to which its replacements may belong, where it chooses among several by a node's sizes."""
        return (self,)

    @abstractmethod
    def applies(self, graph: Graph, node: Node) -> bool:
        """Whether a node can be rewritten."""

    @abstractmethod
    def replace(self, graph: Graph, out: Graph, node: Node) -> None:
        """Add the replacement of a node to a new graph."""


def has_constant_parameters(graph: Graph, node: Node) -> bool:
    """Whether a node computes on a varying source with constant parameters."""
    inputs = graph.inputs(node.name)
    learned = [inputs[one.name] for one in ports(node, inputs) if one.role is Role.PARAMETER]
    return has_varying_source(graph, node) and all(constant_behind(graph, value) is not None for value in learned)


def has_varying_source(graph: Graph, node: Node, source: str = "src") -> bool:
    """Whether a node computes on a varying source, with post-ops element by element."""
    return (
        graph.node(graph.inputs(node.name)[source].node).op != "constant"
        and all(opdef(post_op.op).elementwise for post_op in node.post_ops)
        and 0 not in node.results[0].dims
    )


def constant_behind(graph: Graph, value: Value) -> Node | None:
    """Return the constant that a value is, or that it is converted from to another data type; else None."""
    node = graph.node(value.node)
    if node.op == "reorder":
        node = graph.node(graph.inputs(node.name)["src"].node)
    return node if node.op == "constant" else None


def is_f32(graph: Graph, node: Node) -> bool:
    """Whether a node reads and writes only f32."""
    values = (*graph.inputs(node.name).values(), Value(node.name))
    return all(graph.type_of(value).dtype is DataType.F32 for value in values)
