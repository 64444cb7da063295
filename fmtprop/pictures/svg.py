"""Pictures of layouts as SVG: the logical grid above the line of memory, coloured by memory order.

Owns the drawing; ``composition`` owns the content. Must not know how a layout is computed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

from fmtprop.layout.desc import MemoryDesc
from fmtprop.pictures.composition import Cell, Picture, compose

CELL = 28
MARGIN = 18
MAX_WIDTH = 920
PANEL_GAP = (16, 24)
"""Room between two panels, across and down (down holds the next panel's caption)."""

_STYLE = (
    "text{font-family:Helvetica,Arial,'DejaVu Sans',sans-serif;fill:#222}"
    ".title{font-size:15px;font-weight:bold}.facts{font-size:11px;fill:#555}"
    ".caption{font-size:11px;fill:#333}.tick{font-size:9px;fill:#777}"
    ".label{text-anchor:middle;dominant-baseline:central}"
    ".element{stroke:#fff;stroke-width:1}.padding{fill:url(#hatch);stroke:#bbb;stroke-width:.7}"
    ".gap{fill:#fff;stroke:#aaa;stroke-width:.7;stroke-dasharray:2 2}.block{fill:none;stroke:#111;stroke-width:1.6}"
)
#: the beginning of a picture of ours
OURS = re.compile(rb"<svg [^>]*>\n<style>" + re.escape(_STYLE[:60].encode()))

_HATCH = (
    '<pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="6" height="6" fill="#f2f2f2"/><line y2="6" stroke="#c4c4c4" stroke-width="2"/></pattern>'
)


class Drawing(str):
    """The text of an SVG document, which a notebook shows as the picture."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        """Return the document."""
        return str(self)


def draw_svg(
    md: MemoryDesc, *, labels: Sequence[str] | None = None, title: str | None = None, axes: str = ""
) -> Drawing:
    """Draw a descriptor as the logical grid and the line of memory.

    Both are coloured by memory order, from dark blue to yellow; padding is hatched, a gap between strides is dashed,
    and an inner block is framed. The grid shows positions and the line of memory indices, or both show `labels`.

    `md`: a plain or blocked descriptor of at most 4096 positions. `labels`: text of every logical element in row-major
    order. `title`: headline; default: the descriptor's short form. `axes`: letters of the axes, such as ``"nchw"``.
    Raises ShapeError if the tensor is too large to draw, or labels or axes do not fit, and FormatError if the format is
    any or opaque.

    >>> draw_svg(MemoryDesc((2, 3), tag="ba"), labels="ABCDEF").startswith("<svg")
    True
    """
    picture = compose(md, labels=labels, title=title, axes=axes)
    canvas = _Canvas()
    y = _headline(canvas, picture)
    y = _draw_grid(canvas, picture, y + 12)
    y = _draw_memory(canvas, picture, y + 26)
    _legend(canvas, picture, y + 16)
    return Drawing(canvas.document())


class _Canvas:
    """The elements of a document and their extent."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.width = self.height = 0.0

    def reach(self, x: float, y: float) -> None:
        self.width, self.height = max(self.width, x), max(self.height, y)

    def text(self, x: float, y: float, text: str, style: str, extra: str = "", advance: float = 6.2) -> None:
        self.parts.append(f'<text x="{x:g}" y="{y:g}" class="{style}"{extra}>{escape(text)}</text>')
        if style != "label":
            self.reach(x + advance * len(text), y + 4)

    def cell(self, cell: Cell, x: float, y: float, hint: str) -> None:
        fill = "" if cell.colour is None else f' fill="rgb{cell.colour}"'
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{CELL}" height="{CELL}" class="{cell.kind}"{fill}>'
            f"<title>{escape(hint)}</title></rect>"
        )
        if cell.label:
            size = min(12.0, 1.45 * CELL / max(len(cell.label), 2))
            extra = f' font-size="{size:.3g}" style="fill:{_ink(cell)}"'
            self.text(x + CELL / 2, y + CELL / 2, cell.label, "label", extra)
        self.reach(x + CELL, y + CELL)

    def frame(self, x: float, y: float, width: float, height: float) -> None:
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" class="block"/>')

    def document(self) -> str:
        width, height = self.width + MARGIN, self.height + MARGIN
        body = "\n".join(self.parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
            f'viewBox="0 0 {width:g} {height:g}">\n<style>{_STYLE}</style>\n<defs>{_HATCH}</defs>\n'
            f'<rect width="100%" height="100%" fill="#fff"/>\n{body}\n</svg>\n'
        )


def _ink(cell: Cell) -> str:
    """Black on light colours, white on dark ones."""
    if cell.colour is None:
        return "#888"
    red, green, blue = cell.colour
    return "#fff" if 0.299 * red + 0.587 * green + 0.114 * blue < 140 else "#111"


def _headline(canvas: _Canvas, picture: Picture) -> float:
    canvas.text(MARGIN, MARGIN + 12, picture.title, "title", advance=9.6)
    y = MARGIN + 12.0
    for line in picture.facts:
        y += 16
        canvas.text(MARGIN, y, line, "facts")
    return y


