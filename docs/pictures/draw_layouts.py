"""Draw the pictures of docs/layout.md: the worked examples of the source documents.

Run it from the project's root after a change to the drawing: ``python docs/pictures/draw_layouts.py``. A test
compares the committed pictures with what it draws.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

from fmtprop.dialects.directml import BufferTensor, packed_strides
from fmtprop.dialects.slice1 import Slice1
from fmtprop.dialects.xla import Layout, Shape
from fmtprop.layout import MemoryDesc
from fmtprop.pictures.svg import draw_svg


class Example(NamedTuple):
    """One picture: its title, what it shows, the text of the elements, and the letters of the axes."""

    title: str
    md: MemoryDesc
    labels: str | list[str] | None = None
    axes: str = ""


def _dml(sizes: tuple[int, ...], strides: tuple[int, ...] | None = None) -> MemoryDesc:
    return BufferTensor(sizes, strides, "u8").to_memory_desc()


def _xla(layout: Layout) -> MemoryDesc:
    return Shape("u8", (2, 3), layout).to_memory_desc()


_NUMBERS = [str(n) for n in range(1, 17)]
_IMAGE = MemoryDesc((1, 1, 4, 4))

EXAMPLES = {
    "m4_left": Example("M4 concat in place: the left 2×2", MemoryDesc((2, 5)).submemory((2, 2), (0, 0))),
    "m4_right": Example("M4 concat in place: the right 2×3", MemoryDesc((2, 5)).submemory((2, 3), (0, 2))),
    "m5_plain": Example("M5 matrix 3×4, strides {LDA, 1}, LDA = 6", MemoryDesc((3, 4), strides=(6, 1)), None, "mn"),
    "m5_transposed": Example(
        "M5 the same matrix stored transposed, strides {1, LDA}, LDA = 4",
        MemoryDesc((3, 4), strides=(1, 4)),
        None,
        "mn",
    ),
    "m6_nchw": Example("M6 nchw = abcd", MemoryDesc((2, 3, 2, 4), tag="nchw"), None, "nchw"),
    "m6_nhwc": Example("M6 nhwc = acdb", MemoryDesc((2, 3, 2, 4), tag="nhwc"), None, "nchw"),
    "m6_nChw4c": Example(
        "M6 nChw4c = aBcd4b, 6 channels padded to 8", MemoryDesc((1, 6, 2, 3), tag="nChw4c"), None, "nchw"
    ),
    "m6_nested": Example("M6 two levels of blocks, AB2b4a2b", MemoryDesc((8, 8), tag="AB2b4a2b")),
    "d1_dhw": Example("D1 sizes {2,2,3}, strides {6,3,1}", _dml((2, 2, 3), (6, 3, 1)), "ABCDEFGHIJKL", "dhw"),
    "d2_wh": Example("D2 column major, WH", _dml((2, 3), packed_strides((2, 3), "WH")), "ABCDEF", "hw"),
    "d2_nhwc": Example(
        "D2 sizes {1,2,3,5} as NHWC", _dml((1, 2, 3, 5), packed_strides((1, 2, 3, 5), "NHWC")), None, "nchw"
    ),
    "d4_broadcast": Example("D4 broadcast, strides {0,1}", _dml((2, 3), (0, 1)), "ABCABC", "hw"),
    "d5_padding": Example("D5 padding, strides {5,1}", _dml((2, 3), (5, 1)), "ABCDEF", "hw"),
    "s3_input": Example("S3 the input 1..16", _IMAGE, _NUMBERS, "nchw"),
    "s3_view": Example(
        "S3 example 1: a view, nothing is copied",
        Slice1((0, 0, 0, 1), (1, 1, 4, 3), (1, 1, 2, 2)).view(_IMAGE),
        ["2", "4", "10", "12"],
        "nchw",
    ),
    "s3_copy": Example(
        "S3 example 2: negative strides, a copy", MemoryDesc((1, 1, 2, 2)), ["14", "16", "6", "8"], "nchw"
    ),
    "x2_minor": Example("X2 minor_to_major {0,1}", _xla(Layout((0, 1))), "abcdef", "yx"),
    "x2_major": Example("X2 minor_to_major {1,0}", _xla(Layout((1, 0))), "abcdef", "yx"),
    "x3_padding": Example("X3 padded_dimensions [3,5]", _xla(Layout((0, 1), (3, 5), 0)), "abcdef", "yx"),
}


def pictures() -> dict[str, str]:
    """Return every picture's SVG text by file name."""
    return {
        f"layout_{name}.svg": draw_svg(example.md, labels=example.labels, title=example.title, axes=example.axes)
        for name, example in EXAMPLES.items()
    }


if __name__ == "__main__":
    folder = Path(__file__).parent
    for file, svg in pictures().items():
        (folder / file).write_text(svg)
    sys.stdout.write(f"{len(EXAMPLES)} pictures written to {folder}\n")
