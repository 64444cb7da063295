"""Where a command's words go: results to stdout, everything else to stderr, and what failed becomes an exit code."""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import NoReturn, TextIO

from fmtprop.errors import FmtpropError
from fmtprop.printable import printable

#: exit codes besides 0; 130 (interrupted) and 141 (nobody reads any more) are the shell's own
FAILED, USAGE, BROKEN_PIPE = 1, 2, 141

#: whether an error shows its traceback
TRACEBACK: ContextVar[bool] = ContextVar("traceback", default=False)


def emit(text: str) -> None:
    """Print a result; end quietly when the reader has gone (``fmtprop models | head -1``)."""
    out = sys.stdout
    if out is None:  # the shell's >&-
        complain("cannot write to stdout: it is closed")
        raise SystemExit(FAILED)
    if isinstance(out, io.TextIOWrapper):
        out.reconfigure(errors="replace")  # a terminal without the characters of tables gets question marks
    try:
        out.write(text.rstrip("\n") + "\n")
        out.flush()
    except OSError as error:
        _give_up(error)


def note(text: str) -> None:
    """Tell the user something that is not the result; names from files may be in it."""
    if sys.stderr is None:  # where print would go to stdout
        return
    try:
        print("\n".join(map(printable, text.split("\n"))), file=sys.stderr, flush=True)
    except OSError:  # nobody can be told; the exit code is what is left
        _abandon(sys.stderr)


def complain(text: str) -> None:
    """Tell the user what is wrong."""
    note(f"error: {text}")


def show_warning(message: Warning | str, *_: object, **__: object) -> None:
    """Print a warning as one line; takes the place of :func:`warnings.showwarning`."""
    note(f"warning: {message}")


def save(path: Path, text: str) -> None:
    """Write a result to a file.

    Raises
    ------
    FmtpropError
        The file system refused.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise FmtpropError(f"{path} cannot be written: {error.strerror}") from error


@contextmanager
def failing(code: int) -> Iterator[None]:
    """End the program with an exit code if fmtprop raises an error: one line, or a traceback if asked for."""
    try:
        yield
    except FmtpropError as error:
        if TRACEBACK.get():
            traceback.print_exception(error)
        complain(str(error))
        raise SystemExit(code) from None


@contextmanager
def printing_help() -> Iterator[None]:
    """End the program as :func:`emit` does where help or usage, which typer prints by itself, cannot be written."""
    try:
        yield
    except OSError as error:
        *_, (last, _) = traceback.walk_tb(error.__traceback__)
        if last.f_globals.get("__name__", "").partition(".")[0] not in ("typer", "click"):
            raise
        usage: int | None = getattr(error.__context__, "exit_code", None)
        if usage is None:
            _give_up(error)
        _abandon(sys.stderr)
        raise SystemExit(usage) from None


def _give_up(error: OSError) -> NoReturn:
    """End the program because stdout takes no more."""
    _abandon(sys.stdout)
    if isinstance(error, BrokenPipeError):
        raise SystemExit(BROKEN_PIPE) from None
    complain(f"cannot write to stdout: {error.strerror}")
    raise SystemExit(FAILED) from error


def _abandon(stream: TextIO) -> None:
    # What is still buffered would fail again when the interpreter ends.
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@contextmanager
def progress() -> Iterator[Callable[[str, int, int], None]]:
    """Yield a function that shows what is being done, steps done and steps in all; silent unless on a terminal."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield lambda what, done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    # Redrawn only when told: a thread that redraws by itself would disturb what is being measured.
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False) as bar:
        task = bar.add_task("loading", total=None)
        bar.refresh()
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total, refresh=True)
