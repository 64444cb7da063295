"""Recognition of local response normalization, which PyTorch's exporter decomposes into elementary calls."""

from __future__ import annotations

from dataclasses import dataclass

from fmtprop.ir import Graph, Node, Value
from fmtprop.ops import Binary, Eltwise, Lrn, Pad, Pooling
from fmtprop.passes.base import NodePass
from fmtprop.passes.editing import bypass, insert, is_square, own_producer, source_of


@dataclass(frozen=True)
class RecogniseLrn(NodePass):
    """Replace ``x / (k + alpha * average of x² over neighbouring channels) ** beta`` by one ``lrn``.

    Requires merged views, and padding that is not folded yet. Ensures that no such chain is left, unless its inner
    values have other readers; windows of even size stay, since oneDNN's are symmetric.

    ``torch.nn.functional.local_response_norm``; oneDNN developer guide, "Local Response Normalization (LRN)".
    """

    def _visit(self, graph: Graph, quotient: Node) -> None:
        if not isinstance(quotient.attrs, Binary) or quotient.attrs.alg != "div":
            return
        src, divisor = graph.inputs(quotient.name)["src_0"], graph.inputs(quotient.name)["src_1"]
        attrs = _lrn(graph, src, divisor)
        if attrs is None or graph.type_of(src) != quotient.results[0] or not 3 <= quotient.results[0].ndim <= 5:
            return
        bypass(graph, quotient, [insert(graph, quotient, attrs, src=src)])


def _lrn(graph: Graph, src: Value, divisor: Value) -> Lrn | None:
    """Return the normalization of `src` by a divisor; None if it is another computation."""
    power = own_producer(graph, divisor)
    if power is None or not isinstance(power.attrs, Eltwise) or (power.attrs.alg, power.attrs.alpha) != ("pow", 1.0):
        return None
    alpha, k, node = 1.0, 0.0, source_of(graph, power)
    while node is not None and isinstance(node.attrs, Eltwise) and node.attrs.alg == "linear":
        alpha, k = alpha * node.attrs.alpha, alpha * node.attrs.beta + k
        node = source_of(graph, node)
    size = _window(graph, node, src)
    return None if size is None else Lrn("across_channels", size, alpha, power.attrs.beta, k)


def _window(graph: Graph, joined: Node | None, src: Value) -> int | None:
    """Return the number of channels that are averaged: reshape, pad, pooling, reshape of the squares of src."""
    pooled = source_of(graph, joined, "reshape")
    padded = source_of(graph, pooled, "pooling")
    split = source_of(graph, padded, "pad")
    squares = source_of(graph, split, "reshape")
    if pooled is None or padded is None or split is None or squares is None or not is_square(graph, squares, src):
        return None
    dims, split_dims = graph.type_of(src).dims, split.results[0].dims
    if split_dims[:3] != (dims[0], 1, dims[1]) or joined is None or joined.results[0].dims != dims:
        return None
    pool, pad, rank = pooled.attrs, padded.attrs, len(split_dims)
    if not isinstance(pool, Pooling) or not isinstance(pad, Pad) or pool.alg == "max" or pad.value != 0:
        return None
    size, none, ones = pool.kernel[0], (0,) * (rank - 2), (1,) * (rank - 2)
    plain = (pool.strides, pool.dilates, pool.pad_l, pool.pad_r) == (ones, none, none, none)
    reach = (0, 0, size // 2, *(0,) * (rank - 3))
    fits = pool.kernel == (size, *ones[1:]) and pad.pads_l == reach and pad.pads_r == reach
    return size if plain and fits and size % 2 else None
