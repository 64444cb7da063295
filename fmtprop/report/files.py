"""Reports as files: the extension chooses the form.

Owns the list of extensions, and the errors of files that cannot be written. A report renders itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import asdict
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

from fmtprop.errors import FmtpropError
from fmtprop.system.files import check_replaceable, path_of, replacing

#: file extension -> the method that renders its form
FORMS = {".txt": "to_text", ".json": "to_json", ".html": "to_html"}

#: the forms of a benchmark
TABLES = (".txt", ".json")

#: first line of a report as text
_HEADING = "fmtprop report\n"

#: the beginning of a report: only such files are replaced
_OURS = re.compile(
    rb'fmtprop report\n|\{\s*"schema": \d+,\s*"(policies|model|reference)":|<!doctype html>\n<!-- fmtprop report -->'
)

#: the beginning of a picture of a graph
OURS_SVG = re.compile(rb"<!-- fmtprop graph -->")

#: the beginning of a trace
OURS_TRACE = re.compile(rb'\{"fmtprop": "trace"')


class Renderable(Protocol):
    """A report, a comparison or a benchmark."""

    def to_text(self) -> str:
        """Return tables for people."""

    def to_json(self) -> str:
        """Return JSON for programs."""


def check_destination(path: str | PathLike[str], forms: Collection[str] = FORMS) -> Path:
    """Check that a report can be written, before the work for it is done.

    >>> check_destination("report.pdf")
    Traceback (most recent call last):
        ...
    fmtprop.errors.FmtpropError: report.pdf: unknown kind of report '.pdf'; known: .txt, .json, .html
    """
    file = _path(path)
    if file.suffix.lower() not in forms:
        raise FmtpropError(f"{file}: unknown kind of report {file.suffix!r}; known: {', '.join(forms)}")
    try:
        check_replaceable(file, _OURS)
    except OSError as error:
        raise _refused(file, error) from error
    return file


def write_report(report: Renderable, path: str | PathLike[str]) -> None:
    """Write a report in the form of the file's extension.

    Raises FmtpropError as :func:`check_destination`, or the file system refused.
    """
    file = check_destination(path)
    method = FORMS[file.suffix.lower()]
    text: str = getattr(report, method)()
    write_text(_HEADING + text if method == "to_text" else text, file)


def write_text(text: str, path: str | PathLike[str], ours: re.Pattern[bytes] = _OURS) -> None:
    """Write a rendered document to a file of any extension.

    `ours`: the beginning of such a document, a report by default. An existing file is replaced only if it begins so.
    Raises FmtpropError if a file of another kind exists, the directory does not, or the file system refuses.
    """
    file = _path(path)
    try:
        with replacing(file, ours) as temporary:
            temporary.write_text(text.rstrip("\n") + "\n", encoding="utf-8")
    except OSError as error:
        raise _refused(file, error) from error


class WrittenAsJson:
    """A table, which is a dataclass, as JSON."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {"schema": 1, **asdict(self)}  # type: ignore[call-overload]

    def to_json(self, path: str | PathLike[str] | None = None) -> str:
        """Return it as JSON; also write it when a path is given.

        Raises FmtpropError if the file cannot be written.
        """
        text = json.dumps(self.to_dict(), indent=1, allow_nan=False)
        if path is not None:
            write_text(text, path)
        return text


def _path(path: object) -> Path:
    try:
        return path_of(path)
    except OSError as error:
        raise FmtpropError(error.strerror or str(error)) from error


def _refused(file: Path, error: OSError) -> FmtpropError:
    return FmtpropError(f"{file} cannot be written: {error.strerror}")
