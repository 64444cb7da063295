"""Difference of two reports or plans: added, removed and changed reorders and implementations, with their costs.

Works on JSON, also from other machines and versions. A step is identified by its node's name, a reorder by its edge.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf
from os import PathLike
from typing import Any

from fmtprop.errors import FmtpropError
from fmtprop.report.model import SCHEMA
from fmtprop.report.words import time_text
from fmtprop.system.files import path_of, read
from fmtprop.system.printable import printable

#: size of the largest report that is read
_LARGEST_NBYTES = 256 << 20


@dataclass(frozen=True)
class Told:
    """The compared part of a report's JSON."""

    model: str
    policy: str
    precision: str
    seconds: float
    #: by node: implementation, formats, seconds
    steps: Mapping[str, tuple[str, str, float]]
    #: by edge (``producer -> reader.operand``): formats, seconds, bytes
    reorders: Mapping[str, tuple[str, float, int]]
    machine: Mapping[str, str]
    #: whether its seconds are costs: those of a plan, which was not run
    is_plan: bool = False

    @property
    def reorder_seconds(self) -> float:
        """Seconds of all reorders of a run."""
        return sum(seconds for _, seconds, _ in self.reorders.values())


@dataclass(frozen=True)
class Change:
    """One difference."""

    what: str
    name: str
    #: `before`, `after`: its form in each report; empty if the report does not have it
    before: str
    after: str
    #: its time in the second report minus its time in the first
    seconds: float


