"""Evaluation of nodes and graphs by the ops' references: a graph's meaning, in plain PyTorch.

Owns the meaning of a fused node: its op, then its post-ops in order. Formats play no part: every tensor is a torch
tensor of the logical dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fmtprop.errors import FmtpropError, GraphError, InputError
from fmtprop.ir import Bytes, Graph, result_names
from fmtprop.ir.node import NO_GRIDS, Node, PostOp, Value
from fmtprop.ir.op import Category, Reference, opdef
from fmtprop.ir.tensors import materialise, tensor_type, torch_dtype
from fmtprop.layout import DataType
from fmtprop.ops.quantization import to_bytes, to_reals
from fmtprop.system.printable import first_line


def evaluate(graph: Graph, inputs: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Run a graph at any stage.

    Raises InputError if an input is missing, unknown or of another type, or an op does not exist for these numbers, and
    GraphError if the graph is malformed.

    >>> from fmtprop.ir import TensorType
    >>> from fmtprop.ops import Eltwise, emit
    >>> g = Graph("tiny")
    >>> g.output(emit(g, "eltwise", {"src": g.input("x", TensorType((3,)))}, Eltwise("relu")))
    >>> evaluate(g, {"x": torch.tensor([-1.0, 0.0, 2.0])})
    [tensor([0., 0., 2.])]
    """
    _check_inputs(graph, inputs)
    tensors: dict[Value, torch.Tensor] = {}
    waiting: dict[Value, int] = {}
    with torch.no_grad():
        for node in graph.nodes():
            if node.op == "output":
                continue
            operands = graph.inputs(node.name)
            if node.op == "input":
                results: tuple[torch.Tensor, ...] = (inputs[node.name],)
            elif node.op == "constant":
                results = (_constant(graph, node),)
            else:
                results = _checked(node, {name: tensors[value] for name, value in operands.items()})
            for index, tensor in enumerate(results):
                value = Value(node.name, index)
                tensors[value], waiting[value] = tensor, len(graph.readers(value))
            for value in operands.values():  # free values after their last reader
                waiting[value] -= 1
                if not waiting[value]:
                    del tensors[value]
    return [tensors[graph.inputs(node.name)["src"]] for node in graph.output_nodes]


def _checked(node: Node, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    try:
        return evaluate_node(node, tensors)
    except FmtpropError:
        raise
    except (RuntimeError, ValueError, IndexError) as error:
        raise InputError(f"{node.label}: PyTorch declines these numbers: {first_line(error)}") from error


def evaluate_node(
    node: Node, tensors: Mapping[str, torch.Tensor], instead: Mapping[str, Reference] | None = None
) -> tuple[torch.Tensor, ...]:
    """Run one node: its op's reference, then its post-ops."""
    if node.grids:
        return _in_reals(node, tensors, instead)
    operands = {name: t for name, t in tensors.items() if name not in node.tail}
    declaration = opdef(node.op)
    if declaration.category is Category.COMPUTE and (node.post_ops or node.results[0].dtype is DataType.F32):
        # narrow operands, the accumulator in f32: references compute in the type of their first operand
        first = declaration.operands[0].name
        operands[first] = operands[first].to(torch.promote_types(operands[first].dtype, torch.float32))
    results = (instead or {}).get(node.op, declaration.reference)(node.attrs, operands)
    if not node.post_ops:
        return tuple(results)
    # As in a primitive, the post-ops work on the accumulator in f32, and the stored result is rounded once.
    dst = results[0].to(torch.promote_types(results[0].dtype, torch.float32))
    for post_op in node.post_ops:
        dst = apply_post_op(post_op, dst, tensors, instead)
    return (dst.to(torch_dtype(node.results[0].dtype)), *results[1:])


def _in_reals(
    node: Node, tensors: Mapping[str, torch.Tensor], instead: Mapping[str, Reference] | None
) -> tuple[torch.Tensor, ...]:
    """Run a node on real numbers, where operands or results are stored as bytes of their grids.

    Sums are exact in f64, as they are in a kernel for bytes.
    """
    is_sum = opdef(node.op).numbers.bytes(node.attrs) is Bytes.MULTIPLIED
    real = {
        name: to_reals(tensor.double() if is_sum else tensor, node.grids[name])
        if name in node.grids and not tensor.is_floating_point()
        else tensor
        for name, tensor in tensors.items()
    }
    stored = [
        name in node.grids and not t.dtype.is_floating for name, t in zip(result_names(node), node.results, strict=True)
    ]
    types = tuple(t.with_dtype(DataType.F32) if b else t for t, b in zip(node.results, stored, strict=True))
    results = evaluate_node(node.with_(results=types, grids=NO_GRIDS), real, instead)
    named = zip(result_names(node), results, stored, strict=True)
    return tuple(to_bytes(result, node.grids[name]) if is_stored else result for name, result, is_stored in named)


def apply_post_op(
    post_op: PostOp,
    dst: torch.Tensor,
    tensors: Mapping[str, torch.Tensor],
    instead: Mapping[str, Reference] | None = None,
) -> torch.Tensor:
    """Apply one post-op to the result before it; ``tensors`` has its operand by name."""
    operands = [dst, *(tensors[name].to(dst.dtype) for name in post_op.operands)]
    if post_op.op == "sum":
        scales: tuple[float, ...] = getattr(post_op.attrs, "scales", (1.0,))
        return dst + scales[0] * operands[1]
    declaration = opdef(post_op.op)
    names = [operand.name for operand in declaration.operands]
    needed = sum(not operand.optional for operand in declaration.operands)
    if not needed <= len(operands) <= len(names):
        raise GraphError(f"post-op {post_op.op} takes {needed} operands, not {len(operands)}")
    reference = (instead or {}).get(post_op.op, declaration.reference)
    (result,) = reference(post_op.attrs, dict(zip(names, operands, strict=False)))
    tensor: torch.Tensor = result
    return tensor


def _constant(graph: Graph, node: Node) -> torch.Tensor:
    if node.name not in graph.constants:
        raise GraphError(f"{node.label} has no data any more: it was released after packing; evaluate the normal graph")
    return materialise(graph.constants[node.name], node.results[0])


def _check_inputs(graph: Graph, inputs: Mapping[str, torch.Tensor]) -> None:
    declared = {node.name: node.results[0] for node in graph.input_nodes}
    if set(inputs) != set(declared):
        raise InputError(f"graph {graph.name} has the inputs {sorted(declared)}, got {sorted(inputs)}")
    for name, type_ in declared.items():
        if tensor_type(inputs[name]) != type_:
            raise InputError(f"input {name} is {tensor_type(inputs[name])}, must be {type_}")
