"""Formats to consider for each tensor: the usual ones, and those that make a later view free.

A view transforms its source's format. So a good format for the view's reader, transformed back through the view, is a
good format for the source's producer: if a matmul writes its heads interleaved, the permute after it costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from fmtprop.errors import FmtpropError
from fmtprop.ir import Graph, Node, TensorType, Value, opdef
from fmtprop.layout import MemoryDesc
from fmtprop.passes.target import Target

#: most formats of a tensor in addition to its producer's: more would cost more time of the solver than they save
_MOST_FORMATS = 6


def usable_formats(graph: Graph, target: Target) -> dict[Value, list[MemoryDesc]]:
    """Return, for each value of a normal graph, the formats that its readers could use, the usual ones first."""
    found: dict[Value, list[MemoryDesc]] = {}
    for node in reversed(graph.nodes()):
        for index, type_ in enumerate(node.results):
            value = Value(node.name, index)
            formats = list(target.formats(type_.dims, type_.dtype))
            for reader, _ in graph.readers(value):
                formats += _through(graph.node(reader), found, type_)
            found[value] = list(dict.fromkeys(formats))[:_MOST_FORMATS]
    return found


def _through(view: Node, found: Mapping[Value, list[MemoryDesc]], source: TensorType) -> list[MemoryDesc]:
    """Return the formats of a view's source that give the formats for the view's readers."""
    rule = None if view.is_boundary else opdef(view.op).view
    if rule is None or rule.src is None:
        return []
    formats = []
    for wanted in found[Value(view.name)]:
        try:
            desc = rule.src(view.attrs, wanted, source)
        except FmtpropError:
            continue  # the view cannot have this format
        if desc.is_packed and prod(desc.dims) == prod(source.dims):
            formats.append(desc)
    return formats
