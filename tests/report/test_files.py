from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest

from fmtprop.errors import FmtpropError
from fmtprop.report import Comparison, Report
from fmtprop.report.files import FORMS, TABLES, check_destination, write_report, write_text
from tests.report.test_comparison import report


class Rendered:
    def to_text(self) -> str:
        return "text\n\n"

    def to_json(self) -> str:
        return "{}"


@pytest.mark.parametrize(("name", "content"), [("a.txt", "fmtprop report\ntext\n"), ("b.JSON", "{}\n")])
def test_the_extension_decides(tmp_path, name, content):
    (tmp_path / name).write_text("fmtprop report\nthat is older and much longer")
    write_report(Rendered(), tmp_path / name)
    assert (tmp_path / name).read_text() == content


def test_every_form_is_rendered_by_every_report():
    from fmtprop.bench import Benchmark

    for kind in (Comparison, Report):
        assert all(callable(getattr(kind, method)) for method in FORMS.values())
    assert all(callable(getattr(Benchmark, FORMS[form])) for form in TABLES)


def test_errors(tmp_path, monkeypatch):
    with pytest.raises(FmtpropError, match=r"r.pdf: unknown kind of report '.pdf'; known: .txt, .json, .html"):
        check_destination(tmp_path / "r.pdf")
    with pytest.raises(FmtpropError, match="report: unknown kind of report ''"):
        check_destination(tmp_path / "report")
    (tmp_path / "d.txt").mkdir()
    with pytest.raises(FmtpropError, match=r"d\.txt cannot be written: it is a directory, not a file"):
        check_destination(tmp_path / "d.txt")
    with pytest.raises(FmtpropError, match=r"the directory .*gone does not exist; create it first"):
        check_destination(tmp_path / "gone" / "r.txt")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(FmtpropError, match=r"r\.txt cannot be written: no permission; choose another place"):
        check_destination(tmp_path / "r.txt")


def test_the_file_system_refuses(tmp_path, monkeypatch):
    def refuse(self: Path, *_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", refuse)
    with pytest.raises(FmtpropError, match=r"r\.txt cannot be written: No space left on device"):
        write_report(Rendered(), tmp_path / "r.txt")


def test_a_destination_in_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert check_destination("r.txt") == Path("r.txt")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (5, "a path must be a str or a pathlib.Path, got 5"),
        (b"r.json", "a path must be a str or a pathlib.Path, got b'r.json'"),
        ("", "a path must name a file, got ''"),
        ("a\0.json", r"a path must name a file, got 'a\\x00.json'"),
        ("/nonexistent/r.json", "the directory /nonexistent does not exist; create it first"),
    ],
)
def test_paths_that_cannot_be_written(path, message):
    writers = (check_destination, functools.partial(write_text, "text"), functools.partial(write_report, Rendered()))
    for write in writers:
        with pytest.raises(FmtpropError, match=message):
            write(path)


def test_a_name_that_is_too_long():
    with pytest.raises(FmtpropError, match=r"long\.json cannot be written: File name too long"):
        write_report(Rendered(), "long" * 100 + ".json")


@pytest.mark.parametrize("kind", [Report, Comparison])
def test_to_json_is_told_the_same(kind, tmp_path):
    made = report("plain") if kind is Report else Comparison.of([report("plain")], [0.0])
    for path, message in (
        (5, "must be a str or a"),
        (tmp_path / "gone" / "r", "gone does not exist"),
        (tmp_path, "is a"),
    ):
        with pytest.raises(FmtpropError, match=message):
            made.to_json(path)
    made.to_json(tmp_path / "report")  # any extension
    assert (tmp_path / "report").read_text() == made.to_json() + "\n"
