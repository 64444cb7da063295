"""The sweep's results as text: a summary and tables, written into docs/coverage.md between two marks."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from benchmarks.common import write_between

__all__ = ["bound_of", "read", "render", "write_table"]

Row = Mapping[str, Any]

DOCUMENT = Path(__file__).parents[1] / "docs" / "coverage.md"
BEGIN, END = "<!-- sweep: written by `make sweep` -->", "<!-- sweep: end -->"

#: what a compilation may take: seconds, and runs of the model in PyTorch
_COMPILE_SECONDS, _COMPILE_RUNS = 5.0, 6.0
#: aims for the time over PyTorch's, and for the error over PyTorch's
_FAST, _ACCURATE = 0.9, 2.0


def bound_of(eager_seconds: float) -> float:
    """Return the seconds that compiling a model may take that takes so long in PyTorch.

    >>> bound_of(0.5)
    8.0
    """
    return _COMPILE_SECONDS + _COMPILE_RUNS * eager_seconds


def read(paths: Iterable[Path]) -> list[Row]:
    """Return the records of some files; of one network in one variant the last counts."""
    rows: dict[tuple[str, str, str], Row] = {}
    for path in paths:
        for row in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
            rows[row["isa"], row["variant"], row["name"]] = row
    return list(rows.values())


def write_table(paths: Sequence[Path], document: Path = DOCUMENT) -> None:
    """Put the results of some files into the document, in the place of those that are there.

    Raises FmtpropError if the document does not have the two marks.
    """
    write_between(document, BEGIN, END, render(read(paths)))


def render(rows: Sequence[Row]) -> str:
    """Return the summary, what is not right, and a table for each instruction set."""
    passes: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        passes.setdefault((row["isa"], row["variant"]), []).append(row)
    parts = [_summary(passes), _exceptions(rows)]
    parts += [_table(isa, variant, passes) for isa, variant in passes if _is_timed(passes[isa, variant])]
    return "\n\n".join(part for part in parts if part)


def _is_timed(rows: Iterable[Row]) -> bool:
    return any(row["ratio"] is not None for row in rows)


def _markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---", *["--:"] * (len(columns) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _summary(passes: Mapping[tuple[str, str], Sequence[Row]]) -> str:
    columns = (
        "pass", "networks", "right", "wrong", "unsupported", "crash, timeout, memory", "error ≤ 2 × eager's",
        "compiled in time", "time over eager", f"≤ {_FAST}", "> 1.0",
    )  # fmt: skip
    table = _markdown(columns, (_summary_row(isa, variant, rows) for (isa, variant), rows in passes.items()))
    places = sorted({row["where"] for rows in passes.values() for row in rows if row["where"]})
    return "\n".join([*(f"Measured on {place}." for place in places), "", table])


def _summary_row(isa: str, variant: str, rows: Sequence[Row]) -> list[str]:
    count = Counter(row["status"] for row in rows)
    ratios = [row["ratio"] for row in rows if row["ratio"] is not None]
    ended = sum(count[status] for status in ("crash", "timeout", "memory"))
    cells = [_pass(isa, variant), *map(str, (len(rows), count["right"], count["wrong"], count["unsupported"], ended))]
    accurate = [row["error"] <= _ACCURATE * row["eager_error"] for row in rows if row["eager_error"]]
    cells.append(_share(accurate))
    if not ratios:
        return [*cells, "", "", "", ""]
    cells.append(_share([row["compile_seconds"] <= bound_of(row["eager_seconds"]) for row in rows if row["ratio"]]))
    cells.append(f"{geometric_mean(ratios):.2f}")
    return [*cells, _share([ratio <= _FAST for ratio in ratios]), str(sum(ratio > 1.0 for ratio in ratios))]


def _share(flags: Sequence[bool]) -> str:
    return f"{100 * sum(flags) / len(flags):.0f} %" if flags else ""


def _pass(isa: str, variant: str) -> str:
    return f"{isa or 'all of the CPU'}, {variant.replace('/', ', ')}"


def _exceptions(rows: Sequence[Row]) -> str:
    """Return a line for each network that is not right, of all variants with the same reason."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        if row["status"] != "right":
            found.setdefault((row["name"], row["status"], row["reason"]), []).append(_pass(row["isa"], row["variant"]))
    lines = [[f"`{name}`", status, _shown(reason), "; ".join(where)] for (name, status, reason), where in found.items()]
    return _markdown(("not right", "status", "reason", "where"), lines) if lines else "All are right."


def _shown(reason: str) -> str:
    """Return a reason as a cell of a table, without the place where packages are installed."""
    return re.sub(r"\S*/site-packages/", "", reason).replace("|", "\\|")


def _table(isa: str, variant: str, passes: Mapping[tuple[str, str], Sequence[Row]]) -> str:
    columns = (
        _pass(isa, variant), "status", "error over eager's", "compile, s", "allowed, s", "reorders", "host steps",
        "ref steps", "eager, ms", "time over eager",
    )  # fmt: skip
    rows = sorted(passes[isa, variant], key=lambda row: row["ratio"] or 0.0, reverse=True)
    return _markdown(columns, map(_row, rows))


def _row(row: Row) -> list[str]:
    cells = [f"`{row['name']}`", row["status"]]
    if row["ratio"] is None:
        return [*cells, *[""] * 8]
    error = f"{row['error'] / row['eager_error']:.1f}" if row["eager_error"] else ""
    return [
        *cells,
        error,
        f"{row['compile_seconds']:.1f}",
        f"{bound_of(row['eager_seconds']):.1f}",
        str(row["reorders"]),
        f"{row['host']:.0%}",
        f"{row['ref']:.0%}",
        f"{1e3 * row['eager_seconds']:.2f}",
        f"{row['ratio']:.2f}",
    ]
