"""Which nodes must treat NaN and infinities as PyTorch does, whatever an implementation makes of them.

Owns the marks; what loses which of them is said by an op's declaration (`OpDef.loses`), and who asks for it leaves such
implementations out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fmtprop.ir.graph import Graph
from fmtprop.ir.node import Node, Value
from fmtprop.ir.op import Category, opdef
from fmtprop.ir.tensors import Constant, materialise

__all__ = ["MarkExact"]

#: bytes of the largest constants whose numbers are looked at
_LARGEST = 16 << 20


@dataclass(frozen=True)
class MarkExact:
    """Mark nodes whose special values must be PyTorch's.

    Parameters
    ----------
    everything : bool
        Whether that holds for all nodes. Otherwise it holds for maxima and minima that may meet infinities alone: where
        these come from an input, a constant or an operator of PyTorch's (a mask, say), and not through a layer with
        weights.

    Notes
    -----
    Requires a well-formed graph without formats. Before fusion: a marked node that loses special values is no post-op.
    """

    name: ClassVar[str] = "mark-exact"

    everything: bool = False

    def run(self, graph: Graph) -> Graph:
        """Return the marked graph."""
        infinite = set() if self.everything else _infinite(graph)

        def marked(node: Node) -> Node:
            if node.is_boundary or node.exact:
                return node
            meets = any(value in infinite for value in graph.inputs(node.name).values())
            exact = self.everything or (meets and "extremum" in opdef(node.op).loses(node.attrs))
            return node.with_(exact=True) if exact else node

        return graph.map_nodes(marked)


def _infinite(graph: Graph) -> set[Value]:
    """Return the values that may hold infinities while the weights are finite."""
    found: set[Value] = set()
    for node in graph.nodes():
        if node.op == "output" or _is_spoiled(node):
            continue
        if node.op == "constant":
            begins = _has_infinity(graph, node)
        else:
            begins = node.op == "input" or opdef(node.op).category is Category.HOST
        if begins or any(value in found for value in graph.inputs(node.name).values()):
            found |= {Value(node.name, index) for index, type_ in enumerate(node.results) if type_.dtype.is_floating}
    return found


def _is_spoiled(node: Node) -> bool:
    return not node.is_boundary and opdef(node.op).spreads


def _has_infinity(graph: Graph, node: Node) -> bool:
    """Tell whether a constant has an infinity that counts: weights have none, and may be too large to look at."""
    (type_,) = node.results
    read = any(not _is_spoiled(graph.node(reader)) for reader, _ in graph.readers(Value(node.name)))
    data = graph.constants[node.name]
    # what is no constant's data is refused by those who pack it
    if not (read and type_.dtype.is_floating and type_.nbytes <= _LARGEST and isinstance(data, Constant)):
        return False
    return bool(torch.isinf(materialise(data, type_)).any())
