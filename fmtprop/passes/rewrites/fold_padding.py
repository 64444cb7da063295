"""Folding of explicit padding into the convolution or pooling after it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from fmtprop.errors import ShapeError
from fmtprop.ir import Attrs, Graph, Node
from fmtprop.ops import Conv, Pad, Pooling
from fmtprop.passes.base import NodePass


@dataclass(frozen=True)
class FoldPadding(NodePass):
    """Make a convolution or pooling apply the constant padding before it by itself.

    Foldable are zeros before a convolution, zeros before an average (which then counts them), and minus infinity
    before a maximum. Padding of other axes, or wider than a pooling's window, stays.

    Requires a well-formed graph. Ensures that no such pair is left.
    """

    def _visit(self, graph: Graph, node: Node) -> None:
        if not isinstance(node.attrs, Conv | Pooling):
            return
        source = graph.node(graph.inputs(node.name)["src"].node)
        padding = _padding(source, node.results[0].ndim - 2)
        attrs = _padded(node.attrs, padding) if padding is not None else None
        if attrs is not None:
            graph.replace(node.with_(attrs=attrs))
            graph.set_input(node.name, "src", graph.inputs(source.name)["src"])


class _Padding(NamedTuple):
    left: tuple[int, ...]
    right: tuple[int, ...]
    value: float


def _padding(node: Node, spatial: int) -> _Padding | None:
    """Return a node's padding of the spatial axes; None if it is not constant, or pads other axes."""
    attrs = node.attrs
    if not isinstance(attrs, Pad):
        return None
    outer = len(attrs.pads_l) - spatial
    if any(attrs.pads_l[:outer]) or any(attrs.pads_r[:outer]):
        return None
    return _Padding(attrs.pads_l[outer:], attrs.pads_r[outer:], attrs.value)


def _padded(attrs: Attrs, padding: _Padding) -> Attrs | None:
    """Return the attributes with the padding added; None if this would be another function."""
    if isinstance(attrs, Conv):
        return _added(attrs, padding) if padding.value == 0 else None
    if not isinstance(attrs, Pooling):
        return None
    if attrs.alg == "max":
        return _added(attrs, padding) if padding.value == -math.inf else None
    if padding.value != 0:
        return None
    if attrs.alg == "avg_exclude_padding":
        if any(attrs.pad_l) or any(attrs.pad_r):
            return None
        # The explicit zeros are elements of the source: they count in the average.
        attrs = replace(attrs, alg="avg_include_padding")
    return _added(attrs, padding)


def _added(attrs: Conv | Pooling, padding: _Padding) -> Attrs | None:
    left = tuple(a + b for a, b in zip(attrs.pad_l, padding.left, strict=True))
    right = tuple(a + b for a, b in zip(attrs.pad_r, padding.right, strict=True))
    try:
        return replace(attrs, pad_l=left, pad_r=right)
    except ShapeError:  # wider than the window: oneDNN refuses it
        return None
