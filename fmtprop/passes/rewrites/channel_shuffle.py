"""Recognition of a channel shuffle written as reshape, permute, reshape."""

from __future__ import annotations

from dataclasses import dataclass

from fmtprop.ir import Graph, Node
from fmtprop.ops import Permute, Shuffle
from fmtprop.passes.base import NodePass
from fmtprop.passes.editing import bypass, insert, source_of


@dataclass(frozen=True)
class RecogniseShuffle(NodePass):
    """Replace the three views by one ``shuffle``.

    The axis is split into (groups, size / groups), the two are exchanged and then merged again. No blocked format can
    express these views, but oneDNN's shuffle keeps its source's format.

    Requires merged views. Ensures that no such chain is left, unless its inner values have other readers.

    oneDNN developer guide, "Shuffle".
    """

    def _visit(self, graph: Graph, joined: Node) -> None:
        permuted = source_of(graph, joined, "reshape")
        split = source_of(graph, permuted, "permute")
        if permuted is None or split is None or split.op != "reshape" or not isinstance(permuted.attrs, Permute):
            return
        source = graph.inputs(split.name)["src"]
        attrs = _shuffle(graph.type_of(source).dims, split.results[0].dims, permuted.attrs.order)
        if attrs is None or graph.type_of(source) != joined.results[0]:
            return
        bypass(graph, joined, [insert(graph, joined, attrs, src=source)])


def _shuffle(dims: tuple[int, ...], split: tuple[int, ...], order: tuple[int, ...]) -> Shuffle | None:
    """Return the shuffle that is equivalent to a split and an exchange; None if there is none."""
    for axis in range(len(dims)):
        exchanged = (*range(axis), axis + 1, axis, *range(axis + 2, len(dims) + 1))
        if order == exchanged and split[:axis] == dims[:axis] and split[axis + 2 :] == dims[axis + 1 :]:
            return Shuffle(axis, split[axis])
    return None
