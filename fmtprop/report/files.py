"""Reports as files: the extension says in which form.

Owns which extensions there are, and what is said when a file cannot be written. A report renders itself.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from os import PathLike
from pathlib import Path
from typing import Protocol

from fmtprop.errors import FmtpropError
from fmtprop.system.files import check_replaceable, path_of, replacing

__all__ = ["FORMS", "Renderable", "check_destination", "write_report", "write_text"]

#: file extension -> the method that renders that form
FORMS = {".txt": "to_text", ".json": "to_json", ".html": "to_html"}

#: the forms of a benchmark
TABLES = (".txt", ".json")

#: first line of a report as text
_HEADING = "fmtprop report\n"

#: how a report begins: nothing else is replaced by one
_OURS = re.compile(
    rb'fmtprop report\n|\{\s*"schema": \d+,\s*"(policies|model|reference)":|<!doctype html>\n<!-- fmtprop report -->'
)

#: how a trace begins
OURS_TRACE = re.compile(rb'\{"fmtprop": "trace"')


class Renderable(Protocol):
    """What can be written: a report, a comparison, a benchmark."""

    def to_text(self) -> str:
        """Return tables for people."""

    def to_json(self) -> str:
        """Return JSON for programs."""


def check_destination(path: str | PathLike[str], forms: Collection[str] = FORMS) -> Path:
    """Check that a report can be written, before the work whose result it holds is done.

    Parameters
    ----------
    path : path-like
        The file.
    forms : collection of str
        Extensions of what can be written.

    Returns
    -------
    Path

    Raises
    ------
    FmtpropError
        Unknown extension, something else than a report in its place, no directory to hold it, or no permission.

    Examples
    --------
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
    """Write a report in the form that the file's extension names.

    Parameters
    ----------
    report : Report, Comparison or Benchmark
        What to write.
    path : path-like
        The file; an existing report is replaced.

    Raises
    ------
    FmtpropError
        As :func:`check_destination`, or the file system refused.
    """
    file = check_destination(path)
    method = FORMS[file.suffix.lower()]
    text: str = getattr(report, method)()
    write_text(_HEADING + text if method == "to_text" else text, file)


def write_text(text: str, path: str | PathLike[str], ours: re.Pattern[bytes] = _OURS) -> None:
    """Write a rendered document to a file of any extension.

    Parameters
    ----------
    text : str
        The document; it gets one line break at its end.
    path : path-like
        The file.
    ours : re.Pattern, optional
        How such a document begins, a report by default: an existing one is replaced, anything else is not.

    Raises
    ------
    FmtpropError
        Something else in its place, no directory to hold it, no permission, or the file system refused.
    """
    file = _path(path)
    try:
        with replacing(file, ours) as temporary:
            temporary.write_text(text.rstrip("\n") + "\n", encoding="utf-8")
    except OSError as error:
        raise _refused(file, error) from error


def _path(path: object) -> Path:
    try:
        return path_of(path)
    except OSError as error:
        raise FmtpropError(error.strerror or str(error)) from error


def _refused(file: Path, error: OSError) -> FmtpropError:
    return FmtpropError(f"{file} cannot be written: {error.strerror}")
