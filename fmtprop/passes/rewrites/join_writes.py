"""Joining of the pieces that a model writes into a tensor one after the other."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from fmtprop.ir import Graph, Into, Node, Value, opdef
from fmtprop.ops import Concat, HostCall, Reshape
from fmtprop.ops.building import is_native
from fmtprop.passes.base import NodePass
from fmtprop.passes.editing import bypass, insert, only_reader, window

_SELECT, _SLICE = "aten.select_scatter.default", "aten.slice_scatter.default"


@dataclass(frozen=True)
class JoinWrites(NodePass):
    """Replace writes into parts of a tensor, one after the other, by one ``concat`` of the final parts.

    A loop that fills a tensor (``out[:, t] = …``) is exported as a copy of the whole tensor for each turn. Parts
    without a write are slices of the original tensor. Writes into the caller's tensor change it in place.

    Requires a graph without dead nodes. Ensures that no write of a floating-point tensor along one axis, without a
    step, is left.
    """

    def _visit(self, graph: Graph, node: Node) -> None:
        write = _write(graph, node)
        if write is not None and not _is_written_over(graph, write) and not _is_new_content(graph, write):
            _join(graph, write)


@dataclass(frozen=True)
class _Write:
    """One write: a source that takes the places from start to stop of an axis."""

    node: Node
    whole: Value
    source: Value
    axis: int
    start: int
    stop: int


def _write(graph: Graph, node: Node) -> _Write | None:
    if not isinstance(node.attrs, HostCall) or node.attrs.target not in (_SELECT, _SLICE):
        return None
    given, inputs, dims = json.loads(node.attrs.arguments), graph.inputs(node.name), node.results[0].dims
    names = [given[name].get("tensor") for name in ("self", "src")]
    if None in names:  # complex numbers, as their parts
        return None
    whole, source = (inputs[name] for name in names)
    axis, size = given.get("dim", 0) % len(dims), dims[given.get("dim", 0)]
    if node.attrs.target == _SELECT:
        start = given["index"] % size
        stop, step = start + 1, 1
    else:
        start, stop, step = slice(given.get("start"), given.get("end"), given.get("step", 1)).indices(size)
    fits = graph.type_of(source).dtype is node.results[0].dtype and is_native(node.results[0])
    return _Write(node, whole, source, axis, start, stop) if fits and step == 1 and start < stop else None


def _before(graph: Graph, write: _Write) -> _Write | None:
    """Return the write into the same tensor right before, if no other node reads its result."""
    before = _write(graph, graph.node(write.whole.node))
    alone = before is not None and before.axis == write.axis and only_reader(graph, write.whole) is not None
    return before if alone else None


def _is_written_over(graph: Graph, write: _Write) -> bool:
    reader = only_reader(graph, Value(write.node.name))
    after = _write(graph, reader) if reader is not None else None
    return after is not None and after.whole == Value(write.node.name) and after.axis == write.axis


def _is_new_content(graph: Graph, write: _Write) -> bool:
    """Return whether a write is the last one into the caller's tensor, or others of any kind follow it."""
    values = [Value(write.node.name)]
    for value in values:  # the list grows during the loop
        for name, operand in graph.reading(value):
            node = graph.node(name)
            if isinstance(node.attrs, Into):
                return True
            if not node.is_boundary and opdef(node.op).pytorch.changed(node.attrs) == operand:
                values.append(Value(name))
    return False


def _join(graph: Graph, last: _Write) -> None:
    writes = [last]
    while (before := _before(graph, writes[-1])) is not None:
        writes.append(before)
    writes.reverse()
    axis = last.axis
    writer: list[int] = [-1] * last.node.results[0].dims[axis]  # of each place, which write was the last
    for index, write in enumerate(writes):
        writer[write.start : write.stop] = [index] * (write.stop - write.start)
    pieces = list(_pieces(graph, writes, writer))
    if len(pieces) > 1:
        pieces = [insert(graph, last.node, Concat(axis), **{f"src_{i}": p for i, p in enumerate(pieces)})]
    bypass(graph, last.node, pieces)


def _pieces(graph: Graph, writes: Sequence[_Write], writer: Sequence[int]) -> Iterator[Value]:
    """Yield the final parts of the tensor, in their order along the axis."""
    last = writes[-1]
    for index, group in groupby(range(len(writer)), key=writer.__getitem__):
        places = list(group)
        if index < 0:
            yield window(graph, last.node, writes[0].whole, last.axis, places[0], len(places))
            continue
        write, dims = writes[index], list(last.node.results[0].dims)
        dims[last.axis] = write.stop - write.start
        source = write.source
        if graph.type_of(source).dims != tuple(dims):  # a selected place has no axis
            source = insert(graph, last.node, Reshape(tuple(dims)), src=source)
        yield window(graph, last.node, source, last.axis, places[0] - write.start, len(places))
