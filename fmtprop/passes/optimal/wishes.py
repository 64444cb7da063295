"""Which formats of each tensor are worth having: the field's usual ones, and those that make a later view free.

A view transforms its source's format. So a format that the view's reader likes, taken back through the view, is one
that the source's producer should be asked for: a matmul that writes its heads interleaved makes the permute after it
cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod

from fmtprop.errors import FmtpropError
from fmtprop.ir.graph import Graph
from fmtprop.ir.node import Node, Value
from fmtprop.ir.op import Category, opdef
from fmtprop.ir.types import TensorType
from fmtprop.layout import MemoryDesc
from fmtprop.ops.view_attrs import Permute
from fmtprop.passes.target import Target

__all__ = ["wishes"]

#: formats of one tensor that are tried beyond those its producer offers: with more, solving takes longer than it saves
_MOST = 6


def wishes(graph: Graph, target: Target) -> dict[Value, list[MemoryDesc]]:
    """Return for each value of a normal graph the formats that its readers could use, the more usual first.

    Parameters
    ----------
    graph : Graph
        A normal graph.
    target : Target
        Who says which formats are usual.
    """
    found: dict[Value, list[MemoryDesc]] = {}
    for node in reversed(graph.nodes()):
        for index, type_ in enumerate(node.results):
            value = Value(node.name, index)
            formats = list(target.formats(type_.dims, type_.dtype))
            for reader, _ in graph.readers(value):
                formats += _through(graph.node(reader), found, type_)
            found[value] = list(dict.fromkeys(formats))[:_MOST]
    return found


def _through(view: Node, found: Mapping[Value, list[MemoryDesc]], source: TensorType) -> list[MemoryDesc]:
    """Return the formats of a view's source that give the formats which its readers wish."""
    if view.is_boundary or opdef(view.op).category is not Category.VIEW:
        return []
    inverse = _INVERSES.get(view.op)
    if inverse is None:
        return []
    formats = []
    for wish in found[Value(view.name)]:
        try:
            desc = inverse(view, wish, source)
        except FmtpropError:
            continue  # this format cannot come out of the view
        if desc.is_packed and prod(desc.dims) == prod(source.dims):
            formats.append(desc)
    return formats


def _unpermute(view: Node, wish: MemoryDesc, source: TensorType) -> MemoryDesc:
    order = view.attrs.order if isinstance(view.attrs, Permute) else ()
    return wish.transpose(tuple(order.index(axis) for axis in range(len(order))))


def _unreshape(view: Node, wish: MemoryDesc, source: TensorType) -> MemoryDesc:
    return wish.reshape(source.dims)


_INVERSES: Mapping[str, Callable[[Node, MemoryDesc, TensorType], MemoryDesc]] = {
    "permute": _unpermute,
    "reshape": _unreshape,
}
