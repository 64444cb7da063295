"""Identity of a way to run a node, in this process and across processes: everything that its cost depends on."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import lru_cache

from fmtprop.ir import Node, opdef
from fmtprop.layout import FormatKind, MemoryDesc
from fmtprop.passes.target import Candidate

_MIB = 1 << 20

#: how figures are found; those found in another way are not comparable. 2: on normal numbers, without waiting
_TIMED = 2

#: more bytes of weights than this come from main memory on all machines
_FARTHEST_NBYTES = 128 * _MIB


def regime(weights_nbytes: int) -> int:
    """Return the class of a network's footprint of weights, in bytes; networks of one class share measured figures.

    >>> [regime(mib << 20) >> 20 for mib in (0, 9, 100, 500)]
    [1, 16, 128, 128]
    """
    classes = (1 << power for power in range(_MIB.bit_length() - 1, _FARTHEST_NBYTES.bit_length()))
    return next((size for size in classes if size >= weights_nbytes), _FARTHEST_NBYTES)


def parameters(op: str, operands: Mapping[str, MemoryDesc]) -> frozenset[str]:
    """Return the learned operands: they come from memory, activations from where their producer left them.

    A product does not declare its second factor: with one factor per batch it is an activation, with one for all it is
    learned.
    """
    declared = _declared(op)
    if op == "matmul" and max(operands["weights"].dims[:-2], default=1) == 1:
        return declared | {"weights"}
    return declared


@lru_cache(maxsize=64)
def _declared(op: str) -> frozenset[str]:
    return frozenset(operand.name for operand in opdef(op).operands if operand.parameter)


def is_timed(candidate: Candidate) -> bool:
    """Return whether a way to run a node can be timed on random bytes.

    Integers are indices to all but those that take any numbers; packed weights of a recurrent layer have sizes in them.
    """
    handle = candidate.handle  # a view has none
    if getattr(handle, "takes_any_numbers", False) and all(d.takes_any_bytes for d in candidate.operands.values()):
        return True
    is_floating = all(desc.dtype.is_floating for desc in (*candidate.operands.values(), *candidate.results))
    return handle is not None and handle.makes_results and not handle.by_operators and is_floating


def group_of(node: Node, candidate: Candidate) -> Hashable:
    """Return an identity that all ways to run equal nodes share."""
    shapes = tuple((name, desc.dims, desc.dtype) for name, desc in candidate.operands.items())
    return (node.op, node.attrs, _tail(node), shapes, node.results)


def identity_of(node: Node, candidate: Candidate) -> Hashable:
    """Return an identity that equal ways to run equal nodes share."""
    operands = tuple(candidate.operands.items())
    return (node.op, node.attrs, _tail(node), candidate.target, candidate.impl, operands, candidate.results)


def describe(node: Node, candidate: Candidate, weights_nbytes: int) -> dict[str, object]:
    """Return the identity as plain data, valid in other processes."""
    return {**describe_result(node, candidate), "weights": regime(weights_nbytes), "timed": _TIMED}


def describe_result(node: Node, candidate: Candidate) -> dict[str, object]:
    """Return everything that a node's result depends on in a way to run it, as plain data."""
    return {
        "op": node.op,
        "attrs": node.attrs.to_json(),
        "post_ops": [[p.op, p.attrs.to_json(), p.operand] for p in node.post_ops],
        "target": candidate.target,
        "impl": candidate.impl,
        **candidate.handle.identity,
        "operands": {name: persistent_text(desc) for name, desc in candidate.operands.items()},
        "results": [persistent_text(desc) for desc in candidate.results],
    }


def describe_reorder(src: MemoryDesc, dst: MemoryDesc) -> dict[str, object]:
    """Return the identity of a reorder as plain data, valid in other processes."""
    return {"reorder": [persistent_text(src), persistent_text(dst)], "timed": _TIMED}


def _tail(node: Node) -> tuple[object, ...]:
    return tuple((post_op.op, post_op.attrs, post_op.operand) for post_op in node.post_ops)


@lru_cache(maxsize=4096)
def persistent_text(desc: MemoryDesc) -> str:
    """Return a text for a format, valid in other processes (an opaque format's token is a number of this process)."""
    if desc.kind is FormatKind.OPAQUE:
        return f"opaque {desc.dims} {desc.dtype} {desc.nbytes}"
    return repr(desc)