class _Panels:
    """Positions of the grid's cells: panels of the last two axes, side by side along the third last axis.

    A row of panels that grows too wide is wrapped.
    """

    def __init__(self, dims: Sequence[int]) -> None:
        self.rows, self.columns = ((1, 1, *dims)[-2:]) if dims else (1, 1)
        self.outer = tuple(dims[:-2])
        self.across = self.columns * CELL + PANEL_GAP[0]
        self.down = self.rows * CELL + PANEL_GAP[1]
        count = self.outer[-1] if self.outer else 1
        fitting = max(MAX_WIDTH // self.across, 1)
        # Break at a divisor if there is one: then all rows are equally long.
        divisors = [n for n in range(1, fitting + 1) if count % n == 0]
        self.per_row = count if count <= fitting else max([n for n in divisors if 2 * n > fitting] or [fitting])
        self.lines = -(-count // self.per_row)

    def place(self, index: tuple[int, ...]) -> tuple[float, float]:
        """Return the top left corner of a cell, relative to the grid."""
        row, column = (0, 0, *index)[-2:]
        line = 0
        for i, n in zip(index[:-3], self.outer[:-1], strict=True):
            line = line * n + i
        number = index[-3] if self.outer else 0
        line = line * self.lines + number // self.per_row
        return (number % self.per_row) * self.across + column * CELL, line * self.down + row * CELL


def _draw_grid(canvas: _Canvas, picture: Picture, top: float) -> float:
    md = picture.md
    panels = _Panels(md.padded_dims)
    left, top = MARGIN + (16 if md.ndim > 1 else 0), top + (28 if panels.outer else 14)
    bottom = top
    for cell in picture.grid:
        x, y = panels.place(cell.index)
        hint = f"({', '.join(map(str, cell.index))}) at {cell.position}" + ("" if cell.colour else ", padding")
        canvas.cell(cell, left + x, top + y, hint)
        bottom = max(bottom, top + y + CELL)
        if panels.outer and not any(cell.index[-2:]):
            text = " ".join(f"{name}={i}" for name, i in zip(picture.axes, cell.index[:-2], strict=False))
            canvas.text(left + x, top + y - (16 if y == 0 else 6), text, "caption")
        _ticks(canvas, picture, cell, left + x, top + y)
    _grid_blocks(canvas, picture, panels, left, top)
    return bottom


def _ticks(canvas: _Canvas, picture: Picture, cell: Cell, x: float, y: float) -> None:
    """Write the numbers of rows and columns at the first panel."""
    index = cell.index
    if not index or any(index[:-2]):
        return
    if len(index) == 1 or index[-2] == 0:
        canvas.text(x + CELL / 2, y - 4, f"{picture.axes[-1]}{index[-1]}", "tick", ' text-anchor="middle"')
    if len(index) > 1 and index[-1] == 0:
        canvas.text(x - 4, y + CELL / 2 + 3, f"{picture.axes[-2]}{index[-2]}", "tick", ' text-anchor="end"', 0)


def _grid_blocks(canvas: _Canvas, picture: Picture, panels: _Panels, left: float, top: float) -> None:
    """Frame the inner blocks that lie within a panel."""
    md = picture.md
    blocks = md.geometry.blocks()
    size = [min(b, n) for b, n in zip(blocks, md.padded_dims, strict=True)]
    if md.ndim == 0 or max(size[-2:]) == 1:
        return
    width, height = size[-1] * CELL, (size[-2] if md.ndim > 1 else 1) * CELL
    for cell in picture.grid:
        if all(i % b == 0 for i, b in zip(cell.index[-2:], blocks[-2:], strict=True)):
            x, y = panels.place(cell.index)
            canvas.frame(left + x, top + y, width, height)


def _draw_memory(canvas: _Canvas, picture: Picture, top: float) -> float:
    canvas.text(MARGIN, top, f"memory: {picture.reading} by position", "caption")
    left, top, block = MARGIN + 26.0, top + 8, picture.md.geometry.block_elements()
    bottom = top
    for cell in picture.memory:
        row, column = divmod(cell.position, picture.row)
        x, y = left + column * CELL, top + row * (CELL + 8)
        where = f"position {cell.position}: "
        hint = where + (f"({', '.join(map(str, cell.index))})" if cell.kind == "element" else cell.kind)
        canvas.cell(cell, x, y, hint)
        if column == 0:
            canvas.text(x - 5, y + CELL / 2 + 3, str(cell.position), "tick", ' text-anchor="end"', 0)
        bottom = max(bottom, y + CELL)
    if block > 1:
        _memory_blocks(canvas, picture, left, top, block)
    return bottom


def _memory_blocks(canvas: _Canvas, picture: Picture, left: float, top: float, block: int) -> None:
    start = picture.md.offset0
    for first in range(start, len(picture.memory), block):
        position = first
        while position < min(first + block, len(picture.memory)):
            row, column = divmod(position, picture.row)
            count = min(picture.row - column, first + block - position)
            canvas.frame(left + column * CELL, top + row * (CELL + 8), count * CELL, CELL)
            position += count


def _legend(canvas: _Canvas, picture: Picture, y: float) -> None:
    kinds = {cell.kind for cell in (*picture.memory, *picture.grid)} - {"element"}
    x = float(MARGIN + 26)
    for kind, text in (("padding", "padding"), ("gap", "gap, not part of the tensor")):
        if kind in kinds:
            canvas.parts.append(f'<rect x="{x:g}" y="{y:g}" width="12" height="12" class="{kind}"/>')
            canvas.text(x + 17, y + 10, text, "facts")
            x += 40 + 6.2 * len(text)
    if picture.md.geometry.block_elements() > 1:
        canvas.frame(x, y, 12, 12)
        canvas.text(x + 17, y + 10, "inner block", "facts")
