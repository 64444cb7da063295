"""Chains of post-ops by the declarations of their ops: names of operands, and types before and after each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

from fmtprop.ir.node import Node, PostOp
from fmtprop.ir.op import opdef
from fmtprop.ir.types import TensorType

T = TypeVar("T")


def named_operands(post_op: PostOp, given: Iterable[T]) -> dict[str, T]:
    """Return the operands of a post-op, the result before it first, by the names that its op declares."""
    return dict(zip((operand.name for operand in opdef(post_op.op).operands), given, strict=False))


def types_along(node: Node, types: Mapping[str, TensorType]) -> tuple[list[TensorType], tuple[TensorType, ...]]:
    """Infer the first result of a node before each of its post-ops, and all results after the last.

    Raises ShapeError if operands do not fit, and GraphError if a post-op lacks an operand.
    """
    if not node.post_ops:
        return [], opdef(node.op).infer(node.attrs, types)
    dst, *others = opdef(node.op).infer(node.attrs, {name: t for name, t in types.items() if name not in node.tail})
    before = []
    for post_op in node.post_ops:
        before.append(dst)
        if post_op.op == "convolution":
            declaration = opdef(post_op.op)
            given = named_operands(post_op, (dst, *(types[name] for name in post_op.operands)))
            declaration.check_operands(given)
            (dst,) = declaration.infer(post_op.attrs, given)
    return before, (dst, *others)