@dataclass(frozen=True)
class Difference:
    """The changes from one report to another."""

    before: Told
    after: Told
    #: sorted by seconds: the largest loss first, the largest gain last
    changes: tuple[Change, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the difference as plain data; seconds."""
        sides = {
            side: {"model": one.model, "policy": one.policy, "precision": one.precision, "seconds": one.seconds,
                   "reorders": len(one.reorders), "reorder_seconds": one.reorder_seconds, "machine": dict(one.machine)}
            for side, one in (("before", self.before), ("after", self.after))
        }  # fmt: skip
        return {"schema": SCHEMA, **sides, "changes": [asdict(change) for change in self.changes]}

    def to_text(self) -> str:
        """Return the difference as lines of text."""
        a, b = self.before, self.after
        lines = [
            f"{printable(a.model)}, policy {printable(a.policy)} -> {printable(b.model)}, policy {printable(b.policy)}",
            *([] if a.model == b.model else ["these are two models: nodes of one name may have nothing in common"]),
            f"a run: {_run(a)} -> {_run(b)}",
            f"reorders: {len(a.reorders)} taking {time_text(a.reorder_seconds)} -> "
            f"{len(b.reorders)} taking {time_text(b.reorder_seconds)}",
        ]
        lines += [
            f"{name}: {printable(a.machine.get(name, ''))} -> {printable(b.machine.get(name, ''))}"
            for name in sorted({*a.machine, *b.machine})
            if a.machine.get(name) != b.machine.get(name) and not (a.is_plan or b.is_plan)
        ]
        lines += [
            f"{change.seconds * 1e6:+10.1f} us  {change.what} {printable(change.name)}: "
            f"{printable(change.before or 'none')} -> {printable(change.after or 'none')}"
            for change in self.changes
        ]
        return "\n".join(lines if self.changes else [*lines, "no reorder, implementation or format differs"])


def compare(before: Told, after: Told) -> Difference:
    """Compare two reports."""
    changes = []
    for edge in dict.fromkeys((*before.reorders, *after.reorders)):
        old, new = before.reorders.get(edge, ("", 0.0, 0)), after.reorders.get(edge, ("", 0.0, 0))
        if old[0] != new[0]:
            changes.append(Change("reorder", edge, old[0], new[0], new[1] - old[1]))
    for name in dict.fromkeys((*before.steps, *after.steps)):
        one, other = before.steps.get(name), after.steps.get(name)
        if one is None or other is None:
            gone, came = one or ("", "", 0.0), other or ("", "", 0.0)
            changes.append(Change("step", name, gone[0], came[0], came[2] - gone[2]))
        elif one[:2] != other[:2]:
            if one[0] != other[0]:
                changes.append(Change("implementation", name, one[0], other[0], other[2] - one[2]))
            else:
                changes.append(Change("formats", name, one[1], other[1], other[2] - one[2]))
    return Difference(before, after, tuple(sorted(changes, key=lambda change: -change.seconds)))


def read_reports(path: str | PathLike[str]) -> list[Told]:
    """Read the reports of a JSON file, one for each policy; or a plan, as ``fmtprop show MODEL -f json`` prints it."""
    try:
        text = read(path_of(path), _LARGEST_NBYTES).decode("utf-8")
    except OSError as error:
        raise FmtpropError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise _no_report(path, "it is not text") from error
    try:
        data = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise _no_report(path, f"it is not JSON: {error}") from error
    is_plan = isinstance(data, dict) and data.get("stage") == "formatted"
    if not is_plan and (not isinstance(data, dict) or data.get("schema") != SCHEMA):
        found = data.get("schema") if isinstance(data, dict) else None
        raise _no_report(path, f"its schema is {found!r}, not {SCHEMA}")
    policies = data.get("policies", [data])
    try:
        if is_plan:
            return [told_plan(data)]
        reports = [told(one) for one in policies]
        if not reports:
            raise ValueError("there is no policy in it")
        return reports
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _no_report(path, f"a field is missing or of another type: {error}") from error


def told(data: Mapping[str, Any]) -> Told:
    """Return the compared part of a report as plain data.

    Raises KeyError or TypeError or ValueError or AttributeError if the data is no report.
    """
    reorders = _by_edge(
        (
            f"{row['producer']} -> {', '.join(row['readers'])}",
            (f"{row['src']} to {row['dst']}", _seconds(row["seconds"]), int(row["nbytes"])),
        )
        for row in data["reorders"]
    )
    named = {row["name"] for row in data["reorders"]}
    steps = {
        str(row["name"]): (str(row["impl"]), str(row["formats"]), _seconds(row["seconds"]))
        for row in data["steps"]
        if row["name"] not in named
    }
    machine = {str(name): str(value) for name, value in data["machine"].items()}
    model, policy, precision = (str(data[name]) for name in ("model", "policy", "precision"))
    return Told(model, policy, precision, _seconds(data["seconds"]), steps, reorders, machine)


def told_plan(data: Mapping[str, Any]) -> Told:
    """Return the compared part of a plan as plain data: its seconds are costs.

    Raises KeyError or TypeError or ValueError or AttributeError if the data is no plan.
    """
    nodes = {str(node["name"]): node for node in data["nodes"]}
    computed: set[str] = set()
    readers: dict[str, list[str]] = {}
    for name, node in nodes.items():
        sources = [str(source) for source, _ in node["inputs"].values()]
        if node["op"] == "input" or not computed.isdisjoint(sources):
            computed.add(name)
        for source, operand in zip(sources, node["inputs"], strict=True):
            readers.setdefault(source, []).append(f"{name}.{operand}")

    def producer(name: str) -> str:
        while nodes[name]["op"] == "reorder":
            name = str(next(iter(nodes[name]["inputs"].values()))[0])
        return name

    def read_by(name: str) -> Iterator[str]:
        for reader in readers.get(name, ()):
            other = reader.rpartition(".")[0]
            yield from read_by(other) if nodes[other]["op"] == "reorder" else (reader,)

    steps, edges = {}, []
    for name, node in nodes.items():
        if name not in computed or node["op"] in ("input", "output") or node["impl"] == "view":
            continue
        src, dst = next(iter(node["reads"].values()), ""), ", ".join(node["formats"][:1])
        if node["op"] == "reorder":
            edge = f"{producer(name)} -> {', '.join(dict.fromkeys(read_by(name)))}"
            edges.append((edge, (f"{src} to {dst}", _seconds(node["cost_seconds"]), 0)))
        else:
            steps[name] = (str(node["impl"]), f"{src} -> {dst}", _seconds(node["cost_seconds"]))
    reorders = _by_edge(edges)
    total = sum(seconds for _, _, seconds in steps.values()) + sum(seconds for _, seconds, _ in reorders.values())
    return Told(str(data["name"]), str(data["policy"]), str(data["dtype"]), total, steps, reorders, {}, is_plan=True)


def _run(told: Told) -> str:
    if not told.is_plan:
        return time_text(told.seconds)
    return f"{time_text(told.seconds)} by its costs" if told.seconds else "no costs in the plan"


def _by_edge(rows: Iterable[tuple[str, tuple[str, float, int]]]) -> dict[str, tuple[str, float, int]]:
    """Return reorders by edge; the second one of an edge has a number."""
    found: dict[str, tuple[str, float, int]] = {}
    seen = Counter[str]()
    for edge, row in rows:
        seen[edge] += 1
        found[edge if seen[edge] == 1 else f"{edge} ({seen[edge]})"] = row
    return found


def _seconds(value: Any) -> float:
    if not 0 <= float(value) < inf:
        raise ValueError(f"{value} is no time in seconds")
    return float(value)


def chosen(reports: Sequence[Told], policy: str | None, path: object) -> Told:
    """Return the report of a policy; without a policy, the last report."""
    for report in reversed(reports):
        if policy in (None, report.policy):
            return report
    raise FmtpropError(
        f"{path} has no policy {policy!r}; it has {', '.join(report.policy for report in reports) or 'none'}"
    )


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is no number of JSON")


def _no_report(path: object, why: str) -> FmtpropError:
    return FmtpropError(
        f"{path} is no report of fmtprop: {why}; `fmtprop report MODEL -o FILE.json` writes one, and "
        "`fmtprop show MODEL -f json` prints a plan"
    )
