"""A log added up as it is read: the share of reorders in all primitives' time, and findings.

Holds sums by implementation and by distinct reorder, never the lines: a log may have gigabytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from fmtprop.system.printable import printable, shortened
from fmtprop.verbose.parse import Execution, parse_line

__all__ = ["Ledger"]

#: distinct entries of a table; what comes after is added up as one
_ENTRIES = 10_000
_REST = "(others)"
_SHOWN = 20


@dataclass
class _Sum:
    count: int = 0
    seconds: float = 0.0
    nbytes: int = 0

    def add(self, execution: Execution, nbytes: int = 0) -> None:
        self.count += 1
        self.seconds += execution.seconds
        self.nbytes += nbytes


@dataclass
class Ledger:
    """Sums of a log.

    Examples
    --------
    >>> ledger = Ledger()
    >>> formats = "data_f32::blocked:ab:f0 diff_undef::undef:::"
    >>> ledger.read([f"onednn_verbose,exec,cpu,eltwise,ref:any,forward_inference,{formats},,alg:eltwise_relu,2x3,2"])
    >>> ledger.to_dict()["findings"][0]["kind"]
    'reference implementation'
    """

    primitives: _Sum = field(default_factory=_Sum)
    reorders: _Sum = field(default_factory=_Sum)
    by_kind: dict[str, _Sum] = field(default_factory=dict)
    by_implementation: dict[str, _Sum] = field(default_factory=dict)
    by_reorder: dict[str, _Sum] = field(default_factory=dict)
    _packing: dict[str, _Sum] = field(default_factory=dict)
    _undone: dict[str, _Sum] = field(default_factory=dict)
    _last: list[Execution] = field(default_factory=list)

    def read(self, lines: Iterable[str]) -> None:
        """Add whatever these lines report."""
        for line in lines:
            execution = parse_line(line)
            if execution is not None:
                self.add(execution)

    def add(self, execution: Execution) -> None:
        """Add one execution."""
        self.primitives.add(execution)
        _entry(self.by_kind, execution.kind).add(execution)
        _entry(self.by_implementation, f"{execution.kind} {execution.impl}").add(execution)
        if execution.kind == "reorder" and len(execution.operands) >= 2:
            self._add_reorder(execution)
        elif execution.kind == "reorder":
            self.reorders.add(execution)
        self._last = [*self._last[-1:], execution]

    def _add_reorder(self, execution: Execution) -> None:
        nbytes = execution.nbytes
        self.reorders.add(execution, nbytes)
        src, dst = execution.operands[:2]
        name = f"{src.dtype}:{src.tag} -> {dst.dtype}:{dst.tag} {execution.problem}"
        _entry(self.by_reorder, name).add(execution, nbytes)
        if "A" in dst.tag:  # the first axis is blocked in weights alone: it is the batch of everything else
            _entry(self._packing, name).add(execution, nbytes)
        for before in self._last:
            undone = before.kind == "reorder" and before.problem == execution.problem
            if undone and [o[1:] for o in before.operands[:2]] == [dst[1:], src[1:]]:
                _entry(self._undone, name).add(execution, nbytes)
                break

    def findings(self) -> list[dict[str, Any]]:
        """Return what should not be there, the costliest first."""
        found = [
            _finding("reference implementation", name, total, "another format, data type or size has a fast kernel")
            for name, total in self.by_implementation.items()
            if name.partition(" ")[2].startswith("ref")
        ]
        found += [
            _finding("weights packed again", name, total, "pack them once, and keep what comes of it")
            for name, total in self._packing.items()
            if total.count > 1
        ]
        found += [
            _finding("reorder that is undone", name, total, "let what stands between take the format that is there")
            for name, total in self._undone.items()
        ]
        return sorted(found, key=lambda entry: -float(entry["seconds"]))

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data for JSON; seconds and bytes."""
        share = self.reorders.seconds / self.primitives.seconds if self.primitives.seconds else 0.0
        return {
            "schema": 1,
            "primitives": {"count": self.primitives.count, "seconds": self.primitives.seconds},
            "reorders": {
                "count": self.reorders.count,
                "seconds": self.reorders.seconds,
                "share": share,
                "bytes": self.reorders.nbytes,
            },
            "by_kind": _rows(self.by_kind),
            "by_implementation": _rows(self.by_implementation),
            "by_reorder": _rows(self.by_reorder),
            "findings": self.findings(),
        }

    def to_text(self) -> str:
        """Return a summary for a terminal."""
        data = self.to_dict()
        primitives, reorders = data["primitives"], data["reorders"]
        lines = [
            f"{primitives['count']} executions, {primitives['seconds'] * 1e3:.3f} ms",
            f"{reorders['count']} reorders, {reorders['seconds'] * 1e3:.3f} ms, {reorders['share']:.1%} of the time",
        ]
        for title in ("by_kind", "by_implementation", "by_reorder"):
            lines += ["", title.replace("_", " ")]
            lines += [_line(row) for row in data[title][:_SHOWN]]
        if data["findings"]:
            lines += ["", "findings"]
            lines += [f"{_line(row)}: {row['kind']}; {row['advice']}" for row in data["findings"][:_SHOWN]]
        return "\n".join(lines)


def _entry(table: dict[str, _Sum], name: str) -> _Sum:
    if name not in table and len(table) >= _ENTRIES:
        name = _REST
    return table.setdefault(name, _Sum())


def _finding(kind: str, name: str, total: _Sum, advice: str) -> dict[str, Any]:
    return {"kind": kind, "name": name, "count": total.count, "seconds": total.seconds, "advice": advice}


def _rows(table: dict[str, _Sum]) -> list[dict[str, Any]]:
    ordered = sorted(table.items(), key=lambda item: -item[1].seconds)
    return [{"name": n, "count": s.count, "seconds": s.seconds, "bytes": s.nbytes} for n, s in ordered]


def _line(row: dict[str, Any]) -> str:
    return f"{row['seconds'] * 1e3:12.3f} ms {row['count']:8d}  {printable(shortened(row['name'], 100))}"
