"""Likeness of primitives: sizes that a kernel treats alike.

A kernel's code depends on the tails of its vectors and blocks, and on the rough size of its loops. So of hundreds of
primitives that differ in channels or scales alone, a check of a few shows as much as one of all. And a model's plan for
another shape runs the kernels that were checked for the first one, with other counts of the same loops.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import lru_cache
from math import gcd

from fmtprop.ir import Attrs, Node, Role, ports
from fmtprop.ir.grid import usual_limits
from fmtprop.layout import FormatKind, MemoryDesc
from fmtprop.ops.quantization import FakeQuantize
from fmtprop.passes.target import candidate_of
from fmtprop.tuning.identity import describe_result, persistent_text

#: sizes up to the first are alike only if equal; others leave the same tail of vectors and the same divisors of blocks
_SMALL, _VECTOR, _BLOCK = 32, 16, 64


def describe_likeness(node: Node) -> dict[str, object]:
    """Return the properties that alike nodes share, as plain data: those that a result depends on, with rough sizes."""
    choice = candidate_of(node)
    operands = {name: _likeness_of_desc(desc) for name, desc in choice.operands.items()}
    post_ops = [[one.op, _likeness_of_attrs(one.attrs), one.operand] for one in node.post_ops]
    return {
        **describe_result(node, choice),
        "attrs": _likeness_of_attrs(node.attrs),
        "post_ops": post_ops,
        "operands": operands,
        "results": [_likeness_of_desc(desc) for desc in node.descs],
    }


def _likeness_of_attrs(attrs: Attrs) -> dict[str, object]:
    alike = attrs.to_json()
    if isinstance(attrs, FakeQuantize):  # its numbers are arguments or constants of the code, others in each layer
        return {"limits": usual_limits(attrs.low, attrs.high)}
    groups = alike.get("groups")  # as many as channels, in a depthwise convolution
    return {**alike, "groups": likeness_of_size(groups)} if isinstance(groups, int) else alike


@lru_cache(maxsize=4096)
def _likeness_of_desc(desc: MemoryDesc) -> object:
    if desc.kind is not FormatKind.BLOCKED:
        return persistent_text(desc)
    dims, tag = [likeness_of_size(size) for size in desc.dims], desc.tag
    if tag is not None and not desc.offset0:
        return [tag, str(desc.dtype), dims]
    # a part of another tensor steps over the other's sizes
    steps = [likeness_of_size(size) for size in (*desc.strides, desc.offset0)]
    blocks = [[block.axis, block.size] for block in desc.inner_blocks]
    return [str(desc.dtype), dims, [likeness_of_size(size) for size in desc.padded_dims], steps, blocks]


def likeness_in_model(node: Node) -> tuple[object, ...]:
    """Return the properties that a node shares with the same node for another shape of a model's inputs.

    Its code depends on formats, attributes and weights; lengths are told apart where other code may run for them.
    A kernel of our own that is assembled for a length has an identity of its own.
    """
    choice = candidate_of(node)
    tail = tuple((one.op, one.attrs, one.operand) for one in node.post_ops)
    operands = tuple(
        (one.name, desc if one.role is Role.PARAMETER else _lengths_of_desc(desc))
        for one, desc in zip(ports(node, choice.operands), choice.operands.values(), strict=True)
    )
    identity = tuple(sorted(choice.handle.identity.items()))
    results = tuple(map(_lengths_of_desc, node.descs))
    attrs = _attrs_without_size(node, choice.operands)
    return node.op, attrs, tail, choice.target, choice.impl, identity, operands, results


def _attrs_without_size(node: Node, operands: Mapping[str, MemoryDesc]) -> tuple[object, ...]:
    """Return the attributes of a node, without sizes of its tensors: of a resampling's result, of a whole image."""
    values = {one.name: getattr(node.attrs, one.name) for one in fields(node.attrs)}
    if node.op == "resampling":
        del values["size"]
    if node.op == "pooling" and values["kernel"] == operands["src"].dims[2:]:
        values["kernel"] = values["strides"] = tuple(map(_tail, values["kernel"]))
    return tuple(values.values())


def _tail(size: int) -> tuple[bool, ...]:
    """Return what other code may compute: whole vectors, half a vector, less, and one of a pair of bf16 numbers."""
    return size >= _VECTOR, size % _VECTOR >= _VECTOR // 2, size % (_VECTOR // 2) > 0, size % 2 > 0


@lru_cache(maxsize=4096)
def _lengths_of_desc(desc: MemoryDesc) -> object:
    """Return a format, and its sizes: along vectors what is left of them, along other axes 0, 1 or more."""
    if desc.kind is not FormatKind.BLOCKED or desc.has_broadcast or not desc.ndim:
        return desc
    order = sorted(range(desc.ndim), key=lambda axis: (desc.strides[axis], axis))
    vectors = {1, *([block.axis for block in desc.inner_blocks] or order[:1])}
    lengths = tuple(
        _tail(size) if axis in vectors else min(size, 2)
        for axis, size in enumerate(desc.dims)
        if axis or desc.ndim <= 2  # the rows of a matrix are no batch
    )
    if desc.tag is not None and not desc.offset0:
        return desc.tag, desc.dtype, lengths
    # a part of another tensor: the order of its axes, and the gaps of the innermost one; or a scalar
    gaps = tuple(desc.strides[axis] for axis in order[:1])
    return (*order,), gaps, desc.inner_blocks, desc.offset0 % _VECTOR, desc.dtype, lengths


def likeness_of_size(size: int) -> int | list[int]:
    """Return the properties that a size shares with those that kernels treat alike.

    >>> likeness_of_size(24), likeness_of_size(100) == likeness_of_size(116), likeness_of_size(96)
    (24, True, [0, 32, 7])
    """
    return size if size <= _SMALL else [size % _VECTOR, gcd(size, _BLOCK), size.bit_length()]
