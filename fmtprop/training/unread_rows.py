"""Rows of a captured graph that nothing reads: only the others are computed, forward and, by autograd, backward.

A classifier on the first token of a transformer reads one row of its last layer.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from inspect import signature
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

#: more rows than this share of an axis are computed as the program does
_MOST_SHARE = 0.5


@dataclass(frozen=True)
class _Rows:
    """Consecutive rows of a tensor along an axis."""

    axis: int
    start: int
    size: int

    @property
    def index(self) -> tuple[slice, ...]:
        return (*[slice(None)] * self.axis, slice(self.start, self.start + self.size))


#: place of a node's argument -> its rows that the node reads; it reads all of each other argument
_Read = Mapping[int | str, _Rows]


def leave_out_unread_rows(graph: fx.Graph) -> None:
    """Change a graph of PyTorch's functions so that it computes only the rows that are read.

    Each node passes the rows that its readers select on to its operands, where it computes rows independently. A
    dropout draws the numbers of all rows, as PyTorch would. Results share memory with the same tensors as before, so
    what is changed in place is seen as before; a node that itself changes its operand computes all rows.

    `graph`: the graph, changed in place. Values of its tensors are in ``meta["example_value"]``.

    The gradient of a row that is not read is 0. PyTorch multiplies this 0 by numbers of that row, so a NaN there
    reaches its gradients of weights, and not these.
    """
    asked: dict[fx.Node, set[_Rows | None]] = defaultdict(set)
    few: dict[fx.Node, _Rows] = {}
    reads: dict[fx.Node, _Read] = {}
    for node in reversed(graph.nodes):
        rows = next(iter(asked[node])) if len(asked[node]) == 1 else None
        read = None if rows is None else _operands(node, rows)
        if rows is not None and read is not None:
            few[node] = rows
        reads[node] = _selected(node) if read is None else read
        for place, argument in (*enumerate(node.args), *node.kwargs.items()):
            for operand in _nodes(argument):
                asked[operand].add(reads[node].get(place))
    if few:
        for node in list(graph.nodes):
            with graph.inserting_before(node):
                _rewrite(graph, node, reads[node], few)
        for node in few:
            del node.meta["example_value"]


def _nodes(argument: Any) -> list[fx.Node]:
    """Return the nodes in an argument."""
    found: list[fx.Node] = []
    fx.map_arg(argument, found.append)
    return found


def _rewrite(graph: fx.Graph, node: fx.Node, read: _Read, few: Mapping[fx.Node, _Rows]) -> None:
    """Make a node read few rows, and compute few."""

    def part(value: Any, rows: _Rows) -> fx.Node:
        return graph.call_function(operator.getitem, (value, rows.index))

    if node not in few:
        if read and _args(node)[0] in few:  # it selects all rows that are left
            index, axis = list(_args(node)[1]), read[0].axis
            index[axis] = 0 if isinstance(index[axis], int) else slice(None)
            node.args = (_args(node)[0], tuple(index))
        return
    rows, src = few[node], _args(node)[0]
    if node.target is operator.getitem and src not in few:  # one of several results, all whole
        node.args = (graph.call_function(operator.getitem, _args(node)), rows.index)
        return
    for place, own in read.items():
        operand = _args(node)[place] if isinstance(place, int) else node.kwargs[place]
        if operand not in few:
            update: Callable[[Any, fx.Node], None] = node.update_arg if isinstance(place, int) else node.update_kwarg
            update(place, part(operand, own))
    value = node.meta["example_value"]
    if node.target == "contiguous" and src.meta["example_value"].is_contiguous():  # it shares memory
        node.op, node.target, node.args = "call_function", operator.getitem, (*node.args, slice(None))
    elif node.target == "contiguous":
        node.target, node.kwargs = "clone", {"memory_format": torch.contiguous_format}
    elif node.target in _RESHAPES:
        sizes = list(value.shape)
        sizes[rows.axis] = rows.size
        node.op, node.target, node.args, node.kwargs = "call_method", "reshape", (_args(node)[0], *sizes), {}
    elif node.target is F.dropout and (how := _arguments(F.dropout, node))["training"] and how["p"]:
        ones = graph.call_function(torch.ones, (tuple(value.shape),), {"dtype": value.dtype})
        kept = graph.call_function(F.dropout, (ones, how["p"]))
        node.target, node.args, node.kwargs = operator.mul, (_args(node)[0], part(kept, rows)), {}


# ---------------------------------------------------------------- nodes that select rows


def _selected(node: fx.Node) -> _Read:
    """Return the rows that a node selects from its first argument, if it selects few consecutive ones."""
    if (
        node.target is not operator.getitem
        or not isinstance(_args(node)[1], tuple)
        or not (dims := _dims(_args(node)[0]))
    ):
        return {}
    index = _args(node)[1]
    axis = next((place for place, one in enumerate(index) if one != slice(None)), None)
    if axis is None or axis >= len(dims) or any(one != slice(None) for one in index[axis + 1 :]):
        return {}
    one, size = index[axis], dims[axis]
    if type(one) is int:
        rows = _Rows(axis, one % size, 1)
    elif isinstance(one, slice) and all(type(end) in (int, type(None)) for end in (one.start, one.stop, one.step)):
        chosen = range(size)[one]
        rows = _Rows(axis, chosen.start, len(chosen) if chosen.step == 1 else size)
    else:
        return {}
    return {0: rows} if 0 < rows.size <= _MOST_SHARE * size else {}


# ---------------------------------------------------------------- nodes that compute rows independently


def _operands(node: fx.Node, rows: _Rows) -> _Read | None:
    """Return the rows of its operands of which a node computes some rows of its result; None if it needs all."""
    rule = _RULES.get(node.target)
    return None if rule is None or not _args(node) else rule(node, rows)


def _of_each_operand(node: fx.Node, rows: _Rows) -> _Read | None:
    """Return the elements of each operand at the same places."""
    dims = _dims(node)
    if dims is None or any(one is True for one in (*_args(node)[1:], *node.kwargs.values())):  # in place, perhaps
        return None
    if any(isinstance(one, fx.Node | torch.memory_format) for one in node.kwargs.values()):
        return None
    found: dict[int | str, _Rows] = {}
    for place, operand in enumerate(_args(node)):
        if not isinstance(operand, fx.Node):
            continue
        own = _dims(operand)
        if own is None:
            return None
        axis = rows.axis - len(dims) + len(own)
        if axis >= 0 and own[axis] == dims[rows.axis]:
            found[place] = replace(rows, axis=axis)
    return found


def _before_last(node: fx.Node, rows: _Rows) -> _Read | None:
    """Return the same rows, if they are not along the last axis."""
    dims = _dims(node)
    return {0: rows} if dims is not None and rows.axis < len(dims) - 1 else None


def _normalization(node: fx.Node, rows: _Rows) -> _Read | None:
    dims, how = _dims(node), _arguments(F.layer_norm, node)
    return {0: rows} if dims is not None and rows.axis < len(dims) - len(how["normalized_shape"]) else None


def _dropout(node: fx.Node, rows: _Rows) -> _Read | None:
    is_plain, how = _dims(node) is not None and node.meta["example_value"].is_contiguous(), _arguments(F.dropout, node)
    return {0: rows} if is_plain and not how["inplace"] and isinstance(how["p"], float | int) else None


def _transposed(node: fx.Node, rows: _Rows) -> _Read | None:
    dims, axes = _dims(node), _args(node)[1:]
    if dims is None or [type(axis) for axis in axes] != [int, int]:
        return None
    one, other = (axis % len(dims) for axis in axes)
    return {0: replace(rows, axis={one: other, other: one}.get(rows.axis, rows.axis))}


def _in_order(node: fx.Node, rows: _Rows) -> _Read | None:
    """Return the same rows, if the result is row-major."""
    return {0: rows} if _dims(node) is not None and len(_args(node)) == 1 and not node.kwargs else None


def _reshaped(node: fx.Node, rows: _Rows) -> _Read | None:
    """Return the same rows, if only axes before and behind theirs are joined or split."""
    dims, own, how = _dims(node), _dims(_args(node)[0]), (*_args(node), *node.kwargs.values())
    if dims is None or own is None or any(isinstance(one, torch.dtype) for one in how):
        return None
    for axis, size in enumerate(own):
        if size == dims[rows.axis] and prod(own[:axis]) == prod(dims[: rows.axis]):
            return {0: replace(rows, axis=axis)}
    return None


def _attention(node: fx.Node, rows: _Rows) -> _Read | None:
    """Return queries, and rows of a mask: all of them are independent."""
    how, dims, queries = _arguments(_sdpa, node), _dims(node), _dims(_args(node)[0])
    if dims is None or rows.axis != len(dims) - 2 or how["dropout_p"] or how["is_causal"]:
        return None
    if queries is None or len(queries) != len(dims):
        return None
    found: dict[int | str, _Rows] = {0: rows}
    if (mask := how["attn_mask"]) is not None:
        own = _dims(mask)
        if own is None or len(own) < 2:
            return None
        if own[-2] == dims[-2]:
            found[3 if len(_args(node)) > 3 else "attn_mask"] = replace(rows, axis=len(own) - 2)
    return found


def _multi_head_attention(node: fx.Node, rows: _Rows) -> _Read | None:
    how = _arguments(F.multi_head_attention_forward, node)
    draws = how["training"] and how["dropout_p"]
    return None if rows.axis or draws or how["attn_mask"] is not None or how["is_causal"] else {0: rows}


def _first_result(node: fx.Node, rows: _Rows) -> _Read | None:
    is_first = _args(node)[1] == 0 and isinstance(_args(node)[0].meta.get("example_value"), tuple)
    return {0: rows} if is_first else None


def _sdpa(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    *, scale: Any = None, enable_gqa: bool = False,
) -> None:  # fmt: skip
    """Have the parameters of PyTorch's function, which has no signature."""


