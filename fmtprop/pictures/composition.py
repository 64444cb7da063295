"""Content of a picture of a layout: a cell per padded logical element, a cell per position of memory.

Owns the content of pictures (cells, their colours and labels, the wrapping of the memory line); ``picture_svg`` and
``picture_text`` render it. Must not know about SVG or terminals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from fmtprop.errors import ShapeError
from fmtprop.layout import address
from fmtprop.layout.desc import MemoryDesc
from fmtprop.layout.tags import LETTERS

MAX_CELLS = 4096
ROW_CELLS = 32

# Anchors of a perceptually even scale from dark blue over green to yellow (viridis).
_SCALE = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))


@dataclass(frozen=True)
class Cell:
    """One square of a picture."""

    #: padded logical index; ``()`` for a position of memory that is a gap
    index: tuple[int, ...]
    position: int
    label: str
    #: red, green, blue by memory order; None for padding and gaps
    colour: tuple[int, int, int] | None
    #: ``"element"``, ``"padding"`` or ``"gap"``
    kind: str


@dataclass(frozen=True)
class Picture:
    """The content of a picture of one descriptor."""

    md: MemoryDesc
    title: str
    facts: tuple[str, ...]
    #: letter of every logical axis
    axes: str
    #: the logical tensor with its padding, in row-major order of ``md.padded_dims``
    grid: tuple[Cell, ...]
    #: memory from position 0 to the end of the storage
    memory: tuple[Cell, ...]
    #: positions per row of the memory line
    row: int
    reading: str


def compose(
    md: MemoryDesc, *, labels: Sequence[str] | None = None, title: str | None = None, axes: str = ""
) -> Picture:
    """Lay out the content of a picture.

    `md`: a plain or blocked descriptor of at most 4096 positions. `labels`: text of every logical element in row-major
    order; default: positions in the grid, indices in memory. `title`: headline; default: the descriptor's short form.
    `axes`: letters of the axes, such as ``"nchw"``; default ``"abcd"``. Raises FormatError if the format is any or
    opaque.
    """
    g = md.geometry
    size = md.nbytes // md.dtype.nbytes
    if max(size, prod(g.padded_dims)) > MAX_CELLS:
        raise ShapeError(f"{md} has {size} positions, too many to draw; use dims of at most {MAX_CELLS} positions")
    if labels is not None and len(labels) != md.nelems:
        raise ShapeError(f"{len(labels)} labels for the {md.nelems} elements of {md}; give one per element")
    names = axes or LETTERS[: md.ndim]
    if len(names) != md.ndim:
        raise ShapeError(f"axes {axes!r} must hold one letter per dimension of {md.dims}")
    colours = _colours(md, size)
    return Picture(
        md=md,
        title=title or str(md),
        facts=_facts(md, names),
        axes=names,
        grid=_grid(md, labels, colours),
        memory=_memory(md, labels, colours, size),
        row=_row(md, size),
        reading="elements" if labels else "logical indices" if _short_indices(md) else "row-major element numbers",
    )


def _facts(md: MemoryDesc, names: str) -> tuple[str, ...]:
    facts = ["strides " + ", ".join(f"{n}:{s}" for n, s in zip(names, md.strides, strict=True))]
    if md.inner_blocks:
        facts[0] += "  inner blocks " + " ".join(f"{b.size}{names[b.axis]}" for b in md.inner_blocks)
    size = f"{md.nbytes} bytes"
    if md.padding_bytes:
        size += f", {md.padding_bytes} unused ({md.padding_percent:.1f} %)"
    if md.padded_dims != md.dims:
        size += f"; padded to {'×'.join(map(str, md.padded_dims))}"
    if md.offset0:
        size += f"; starts at {md.offset0}"
    return (*facts, size)


def _colours(md: MemoryDesc, size: int) -> dict[int, tuple[int, int, int]]:
    """Colour every position that holds an element, evenly along memory."""
    used = [p for p, index in enumerate(md.indices_at(np.arange(size)).tolist()) if md.ndim == 0 or index[0] >= 0]
    last = max(len(used) - 1, 1)
    return {position: _scale(rank / last) for rank, position in enumerate(used)}


def _scale(share: float) -> tuple[int, int, int]:
    at = share * (len(_SCALE) - 1)
    low = min(int(at), len(_SCALE) - 2)
    red, green, blue = (round(a + (b - a) * (at - low)) for a, b in zip(_SCALE[low], _SCALE[low + 1], strict=True))
    return red, green, blue


def _grid(md: MemoryDesc, labels: Sequence[str] | None, colours: dict[int, tuple[int, int, int]]) -> tuple[Cell, ...]:
    g = md.geometry
    padded = g._replace(dims=g.padded_dims, padded_offsets=(0,) * md.ndim)
    cells = []
    for index in np.ndindex(*g.padded_dims):
        position = address.offset(padded, index)
        logical = tuple(i - p for i, p in zip(index, g.padded_offsets, strict=True))
        if all(0 <= i < n for i, n in zip(logical, g.dims, strict=True)):
            label = str(position) if labels is None else labels[_row_major(logical, g.dims)]
            cells.append(Cell(index, position, label, colours[position], "element"))
        else:
            cells.append(Cell(index, position, "", None, "padding"))
    return tuple(cells)


def _memory(
    md: MemoryDesc, labels: Sequence[str] | None, colours: dict[int, tuple[int, int, int]], size: int
) -> tuple[Cell, ...]:
    g = md.geometry
    padded = g._replace(dims=tuple(n * b for n, b in zip(g.outer_counts(), g.blocks(), strict=True)))
    padded = padded._replace(padded_dims=padded.dims, padded_offsets=(0,) * md.ndim)
    cells = []
    for position in range(size):
        index = md.index_at(position)
        if index is not None:
            number = _row_major(index, g.dims)
            own = "".join(map(str, index)) if _short_indices(md) and index else str(number)
            label = own if labels is None else labels[number]
            cells.append(Cell(index, position, label, colours[position], "element"))
        else:
            inside = address.index_at(padded, position)
            cells.append(Cell(inside or (), position, "", None, "gap" if inside is None else "padding"))
    return tuple(cells)


def _short_indices(md: MemoryDesc) -> bool:
    """Return whether an index fits into a square with one digit per axis."""
    return md.ndim <= 4 and max(md.dims, default=0) <= 10


def _row_major(index: tuple[int, ...], dims: tuple[int, ...]) -> int:
    flat = 0
    for i, n in zip(index, dims, strict=True):
        flat = flat * n + i
    return flat


def _row(md: MemoryDesc, size: int) -> int:
    """Return the positions per row of the memory line: whole blocks or whole fast dimensions if they fit."""
    if size <= ROW_CELLS:
        return max(size, 1)
    steps = {md.geometry.block_elements(), *md.strides}
    steps |= {s * n for s, n in zip(md.strides, md.geometry.outer_counts(), strict=True)}
    fitting = [step for step in steps if ROW_CELLS // 4 < step <= ROW_CELLS]
    best = max(fitting, default=ROW_CELLS)
    return best * (ROW_CELLS // best)
