"""Recognition of rotary embeddings, which models write out."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations

from fmtprop.ir import Graph, Node, Value
from fmtprop.layout import DataType
from fmtprop.ops import Binary, Concat, Eltwise, Permute, Reshape, RotaryEmbedding, Slice
from fmtprop.passes.base import NodePass
from fmtprop.passes.editing import bypass, insert, own_producer, widened

_NEGATION = Eltwise("linear", alpha=-1.0)


@dataclass(frozen=True)
class RecogniseRotary(NodePass):
    """Replace ``x * cos + concat(-second half of x, first half) * sin`` by one ``rotary_embedding``.

    The same with ``stack(-odd numbers of x, even numbers)`` becomes an interleaved one.

    Requires a graph before fusion. Ensures that no such chain is left, unless its inner values have other readers.
    Halves may be slices of x, or of the tensor that x is a slice of. Angles of a model in bf16 are converted to f32:
    then the sum is rounded once, and its products are not.

    ``transformers.models.llama.modeling_llama.apply_rotary_pos_emb``; interleaved, that of ``gptj.modeling_gptj``.
    """

    def _visit(self, graph: Graph, total: Node) -> None:
        if not isinstance(total.attrs, Binary) or total.attrs.alg != "add":
            return
        for straight, crossed in permutations(graph.inputs(total.name).values()):
            for x, cos in _factors(graph, straight):
                for other, sin in _factors(graph, crossed):
                    angles, made = [graph.type_of(one) for one in (cos, sin)], total.results[0]
                    fits = all(
                        one.dims[-1:] == made.dims[-1:] and one.dtype in (DataType.F32, made.dtype) for one in angles
                    )
                    attrs = _embedding(graph, x, other) if fits and graph.type_of(x) == made else None
                    if attrs is None:
                        continue
                    cos, sin = (widened(graph, one, total) for one in (cos, sin))
                    bypass(graph, total, [insert(graph, total, attrs, src=x, cos=cos, sin=sin)])
                    return


def _factors(graph: Graph, value: Value) -> list[tuple[Value, Value]]:
    """Return the factors of a product that only one node reads, in both orders; none for another value."""
    node = own_producer(graph, value)
    if node is None or not isinstance(node.attrs, Binary) or node.attrs.alg != "mul":
        return []
    first, second = graph.inputs(node.name).values()
    return [(first, second), (second, first)]


def _embedding(graph: Graph, x: Value, crossed: Value) -> RotaryEmbedding | None:
    """Return the embedding of which a value is x with each pair's numbers exchanged, the second one negated."""
    node, dims = own_producer(graph, crossed), graph.type_of(x).dims
    interleaved = node is not None and isinstance(node.attrs, Reshape)
    joined = _stacked(graph, node, dims) if node is not None and interleaved else node
    if joined is None or not isinstance(joined.attrs, Concat) or len(graph.inputs(joined.name)) != 2 or dims[-1] % 2:
        return None
    if not interleaved and joined.attrs.axis != len(dims) - 1:
        return None
    negated, first = graph.inputs(joined.name).values()
    if interleaved:
        negated, first = _before_reshape(graph, negated), _before_reshape(graph, first)
    negation = own_producer(graph, negated)
    if negation is None or negation.attrs != _NEGATION:
        return None
    (second,) = graph.inputs(negation.name).values()
    if interleaved:  # the negation may come before the reshape or behind it
        second = _before_reshape(graph, second)
    source, start, size, step = _span(graph, x)
    apart, stride = (step, 2 * step) if interleaved else (size // 2 * step, step)
    pairs = [(source, start, size // 2, stride), (source, start + apart, size // 2, stride)]
    return RotaryEmbedding(interleaved) if [_span(graph, part) for part in (first, second)] == pairs else None


def _stacked(graph: Graph, reshape: Node, dims: tuple[int, ...]) -> Node | None:
    """Return the concat of tensors along a new last axis, which a reshape merges with the axis before.

    The concat may be along a new first axis, with a permutation after it.
    """
    pairs, ndim = (*dims[:-1], dims[-1] // 2, 2), len(dims)
    stack = own_producer(graph, graph.inputs(reshape.name)["src"])
    if stack is None or stack.results[0].dims != pairs or reshape.results[0].dims != dims:
        return None
    if stack.attrs == Permute((*range(1, ndim + 1), 0)):
        stack = own_producer(graph, graph.inputs(stack.name)["src"])
        return stack if stack is not None and stack.attrs == Concat(0) else None
    return stack if stack.attrs == Concat(ndim) else None


def _before_reshape(graph: Graph, value: Value) -> Value:
    node = own_producer(graph, value)
    return graph.inputs(node.name)["src"] if node is not None and isinstance(node.attrs, Reshape) else value


def _span(graph: Graph, value: Value) -> tuple[Value, int, int, int]:
    """Return the tensor of which a value is a part along the last axis; where the part starts, its size, its step."""
    start, size, step = 0, graph.type_of(value).dims[-1], 1
    while isinstance(attrs := graph.node(value.node).attrs, Slice):
        source = graph.inputs(value.node)["src"]
        *dims, _ = graph.type_of(source).dims
        if {*attrs.steps[:-1]} - {1} or any(attrs.starts[:-1]) or attrs.sizes[:-1] != tuple(dims):
            break
        start, step = attrs.starts[-1] + attrs.steps[-1] * start, attrs.steps[-1] * step
        value = source
    return value, start, size, step