_ELEMENTWISE = (
    *(operator.add, operator.sub, operator.mul, operator.truediv, torch.add, torch.sub, torch.mul, torch.div),
    *(F.gelu, F.relu, F.silu, torch.relu, torch.tanh, torch.sigmoid),
    *("add", "sub", "mul", "div", "relu", "tanh", "sigmoid", "float", "to"),
)
_RESHAPES = (torch.reshape, torch.flatten, "reshape", "view", "flatten", "unflatten")

#: function, or name of a tensor's method -> its operands' rows by those of its result
_RULES: Mapping[Any, Callable[[fx.Node, _Rows], _Read | None]] = {
    **dict.fromkeys(_ELEMENTWISE, _of_each_operand),
    **dict.fromkeys(_RESHAPES, _reshaped),
    "contiguous": _in_order,
    **dict.fromkeys((torch.transpose, "transpose"), _transposed),
    F.linear: _before_last,
    F.layer_norm: _normalization,
    F.dropout: _dropout,
    operator.getitem: _first_result,
    F.multi_head_attention_forward: _multi_head_attention,
    F.scaled_dot_product_attention: _attention,
}


def _args(node: fx.Node) -> tuple[Any, ...]:
    return node.args


def _arguments(function: Callable[..., Any], node: fx.Node) -> Mapping[str, Any]:
    how = signature(function).bind(*_args(node), **node.kwargs)
    how.apply_defaults()
    return how.arguments


def _dims(value: Any) -> tuple[int, ...] | None:
    """Return the sizes of a tensor; None if it is none, or if sizes change."""
    tensor = value.meta.get("example_value") if isinstance(value, fx.Node) else None
    if not isinstance(tensor, torch.Tensor) or not all(type(size) is int for size in tensor.shape):
        return None
    return tuple(tensor.shape)
