"""Post-ops on this target: those that an operator applies itself, and those that follow it.

Owns the names of oneDNN's element-wise functions in PyTorch's fused operators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from fmtprop.ir.node import PostOp
from fmtprop.layout import MemoryDesc
from fmtprop.ops import Binary, Eltwise, Sum
from fmtprop.ops.evaluate import apply_post_op
from fmtprop.targets.mkldnn.dispatcher import accepts_unary

_SIXTH = 1 / 6


@dataclass(frozen=True)
class Unary:
    """An element-wise function, as an argument of PyTorch's fused operators."""

    attr: str = "none"
    scalars: tuple[float, ...] = ()
    algorithm: str = ""


#: one of each function that fused operators may have
UNARIES = (
    *(Unary(attr) for attr in ("relu", "sigmoid", "tanh", "swish", "hardswish", "hardsigmoid")),
    Unary("leaky_relu", (0.1,)),
    Unary("hardtanh", (0.0, 6.0)),
    Unary("gelu", (), "none"),
    Unary("gelu", (), "tanh"),
)


@dataclass(frozen=True)
class Division:
    """The post-ops of a node, divided."""

    #: operation that is applied first, with the operand ``other``; empty for none
    binary: str = ""
    other: str = ""
    unary: Unary = Unary()
    rest: tuple[PostOp, ...] = ()


def split(
    post_ops: Sequence[PostOp], dst: MemoryDesc, dims: dict[str, tuple[int, ...]], *, then_unary: bool
) -> Division:
    """Divide the post-ops of a node."""
    waiting = list(post_ops)
    binary = other = ""
    unary = Unary()
    if waiting and waiting[0].operand is not None and dims[waiting[0].operand] == dst.dims:
        binary = _binary(waiting[0])
        if binary:
            other = waiting.pop(0).operand or ""
    if waiting and (not binary or then_unary):
        found = _unary(waiting[0])
        if found is not None and accepts_unary(found.attr, found.scalars, found.algorithm, after_add=bool(binary)):
            unary = found
            del waiting[0]
    return Division(binary, other, unary, tuple(waiting))


def finish(
    rest: Sequence[PostOp], names: tuple[str, ...]
) -> Callable[[torch.Tensor, tuple[torch.Tensor, ...]], torch.Tensor]:
    """Return ``(result, operands with these names) -> result`` of post-ops that separate operators apply."""
    if not rest:
        return lambda dst, tensors: dst

    def call(dst: torch.Tensor, tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
        named = dict(zip(names, tensors, strict=True))
        dtype = dst.dtype
        for post_op in rest:
            dst = apply_post_op(post_op, dst, named)
        return dst.to(dtype)

    return call


def _binary(post_op: PostOp) -> str:
    attrs = post_op.attrs
    if isinstance(attrs, Sum):
        return "add" if attrs.scales == (1.0,) else ""
    if isinstance(attrs, Binary) and attrs.alg in ("add", "sub", "mul", "div"):
        return attrs.alg
    return ""


def _unary(post_op: PostOp) -> Unary | None:
    attrs = post_op.attrs
    if not isinstance(attrs, Eltwise):
        return None
    alpha, beta = attrs.alpha, attrs.beta
    sixths = abs(alpha - _SIXTH) < 1e-6 and beta == 0.5
    if attrs.alg == "relu":
        return Unary("leaky_relu", (alpha,)) if alpha else Unary("relu")
    if attrs.alg == "clip":
        return Unary("hardtanh", (alpha, beta))
    if attrs.alg in ("gelu_erf", "gelu_tanh"):
        return Unary("gelu", (), "tanh" if attrs.alg == "gelu_tanh" else "none")
    if attrs.alg in ("hardswish", "hardsigmoid"):
        return Unary(attrs.alg) if sixths else None
    if attrs.alg == "swish":
        return Unary("swish") if alpha == 1.0 else None
    return {"logistic": Unary("sigmoid"), "tanh": Unary("tanh")}.get(attrs.alg)
