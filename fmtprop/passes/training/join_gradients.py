"""Joining of the gradients of a tensor's parts.

Autograd gives each part's gradient as a whole tensor, which is zero elsewhere, and adds these tensors: for queries,
keys and values of one product, three tensors are filled and two additions made. One ``concat`` has the same numbers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fmtprop.ir import Graph, Node, Value
from fmtprop.ops import Binary, Concat, HostCall, Reshape
from fmtprop.ops.building import is_native
from fmtprop.passes.base import NodePass
from fmtprop.passes.editing import bypass, insert, only_reader

_SELECT, _SLICE = "aten.select_backward.default", "aten.slice_backward.default"


@dataclass(frozen=True)
class JoinGradients(NodePass):
    """Replace terms of a sum that are the gradients of all parts of a tensor along an axis by one ``concat``.

    Requires a graph without dead nodes. Ensures that such terms, without a step, are left only where parts overlap or
    where a place belongs to none. The other terms are added in their order.
    """

    def _visit(self, graph: Graph, node: Node) -> None:
        if not _is_addition(graph, node) or _is_term(graph, node):
            return
        terms = list(_terms(graph, node))
        found = True
        while found:
            found = False
            for axis in range(node.results[0].ndim):
                if parts := _tiling(graph, terms, axis):
                    found = True
                    terms = [term for term in terms if term not in {part.value for part in parts}]
                    terms.append(_joined(graph, node, parts))
        if len(terms) < len(list(_terms(graph, node))):
            total = terms[0]
            for term in terms[1:]:
                total = insert(graph, node, Binary("add"), src_0=total, src_1=term)
            bypass(graph, node, [total])


@dataclass(frozen=True)
class _Part:
    """A tensor that is zero outside of the places from start to stop of an axis, where it has its source's numbers."""

    value: Value
    source: Value
    axis: int
    start: int
    stop: int


def _is_addition(graph: Graph, node: Node) -> bool:
    if node.attrs != Binary("add") or not is_native(node.results[0]):
        return False
    return all(graph.type_of(value) == node.results[0] for value in graph.inputs(node.name).values())


def _is_term(graph: Graph, node: Node) -> bool:
    """Return whether an addition's result is only a term of another one."""
    reader = only_reader(graph, Value(node.name))
    return reader is not None and _is_addition(graph, reader)


def _terms(graph: Graph, node: Node) -> Iterator[Value]:
    """Yield the terms of a sum in their order."""
    for value in graph.inputs(node.name).values():
        inner = graph.node(value.node)
        if _is_addition(graph, inner) and only_reader(graph, value) is not None:
            yield from _terms(graph, inner)
        else:
            yield value


def _part(graph: Graph, value: Value) -> _Part | None:
    node = graph.node(value.node)
    if not isinstance(node.attrs, HostCall) or node.attrs.target not in (_SELECT, _SLICE):
        return None
    given, dims = json.loads(node.attrs.arguments), node.results[0].dims
    if "tensor" not in given["grad_output"] or only_reader(graph, value) is None:
        return None
    source, axis = graph.inputs(node.name)[given["grad_output"]["tensor"]], given["dim"] % len(dims)
    if node.attrs.target == _SELECT:
        start = given["index"] % dims[axis]
        stop, step = start + 1, 1
    else:
        start, stop, step = slice(given["start"], given["end"], given["step"]).indices(dims[axis])
    return _Part(value, source, axis, start, stop) if step == 1 and start < stop else None


def _tiling(graph: Graph, terms: Sequence[Value], axis: int) -> list[_Part]:
    """Return terms that are the gradients of all parts along an axis, in order; none if a place has none."""
    found = [part for part in (_part(graph, term) for term in terms) if part is not None and part.axis == axis]
    beginning = {part.start: part for part in reversed(found)}
    size = graph.type_of(terms[0]).dims[axis]
    parts: list[_Part] = []
    while (end := parts[-1].stop if parts else 0) < size:
        if end not in beginning:
            return []
        parts.append(beginning[end])
    return parts if len(parts) > 1 else []


def _joined(graph: Graph, node: Node, parts: Sequence[_Part]) -> Value:
    sources = {}
    for index, part in enumerate(parts):
        dims = list(node.results[0].dims)
        dims[part.axis] = part.stop - part.start
        source = part.source
        if graph.type_of(source).dims != tuple(dims):  # a selected place has no axis
            source = insert(graph, node, Reshape(tuple(dims)), src=source)
        sources[f"src_{index}"] = source
    return insert(graph, node, Concat(parts[0].axis), **sources)
