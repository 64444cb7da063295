"""The texts of ``fmtprop layout``."""

from __future__ import annotations

import pytest

from fmtprop.errors import FmtpropError, FormatError, ShapeError
from fmtprop.layout import MemoryDesc
from fmtprop.pictures.description import describe, draw, read_layout


@pytest.mark.parametrize(
    ("words", "md", "axes"),
    [
        (("nChw16c", "2,17,5,7"), MemoryDesc((2, 17, 5, 7), tag="aBcd16b"), "nchw"),
        (("ab", "2,3", "i32"), MemoryDesc((2, 3), "s32"), "ab"),
        (("acdb", "2x17x5x7", "bf16"), MemoryDesc((2, 17, 5, 7), "bf16", tag="acdb"), "abcd"),
        (("strides:5,1", "(2, 3)"), MemoryDesc((2, 3), strides=(5, 1)), "ab"),
        (("dml:NHWC", "1,1,3,5"), MemoryDesc((1, 1, 3, 5), strides=(15, 1, 5, 1)), "nchw"),
        (("dml:0,1", "2,3", "u8"), MemoryDesc((2, 3), "u8", strides=(0, 1)), "hw"),
        (("dml:packed", "2,3"), MemoryDesc((2, 3)), "hw"),
        (("s8[2,3]{0,1}",), MemoryDesc((2, 3), "s8", tag="ba"), "ab"),
        (("f32[]",), MemoryDesc(()), ""),
    ],
)
def test_reads_every_form(words: tuple[str, ...], md: MemoryDesc, axes: str) -> None:
    subject = read_layout(*words)
    assert subject.md == md
    assert (subject.axes, subject.title) == (axes, words[0])


@pytest.mark.parametrize(
    ("words", "error", "says"),
    [
        (("nchw",), ShapeError, "'nchw' needs dims, such as 2,17,5,7"),
        (("f32[2]{0}", "2"), ShapeError, "brings its own dims and data type"),
        (("f32[2]{0}", None, "s8"), ShapeError, "brings its own dims and data type"),
        (("a[b", "2,3"), FormatError, "'a.b' is not an array shape such as"),
        (("any", "2,3"), FormatError, "'any' names no format: it leaves the choice to the primitive"),
        (("nchw", "2,a"), FormatError, "dims '2,a' must be integers separated by commas"),
        (("strides:x", "2"), FormatError, "strides 'x' must be integers"),
        (("nope", "2,3,4,5"), FormatError, "format tag 'nope'"),
        (("dml:NHWC", "2,3"), ShapeError, "must name each of the 2 dimensions"),
    ],
)
def test_refused(words: tuple[str, ...], error: type[FmtpropError], says: str) -> None:
    with pytest.raises(error, match=says):
        read_layout(*words)


def test_description() -> None:
    lines = describe(read_layout("nChw4c", "1,6,2,2")).splitlines()
    for line in (
        "nChw4c: f32[1,6,2,2]:aBcd4b",
        "tag           aBcd4b",
        "padded dims   (1, 8, 2, 2)",
        "strides       (32, 16, 8, 4)",
        "inner blocks  4c",
        "storage       128 bytes, of which 32 (25.0 %) hold no element",
        "dense         yes, with padding",
        "memory: logical indices",
    ):
        assert line in lines
    assert "DirectML      not expressible: DirectML describes a tensor by strides only" in "\n".join(lines)
    assert "XLA           not expressible: XLA's minor_to_major cannot express inner blocks" in "\n".join(lines)


def test_description_in_the_other_dialects() -> None:
    lines = describe(read_layout("nhwc", "2,3,4,5", "u8")).splitlines()
    assert "DirectML      sizes (2, 3, 4, 5) strides (60, 1, 15, 3), 120 bytes" in lines
    assert "XLA           u8[2,3,4,5]{1,3,2,0}" in lines
    assert "dense         yes" in lines


def test_large_tensors_are_described_without_a_picture() -> None:
    text = describe(read_layout("nChw16c", "64,256,56,56"))
    assert "storage       205520896 bytes" in text
    assert "memory:" not in text


def test_questions_have_short_answers() -> None:
    subject = read_layout("nChw16c", "2,17,5,7")
    assert describe(subject, at="0,16,0,1") == "index (0, 16, 0, 1) lies at position 576, byte 2304"
    assert describe(subject, position=576) == "position 576 holds index (0, 16, 0, 1)"
    assert describe(subject, position=577) == "position 577 holds padding"
    assert describe(subject, position=99999) == "position 99999 holds nothing: the storage ends before it"
    assert describe(subject, position=-1) == "position -1 holds nothing: positions begin at 0"
    assert describe(subject, at="0,0,0,0", position=0).count("\n") == 1
    with pytest.raises(ShapeError, match="is out of range"):
        describe(subject, at="0,17,0,0")


def test_drawing() -> None:
    assert draw(read_layout("nchw", "1,2,2,2")).startswith("<svg")
    with pytest.raises(ShapeError, match="too many to draw"):
        draw(read_layout("nchw", "64,256,56,56"))
