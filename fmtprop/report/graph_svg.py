"""Graphs as SVG, readable at 100 %: what a run computes, from top to bottom, in columns. Reads a graph at any stage."""

from __future__ import annotations

from html import escape

from fmtprop.ir import Graph, Node
from fmtprop.passes.assignment.formats import describe
from fmtprop.report.sketch import computed, op_with_tail, places
from fmtprop.system.printable import printable

#: size of a box, and the distance between boxes, in pixels
_WIDTH, _HEIGHT, _STEP_X, _STEP_Y, _MARGIN = 230, 46, 254, 78, 24
_HEADING = 28

#: characters of 12 px that fit into a box
_CHARACTERS = 30

_STYLE = """
.fmtprop { background: #fff; font: 12px system-ui, sans-serif }
.fmtprop rect { fill: #eef3f8; stroke: #6b7c93 } .fmtprop text { fill: #1b2733 } .fmtprop .detail { fill: #51606f }
.fmtprop path { fill: none; stroke: #8a99a8 } .fmtprop .reorder rect { fill: #ffd08a; stroke: #b36b00 }
@media (prefers-color-scheme: dark) {
.fmtprop { background: #14181d } .fmtprop rect { fill: #25303b; stroke: #7d8fa3 }
.fmtprop text { fill: #e6edf3 } .fmtprop .detail { fill: #a8b5c2 }
.fmtprop .reorder rect { fill: #6b4a12; stroke: #e0a040 } }
"""


def graph_svg(graph: Graph, title: str = "") -> str:
    """Return a graph as a picture, without constants and without what is packed once.

    `title`: the heading; the graph's name by default.

    >>> from fmtprop.capture import load
    >>> graph_svg(load("chain")).count("<rect")
    5
    """
    nodes = computed(graph)
    at = {
        name: (x * _STEP_X + _MARGIN, y * _STEP_Y + _MARGIN + _HEADING) for name, (x, y) in places(graph, nodes).items()
    }
    width = max((x for x, _ in at.values()), default=0) + _WIDTH + _MARGIN
    height = max((y for _, y in at.values()), default=0) + _HEIGHT + _MARGIN
    edges = [
        _edge(*at[value.node], *at[name])
        for name in nodes
        for value in graph.inputs(name).values()
        if value.node in nodes
    ]
    boxes = [_box(graph, node, *at[name]) for name, node in nodes.items()]
    return "\n".join([
        "<!-- fmtprop graph -->",
        f'<svg class="fmtprop" xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}">',
        f"<style>{_STYLE}</style>",
        f'<text x="{_MARGIN}" y="{_MARGIN}">{_text(title or graph.name)}</text>',
        *edges, *boxes, "</svg>\n",
    ])  # fmt: skip


def _edge(x0: float, y0: float, x1: float, y1: float) -> str:
    """Draw the way of a tensor, from below its producer to above its reader."""
    x0, y0, x1 = x0 + _WIDTH / 2, y0 + _HEIGHT, x1 + _WIDTH / 2
    bend = (_STEP_Y - _HEIGHT) / 2
    way = f"M{x0:.0f} {y0:.0f} C{x0:.0f} {y0 + bend:.0f} {x1:.0f} {y1 - bend:.0f} {x1:.0f} {y1:.0f}"
    return f'<path d="{way}"/>'


def _box(graph: Graph, node: Node, x: float, y: float) -> str:
    value = None if node.results else graph.inputs(node.name)["src"]
    type_ = graph.type_of(value) if value is not None else node.results[0]
    formatted = graph.node(value.node).descs[value.index : value.index + 1] if value is not None else node.descs[:1]
    what = f"{type_!r} {describe(formatted[0])}" if formatted else repr(type_)
    impl = f"\n{node.choice.impl}" if node.choice is not None and not node.is_boundary else ""
    kind = ' class="reorder"' if node.op == "reorder" else ""
    name, op = f"{node.name}: {op_with_tail(node)}", _text(what)
    return (
        f"<g{kind}><title>{_text(name)}\n{op}{_text(impl)}</title>"
        f'<rect x="{x:.0f}" y="{y:.0f}" width="{_WIDTH}" height="{_HEIGHT}" rx="5"/>'
        f'<text x="{x + 8:.0f}" y="{y + 19:.0f}">{_text(_short(name))}</text>'
        f'<text class="detail" x="{x + 8:.0f}" y="{y + 36:.0f}">{_text(_short(what))}</text></g>'
    )


def _short(text: str) -> str:
    return text if len(text) <= _CHARACTERS else f"{text[: _CHARACTERS - 1]}…"


def _text(text: str) -> str:
    return escape("\n".join(map(printable, text.split("\n"))))
