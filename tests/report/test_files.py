from __future__ import annotations

import os
from pathlib import Path

import pytest

from fmtprop.errors import FmtpropError
from fmtprop.report.files import FORMS, check_destination, write_report


class Rendered:
    def to_text(self) -> str:
        return "text\n\n"

    def to_json(self) -> str:
        return "{}"


@pytest.mark.parametrize(("name", "content"), [("a.txt", "text\n"), ("b.JSON", "{}\n")])
def test_the_extension_decides(tmp_path, name, content):
    (tmp_path / name).write_text("an older and much longer report")
    write_report(Rendered(), tmp_path / name)
    assert (tmp_path / name).read_text() == content


def test_every_form_is_rendered_by_every_report():
    from fmtprop.bench import Benchmark
    from fmtprop.report import Comparison, Report

    for kind in (Comparison, Report, Benchmark):
        assert all(callable(getattr(kind, method)) for method in FORMS.values())


def test_errors(tmp_path, monkeypatch):
    with pytest.raises(FmtpropError, match=r"r.pdf: unknown kind of report '.pdf'; known: .txt, .json"):
        check_destination(tmp_path / "r.pdf")
    with pytest.raises(FmtpropError, match="report: unknown kind of report ''"):
        check_destination(tmp_path / "report")
    (tmp_path / "d.txt").mkdir()
    with pytest.raises(FmtpropError, match=r"d\.txt is a directory; give a file, such as .*d\.txt/report\.txt"):
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
