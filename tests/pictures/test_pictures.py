"""Pictures: every cell is there, coloured by memory order, padding and gaps marked."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from fmtprop.errors import FormatError, ShapeError
from fmtprop.layout import MemoryDesc
from fmtprop.pictures.composition import compose
from fmtprop.pictures.description import draw_text
from fmtprop.pictures.svg import draw_svg

DOCS = Path(__file__).parents[2] / "docs"
SVG = "{http://www.w3.org/2000/svg}"

DRAWN = [
    MemoryDesc((2, 3), tag="ba"),
    MemoryDesc((2, 6, 2, 3), tag="nChw4c"),
    MemoryDesc((5, 6), tag="AB2b4a2b"),
    MemoryDesc((2, 3), strides=(5, 1)),
    MemoryDesc((2, 3), strides=(0, 1)),
    MemoryDesc((4, 4)).submemory((2, 3), (1, 1)),
    MemoryDesc((3, 2), padded_dims=(5, 4), padded_offsets=(1, 2)),
    MemoryDesc((40, 3, 3), tag="bca"),
    MemoryDesc((2, 1, 3, 2, 2), tag="ebcda"),
    MemoryDesc((7,)),
    MemoryDesc(()),
]


@pytest.mark.parametrize("md", DRAWN, ids=str)
def test_cells_are_the_tensor_and_its_storage(md: MemoryDesc) -> None:
    picture = compose(md)
    elements = [cell for cell in picture.grid if cell.kind == "element"]
    assert len(picture.grid) == np.prod(md.padded_dims)
    assert [cell.position for cell in elements] == [md.offset(index) for index in np.ndindex(*md.dims)]
    assert len(picture.memory) * md.dtype.nbytes == md.nbytes
    for cell in picture.memory:
        assert cell.index == (md.index_at(cell.position) or cell.index)
        assert (cell.kind == "element") == (md.index_at(cell.position) is not None)
    unused = sum(cell.kind != "element" for cell in picture.memory)
    assert unused * md.dtype.nbytes == md.padding_bytes


@pytest.mark.parametrize("md", DRAWN, ids=str)
def test_colours_follow_memory_and_agree_in_both_parts(md: MemoryDesc) -> None:
    picture = compose(md)
    of_position = {cell.position: cell.colour for cell in picture.memory}
    assert all(cell.colour == of_position[cell.position] for cell in picture.grid if cell.kind == "element")
    assert all((cell.colour is None) == (cell.kind != "element") for cell in (*picture.grid, *picture.memory))
    greens = [cell.colour[1] for cell in picture.memory if cell.colour]
    assert greens == sorted(greens)  # the scale brightens monotonically in green


@pytest.mark.parametrize("md", DRAWN, ids=str)
def test_svg_draws_every_cell_inside_the_page_without_overlap(md: MemoryDesc) -> None:
    root = ElementTree.fromstring(draw_svg(md))
    rects = [r for r in root.iter(f"{SVG}rect") if r.get("class") in ("element", "padding", "gap") and len(r)]
    picture = compose(md)
    assert len(rects) == len(picture.grid) + len(picture.memory)
    corners = {(r.get("x"), r.get("y")) for r in rects}
    assert len(corners) == len(rects)
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    for rect in rects:
        assert float(rect.get("x", 0)) + float(rect.get("width", 0)) <= width
        assert float(rect.get("y", 0)) + float(rect.get("height", 0)) <= height
    assert width <= 1100


def test_svg_is_safe_with_any_label() -> None:
    root = ElementTree.fromstring(draw_svg(MemoryDesc((2,)), labels=["<&", '"'], title="a < b & c"))
    texts = [t.text for t in root.iter(f"{SVG}text")]
    assert texts[0] == "a < b & c"
    assert texts.count("<&") == 2


def test_text_without_colour() -> None:
    assert draw_text(MemoryDesc((2, 3), "u8", strides=(5, 1)), labels="ABCDEF", axes="hw").splitlines() == [
        "u8[2,3]:5x1",
        "strides h:5, w:1",
        "10 bytes, 4 unused (40.0 %)",
        "",
        "A B C",
        "D E F",
        "",
        "memory: elements",
        "0: A B C - - D E F - -",
    ]


def test_text_sets_panels_side_by_side() -> None:
    lines = draw_text(MemoryDesc((2, 2, 2), "u8", tag="cab")).splitlines()
    assert lines[4:10] == [
        "a=0   a=1",
        "0 4   2 6",
        "1 5   3 7",
        "",
        "memory: logical indices",
        "0: 000 010 100 110 001 011 101 111",
    ]


def test_text_with_colour_is_the_same_text() -> None:
    md = MemoryDesc((2, 6), tag="aB4b")
    coloured = draw_text(md, colour=True)
    assert "\x1b[" in coloured
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == draw_text(md)


def test_empty_tensor() -> None:
    assert "(empty)" in draw_text(MemoryDesc((0, 3)))
    ElementTree.fromstring(draw_svg(MemoryDesc((0, 3))))


def test_what_cannot_be_drawn() -> None:
    with pytest.raises(ShapeError, match="4097 positions, too many to draw; use dims of at most 4096"):
        draw_svg(MemoryDesc((4097,)))
    with pytest.raises(ShapeError, match="5 labels for the 6 elements"):
        draw_svg(MemoryDesc((2, 3)), labels="ABCDE")
    with pytest.raises(ShapeError, match="axes 'hwc' must hold one letter per dimension"):
        draw_text(MemoryDesc((2, 3)), axes="hwc")
    with pytest.raises(FormatError, match="format any"):
        draw_svg(MemoryDesc.any((2, 3)))


def test_the_docs_show_what_is_drawn_today() -> None:
    script = DOCS / "pictures" / "draw_layouts.py"
    spec = importlib.util.spec_from_file_location("draw_layouts", script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = (DOCS / "layout.md").read_text()
    drawn = module.pictures()
    assert drawn.keys() == {path.name for path in (DOCS / "pictures").glob("layout_*.svg")}
    for name, svg in drawn.items():
        assert (DOCS / "pictures" / name).read_text() == svg, f"run python {script.relative_to(DOCS.parent)}"
        assert f"pictures/{name}" in page, f"docs/layout.md does not show {name}"


def test_a_notebook_shows_layouts():
    desc = MemoryDesc((1, 17, 3, 3), "bf16", tag="aBcd16b")
    assert draw_svg(desc)._repr_html_() == draw_svg(desc) and draw_svg(desc).startswith("<svg")
    table = desc._repr_html_()
    assert "<td>bf16[1,17,3,3]:aBcd16b</td>" in table and "<td>576</td>" in table
    assert "<td>16 of axis 1</td>" in table and "<td>1 x 32 x 3 x 3</td>" in table
    assert "<td>f32[2]:any</td>" in MemoryDesc.any((2,), "f32")._repr_html_()
    assert "strides" not in MemoryDesc.any((2,), "f32")._repr_html_()
