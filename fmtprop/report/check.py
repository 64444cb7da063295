"""Limits of a plan, for a program that checks each change of a model; results as JUnit and SARIF."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote
from xml.sax.saxutils import escape, quoteattr

from fmtprop import __version__
from fmtprop.passes.target import is_loop
from fmtprop.report.diff import Told, compare
from fmtprop.system.printable import counted, printable

if TYPE_CHECKING:
    from fmtprop.report.model import Report

#: the rules, and their meanings
RULES = {
    "max-reorders": "A run executes at most so many reorders.",
    "max-reorder-share": "At most this part of a run is spent in reorders.",
    "max-ref": "At most so many steps run in loops without optimized code.",
    "baseline": "No reorder and no unoptimized step is new.",
}


@dataclass(frozen=True)
class Limits:
    """Limits of a plan; None is no limit."""

    max_reorders: int | None = None
    #: part of a run in reorders, 0 to 1
    max_reorder_share: float | None = None
    max_ref: int | None = None
    #: a report; nothing may be worse than in it
    baseline: Told | None = None

    @property
    def rules(self) -> tuple[str, ...]:
        """The rules that are in force."""
        values = (self.max_reorders, self.max_reorder_share, self.max_ref, self.baseline)
        return tuple(rule for rule, value in zip(RULES, values, strict=True) if value is not None)


@dataclass(frozen=True)
class Violation:
    """A limit that a plan exceeds."""

    rule: str
    message: str

    def __str__(self) -> str:
        return printable(f"{self.rule}: {self.message}")


def check(report: Report, limits: Limits) -> tuple[Violation, ...]:
    """Return the limits that a report exceeds."""
    found = []
    total = sum(row.seconds for row in report.steps)
    share = report.reorder_seconds / total if total else 0.0
    loops = [row.name for row in report.steps if is_loop(row.impl)]
    if limits.max_reorders is not None and len(report.reorders) > limits.max_reorders:
        worst = max(report.reorders, key=lambda row: row.seconds)
        found.append(
            Violation(
                "max-reorders",
                f"{report.model} executes {counted(len(report.reorders), 'reorder')}, more than "
                f"{limits.max_reorders}; the "
                f"costliest is {worst.name} ({worst.src} to {worst.dst} for {', '.join(worst.readers)}): {worst.cause}",
            )
        )
    if limits.max_reorder_share is not None and share > limits.max_reorder_share:
        found.append(
            Violation(
                "max-reorder-share",
                f"{report.model} spends {share:.1%} of a run in reorders, more than {limits.max_reorder_share:.1%}",
            )
        )
    if limits.max_ref is not None and len(loops) > limits.max_ref:
        named = ", ".join(loops[:5])
        found.append(
            Violation(
                "max-ref", f"{report.model} runs {len(loops)} steps in loops, more than {limits.max_ref}: {named}"
            )
        )
    return (*found, *_new(report, limits.baseline))


def _new(report: Report, baseline: Told | None) -> Sequence[Violation]:
    """Return a violation for each reorder and each step in a loop that the baseline does not have."""
    if baseline is None:
        return ()
    from fmtprop.report.diff import told

    found = []
    more = len(report.reorders) - len(baseline.reorders)
    for change in compare(baseline, told(report.to_dict())).changes:
        if change.what == "reorder" and not change.before and more > 0:
            found.append(Violation("baseline", f"{report.model} has a new reorder on {change.name}: {change.after}"))
        elif change.what in ("implementation", "step") and is_loop(change.after) and not is_loop(change.before):
            was = f", where it ran {change.before}" if change.before else ""
            found.append(Violation("baseline", f"{report.model} runs {change.name} in a loop ({change.after}){was}"))
    return found


def junit(model: str, rules: Sequence[str], violations: Sequence[Violation]) -> str:
    """Return the result as JUnit's XML: one test case for each rule.

    ``JUnit.xsd`` of Ant, which asks for the most: one failure a case, and fields that have no meaning here.
    """
    cases = []
    for rule in rules:
        wrong = [str(violation) for violation in violations if violation.rule == rule]
        text = escape("\n".join(wrong))
        inside = f"<failure type={quoteattr(rule)} message={quoteattr(wrong[0])}>{text}</failure>" if wrong else ""
        cases.append(f'<testcase classname="fmtprop.check" name={quoteattr(rule)} time="0">{inside}</testcase>')
    failed = len({violation.rule for violation in violations})
    now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S")
    head = (
        f'name={quoteattr(printable(f"fmtprop check {model}"))} tests="{len(rules)}" failures="{failed}" errors="0" '
        f'time="0" timestamp="{now}" hostname="localhost"'
    )
    return (
        f'<?xml version="1.0" encoding="utf-8"?>\n<testsuite {head}><properties/>{"".join(cases)}'
        "<system-out/><system-err/></testsuite>\n"
    )


def sarif(model: str, violations: Sequence[Violation]) -> str:
    """Return the result as SARIF 2.1.0, with the model as the artifact.

    https://docs.oasis-open.org/sarif/sarif/v2.1.0/sarif-v2.1.0.html
    """
    rules = [{"id": rule, "shortDescription": {"text": text}} for rule, text in RULES.items()]
    results: list[dict[str, Any]] = [
        {
            "ruleId": one.rule,
            "level": "error",
            "message": {"text": printable(one.message)},
            "locations": [_location(model)],
        }
        for one in violations
    ]
    driver = {"name": "fmtprop", "version": __version__, "rules": rules}
    data = {
        "version": "2.1.0",
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "runs": [{"tool": {"driver": driver}, "results": results}],
    }
    return json.dumps(data, indent=1)


def _location(model: str) -> dict[str, Any]:
    """Return a model's place: its file, if it is one, so that viewers attach results to it."""
    named = {"logicalLocations": [{"name": printable(model), "kind": "module"}]}
    path = Path(model)
    if not path.is_file():
        return named
    uri = path.as_uri() if path.is_absolute() else quote(path.as_posix())
    return {"physicalLocation": {"artifactLocation": {"uri": uri}}, **named}
