"""Attention of few queries, as in a decoder's step, is one node that reads keys and values where they are."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import torch

from fmtprop.ir import Graph, Node, Value, opdef
from fmtprop.ops import Attention, Binary, Concat, Eltwise, Permute, Reduction, Reshape, Softmax
from fmtprop.passes.base import NodePass
from fmtprop.passes.editing import bypass, constant, insert, is_constant, only_reader
from fmtprop.passes.rewrites.few_rows import repeated_matrix
from fmtprop.passes.variants.attention_fusion import Scores, is_product

#: more queries of a head are treated in vectors, as :mod:`fmtprop.passes.variants.attention_fusion` finds them
_MOST_QUERIES = 16

#: most masks that the kernel adds
_MOST_MASKS = 2

#: numbers of a query and of a value are multiples of the longest vector, up to a limit
_LANES, _LONGEST_ROW, _MOST_KEYS = 16, 512, 1 << 16


@dataclass(frozen=True)
class FewQueries(NodePass):
    """Replace the products and the softmax of attention by one node, where a head has few queries.

    A decoder's step computes a few numbers for each key; then a dozen short steps take longer than reading the keys and
    values. These may be a concat of earlier ones and new ones, and repeated for the heads of a group, which then have
    an axis of their own.

    Requires folded constants, and a graph before fusion. Ensures that a node `attention` replaces each product of a
    softmax, of at most 16 queries, of rows that vectors divide, without a limit of scores.
    """

    def _visit(self, graph: Graph, node: Node) -> None:
        if not is_product(graph, node) or node.post_ops:
            return
        softmax, last = graph.node(graph.inputs(node.name)["src"].node), node.results[0].ndim - 1
        # the gradient of a softmax has the same attributes
        if softmax.op != "softmax" or softmax.attrs != Softmax(last) or node.results[0].dims[-2] > _MOST_QUERIES:
            return
        found = Scores(graph)
        product = found.product(graph.inputs(softmax.name)["src"])
        if product is None or product.post_ops or only_reader(graph, Value(softmax.name)) is None:
            return
        blanked = _blanked(graph, node, found)
        if found.lowest != -inf and blanked is None:
            return
        src = graph.inputs(product.name)["src"]
        keys, values = _Matrix(graph, product, by_column=True), _Matrix(graph, node, by_column=False)
        masks = [mask for mask in found.masks if not _is_zero(graph, mask)]
        types = {graph.type_of(value).dtype for value in (src, *masks, *keys.parts, *values.parts)}
        alike = types == {node.results[0].dtype} and (keys.sharing, keys.sizes) == (values.sharing, values.sizes)
        if alike and _fits(graph, node, src, keys) and _fit(graph, product, masks):
            attrs = Attention(found.scale, blanks=blanked is not None)
            _replace(graph, node, attrs, src, keys, values, masks)
            if blanked is not None:
                bypass(graph, blanked, [graph.inputs(blanked.name)["src_0"]])


def _fits(graph: Graph, node: Node, src: Value, keys: _Matrix) -> bool:
    """Return whether queries and keys are such that every machine's kernel takes them."""
    *batch, depth = graph.type_of(src).dims
    rows = (depth, node.results[0].dims[-1])
    return (
        batch == list(node.results[0].dims[:-1])
        and not any(row % _LANES or row > _LONGEST_ROW for row in rows)
        and 0 not in (*batch, *rows, *keys.sizes)
        and sum(keys.sizes) <= _MOST_KEYS
    )


def _fit(graph: Graph, product: Node, masks: list[Value]) -> bool:
    """Return whether the kernel takes so many masks, and each has a number for each key."""
    scores = product.results[0].dims
    dims = [graph.type_of(mask).dims for mask in masks]
    return all(len(one) == len(scores) and one[-1] == scores[-1] for one in dims) and len(masks) <= _MOST_MASKS


