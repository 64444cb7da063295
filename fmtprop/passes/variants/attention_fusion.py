"""Fusion of attention: a product, a softmax and another product become one node.

Owns the pattern of attention. Must not know whether the fusion pays: the choice among plans decides.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

import torch

from fmtprop.ir import Graph, Node, Value
from fmtprop.ir.tensors import materialise, torch_dtype
from fmtprop.ops import Attention, Binary, Eltwise, MatMul, Reshape, Softmax, Sum
from fmtprop.passes.editing import own_producer
from fmtprop.passes.variants.depthwise_fusion import Fused

#: most elements of a constant mask that is examined
_MOST_NUMBERS = 1 << 24


def attention(graph: Graph, node: Node) -> Fused | None:
    """Return one node that computes softmax(query · key · scale + masks) · value.

    Result: None if the node is no such product. The pattern: no other node reads the intermediate results, both
    products are of a batch of matrices without bias, the softmax is along the keys, and only a factor, additions and a
    lower bound precede it, in this order.
    """
    inputs = graph.inputs(node.name)
    if not is_product(graph, node) or node.post_ops:
        return None
    softmax = own_producer(graph, inputs["src"])
    # the gradient of a softmax has the same attributes
    if softmax is None or softmax.op != "softmax" or softmax.post_ops:
        return None
    if not isinstance(softmax.attrs, Softmax) or replace(softmax.attrs, dtype="") != Softmax(node.results[0].ndim - 1):
        return None
    found = Scores(graph)
    product = found.product(graph.inputs(softmax.name)["src"])
    if product is None:
        return None
    queries, keys = product.results[0].dims[-2:]
    limit, masks = _limit(graph, found, queries, keys)
    operands = graph.inputs(product.name)
    query, key = found.unscaled(operands["src"]), found.unscaled(operands["weights"])
    read = {"src": query, "key": key, "value": inputs["weights"]}
    batches = {graph.type_of(value).dims[:-2] for value in read.values()}
    read |= {f"mask_{number}": mask for number, mask in enumerate(masks)}
    types = {graph.type_of(value).dtype for value in read.values()}
    if any(graph.node(name).exact for name in (*found.covers, softmax.name, node.name)):
        return None
    alike = len(batches) == len(types) == 1 and types == {node.results[0].dtype}
    if not alike or any(graph.type_of(mask).dims[-1] != keys for mask in masks):
        return None
    whole = Node(node.name, "attention", Attention(found.scale, limit, found.lowest), node.results, origin=node.origin)
    return Fused(whole, read, (*reversed(found.covers), softmax.name, node.name))


class Scores:
    """The nodes between a product and its softmax, found backwards from the softmax.

    `scale`, `lowest`: factor of the product, and lower bound.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph, self.scale, self.lowest = graph, 1.0, -inf
        self.masks: list[Value] = []
        self.covers: list[str] = []

    def product(self, value: Value, *, grouped: bool = False) -> Node | None:
        """Return the product of queries and keys; None if the nodes before the softmax are others.

        `grouped`: whether a reshape may follow it, of rows of heads that share keys.
        """
        node = own_producer(self.graph, value)
        while node is not None:
            self.covers.append(node.name)
            if is_product(self.graph, node):
                return node if self._takes_post_ops(node) else None
            inputs = self.graph.inputs(node.name)
            if grouped and isinstance(node.attrs, Reshape):
                product = own_producer(self.graph, inputs["src"])
                return product if product is not None and is_product(self.graph, product) else None
            if node.post_ops or not self._takes(node.attrs, inputs.get("src_1")):
                return None
            following = inputs.get("src_0") or inputs["src"]
            if self.graph.type_of(following) != node.results[0]:
                return None
            node = own_producer(self.graph, following)
        return None

    def unscaled(self, value: Value) -> Value:
        """Return an operand of the product before a factor, which becomes one of the product; exporters write two."""
        node = own_producer(self.graph, value)
        match node.attrs if node is not None else None:
            case Eltwise("linear", factor, 0.0) if node is not None and factor and not node.post_ops:
                source = self.graph.inputs(node.name)["src"]
                if self.graph.type_of(source) == node.results[0]:
                    self.scale *= factor
                    self.covers.append(node.name)
                    return source
        return value

    def _takes_post_ops(self, product: Node) -> bool:
        inputs = self.graph.inputs(product.name)
        return all(
            self._takes(post_op.attrs, None if post_op.operand is None else inputs[post_op.operand])
            for post_op in reversed(product.post_ops)
        )

    def _takes(self, attrs: object, operand: Value | None) -> bool:
        """Record a lower bound, a factor, or the addition of an unscaled mask; return False for all else."""
        match attrs:
            case Eltwise("clip", lowest, highest) if highest == inf and not self.masks and self.scale == 1.0:
                self.lowest = max(self.lowest, lowest)
                return True
            case Eltwise("linear", factor, 0.0):
                self.scale *= factor
                return True
            case Binary("add") | Sum((1.0,)) | Sum((1.0, 1.0)) if operand is not None and self.scale == 1.0:
                self.masks.insert(0, operand)
                return True
        return False


def is_product(graph: Graph, node: Node) -> bool:
    """Return whether a node multiplies batches of matrices of the same rank, without a bias."""
    inputs = {} if node.is_boundary else graph.inputs(node.name)
    if not isinstance(node.attrs, MatMul) or "bias" in inputs:
        return False
    return graph.type_of(inputs["weights"]).ndim == graph.type_of(inputs["src"]).ndim >= 3


def _limit(graph: Graph, found: Scores, queries: int, keys: int) -> tuple[int | None, list[Value]]:
    """Return the limit that some masks express, and the other masks.

    Models write the lowest finite number for minus infinity. Beside another mask it hides nothing for certain: where
    the other one lowers all other scores too, as at padding, PyTorch's weights are equal. A lower bound of the scores
    shows keys again that it raises.
    """
    masks = found.masks
    hidden = torch.finfo(torch_dtype(graph.type_of(masks[0]).dtype)).min if len(masks) == 1 else -inf
    if found.lowest > hidden:
        return None, masks
    limits = {mask: _limit_of(graph, mask, queries, keys, hidden) for mask in masks}
    known = [limit for limit in limits.values() if limit is not None]
    limit = min(known, default=None)
    if limit is not None and limit >= keys - 1:  # all keys
        limit = None
    return limit, [mask for mask in masks if limits[mask] is None]


def _limit_of(graph: Graph, mask: Value, queries: int, keys: int, hidden: float) -> int | None:
    """Return n if a constant mask is 0 for keys up to i + n of query i, and at most `hidden` for the others."""
    node = graph.node(mask.node)
    if node.op == "reorder":  # of a constant in another data type
        node = graph.node(graph.inputs(node.name)["src"].node)
    dims = node.results[0].dims
    if node.op != "constant" or dims[-2:] != (queries, keys) or not 1 <= node.results[0].size <= _MOST_NUMBERS:
        return None
    if node.name not in graph.constants:  # a compiled graph has released its numbers
        return None
    numbers = materialise(graph.constants[node.name], node.results[0]).reshape(-1, queries, keys)
    allowed = numbers == 0
    limit = int(allowed[0, 0].sum()) - 1
    if limit < 0:
        return None
    forbidden = numbers <= hidden
    expected = torch.ones(queries, keys, dtype=torch.bool).tril(limit)
    return limit if bool((allowed == expected).all() and (forbidden == ~expected).all()) else None
