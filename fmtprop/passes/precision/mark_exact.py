"""Marks of nodes that must treat NaN and infinities exactly as PyTorch does.

Owns the marks. An op's declaration lists the special values that its primitive loses (`Numbers.loses`); targets do not
offer such implementations for marked nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fmtprop.ir import Category, Graph, Node, Value, opdef
from fmtprop.ir.tensors import Constant, materialise
from fmtprop.passes.base import Pass

#: numbers of larger constants are not examined
_LARGEST_NBYTES = 16 << 20


@dataclass(frozen=True)
class MarkExact(Pass):
    """Mark nodes that must give PyTorch's special values.

    Requires a well-formed graph without formats, before fusion: a marked node that loses special values never becomes
    a post-op.
    """

    #: whether to mark all nodes. Otherwise only maxima and minima that may read infinities are marked: those that come
    #: from an input, a constant or a PyTorch operator (such as a mask) without a layer with weights between.
    everything: bool = False

    def run(self, graph: Graph) -> Graph:
        """Return the marked graph."""
        infinite = set() if self.everything else _infinite(graph)

        def marked(node: Node) -> Node:
            if node.is_boundary or node.exact:
                return node
            meets = any(value in infinite for value in graph.inputs(node.name).values())
            exact = self.everything or (meets and "extremum" in opdef(node.op).numbers.loses(node.attrs))
            return node.with_(exact=True) if exact else node

        return graph.map_nodes(marked)


def _infinite(graph: Graph) -> set[Value]:
    """Return the values that may hold infinities although the weights are finite."""
    found: set[Value] = set()
    for node in graph.nodes():
        if node.op == "output" or _is_spoiled(node):
            continue
        begins = _has_infinity(graph, node) if node.op == "constant" else node.op == "input" or _is_pytorch(node)
        if begins or any(value in found for value in graph.inputs(node.name).values()):
            found |= {Value(node.name, index) for index, type_ in enumerate(node.results) if type_.dtype.is_floating}
    return found


def _is_pytorch(node: Node) -> bool:
    return not node.is_boundary and opdef(node.op).category is Category.HOST


def _is_spoiled(node: Node) -> bool:
    return not node.is_boundary and opdef(node.op).numbers.spreads


def _has_infinity(graph: Graph, node: Node) -> bool:
    """Return whether a constant has a relevant infinity; weights have none, and may be too large to examine."""
    (type_,) = node.results
    readers = (graph.node(reader) for reader, _ in graph.reading(Value(node.name)))
    # those of PyTorch may make infinities themselves
    read = any(not (_is_spoiled(one) or _is_pytorch(one)) for one in readers)
    data = graph.constants[node.name]
    # the packing refuses data that is not a constant's
    if not (read and type_.dtype.is_floating and type_.nbytes <= _LARGEST_NBYTES and isinstance(data, Constant)):
        return False
    return bool(torch.isinf(materialise(data, type_)).any())
