"""The results on PyTorch's lists as text, written into docs/coverage.md between two marks: the summary first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

from benchmarks.common import write_between

__all__ = ["render", "write_table"]

Row = Mapping[str, Any]

DOCUMENT = Path(__file__).parents[1] / "docs" / "coverage.md"
BEGIN, END = "<!-- suites: written by `make suites` -->", "<!-- suites: end -->"

_DOORS = ("torch.compile", "fp.compile")
_EAGER = ("eager", "channels-last")


def write_table(rows: Sequence[Row], document: Path = DOCUMENT) -> None:
    """Put results into the document, in the place of those that are there.

    Raises FmtpropError if the document does not have the two marks.
    """
    write_between(document, BEGIN, END, render(rows))


def render(rows: Sequence[Row]) -> str:
    """Return the summary, what is not right, and a row for each network."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        case = row["case"]
        key = (case["suite"], case["mode"], case["dtype"], case["batch"], case["threads"])
        groups.setdefault(key, []).append(row)
    places = sorted({row["where"] for row in rows if row["where"]})
    parts = ["\n".join(f"Measured on {place}." for place in places), _summary(groups), _exceptions(rows), _table(rows)]
    return "\n\n".join(part for part in parts if part)


def _summary(groups: Mapping[tuple[Any, ...], Sequence[Row]]) -> str:
    columns = (
        "list", "mode", "type", "batch", "threads", "networks", *(f"right by `{door}`" for door in _DOORS),
        "time over Inductor's", "over eager's", "slower than eager", "compile, s", "memory over eager's",
    )  # fmt: skip
    return _markdown(columns, [[*map(str, key), *_figures(rows)] for key, rows in sorted(groups.items())])


def _figures(rows: Sequence[Row]) -> list[str]:
    right = []
    for door in _DOORS:
        tried = [row for row in rows if door in row["doors"] or not row["doors"]]
        passed = sum(door in row["doors"] and row["doors"][door]["passed"] for row in tried)
        right.append(f"{passed} of {len(tried)}" if any(door in row["doors"] for row in rows) else "")
    inductor, eager = ([r for row in rows if (r := _ratio(row, others))] for others in (("inductor",), _EAGER))
    compiled = [
        found["compile_seconds"] for row in rows if "compile_seconds" in (found := row["doors"].get(_DOORS[0], {}))
    ]
    peaks = [p for row in rows if (p := _peak(row))]
    return [
        str(len(rows)),
        *right,
        *(f"{geometric_mean(ratios):.2f}" if ratios else "" for ratios in (inductor, eager)),
        str(sum(ratio > 1.0 for ratio in eager)),
        f"{median(compiled):.1f}" if compiled else "",
        f"{geometric_mean(peaks):.2f}" if peaks else "",
    ]


def _ratio(row: Row, others: Sequence[str]) -> float | None:
    """Return the time of our first door over the best of some others."""
    times = [t for other in others if (t := row["doors"].get(other, {}).get("milliseconds"))]
    ours = row["doors"].get(_DOORS[0], {}).get("milliseconds")
    return ours / min(times) if times and ours else None


def _peak(row: Row) -> float | None:
    ours, eager = (row["doors"].get(door, {}).get("peak_nbytes") for door in (_DOORS[0], _EAGER[0]))
    return ours / eager if ours and eager else None


def _exceptions(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        reasons = [row["reason"]] if row["reason"] else []
        reasons += [f"`{d}`: {row['doors'][d]['message']}" for d in _DOORS if d in row["doors"] and _fails(row, d)]
        lines += [[_name(row), reason.replace("|", "\\|")] for reason in reasons]
    return _markdown(("not right", "reason"), lines) if lines else "All are right."


def _fails(row: Row, door: str) -> bool:
    return not row["doors"][door]["passed"]


def _name(row: Row) -> str:
    case = row["case"]
    return f"`{case['name']}`, {case['mode']}, {case['dtype']}, {row['size']}, {case['threads']} threads"


def _table(rows: Sequence[Row]) -> str:
    """Return a row for each network that was timed."""
    rows = [row for row in rows if any(found["milliseconds"] for found in row["doors"].values())]
    doors = list(dict.fromkeys(door for row in rows for door in row["doors"]))
    lines = []
    for row in sorted(rows, key=lambda row: _ratio(row, _EAGER) or 0.0, reverse=True):
        times = (row["doors"].get(door, {}).get("milliseconds") for door in doors)
        ratios = (_ratio(row, others) for others in (("inductor",), _EAGER))
        shown = [*("" if t is None else f"{t:.1f}" for t in times), *("" if r is None else f"{r:.2f}" for r in ratios)]
        lines.append([_name(row), *shown])
    columns = ("network, mode, type, batch", *(f"{door}, ms" for door in doors), "over Inductor's", "over eager's")
    return _markdown(columns, lines) if lines else ""


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---", *["--:"] * (len(columns) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
