"""A large node cut down to fewer rows or images, for a fast check.

A primitive is characterized by its implementation, formats, attributes, channels and columns. Threads share its rows,
and a few dozen rows show as much as a thousand. A node is cut down only if the library runs the smaller one with the
same implementation in the same formats; otherwise the check has its full size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from fmtprop.errors import FmtpropError
from fmtprop.ir import Node, Role, TensorType, linear_of, ports, result_names, sources
from fmtprop.ir.post_ops import types_along
from fmtprop.layout import MemoryDesc
from fmtprop.passes.assignment.formats import like
from fmtprop.passes.target import Target

#: a node with more bytes of operands and results is cut down
LARGE_NBYTES = 2 << 20

#: an axis keeps its remainder modulo _PERIOD_ELEMENTS (for strides, tiles and blocks), and at least _LEAST_ELEMENTS
_LEAST_ELEMENTS, _PERIOD_ELEMENTS = 16, 16


def cut_down(node: Node, target: Target) -> Node | None:
    """Return a smaller node that the same implementation runs in the same formats; None if there is none."""
    choice = node.choice
    if choice is None or sum(desc.nbytes for desc in (*choice.operands.values(), *node.descs)) <= LARGE_NBYTES:
        return None
    read = sources(node, choice.operands)
    linear = linear_of(node)
    # a product's rows are those of src alone
    rows = (node.results[0].ndim - 2, [linear.roles[0]]) if linear is not None and linear.by_columns else (2, read)
    for axis, cut in (rows, (0, read)):
        types = _cut_types(node, axis, cut)
        small = None if types is None else _planned(node, types, target)
        if small is not None:
            return small
    return None


def _cut_types(node: Node, axis: int, read: Sequence[str]) -> dict[str, TensorType] | None:
    """Return the types of a node's operands if those of some sources have fewer elements along an axis.

    None if the axis cannot be cut.
    """
    descs = node.choice.operands if node.choice is not None else {}
    types = {name: TensorType(desc.dims, desc.dtype) for name, desc in descs.items()}
    if not read or node.results[0].ndim <= axis:
        return None
    ndim = max(types[name].ndim for name in read)
    read = [name for name in read if types[name].ndim == ndim]  # axis 0 of a batch normalization's vectors is channels
    size = max(types[name].dims[axis] if types[name].ndim > axis else 0 for name in read)
    if size < 2 * (_LEAST_ELEMENTS + _PERIOD_ELEMENTS):
        return None
    cut = {name: _with_size(types[name], axis, size, _LEAST_ELEMENTS + size % _PERIOD_ELEMENTS) for name in read}
    alone = replace(node, post_ops=())
    try:
        _, results = types_along(alone, {**types, **cut})
    except FmtpropError:
        return None
    before, after = node.results[0].dims, results[0].dims
    if any(a != b for i, (a, b) in enumerate(zip(before, after, strict=False)) if i != axis) or len(before) != len(
        after
    ):
        return None
    tail = [one.name for one in ports(node, types) if one.role is Role.POST_OP]
    return {**types, **cut, **{name: _with_size(types[name], axis, before[axis], after[axis]) for name in tail}}


def _with_size(type_: TensorType, axis: int, size: int, wanted: int) -> TensorType:
    if type_.ndim <= axis or type_.dims[axis] != size:
        return type_
    return type_.with_dims((*type_.dims[:axis], wanted, *type_.dims[axis + 1 :]))


def _planned(node: Node, types: Mapping[str, TensorType], target: Target) -> Node | None:
    """Return the node for other types, with the same implementation in the same formats."""
    choice = node.choice
    try:
        _, results = types_along(node, types)
    except FmtpropError:
        return None
    if choice is None or len(results) != len(node.results):
        return None
    results = tuple(new.with_dtype(old.dtype) for new, old in zip(results, node.results, strict=True))
    operands = {name: _like(types[name], desc) for name, desc in choice.operands.items()}
    descs = [_like(type_, desc) for type_, desc in zip(results, node.descs, strict=True)]
    request = {**operands, **dict(zip(result_names(node), descs, strict=True))}
    formats = {name: desc for name, desc in request.items() if desc is not None}
    if len(formats) < len(request):
        return None
    small = node.with_(results=results, descs=tuple(desc for desc in descs if desc is not None), choice=None)
    for candidate in target.candidates(small, formats):
        same = (candidate.target, candidate.impl) == (choice.target, choice.impl)
        if same and candidate.operands == operands and candidate.results == small.descs:
            return small.with_(choice=candidate.choice(choice.reason))
    return None


def _like(type_: TensorType, desc: MemoryDesc) -> MemoryDesc | None:
    """Return the format of another tensor in the style of `desc`; `desc` itself if the types are equal."""
    if type_.dims == desc.dims:
        return desc
    wanted = like(MemoryDesc(type_.dims, type_.dtype), desc) if desc.is_dense and not desc.offset0 else None
    return None if wanted is None else wanted.with_dtype(desc.dtype)
