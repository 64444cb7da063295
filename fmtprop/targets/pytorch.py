"""Running a node by PyTorch: its meaning, post-ops included, by the op's reference or by PyTorch's own operators."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from fmtprop.errors import FmtpropError, PlanError
from fmtprop.ir import Attrs, Node, result_names
from fmtprop.ir.op import Category, Reference, opdef
from fmtprop.ir.post_ops import named_operands
from fmtprop.ir.tensors import data_type
from fmtprop.ops import Eltwise, Sum
from fmtprop.ops.building import Copying
from fmtprop.ops.evaluate import evaluate_node
from fmtprop.targets.bound import REFUSED, as_planned, failed, shape_differs


def call_reference(
    node: Node, tensors: Mapping[str, torch.Tensor], instead: Mapping[str, Reference] | None = None
) -> tuple[torch.Tensor, ...]:
    """Return the node's results; an error of PyTorch's names the node.

    `instead` has functions that replace references, by the op's name.

    Raises PlanError if PyTorch refused.
    """
    try:
        with as_planned():
            return evaluate_node(node, tensors, instead)
    except FmtpropError:
        raise
    except REFUSED as error:
        raise failed(node, "reference", error) from error


def bind(
    node: Node,
    tensors: Mapping[str, torch.Tensor],
    places: Sequence[torch.Tensor | None],
    *,
    by_operator: bool = True,
) -> Callable[[], object]:
    """Return a call that runs a node on these tensors; its results are written to their places.

    It is to be made under :func:`as_planned`, as often as the tensors hold other numbers.

    `places`: as :func:`write_results` takes them. None shares memory with an operand.
    """
    written = [place for place in places if place is not None]
    if node.grids and any(node.grids[name].stored is data_type(t.dtype) for name, t in _gridded(node, tensors, places)):
        return lambda: write_results(node, places, evaluate_node(node, tensors))
    if node.op == "reorder" and written and not node.post_ops:
        return partial(written[0].copy_, tensors["src"])
    # only a call from outside is told of results without readers
    is_call = opdef(node.op).category is Category.HOST and bool(written)
    if by_operator and (is_call or len(written) == len(places)):
        calls = _operators(node, tensors, places)
        if calls and (all(map(_is_dense, written)) or all(isinstance(call, Copying) for call in calls)):
            return calls[0] if len(calls) == 1 else lambda: [call() for call in calls]
    declaration = opdef(node.op)
    if node.post_ops or declaration.category is Category.COMPUTE:
        return lambda: write_results(node, places, evaluate_node(node, tensors))
    return lambda: write_results(node, places, declaration.reference(node.attrs, tensors))


def _gridded(
    node: Node, tensors: Mapping[str, torch.Tensor], places: Sequence[torch.Tensor | None]
) -> list[tuple[str, torch.Tensor]]:
    """Return the operands and results that lie on a grid."""
    results = zip(result_names(node), places, strict=True)
    named = {**tensors, **{name: place for name, place in results if place is not None}}
    return [(name, tensor) for name, tensor in named.items() if name in node.grids]


def copying(node: Node, tensors: Mapping[str, torch.Tensor], places: Sequence[torch.Tensor | None]) -> Copying | None:
    """Return the call that computes a node, if it is of one operator that cannot write to given memory.

    Its results are in the types and shapes of the places, which may have no data.
    """
    call = _operator(node.op, node.attrs, tensors, places)
    return call if isinstance(call, Copying) else None


def _operators(
    node: Node, tensors: Mapping[str, torch.Tensor], places: Sequence[torch.Tensor | None]
) -> list[Callable[[], object]]:
    """Return the calls of PyTorch's operators that compute a node, written to its place; none if one is missing."""
    first = places[0]
    calls = [_operator(node.op, node.attrs, {n: t for n, t in tensors.items() if n not in node.tail}, places)]
    for post_op in node.post_ops:
        if first is None or (first.dtype is not torch.float32 and post_op.attrs != Eltwise("relu")):
            return []  # narrow types are rounded once, after the last post-op; a ReLU of rounded numbers is the same
        others = [tensors[name] for name in post_op.operands]
        if isinstance(post_op.attrs, Sum):
            calls.append(partial(torch.add, first, others[0], alpha=post_op.attrs.scales[0], out=first))
            continue
        calls.append(_operator(post_op.op, post_op.attrs, named_operands(post_op, (first, *others)), places))
    found = [call for call in calls if call is not None]
    return found if len(found) == len(calls) else []


def _operator(
    op: str, attrs: Attrs, tensors: Mapping[str, torch.Tensor], places: Sequence[torch.Tensor | None]
) -> Callable[[], object] | None:
    declaration = opdef(op)
    if declaration.pytorch.operator is None:
        return None
    alike = len({tensor.dtype for tensor in (*tensors.values(), *places) if tensor is not None}) == 1
    return (
        declaration.pytorch.operator(attrs, tensors, places) if alike or declaration.category is Category.HOST else None
    )


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies in a memory format that PyTorch's operators are written for."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.ndim)
    return tensor.is_contiguous() or (last is not None and tensor.is_contiguous(memory_format=last))


def write_results(node: Node, places: Sequence[torch.Tensor | None], values: Sequence[torch.Tensor]) -> None:
    """Write a node's results to where they are to lie.

    `places`: None for a result without readers: its type may differ from the exporter's (``aten._embedding_bag``).
    """
    for index, (place, value) in enumerate(zip(places, values, strict=True)):
        if place is None:
            continue
        if place.shape != value.shape:
            raise PlanError(shape_differs(node, index, value, place.shape))
        place.copy_(value)
