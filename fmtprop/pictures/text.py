"""Pictures of layouts in a terminal: the logical grid and the line of memory as text.

Owns the rendering; ``composition`` owns the content. Must not know how a layout is computed.
"""

from __future__ import annotations

from collections.abc import Sequence

from fmtprop.layout.desc import MemoryDesc
from fmtprop.pictures.composition import Cell, Picture, compose

MAX_COLUMNS = 100

_MARKS = {"padding": "·", "gap": "-"}


def draw_text(
    md: MemoryDesc,
    *,
    labels: Sequence[str] | None = None,
    title: str | None = None,
    axes: str = "",
    colour: bool = False,
) -> str:
    """Draw a descriptor as text: the logical grid of positions, and the line of memory with indices.

    `md`: a plain or blocked descriptor of at most 4096 positions. `labels`: text of every logical element in row-major
    order, shown in both parts. `title`: headline; default: the descriptor's short form. `axes`: letters of the axes,
    such as ``"nchw"``. `colour`: True to colour by memory order with ANSI escapes (24-bit). Raises ShapeError if the
    tensor is too large to draw, or labels or axes do not fit, and FormatError if the format is any or opaque.

    >>> print(draw_text(MemoryDesc((2, 3), "u8", tag="aB4b"), labels="ABCDEF"))
    u8[2,3]:aB4b
    strides a:4, b:4  inner blocks 4b
    8 bytes, 2 unused (25.0 %); padded to 2×4
    <BLANKLINE>
    A B C ·
    D E F ·
    <BLANKLINE>
    memory: elements
    0: A B C · D E F ·
    """
    picture = compose(md, labels=labels, title=title, axes=axes)
    lines = [picture.title, *picture.facts, "", *_grid_lines(picture, colour), "", f"memory: {picture.reading}"]
    return "\n".join([*lines, *_memory_lines(picture, colour)])


def _square(cell: Cell, width: int, colour: bool) -> str:
    text = (cell.label or _MARKS.get(cell.kind, "")).rjust(width)
    if not colour or cell.colour is None:
        return text
    red, green, blue = cell.colour
    ink = 255 if 0.299 * red + 0.587 * green + 0.114 * blue < 140 else 16
    return f"\x1b[38;5;{ink};48;2;{red};{green};{blue}m{text}\x1b[0m"


def _width(cells: Sequence[Cell]) -> int:
    return max((len(cell.label) for cell in cells), default=1) or 1


def _grid_lines(picture: Picture, colour: bool) -> list[str]:
    """Write the panels of the last two axes, as many side by side as fit."""
    dims, width = picture.md.padded_dims, _width(picture.grid)
    if not picture.grid:
        return ["(empty)"]
    rows, columns = (1, 1, *dims)[-2:]
    caption = max((len(_caption(picture, cell)) for cell in picture.grid[:: rows * columns]), default=0)
    across = max(columns * (width + 1) - 1, caption)
    panels = [_panel(picture, start, width, across, colour) for start in range(0, len(picture.grid), rows * columns)]
    count = dims[-3] if len(dims) > 2 else 1
    abreast = max(min(count, (MAX_COLUMNS + 3) // (across + 3)), 1)
    lines: list[str] = []
    for line in range(0, len(panels), count):
        for first in range(line, line + count, abreast):
            lines += [""] * bool(lines)
            side = panels[first : min(first + abreast, line + count)]
            lines += ["   ".join(parts).rstrip() for parts in zip(*side, strict=True)]
    return lines


def _caption(picture: Picture, cell: Cell) -> str:
    return " ".join(f"{name}={i}" for name, i in zip(picture.axes, cell.index[:-2], strict=False))


def _panel(picture: Picture, start: int, width: int, across: int, colour: bool) -> list[str]:
    dims = (1, 1, *picture.md.padded_dims)
    rows, columns = dims[-2:]
    lines = [_caption(picture, picture.grid[start]).ljust(across)] if len(dims) > 4 else []
    fill = " " * (across - columns * (width + 1) + 1)
    for first in range(start, start + rows * columns, columns):
        cells = picture.grid[first : first + columns]
        lines.append(" ".join(_square(cell, width, colour) for cell in cells) + fill)
    return lines


def _memory_lines(picture: Picture, colour: bool) -> list[str]:
    width, last = _width(picture.memory), len(str(max(len(picture.memory) - 1, 0)))
    lines = []
    for start in range(0, len(picture.memory), picture.row):
        cells = picture.memory[start : start + picture.row]
        lines.append(f"{start:>{last}}: " + " ".join(_square(cell, width, colour) for cell in cells))
    return lines or ["(empty)"]
