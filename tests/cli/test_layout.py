"""`fmtprop layout`."""

from __future__ import annotations

import pytest

from tests.cli.command import fmtprop


def test_facts(capsys):
    code, out, err = fmtprop(capsys, "layout", "nChw16c", "2,17,5,7")
    assert (code, err) == (0, "")
    assert "padded dims   (2, 32, 5, 7)" in out
    assert "\x1b" not in out, "colours are for terminals"


def test_there_and_back(capsys):
    assert fmtprop(capsys, "layout", "nChw16c", "2x17x5x7", "--at", "1,16,4,6").out == (
        "index (1, 16, 4, 6) lies at position 2224, byte 8896\n"
    )
    assert fmtprop(capsys, "layout", "nChw16c", "2,17,5,7", "-d", "bf16", "--position", 2225).out == (
        "position 2225 holds padding\n"
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["dml:NHWC", "1,2,3,4"], "strides       (24, 1, 8, 2)"),
        (["f32[2,3]{0,1}"], "strides       (1, 2)"),
        (["strides:5,1", "3,4"], "none: no format tag expresses these strides"),
    ],
)
def test_other_forms(capsys, words, expected):
    code, out, err = fmtprop(capsys, "layout", *words)
    assert (code, err) == (0, "")
    assert expected in out


def test_picture(capsys, tmp_path):
    path = tmp_path / "picture.svg"
    code, _, err = fmtprop(capsys, "layout", "nChw8c", "1,8,2,2", "--svg", path)
    assert (code, err) == (0, f"wrote {path}\n")
    assert path.read_text().lstrip().startswith("<svg")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nChw16c"], "'nChw16c' needs dims, such as 2,17,5,7"),
        (["nChw16c", "2,x,5"], "dims '2,x,5' must be integers separated by commas"),
        (["nope!", "2,3"], "nope!"),
        (["f32[2,3]{0,1}", "2,3"], "is an XLA shape: it brings its own dims"),
        (["nchw", "2,3,4,5", "--at", "0,3,0,0"], "3"),
        (
            ["nchw", "2,3,4,5", "--svg", "/gone/picture.svg"],
            "picture.svg cannot be written: the directory /gone does not exist",
        ),
    ],
)
def test_bad_layouts(capsys, words, message):
    code, out, err = fmtprop(capsys, "layout", *words)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and message in err
