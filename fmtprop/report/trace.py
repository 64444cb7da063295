"""A run as Chrome's trace events, which Perfetto and ``chrome://tracing`` open."""

from __future__ import annotations

from math import inf
from os import PathLike
from typing import TYPE_CHECKING

from fmtprop.report.profile import document, named, span

if TYPE_CHECKING:
    from fmtprop.report.model import Report

_PROCESS = "fmtprop"


def trace(report: Report, profile: str | PathLike[str] | None = None) -> str:
    """Return the steps of a report's run as trace events."""
    reorders = {row.name: row for row in report.reorders}
    events = [
        named("process_name", _PROCESS, 0, f"fmtprop: {report.model}, policy {report.policy}"),
        named("thread_name", _PROCESS, 0, "steps"),
        named("thread_name", _PROCESS, 1, "reorders"),
    ]
    # a time since 1970 has no digits below a fraction of a microsecond, and a step may not overlap the next one
    following = [*(start for start, _ in report.timeline[1:]), inf]
    for row, (start, took), end in zip(report.steps, report.timeline, following, strict=True):
        seconds = min(took, end - start)
        arguments = {"implementation": row.impl, "formats": row.formats, "reason": row.reason, "module": row.origin}
        events.append(span(start, seconds, pid=_PROCESS, tid=0, cat=row.op, name=row.name, args=arguments))
        reorder = reorders.get(row.name)
        if reorder is not None:
            facts = {**arguments, "bytes": reorder.nbytes, "kind": reorder.kind, "cause": reorder.cause}
            facts["producer"] = reorder.producer
            events.append(span(start, seconds, pid=_PROCESS, tid=1, cat="reorder", name=row.name, args=facts))
    return document(events, profile)
