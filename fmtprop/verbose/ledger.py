"""Sums of a log, updated line by line: the share of reorders in all primitives' time, and findings.

Holds sums of distinct executions, never the lines: a log may have gigabytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from fmtprop.system.printable import printable, shortened
from fmtprop.verbose.findings import Tally, Total, findings
from fmtprop.verbose.parse import LONGEST_MILLISECONDS, Execution, executions, parse_body, unwrapped

#: most distinct executions, and most characters of them; further ones are added up by kind and implementation
_ENTRIES, _CHARACTERS = 20_000, 1 << 25
_REST = "(others)"
_SHOWN, _SHOWN_CASES, _SHOWN_REASONS = 20, 5, 3

_VERSION = re.compile(r"_verbose,(?:v\d+,)?info,(?:oneDNN|DNNL|Intel\(R\) MKL-DNN|Intel MKL-DNN) v?([\w.]+)")
_INFO = re.compile(r"_verbose,(?:v\d+,)?info,cpu,(isa|runtime):([^\r\n]{1,200})")
#: a line of ONEDNN_VERBOSE=dispatch; fields before the reason; kinds, reasons of each and characters that are kept
_REFUSED = re.compile(r",create:dispatch,([a-z_]{1,40}),([^\r\n]*)")
_FIELDS, _KINDS, _REASONS, _LONGEST_REASON = 8, 100, 64, 200
_CREATED = re.compile(r",(graph,)?create(_nested)?(?::(\w+))?,.*,(\d+(?:\.\d+)?(?:e[+-]?\d+)?)\s*$")


class Ledger:
    """Sums of a log.

    >>> ledger = Ledger()
    >>> formats = "data_f32::blocked:ab:f0 diff_undef::undef:::"
    >>> ledger.read([f"onednn_verbose,exec,cpu,eltwise,ref:any,forward_inference,{formats},,alg:eltwise_relu,2x3,2"])
    >>> ledger.to_dict()["findings"][0]["kind"]
    'reference implementation'
    """

    def __init__(self) -> None:
        self._tallies: dict[str, Tally | None] = {}
        #: executions beyond the limit, by kind and implementation
        self._others: dict[tuple[str, str], Tally] = {}
        #: executions that are no reorders, and whether the library that told of itself last can be PyTorch's
        self._computed, self._in_pytorch = 0, True
        self._before: Tally | None = None
        self._earlier: Tally | None = None
        self._room = _CHARACTERS
        #: facts about the library; a process can have several oneDNNs, PyTorch's and OpenVINO's
        self._library: dict[str, dict[str, None]] = {}
        self._created: dict[str, Total] = {}
        #: by kind: sizes, where the line has them, and reasons of refusals
        self._refused: dict[str, dict[tuple[str, str], None]] = {}

    def read(self, lines: Iterable[str]) -> None:
        """Add the executions of these lines."""
        known = self._tallies
        for line in lines:
            # most lines repeat an earlier one except for the time, so they are not parsed again
            begin = line.find(",exec,")
            if begin < 0 and "_verbose," not in line:
                continue
            body, _, time = line[begin + 6 :].rpartition(",")
            if begin < 0 or body not in known or line.count("_verbose,") != 1:
                self.read_line(line)
                continue
            try:
                milliseconds = float(time)
            except ValueError:
                self.read_line(line)
                continue
            if not 0 <= milliseconds < LONGEST_MILLISECONDS or ",graph," in line[:begin]:
                continue
            self._count(body, milliseconds)

    def read_line(self, line: str) -> bool:
        """Add the executions of a line; return whether it is a line of oneDNN's log."""
        if "_verbose," not in line:
            return False
        found = False
        for body, milliseconds in executions(line):
            found = True
            self._count(body, milliseconds)
        if not found:
            self._note(line)
        return True

    def _count(self, body: str, milliseconds: float) -> None:
        try:
            tally = self._tallies[body]
        except KeyError:
            tally = self._new(body)
        if tally is None:
            return
        tally.count += 1
        tally.milliseconds += milliseconds
        if not tally.is_reorder:
            self._computed += 1
        elif tally.moves:
            tally.follow(self._before, self._earlier, milliseconds)
            if tally.packs:
                tally.pack(self._computed)
        self._before, self._earlier = tally, self._before

    def _new(self, body: str) -> Tally | None:
        execution = parse_body(body)
        refusals = self._refusals(execution) if execution is not None else ()
        if len(self._tallies) < _ENTRIES and self._room >= len(body):
            self._room -= len(body)
            tally = Tally(execution, refusals=refusals, in_pytorch=self._in_pytorch) if execution is not None else None
            self._tallies[body] = tally
            return tally
        if execution is None:
            return None
        # without formats and sizes, to bound the memory
        kind, impl = (execution.kind, execution.impl) if len(self._others) < _ENTRIES else (_REST, "")
        rest = Execution(kind, impl, "", (), "", 0.0)
        return self._others.setdefault((kind, impl), Tally(rest))

    def _refusals(self, execution: Execution) -> tuple[str, ...]:
        """Return the reasons for which implementations were refused before a first execution, and forget them."""
        found = self._refused.pop(execution.kind, {})
        others = {key: None for key in found if key[0] not in ("", execution.problem)}
        if others:
            self._refused[execution.kind] = others
        return tuple(dict.fromkeys(reason for sizes, reason in found if (sizes, reason) not in others))

    def _refuse(self, kind: str, text: str) -> None:
        """Keep a reason: ``REASON,FILE:LINE``, or with engine, kind, …, auxiliary and sizes before it."""
        said = text.rpartition(",")[0]
        fields = said.split(",", _FIELDS) if said.startswith(("cpu,", "gpu,")) else []
        sizes, reason = fields[-2:] if len(fields) > _FIELDS else ("", said)
        known = self._refused.setdefault(kind, {}) if len(self._refused) < _KINDS else self._refused.get(kind)
        if known is not None and len(known) < _REASONS and reason:
            known[shortened(sizes, _LONGEST_REASON), shortened(reason, _LONGEST_REASON)] = None

    def _note(self, line: str) -> None:
        """Record a line without an execution: facts about the library, or a created primitive."""
        line = unwrapped(line)
        if (version := _VERSION.search(line)) is not None:
            self._library.setdefault("version", {})[version.group(1)] = None
        elif (info := _INFO.search(line)) is not None:
            self._library.setdefault(info.group(1), {})[info.group(2).strip()] = None
            if info.group(1) == "runtime":
                self._in_pytorch = info.group(2).startswith("OpenMP")
        elif (created := _CREATED.search(line[: 1 << 14])) is not None:
            self._create(*created.groups())
        elif (refused := _REFUSED.search(line[: 1 << 14])) is not None:
            self._refuse(*refused.groups())

    def _create(self, graph: str | None, nested: str | None, outcome: str | None, time: str) -> None:
        """Add a created primitive, or a compiled partition of the graph API."""
        name = "graph" if graph else f"{'nested_' if nested else ''}{outcome or 'create'}"
        if (milliseconds := float(time)) < LONGEST_MILLISECONDS:
            self._created.setdefault(name, Total()).add(Total(1, milliseconds / 1e3))

    # ------------------------------------------------------------------ sums

    def _all(self) -> Iterator[Tally]:
        yield from (tally for tally in self._tallies.values() if tally is not None)
        yield from self._others.values()

    @property
    def primitives(self) -> Total:
        """All executions."""
        return _total(self._all())

    @property
    def reorders(self) -> Total:
        """All reorders."""
        return _total(tally for tally in self._all() if tally.is_reorder)

    @property
    def packings(self) -> Total:
        """The reorders that pack weights: a program that keeps its weights packed needs them once."""
        return _total(tally for tally in self._all() if tally.execution.packs)

    @property
    def knows_library(self) -> bool:
        """Whether a line tells of the library, so that the log was switched on."""
        return bool(self._library)

    @property
    def has_creations(self) -> bool:
        """Whether a line tells of a primitive that was made, or of an implementation that refused it."""
        return bool(self._created or self._refused)

    def findings(self) -> list[dict[str, Any]]:
        """Return the avoidable executions, the costliest first."""
        return findings(self._all())

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data for JSON; seconds and bytes."""
        primitives, reorders, packings = self.primitives, self.reorders, self.packings
        tables: dict[str, dict[str, Total]] = {
            "by_kind": {},
            "by_implementation": {},
            "by_reorder": {},
            "by_data_type": {},
        }
        for tally in self._all():
            one = tally.execution
            _entry(tables["by_kind"], one.kind).add(tally.sum)
            _entry(tables["by_implementation"], f"{one.kind} {one.impl}").add(tally.sum)
            if tally.moves:
                _entry(tables["by_reorder"], tally.name).add(tally.sum)
            elif tally.is_reorder:
                _entry(tables["by_reorder"], _REST).add(tally.sum)
            if one.operands:
                _entry(tables["by_data_type"], one.operands[0].dtype).add(tally.sum)
        return {
            "schema": 1,
            "library": {name: "; ".join(found) for name, found in self._library.items()},
            "primitives": {"count": primitives.count, "seconds": primitives.seconds},
            "reorders": {
                "count": reorders.count,
                "seconds": reorders.seconds,
                "share": reorders.seconds / primitives.seconds if primitives.seconds else 0.0,
                "bytes": reorders.nbytes,
                "bytes_per_second": _rate(reorders),
                "packings": {"count": packings.count, "seconds": packings.seconds},
            },
            "created": {name: {"count": s.count, "seconds": s.seconds} for name, s in sorted(self._created.items())},
            **{name: _rows(table) for name, table in tables.items()},
            "findings": self.findings(),
        }

    def to_text(self) -> str:
        """Return a summary for a terminal."""
        data = self.to_dict()
        primitives, reorders = data["primitives"], data["reorders"]
        lines = [
            f"{primitives['count']} executions, {primitives['seconds'] * 1e3:.3f} ms",
            f"{reorders['count']} reorders, {reorders['seconds'] * 1e3:.3f} ms, {reorders['share']:.1%} of the time"
            f", {reorders['bytes'] / 2**20:.1f} MiB at {reorders['bytes_per_second'] / 1e9:.1f} GB/s",
        ]
        if count := reorders["packings"]["count"]:
            lines.append(
                f"{count} of these pack weights, {reorders['packings']['seconds'] * 1e3:.3f} ms: needed once, if the "
                "program keeps them"
            )
        if data["library"]:
            lines.insert(0, "oneDNN " + ", ".join(printable(shortened(word, 100)) for word in data["library"].values()))
        for title in ("by_kind", "by_implementation", "by_reorder"):
            lines += ["", title.replace("_", " ")]
            lines += [_line(row) for row in data[title][:_SHOWN]]
        if data["findings"]:
            lines += ["", "findings"]
            kinds: dict[str, list[dict[str, Any]]] = {}
            for row in data["findings"]:
                kinds.setdefault(row["kind"], []).append(row)
            for rows in sorted(kinds.values(), key=lambda rows: -sum(row["seconds"] for row in rows)):
                lines += _finding(rows)
        return "\n".join(lines)


def _total(tallies: Iterable[Tally]) -> Total:
    total = Total()
    for tally in tallies:
        total.add(tally.sum)
    return total


def _entry(table: dict[str, Total], name: str) -> Total:
    return table.setdefault(name, Total())


def _rate(total: Total) -> float:
    return total.nbytes / total.seconds if total.seconds else 0.0


def _rows(table: dict[str, Total]) -> list[dict[str, Any]]:
    ordered = sorted(table.items(), key=lambda item: -item[1].seconds)
    return [
        {"name": n, "count": s.count, "seconds": s.seconds, "bytes": s.nbytes, "bytes_per_second": _rate(s)}
        for n, s in ordered
    ]


def _finding(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield a line for a kind of finding with its advice, and one for each of its costliest cases."""
    first = rows[0]
    whole = {"name": first["kind"], **{key: sum(row[key] for row in rows) for key in ("count", "seconds")}}
    yield f"{_line(whole)}: {first['advice']}"
    yield from (f"{_line(row, indent=4)}{_why(row)}" for row in rows[:_SHOWN_CASES])
    if len(rows) > _SHOWN_CASES:
        yield f"{'':29}{len(rows) - _SHOWN_CASES} more"


def _why(row: dict[str, Any]) -> str:
    reasons = row["reasons"][:_SHOWN_REASONS]
    return f" (refused before: {printable('; '.join(reasons))})" if reasons else ""


def _line(row: Mapping[str, Any], indent: int = 0) -> str:
    name = printable(shortened(row["name"], 100))
    return f"{'':{indent}}{row['seconds'] * 1e3:12.3f} ms {row['count']:8d}  {name}"
