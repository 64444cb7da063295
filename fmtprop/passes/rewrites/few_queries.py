"""Attention of few queries, as in a decoder's step, is one node that reads keys and values where they are."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations
from math import inf

import torch

from fmtprop.ir import Graph, Node, Value, opdef
from fmtprop.layout import DataType
from fmtprop.ops import Attention, Binary, Concat, Eltwise, Permute, Reduction, Reshape, Softmax
from fmtprop.ops.host_call import is_conversion
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
        softmax = _behind_reshape(graph, graph.inputs(node.name)["src"])
        scores = softmax.results[0].dims if softmax.results else ()
        # the gradient of a softmax has the same attributes
        is_softmax = softmax.op == "softmax" and softmax.attrs == Softmax(len(scores) - 1)
        if not is_softmax or len(scores) != node.results[0].ndim or scores[-2] > _MOST_QUERIES:
            return
        found = Scores(graph)
        product = found.product(graph.inputs(softmax.name)["src"], grouped=True)
        if product is None or product.post_ops or only_reader(graph, Value(softmax.name)) is None:
            return
        blanked = _blanked(graph, node, found)
        if found.lowest != -inf and blanked is None:
            return
        src = graph.inputs(product.name)["src"]
        keys, values = _Matrix(graph, product, by_column=True), _Matrix(graph, node, by_column=False)
        masks = [mask for mask in found.masks if not _is_zero(graph, mask)]
        types = {graph.type_of(value).dtype for value in (src, *masks, *keys.parts, *values.parts)}
        alike = types == {node.results[0].dtype} and (keys.batch, keys.sizes) == (values.batch, values.sizes)
        if alike and _fits(graph, node, src, keys) and _fit(graph, scores, masks) and _shares(scores, keys):
            attrs = Attention(found.scale, blanks=blanked is not None)
            _replace(graph, node, attrs, scores, src, keys, values, masks)
            if blanked is not None:
                bypass(graph, blanked, [graph.inputs(blanked.name)["src_0"]])


def _behind_reshape(graph: Graph, value: Value) -> Node:
    """Return the node that makes a tensor, or what a reshape makes it of: rows of heads that share keys."""
    node = graph.node(value.node)
    return graph.node(graph.inputs(node.name)["src"].node) if isinstance(node.attrs, Reshape) else node


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


def _fit(graph: Graph, scores: tuple[int, ...], masks: list[Value]) -> bool:
    """Return whether the kernel takes so many masks, and each has a number for each key."""
    dims = [graph.type_of(mask).dims for mask in masks]
    return all(len(one) == len(scores) and one[-1] == scores[-1] for one in dims) and len(masks) <= _MOST_MASKS


def _shares(scores: tuple[int, ...], keys: _Matrix) -> bool:
    """Return whether consecutive heads of the scores share keys, and nothing else is repeated."""
    return scores[-1] == sum(keys.sizes) and scores[:-3] == keys.batch[:-1] and scores[-3] % keys.batch[-1] == 0


def _replace(
    graph: Graph, node: Node, attrs: Attention, scores: tuple[int, ...], src: Value, keys: _Matrix, values: _Matrix,
    masks: list[Value],
) -> None:  # fmt: skip
    *batch, heads, queries, _ = scores
    groups = keys.batch[-1]
    operands = {f"mask_{number}": mask for number, mask in enumerate(masks)}
    names = ("past_", "") if len(keys.parts) > 1 else ("",)
    for name, key, value in zip(names, keys.parts, values.parts, strict=True):
        for kind, part, matrix in (("key", key, keys), ("value", value, values)):
            for suffix, stored in matrix.stored(part).items():
                turned = stored if matrix.view is None else insert(graph, node, matrix.view, src=stored)
                operands[f"{name}{kind}{suffix}"] = turned
    if heads > groups:
        src = insert(
            graph, node, Reshape((*batch, groups, heads // groups, queries, graph.type_of(src).dims[-1])), src=src
        )
        operands = {
            name: insert(graph, node, Reshape(_by_groups(graph.type_of(value).dims, groups)), src=value)
            for name, value in operands.items()
        }
    result = insert(graph, node, attrs, src=src, **operands)
    if heads > groups:
        result = insert(graph, node, Reshape(node.results[0].dims), src=result)
    bypass(graph, node, [result])


def _by_groups(dims: tuple[int, ...], groups: int) -> tuple[int, ...]:
    """Return the dims with an axis for the heads of a group, of size 1 where all of them have the same numbers."""
    heads = dims[-3]
    return (*dims[:-3], 1, 1, *dims[-2:]) if heads == 1 else (*dims[:-3], groups, heads // groups, *dims[-2:])


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
    """The keys or values that a product reads, as they are before they are repeated for heads that share them."""

    def __init__(self, graph: Graph, product: Node, *, by_column: bool) -> None:
        self.graph, self.view = graph, None
        value = graph.inputs(product.name)["weights"]
        ndim = graph.type_of(value).ndim
        transposed = Permute((*range(ndim - 2), ndim - 1, ndim - 2))
        self.axis = ndim - 1 if by_column else ndim - 2
        if by_column and graph.node(value.node).attrs == transposed:
            self.view, self.axis = transposed, ndim - 2
            value = graph.inputs(value.node)["src"]
        matrix = repeated_matrix(graph, graph.node(value.node))
        if matrix is not None and graph.type_of(matrix).ndim == ndim:
            value = matrix
        #: sizes of the batch axes, without the repetition for heads that share a matrix
        self.batch = graph.type_of(value).dims[:-2]
        #: two tensors that follow one another, or the whole
        self.parts = [value]
        if graph.node(value.node).attrs == Concat(self.axis) and len(graph.inputs(value.node)) == 2:
            self.parts = list(graph.inputs(value.node).values())

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of keys or values of each part."""
        return tuple(self.graph.type_of(part).dims[self.axis] for part in self.parts)

    def stored(self, part: Value) -> dict[str, Value]:
        """Return a part as it is stored: it, or codes and their scales, of which a conversion and a product make it."""
        graph, decoded, type_ = self.graph, self.graph.node(part.node), self.graph.type_of(part)
        if decoded.attrs != Binary("mul") or decoded.post_ops or self.axis != type_.ndim - 2:
            return {"": part}
        for made, scales in permutations(graph.inputs(decoded.name).values()):
            conversion = graph.node(made.node)
            if not is_conversion(conversion.attrs) or graph.type_of(made) != type_:
                continue
            codes = graph.inputs(conversion.name)["src_0"]
            is_coded = graph.type_of(codes).dtype is DataType.S8
            if is_coded and graph.type_of(scales) == type_.with_dims((*type_.dims[:-1], 1)):
                return {"": codes, "_scales": scales}
        return {"": part}


def _is_zero(graph: Graph, mask: Value) -> bool:
    """Return whether a mask changes no score."""
    if not is_constant(graph, mask):
        return False
    numbers = constant(graph, mask)
    return numbers is not None and not bool(torch.count_nonzero(numbers))
