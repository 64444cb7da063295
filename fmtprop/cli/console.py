"""Output of commands: results go to stdout, everything else to stderr, and failures become exit codes."""

from __future__ import annotations

import io
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TextIO

from fmtprop.errors import FmtpropError, OptionError
from fmtprop.system.files import replacing
from fmtprop.system.printable import printable

if TYPE_CHECKING:
    from fmtprop.bench import Benchmark
    from fmtprop.report import Comparison

#: exit codes other than 0; 130 (interrupted) and 141 (broken pipe) are the shell's own
FAILED, USAGE, BROKEN_PIPE = 1, 2, 141

#: whether an error shows its traceback
TRACEBACK: ContextVar[bool] = ContextVar("traceback", default=False)


def emit(text: str) -> None:
    """Print a result; end quietly if the reader has closed the pipe (``fmtprop models | head -1``)."""
    out = sys.stdout
    if out is None:  # the shell's >&-
        complain("cannot write to stdout: it is closed")
        raise SystemExit(FAILED)
    if isinstance(out, io.TextIOWrapper):
        out.reconfigure(errors="replace")  # a terminal that cannot show the characters of tables shows question marks
    try:
        out.write(text.rstrip("\n") + "\n")
        out.flush()
    except OSError as error:
        _give_up(error)


def note(text: str) -> None:
    """Print a note that is not the result; it may contain names from files."""
    if sys.stderr is None:  # then print would write to stdout
        return
    try:
        print("\n".join(map(printable, text.split("\n"))), file=sys.stderr, flush=True)
    except OSError:  # nothing can be printed; only the exit code is left
        _abandon(sys.stderr)


def pass_on(text: str) -> None:
    """Print another program's output unchanged."""
    if sys.stderr is None:
        return
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except OSError:
        _abandon(sys.stderr)


def exit_code(returned: int) -> int:
    """Return the exit code of a program that ended; after a signal, the number of shells for it."""
    return returned if returned >= 0 else 128 - returned


def complain(text: str) -> None:
    """Print an error."""
    note(f"error: {text}")


def warning_printer() -> Callable[..., None]:
    """Return a replacement of :func:`warnings.showwarning`: one line for each distinct warning."""
    seen: set[str] = set()

    def show(message: Warning | str, *_: object, **__: object) -> None:
        text = str(message)
        if text not in seen:
            seen.add(text)
            note(f"warning: {text}")

    return show


class WarningsOfLog(logging.Handler):
    """Prints what the package logs as warnings are printed, in place of logging's bare lines."""

    def __init__(self, show: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._show = show

    def emit(self, record: logging.LogRecord) -> None:
        """Print the message of a record."""
        self._show(record.getMessage())


def keep_stdout() -> None:
    """Keep stdout for results: libraries' output to stdout goes to stderr from now on.

    oneDNN prints its log (``ONEDNN_VERBOSE``) directly to the process's stdout.
    """
    out = sys.stdout
    try:
        place = out.fileno() if out is not None else -1
    except (OSError, ValueError):  # stdout of a test or a notebook
        return
    if place != 1:
        return
    sys.stdout = open(os.dup(1), "w", encoding=out.encoding, errors=out.errors)  # noqa: SIM115 (as long as the process)
    try:
        os.dup2(2, 1)
    except OSError:  # the shell's 2>&-
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def save(path: Path, text: str, ours: re.Pattern[bytes]) -> None:
    """Write a result to a file; an existing file is replaced if it is an earlier result of this kind."""
    try:
        with replacing(path, ours) as temporary:
            temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        raise FmtpropError(f"{path} cannot be written: {error.strerror}") from error


def finish(result: Comparison | Benchmark, destination: Path | None) -> None:
    """Write a whole result to a file, if one is named; end the program with an error if one of its checks failed."""
    from fmtprop.report.files import write_report

    if destination is not None:
        write_report(result, destination)
        note(f"wrote {destination}")
    for failure in result.failures:
        complain(failure)
    if result.failures:
        raise SystemExit(FAILED)


@contextmanager
def failing(code: int) -> Iterator[None]:
    """End the program with an exit code if fmtprop raises an error: print one line, or a traceback on request.

    A wrong option is a wrong option wherever it is noticed: a pin, after the model is imported.
    """
    try:
        yield
    except FmtpropError as error:
        if TRACEBACK.get():
            traceback.print_exception(error)
        complain(str(error))
        raise SystemExit(USAGE if isinstance(error, OptionError) else code) from None


@contextmanager
def printing_help() -> Iterator[None]:
    """End the program as :func:`emit` does if help or usage, which typer prints, cannot be written."""
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
    """End the program because stdout cannot be written."""
    _abandon(sys.stdout)
    if isinstance(error, BrokenPipeError):
        raise SystemExit(BROKEN_PIPE) from None
    complain(f"cannot write to stdout: {error.strerror}")
    raise SystemExit(FAILED) from error


def _abandon(stream: TextIO) -> None:
    # Writing the buffered rest would fail again when the interpreter ends.
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@contextmanager
def progress() -> Iterator[Callable[[str, int, int], None]]:
    """Yield a function that shows a description, steps done and steps in all; silent unless on a terminal."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield lambda task, done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    # Redrawn only on request: a redrawing thread would disturb measurements.
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False) as bar:
        task = bar.add_task("loading", total=None)
        bar.refresh()
        yield lambda text, done, total: bar.update(task, description=text, completed=done, total=total, refresh=True)
