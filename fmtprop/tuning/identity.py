"""What a cost depends on: the identity of a way to run a node, in this process and across processes."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import lru_cache

from fmtprop.ir.node import Node
from fmtprop.ir.op import opdef
from fmtprop.layout import FormatKind, MemoryDesc
from fmtprop.passes.target import Candidate

_MIB = 1 << 20

#: beyond this many bytes weights come from memory on every machine that fmtprop is for
_FARTHEST = 128 * _MIB


def regime(weights_nbytes: int) -> int:
    """Return the footprint of a network's weights, in classes: networks of a class share what is measured.

    Examples
    --------
    >>> [regime(mib << 20) >> 20 for mib in (0, 9, 100, 500)]
    [1, 16, 128, 128]
    """
    classes = (1 << power for power in range(_MIB.bit_length() - 1, _FARTHEST.bit_length()))
    return next((size for size in classes if size >= weights_nbytes), _FARTHEST)


def parameters(op: str, operands: Mapping[str, MemoryDesc]) -> frozenset[str]:
    """Return the operands that are learned: they come from afar, activations are as their producer left them.

    A product does not say what its second factor is: one per row of a batch is an activation, one for all is learned.
    """
    declared = _declared(op)
    if op == "matmul" and max(operands["weights"].dims[:-2], default=1) == 1:
        return declared | {"weights"}
    return declared


@lru_cache(maxsize=64)
def _declared(op: str) -> frozenset[str]:
    return frozenset(operand.name for operand in opdef(op).operands if operand.parameter)


def is_timed(candidate: Candidate) -> bool:
    """Say whether a way to run a node can be timed on any numbers."""
    return getattr(candidate.handle, "takes_any_numbers", False)  # nothing runs a view


def group_of(node: Node, candidate: Candidate) -> Hashable:
    """Return what equals among all ways to run equal nodes."""
    shapes = tuple((name, desc.dims, desc.dtype) for name, desc in candidate.operands.items())
    return (node.op, node.attrs, _tail(node), shapes, node.results)


def identity_of(node: Node, candidate: Candidate) -> Hashable:
    """Return what equals among equal ways to run equal nodes."""
    operands = tuple(candidate.operands.items())
    return (node.op, node.attrs, _tail(node), candidate.target, candidate.impl, operands, candidate.results)


def describe(node: Node, candidate: Candidate, weights_nbytes: int) -> dict[str, object]:
    """Return the same as plain data that means the same in another process."""
    return {
        "op": node.op,
        "attrs": node.attrs.to_json(),
        "post_ops": [[p.op, p.attrs.to_json(), p.operand] for p in node.post_ops],
        "target": candidate.target,
        "impl": candidate.impl,
        **candidate.handle.identity,
        "operands": {name: persistent_text(desc) for name, desc in candidate.operands.items()},
        "results": [persistent_text(desc) for desc in candidate.results],
        "weights": regime(weights_nbytes),
    }


def describe_reorder(src: MemoryDesc, dst: MemoryDesc) -> dict[str, object]:
    """Return a reorder as plain data that means the same in another process."""
    return {"reorder": [persistent_text(src), persistent_text(dst)]}


def _tail(node: Node) -> tuple[object, ...]:
    return tuple((post_op.op, post_op.attrs, post_op.operand) for post_op in node.post_ops)


def persistent_text(desc: MemoryDesc) -> str:
    """Return a text of a format that means the same in another process: an opaque one's token is a number of this."""
    if desc.kind is FormatKind.OPAQUE:
        return f"opaque {desc.dims} {desc.dtype} {desc.nbytes}"
    return repr(desc)
