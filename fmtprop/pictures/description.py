"""Output of ``fmtprop layout``: a layout is read from text and described in words, numbers and pictures.

Owns the texts of the command; the command line itself only parses, calls and prints. ``composition`` owns the content
of pictures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fmtprop.dialects import directml, xla
from fmtprop.errors import FormatError, ShapeError
from fmtprop.layout.desc import MemoryDesc
from fmtprop.layout.tags import LETTERS, parse_tag
from fmtprop.pictures.composition import Cell, Picture, compose
from fmtprop.pictures.svg import draw_svg

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


#: the text includes the picture up to this number of positions
MOST_DRAWN_POSITIONS = 512

# Logical axes of DirectML's tensors by rank (SPEC D2).
_DML_AXES = {2: "hw", 3: "dhw", 4: "nchw", 5: "ncdhw"}


@dataclass(frozen=True)
class Subject:
    """A layout that was read from text."""

    md: MemoryDesc
    title: str
    axes: str


def read_layout(form: str, dims: str | None = None, dtype: str | None = None) -> Subject:
    """Read a layout from the words of the command line.

    `form`: one of: a format tag (``nChw16c``); ``strides:5,1``; DirectML's ``dml:15,1,5,1``, ``dml:NHWC`` or
    ``dml:packed``; an XLA shape (``f32[2,3]{0,1}``), which brings its own dims and data type. `dims`: sizes, separated
    by commas or ``x``: ``2,17,5,7``. Required by all forms except XLA's. `dtype`: data type; default f32. Raises
    FormatError or ShapeError if the form or the sizes cannot be read, or do not fit each other.

    >>> read_layout("nChw16c", "2,17,5,7").md.nbytes, read_layout("f32[2,3]{0,1}").md.tag
    (8960, 'ba')
    """
    if "[" in form:
        shape = xla.parse_shape(form)
        if dims is not None or dtype is not None:
            raise ShapeError(f"{form!r} is an XLA shape: it brings its own dims and data type, so leave them out")
        return Subject(shape.to_memory_desc(), form, LETTERS[: shape.rank])
    if dims is None:
        raise ShapeError(f"{form!r} needs dims, such as 2,17,5,7 (only XLA shapes bring their own)")
    sizes, data_type = _integers(dims, "dims"), dtype or "f32"
    kind, _, rest = form.partition(":")
    if kind == "strides":
        md = MemoryDesc(sizes, data_type, strides=_integers(rest, "strides"))
        return Subject(md, form, LETTERS[: md.ndim])
    if kind == "dml":
        return Subject(_directml(rest, sizes, data_type), form, _DML_AXES.get(len(sizes), LETTERS[: len(sizes)]))
    tag = parse_tag(form)
    return Subject(MemoryDesc(sizes, data_type, tag=form), form, tag.letters)


def _directml(rest: str, sizes: tuple[int, ...], dtype: str) -> MemoryDesc:
    if rest == "packed":
        strides = None
    elif rest.isalpha():
        strides = directml.packed_strides(sizes, rest)
    else:
        strides = _integers(rest, "strides")
    return directml.BufferTensor(sizes, strides, dtype).to_memory_desc()


def describe(subject: Subject, *, at: str | None = None, position: int | None = None, colour: bool = False) -> str:
    """Describe a layout in text.

    `at`: a logical index, such as ``0,16,0,1``; the answer is its position. `position`: a position in memory; the
    answer is its logical index. Raises ShapeError if the index is out of range, and FormatError if the index cannot be
    read.

    >>> print(describe(read_layout("nChw16c", "2,17,5,7"), at="0,16,0,1", position=577))
    index (0, 16, 0, 1) lies at position 576, byte 2304
    position 577 holds padding
    """
    md = subject.md
    answers = []
    if at is not None:
        index = _integers(at, "index")
        where = md.offset(index)
        answers.append(f"index {_tuple(index)} lies at position {where}, byte {where * md.dtype.nbytes}")
    if position is not None:
        answers.append(f"position {position} holds {_content(md, position)}")
    if answers:
        return "\n".join(answers)
    lines = [f"{subject.title}: {md}", "", *_facts(subject), "", *_dialects(md)]
    if md.nbytes // md.dtype.nbytes <= MOST_DRAWN_POSITIONS:
        lines += ["", draw_text(md, title=subject.title, axes=subject.axes, colour=colour)]
    return "\n".join(lines)


def draw(subject: Subject) -> str:
    """Draw a layout as SVG.

    Raises ShapeError if the tensor is too large to draw.
    """
    return draw_svg(subject.md, title=f"{subject.title}  {_shape(subject.md)}", axes=subject.axes)


def _content(md: MemoryDesc, position: int) -> str:
    if not 0 <= position < md.nbytes // md.dtype.nbytes:
        return "nothing: the storage ends before it" if position >= 0 else "nothing: positions begin at 0"
    index = md.index_at(position)
    return "padding" if index is None else f"index {_tuple(index)}"


def _facts(subject: Subject) -> list[str]:
    md = subject.md
    unused = f", of which {md.padding_bytes} ({md.padding_percent:.1f} %) hold no element" if md.padding_bytes else ""
    rows = {
        "tag": md.tag or "none: no format tag expresses these strides",
        "data type": f"{md.dtype} ({md.dtype.nbytes} bytes)",
        "dims": _shape(md),
        "padded dims": _tuple(md.padded_dims),
        "strides": _tuple(md.strides),
        "inner blocks": " ".join(f"{b.size}{subject.axes[b.axis]}" for b in md.inner_blocks) or "none",
        "storage": f"{md.nbytes} bytes{unused}",
        "dense": "yes" if md.is_packed else "yes, with padding" if md.is_dense else "no",
    }
    return [f"{name:<13} {value}" for name, value in rows.items()]


def _dialects(md: MemoryDesc) -> list[str]:
    """Describe the layout in DirectML's and XLA's words, or say why they cannot express it."""
    lines = []
    try:
        tensor = directml.BufferTensor.from_memory_desc(md)
        lines.append(
            f"DirectML      sizes {_tuple(tensor.sizes)} strides {_tuple(md.strides)}, {tensor.size_in_bytes} bytes"
        )
    except (FormatError, ShapeError) as error:
        lines.append(f"DirectML      not expressible: {_reason(md, error)}")
    try:
        lines.append(f"XLA           {xla.Shape.from_memory_desc(md)}")
    except FormatError as error:
        lines.append(f"XLA           not expressible: {_reason(md, error)}")
    return lines


def _reason(md: MemoryDesc, error: Exception) -> str:
    return str(error).removeprefix(f"{md}: ")


def _shape(md: MemoryDesc) -> str:
    return _tuple(md.dims)


def _tuple(values: tuple[int, ...]) -> str:
    return "(" + ", ".join(map(str, values)) + ")"


def _integers(text: str, what: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.replace("x", ",").strip("()").split(",")) if text.strip() else ()
    except ValueError:
        raise FormatError(f"{what} {text!r} must be integers separated by commas, such as 2,17,5,7") from None
