"""Reports as files: the extension says in which form.

Owns which extensions there are, and what is said when a file cannot be written. A report renders itself.
"""

from __future__ import annotations

import os
from os import PathLike
from pathlib import Path
from typing import Protocol

from fmtprop.errors import FmtpropError

__all__ = ["FORMS", "Renderable", "check_destination", "write_report", "write_text"]

#: file extension -> the method that renders that form
FORMS = {".txt": "to_text", ".json": "to_json"}


class Renderable(Protocol):
    """What can be written: a report, a comparison, a benchmark."""

    def to_text(self) -> str:
        """Return tables for people."""

    def to_json(self) -> str:
        """Return JSON for programs."""


def check_destination(path: str | PathLike[str]) -> Path:
    """Check that a report can be written, before the work whose result it holds is done.

    Parameters
    ----------
    path : path-like
        The file.

    Returns
    -------
    Path

    Raises
    ------
    FmtpropError
        Unknown extension, a directory in its place, no directory to hold it, or no permission.

    Examples
    --------
    >>> check_destination("report.pdf")
    Traceback (most recent call last):
        ...
    fmtprop.errors.FmtpropError: report.pdf: unknown kind of report '.pdf'; known: .txt, .json
    """
    file = _path(path)
    if file.suffix.lower() not in FORMS:
        raise FmtpropError(f"{file}: unknown kind of report {file.suffix!r}; known: {', '.join(FORMS)}")
    _check_place(file)
    return file


def write_report(report: Renderable, path: str | PathLike[str]) -> None:
    """Write a report in the form that the file's extension names.

    Parameters
    ----------
    report : Report, Comparison or Benchmark
        What to write.
    path : path-like
        The file; an existing one is replaced.

    Raises
    ------
    FmtpropError
        As :func:`check_destination`, or the file system refused.
    """
    file = check_destination(path)
    text: str = getattr(report, FORMS[file.suffix.lower()])()
    write_text(text, file)


def write_text(text: str, path: str | PathLike[str]) -> None:
    """Write a rendered report to a file of any extension.

    Parameters
    ----------
    text : str
        The report; it gets one line break at its end.
    path : path-like
        The file; an existing one is replaced.

    Raises
    ------
    FmtpropError
        A directory in its place, no directory to hold it, no permission, or the file system refused.
    """
    file = _path(path)
    _check_place(file)
    try:
        file.write_text(text.rstrip("\n") + "\n", encoding="utf-8")
    except OSError as error:
        raise FmtpropError(f"{file} cannot be written: {error.strerror}") from error


def _path(path: object) -> Path:
    if not isinstance(path, str | PathLike) or not isinstance(os.fspath(path), str):
        raise FmtpropError(f"a report's path must be a str or a pathlib.Path, got {path!r}")
    if not os.fspath(path) or "\0" in os.fspath(path):
        raise FmtpropError(f"a report's path must name a file, got {os.fspath(path)!r}")
    return Path(path)


def _check_place(file: Path) -> None:
    try:
        if file.is_dir():
            raise FmtpropError(f"{file} is a directory; give a file, such as {file / 'report.txt'}")
        if not file.parent.is_dir():
            raise FmtpropError(f"{file}: the directory {file.parent} does not exist; create it first")
        writable = os.access(file if file.exists() else file.parent, os.W_OK)
    except OSError as error:  # such as a name that is too long
        raise FmtpropError(f"{file} cannot be written: {error.strerror}") from error
    if not writable:
        raise FmtpropError(f"{file} cannot be written: no permission; choose another place")
