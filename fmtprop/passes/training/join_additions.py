"""Joining of additions of neighbouring slices: one addition of the joint slices takes their place.

In a dense block, a tensor is a part of all later concats. Its gradient is a sum of slices of all their gradients, one
small addition after the other. Joined, the block's gradients are one large addition for each concat, a chain without
copies, in which formats can be chosen exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from fmtprop.ir import Graph, Node, Value
from fmtprop.ops import Binary, Slice
from fmtprop.passes.base import Pass
from fmtprop.passes.editing import bypass, only_reader, window


@dataclass(frozen=True)
class JoinAdditions(Pass):
    """Rewrite ``x[:a] + y[:a]`` and ``x[a:b] + y[a:b]`` to slices of ``x[:b] + y[:b]``, along any axis.

    Imported graph to imported graph, with bit-equal results and as many single additions. An addition that only a
    function reads stays, since it absorbs the function.
    """

    def run(self, graph: Graph) -> Graph:
        """Return the rewritten graph; the given one if there is nothing to join."""
        runs = list(_runs(graph, graph.nodes()))
        if not runs:
            return graph
        graph = graph.copy()
        while runs:
            for run in runs:
                _join(graph, run)
            # the slices of a joint addition may be operands of the next ones
            runs = list(_runs(graph, graph.nodes()))
        graph.remove_dead()
        return graph


@dataclass(frozen=True)
class _Addend:
    """A slice along one axis."""

    source: Value
    axis: int
    start: int
    size: int


@dataclass(frozen=True)
class _Addition:
    """An addition of two slices along the same axis."""

    node: Node
    parts: tuple[_Addend, _Addend]

    @property
    def kind(self) -> object:
        """All that neighbours have in common."""
        first, second = self.parts
        return first.source, second.source, first.axis, second.start - first.start


def _runs(graph: Graph, nodes: Iterable[Node]) -> Iterator[list[_Addition]]:
    """Yield additions of slices that follow each other."""
    kinds: dict[object, list[_Addition]] = {}
    for node in nodes:
        if (found := _addition(graph, node)) is not None:
            kinds.setdefault(found.kind, []).append(found)
    for alike in kinds.values():
        run: list[_Addition] = []
        for one in sorted(alike, key=lambda one: one.parts[0].start):
            if run and run[-1].parts[0].start + run[-1].parts[0].size != one.parts[0].start:
                if len(run) > 1:
                    yield run
                run = []
            run.append(one)
        if len(run) > 1:
            yield run


def _addition(graph: Graph, node: Node) -> _Addition | None:
    if node.attrs != Binary("add") or node.post_ops:
        return None
    reader = only_reader(graph, Value(node.name))
    if reader is not None and reader.op == "eltwise":
        return None
    inputs = graph.inputs(node.name)
    parts = _part(graph, inputs["src_0"]), _part(graph, inputs["src_1"])
    if parts[0] is None or parts[1] is None or (parts[0].axis, parts[0].size) != (parts[1].axis, parts[1].size):
        return None
    return _Addition(node, (parts[0], parts[1]))


def _part(graph: Graph, value: Value) -> _Addend | None:
    """Return the slice that makes a value; None if it cuts several axes or leaves gaps."""
    node = graph.node(value.node)
    if not isinstance(node.attrs, Slice):
        return None
    source = graph.inputs(node.name)["src"]
    starts, sizes, steps = node.attrs.starts, node.attrs.sizes, node.attrs.steps
    cut = [axis for axis, dim in enumerate(graph.type_of(source).dims) if sizes[axis] != dim]
    if len(cut) != 1 or any(step != 1 for step in steps):
        return None
    return _Addend(source, cut[0], starts[cut[0]], sizes[cut[0]])


def _join(graph: Graph, run: Sequence[_Addition]) -> None:
    """Put one addition into the place of a run of them."""
    first = run[0]
    size = sum(one.parts[0].size for one in run)
    operands = [window(graph, first.node, part.source, part.axis, part.start, size) for part in first.parts]
    type_ = first.node.results[0]
    dims = tuple(size if axis == first.parts[0].axis else dim for axis, dim in enumerate(type_.dims))
    joint = first.node.with_(name=graph.fresh_name(first.node.name), results=(type_.with_dims(dims),))
    (whole,) = graph.insert(joint, {"src_0": operands[0], "src_1": operands[1]}, before=first.node.name)
    start = 0
    for one in run:
        part = one.parts[0]
        bypass(graph, one.node, [window(graph, one.node, whole, part.axis, start, part.size)])
        start += part.size
