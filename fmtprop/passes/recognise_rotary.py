"""Recognition of rotary embeddings, which models write out."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations
from typing import ClassVar

from fmtprop.ir.graph import Graph
from fmtprop.ir.node import Node, Value
from fmtprop.layout import DataType
from fmtprop.ops.binary import Binary
from fmtprop.ops.concat import Concat
from fmtprop.ops.eltwise import Eltwise
from fmtprop.ops.rotary_embedding import RotaryEmbedding
from fmtprop.ops.views import Slice
from fmtprop.passes.editing import bypass, own_producer

_NEGATION = Eltwise("linear", alpha=-1.0)


@dataclass(frozen=True)
class RecogniseRotary:
    """Replace ``x * cos + concat(-second half of x, first half) * sin`` by one ``rotary_embedding``.

    Notes
    -----
    Requires a graph before fusion. Ensures that no such chain is left, unless its inner values have other readers.
    Halves may be slices of x, or of the tensor that x is a slice of.

    References
    ----------
    ``transformers.models.llama.modeling_llama.apply_rotary_pos_emb``.
    """

    name: ClassVar[str] = "recognise-rotary"

    def run(self, graph: Graph) -> Graph:
        """Return the rewritten graph."""
        graph = graph.copy()
        for node in graph.nodes():
            if isinstance(node.attrs, Binary) and node.attrs.alg == "add":
                _recognise(graph, node)
        graph.remove_dead()
        return graph


def _recognise(graph: Graph, total: Node) -> None:
    for straight, crossed in permutations(graph.inputs(total.name).values()):
        for x, cos in _factors(graph, straight):
            for other, sin in _factors(graph, crossed):
                angles = [graph.type_of(one) for one in (cos, sin)]
                fits = all(one.dims[-1:] == total.results[0].dims[-1:] and one.dtype is DataType.F32 for one in angles)
                if not fits or graph.type_of(x) != total.results[0] or not _is_crossed(graph, other, x):
                    continue
                name = graph.fresh_name("rotary")
                node = Node(name, "rotary_embedding", RotaryEmbedding(), total.results, origin=total.origin)
                bypass(graph, total, graph.insert(node, {"src": x, "cos": cos, "sin": sin}, before=total.name))
                return


def _factors(graph: Graph, value: Value) -> list[tuple[Value, Value]]:
    """Return the factors of a product that only one node reads, in both orders; none for another value."""
    node = own_producer(graph, value)
    if node is None or not isinstance(node.attrs, Binary) or node.attrs.alg != "mul":
        return []
    first, second = graph.inputs(node.name).values()
    return [(first, second), (second, first)]


def _is_crossed(graph: Graph, value: Value, x: Value) -> bool:
    """Whether a value is x with its halves exchanged, the second one negated."""
    node, last = own_producer(graph, value), graph.type_of(x).ndim - 1
    if node is None or node.attrs != Concat(last) or len(graph.inputs(node.name)) != 2:
        return False
    negated, first = graph.inputs(node.name).values()
    negation = own_producer(graph, negated)
    if negation is None or negation.attrs != _NEGATION:
        return False
    (second,) = graph.inputs(negation.name).values()
    source, start, size = _span(graph, x)
    half = size // 2
    parts = [_span(graph, part) for part in (first, second)]
    return size % 2 == 0 and parts == [(source, start, half), (source, start + half, half)]


def _span(graph: Graph, value: Value) -> tuple[Value, int, int]:
    """Return the tensor of which a value is a part along the last axis, where the part starts, and its size."""
    start, size = 0, graph.type_of(value).dims[-1]
    while isinstance(attrs := graph.node(value.node).attrs, Slice):
        source = graph.inputs(value.node)["src"]
        *dims, _ = graph.type_of(source).dims
        if {*attrs.steps} != {1} or any(attrs.starts[:-1]) or attrs.sizes[:-1] != tuple(dims):
            break
        start, value = start + attrs.starts[-1], source
    return value, start, size