def _replace(
    graph: Graph, node: Node, attrs: Attention, src: Value, keys: _Matrix, values: _Matrix, masks: list[Value]
) -> None:
    dims, sharing = node.results[0].dims, keys.sharing
    operands = {"src": src} | {f"mask_{number}": mask for number, mask in enumerate(masks)}
    names = ("past_", "") if len(keys.parts) > 1 else ("",)
    for name, key, value in zip(names, keys.parts, values.parts, strict=True):
        if keys.view is not None:
            key = insert(graph, node, keys.view, src=key)
        operands |= {f"{name}key": key, f"{name}value": value}
    if sharing > 1:
        operands = {
            name: insert(graph, node, Reshape(_by_groups(graph.type_of(value).dims, dims[-3], sharing)), src=value)
            for name, value in operands.items()
        }
    result = insert(graph, node, attrs, **operands)
    if sharing > 1:
        result = insert(graph, node, Reshape(dims), src=result)
    bypass(graph, node, [result])


def _by_groups(dims: tuple[int, ...], heads: int, sharing: int) -> tuple[int, ...]:
    """Return the dims with an axis for the heads of a group, of size 1 where all of them have the same numbers."""
    group = sharing if dims[-3] == heads else 1
    return (*dims[:-3], dims[-3] // group, group, *dims[-2:])


def _blanked(graph: Graph, node: Node, found: Scores) -> Node | None:
    """Return the product that makes 0 of the results of queries without visible keys; None if there is none.

    Its factor is 0 for a row of the only mask that is -inf alone, and 1 for any other.
    """
    reader = only_reader(graph, Value(node.name))
    while reader is not None and isinstance(reader.attrs, Reshape):
        reader = only_reader(graph, Value(reader.name))
    if reader is None or reader.attrs != Binary("mul") or reader.post_ops or len(found.masks) != 1:
        return None
    factor, steps = graph.node(graph.inputs(reader.name)["src_1"].node), list[Eltwise]()
    while isinstance(factor.attrs, Eltwise) and not factor.post_ops:
        steps.insert(0, factor.attrs)
        factor = graph.node(graph.inputs(factor.name)["src"].node)
    numbers = torch.tensor([0.0, -1.0, torch.finfo(torch.float32).min, -inf])
    for step in steps:
        (numbers,) = opdef("eltwise").reference(step, {"src": numbers})
    last = graph.type_of(found.masks[0]).ndim - 1
    is_of_mask = factor.attrs == Reduction("max", (last,)) and graph.inputs(factor.name)["src"] == found.masks[0]
    return reader if is_of_mask and numbers.tolist() == [1.0, 1.0, 1.0, 0.0] else None


class _Matrix:
    """The keys or values that a product reads: their parts, and how many heads share them."""

    def __init__(self, graph: Graph, product: Node, *, by_column: bool) -> None:
        self.graph, self.view = graph, None
        value = graph.inputs(product.name)["weights"]
        ndim = graph.type_of(value).ndim
        transposed = Permute((*range(ndim - 2), ndim - 1, ndim - 2))
        self.axis = ndim - 1 if by_column else ndim - 2
        if by_column and graph.node(value.node).attrs == transposed:
            self.view, self.axis = transposed, ndim - 2
            value = graph.inputs(value.node)["src"]
        #: how many consecutive heads read the same matrix
        self.sharing = 1
        matrix = repeated_matrix(graph, graph.node(value.node))
        if matrix is not None and graph.type_of(matrix).ndim == ndim:
            self.sharing, value = graph.type_of(value).dims[-3] // graph.type_of(matrix).dims[-3], matrix
        #: two tensors that follow one another, or the whole
        self.parts = [value]
        if graph.node(value.node).attrs == Concat(self.axis) and len(graph.inputs(value.node)) == 2:
            self.parts = list(graph.inputs(value.node).values())

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of keys or values of each part."""
        return tuple(self.graph.type_of(part).dims[self.axis] for part in self.parts)


def _is_zero(graph: Graph, mask: Value) -> bool:
    """Return whether a mask changes no score."""
    if not is_constant(graph, mask):
        return False
    numbers = constant(graph, mask)
    return numbers is not None and not bool(torch.count_nonzero(numbers))
