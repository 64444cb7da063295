"""Element-wise ops move before a reshape, next to the product that they can become a part of."""

from __future__ import annotations

from dataclasses import dataclass

from fmtprop.ir import Category, Graph, Node, TensorType, Value, opdef
from fmtprop.ops import FakeQuantize, GroupNorm, Reshape
from fmtprop.passes.base import Pass
from fmtprop.passes.editing import bypass, insert, only_reader


@dataclass(frozen=True)
class DelayReshapes(Pass):
    """Exchange a reshape of a product with the element-wise op behind it, so that the product can absorb the op.

    Linear layers see their rows as a matrix: between the product of two matrices and its activation, or its residual
    addition, there is a reshape, and only neighbours are fused. The other operand of a binary op gets the reshape in
    reverse, a view: it has the dims of the result, one number, or it varies along the last axis alone and the reshape
    keeps this axis, or along the rows of one batch. A permuted or sliced view stays as it is: its reshape would be a
    copy.

    Requires recognised functions and merged reshapes. Ensures that no element-wise op with such operands is the only
    reader of a reshape that is the only reader of a compute-intensive op.
    """

    def run(self, graph: Graph) -> Graph:
        """Return the rewritten graph."""
        graph = graph.copy()
        nodes = graph.nodes()
        ranks = {node.name: rank for rank, node in enumerate(nodes)}
        for node in nodes:
            if node.is_boundary or node.post_ops or not opdef(node.op).elementwise:
                continue
            found = [value for value in graph.inputs(node.name).values() if _is_between(graph, value, node)]
            # the producer that is ready later absorbs the op
            for value in sorted(found, key=lambda value: ranks.get(_producer(graph, value), -1), reverse=True):
                if _exchange(graph, node, graph.node(value.node)):
                    break
        graph.remove_dead()
        return graph


def _is_between(graph: Graph, value: Value, node: Node) -> bool:
    """Return whether a value is a product, reshaped, that only this node reads and does not broadcast.

    In front of a rounding, it may be the result of any element-wise op, or of a normalization of groups.
    """
    reshape = graph.node(value.node)
    if reshape.op != "reshape" or only_reader(graph, value) != node:
        return False
    if reshape.results[0].dims != node.results[0].dims:
        return False
    source = graph.inputs(reshape.name)["src"]
    producer = graph.node(source.node)
    if producer.is_boundary or only_reader(graph, source) is None:
        return False
    if isinstance(node.attrs, FakeQuantize):  # a function of quantized numbers may be looked up
        return opdef(producer.op).elementwise or isinstance(producer.attrs, GroupNorm) or _is_product(graph, producer)
    return _is_product(graph, producer)


def _is_product(graph: Graph, node: Node) -> bool:
    """Return whether a node is a product that absorbs others, or an element-wise node behind one, which it absorbs."""
    if node.is_boundary:
        return False
    declaration = opdef(node.op)
    if declaration.category is Category.COMPUTE:
        return declaration.absorbs.wanted
    if not declaration.elementwise:
        return False
    sources = (value for value in graph.inputs(node.name).values() if graph.type_of(value) == node.results[0])
    return any(_is_product(graph, graph.node(value.node)) for value in sources if only_reader(graph, value) is not None)


def _producer(graph: Graph, reshaped: Value) -> str:
    return graph.inputs(reshaped.node)["src"].node


def _exchange(graph: Graph, node: Node, reshape: Node) -> bool:
    """Move a node before a reshape; return whether it was possible."""
    source, inputs = graph.inputs(reshape.name)["src"], graph.inputs(node.name)
    type_ = graph.type_of(source)
    others = {name: value for name, value in inputs.items() if value.node != reshape.name}
    shapes = {name: _shape_before(graph.type_of(value), node.results[0], type_) for name, value in others.items()}
    if type_.dtype is not node.results[0].dtype or None in shapes.values():
        return False
    if any(shapes[name] != graph.type_of(value).dims and _is_strided(graph, value) for name, value in others.items()):
        return False
    readers = graph.reading(Value(node.name))
    moved = dict.fromkeys(inputs, source)
    for name, shape in shapes.items():
        moved[name] = _reshaped(graph, others[name], shape, before=node)
    graph.set_inputs(node.name, moved)
    graph.replace(node.with_(results=(type_,)))
    graph.remove(reshape.name)
    _reshape_back(graph, node, reshape.results[0].dims, readers)
    return True


def _reshape_back(graph: Graph, node: Node, shape: tuple[int, ...], readers: list[tuple[str, str]]) -> None:
    """Give the readers of a moved node its result in the old shape; readers that reshape it read it as it is."""
    moved = Value(node.name)
    for name, operand in readers:
        reader = graph.node(name)
        if reader.op != "reshape":
            graph.set_input(name, operand, _reshaped(graph, moved, shape, before=node))
        elif reader.results[0] == graph.type_of(moved):
            bypass(graph, reader, [moved])
        else:
            graph.set_input(name, operand, moved)


def _is_strided(graph: Graph, value: Value) -> bool:
    node = graph.node(value.node)
    return not node.is_boundary and opdef(node.op).category is Category.VIEW and node.op != "reshape"


def _shape_before(operand: TensorType, after: TensorType, before: TensorType) -> tuple[int, ...] | None:
    """Return the dims that an operand needs before the reshape, None if no reshape gives them."""
    if operand.dims == after.dims:
        return before.dims
    ones = (1,) * (before.ndim - 1)
    if operand.size == 1:
        return (*ones, 1)
    keeps_last = before.dims[-1:] == after.dims[-1:]
    is_batch = before.ndim == 3 and before.dims[0] == 1  # oneDNN has code for a factor of each row of one batch
    if keeps_last and is_batch and operand.dims == (*after.dims[:-1], 1):
        return (*before.dims[:-1], 1)
    return (*ones, operand.size) if keeps_last and operand.dims[-1] == operand.size else None


def _reshaped(graph: Graph, value: Value, shape: tuple[int, ...] | None, before: Node) -> Value:
    while graph.node(value.node).op == "reshape" and graph.type_of(value).dims != shape:
        value = graph.inputs(value.node)["src"]
    if shape is None or graph.type_of(value).dims == shape:
        return value
    known = [name for name, _ in graph.reading(value) if graph.node(name).attrs == Reshape(shape)]
    return Value(known[0]) if known else insert(graph, before, Reshape(shape), src=value)
