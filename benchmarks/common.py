"""What the benchmark scripts share: options, tables, JSON. Measures nothing."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from fmtprop.api import Options
from fmtprop.bench import Environment
from fmtprop.builtin import builtin_names
from fmtprop.errors import FmtpropError
from fmtprop.report.text import render

__all__ = [
    "add_options", "add_race_options", "headline", "markdown", "table", "tell", "tell_turns", "warn_if_busy",
    "write_between", "write_json",
]  # fmt: skip

_WIDTH = 120


def add_options(parser: argparse.ArgumentParser, default: Sequence[str]) -> None:
    """Add the options that every script has.

    `default`: models if none are named.
    """
    known = ", ".join(builtin_names())
    chosen = f"of {known}, or a file (default: {' '.join(default)})"
    parser.add_argument("models", nargs="*", default=list(default), metavar="MODEL", help=chosen)
    parser.add_argument("--threads", type=int, default=2, help="threads of every runtime (default: 2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures to a file")


def add_race_options(parser: argparse.ArgumentParser, tune: str) -> None:
    """Add the options of scripts that race whole models.

    `tune`: where fmtprop's costs come from by default.
    """
    parser.add_argument("--dtype", default=Options.dtype, help="fmtprop's precision (default: %(default)s)")
    parser.add_argument("--tune", default=tune, help="where fmtprop's costs come from (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=10, help="turns of every contender (default: 10)")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs in a turn (default: 3)")
    parser.add_argument("--seed", type=int, default=0)


def headline(environment: Environment) -> str:
    """Return the machine and the versions in a line.

    >>> headline(Environment("A CPU", ("sse4_1", "avx2"), 4, 2, {"torch": "2.9"}))
    'A CPU (avx2), 2 threads of 4 CPUs; torch 2.9'
    """
    isa = environment.isa[-1] if environment.isa else "instruction sets unknown"
    versions = ", ".join(f"{name} {version}" for name, version in environment.versions.items())
    return f"{environment.cpu} ({isa}), {environment.threads} threads of {environment.cpus} CPUs; {versions}"


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a text table, its first column aligned left.

    >>> table("size", ["what", "KB"], [["a", "1"]]).splitlines()
    ['  size', 'what  KB', 'a      1']
    """
    grid = Table(title=title, box=None, pad_edge=False, show_edge=False)
    for index, column in enumerate(columns):
        grid.add_column(column, justify="right" if index else "left", no_wrap=True)
    for row in rows:
        grid.add_row(*row)
    return render(grid, _WIDTH).rstrip("\n")


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of a page.

    >>> print(markdown(["what", "KB"], [["a", "1"]]))
    | what | KB |
    |---|---|
    | a | 1 |
    """
    head, *lines = [f"| {' | '.join(row)} |" for row in (columns, *rows)]
    return "\n".join([head, "|" + "---|" * len(columns), *lines])


def write_between(document: Path, begin: str, end: str, text: str) -> None:
    """Put results into a document between two lines, in the place of those that are there."""
    before, has_begin, rest = document.read_text(encoding="utf-8").partition(begin)
    _, has_end, after = rest.partition(end)
    if not has_begin or not has_end:
        raise FmtpropError(f"{document} must have the lines {begin!r} and {end!r}: the table goes between them")
    document.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}", encoding="utf-8")


def write_json(path: Path | None, data: Any) -> None:
    """Write figures to a file, if one was asked for; infinite errors become null, since JSON has no infinity."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(_finite(data), indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _finite(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def tell(text: str) -> None:
    """Say on a terminal what is going on; nothing where the errors go to a file."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()


def tell_turns(model: object, what: str, done: int, total: int) -> None:
    """Say how far the race of a model is."""
    tell(f"{model}: {what} ({done} of {total} turns)")


def warn_if_busy(load: float) -> None:
    """Say so where others use the machine: their work is in every figure, and unequally.

    `load`: average number of running processes in the last minute, before anything is measured.
    """
    if load > 0.5:
        print(
            f"warning: the machine is busy (load {load:.1f}); figures depend on who else runs. Wait for a quiet hour",
            file=sys.stderr,
        )
