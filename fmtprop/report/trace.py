"""A run as Chrome's trace events, which Perfetto and ``chrome://tracing`` open."""

from __future__ import annotations

from math import inf
from os import PathLike
from typing import TYPE_CHECKING

from fmtprop.report.profile import document, named, span

if TYPE_CHECKING:
    from fmtprop.report.model import Report

_PROCESS = "fmtprop"
#: rows of the picture: each step is in one of them
_STEPS, _REORDERS = 0, 1


def trace(report: Report, profile: str | PathLike[str] | None = None) -> str:
    """Return the steps of a report's run as trace events."""
    reorders = {row.name: row for row in report.reorders}
    events = [
        named("process_name", _PROCESS, 0, f"fmtprop: {report.model}, policy {report.policy}"),
        named("thread_name", _PROCESS, _STEPS, "steps"),
        named("thread_name", _PROCESS, _REORDERS, "reorders"),
    ]
    # a time since 1970 has no digits below a fraction of a microsecond, and a step may not overlap the next one
    following = [*(start for start, _ in report.timeline[1:]), inf]
    for row, (start, took), end in zip(report.steps, report.timeline, following, strict=True):
        seconds = min(took, end - start)
        arguments: dict[str, object] = {
            "implementation": row.impl,
            "formats": row.formats,
            "reason": row.reason,
            "module": row.origin,
        }
        reorder = reorders.get(row.name)
        if reorder is not None:
            arguments |= {"bytes": reorder.nbytes, "kind": reorder.kind, "cause": reorder.cause}
            arguments["producer"] = reorder.producer
        thread = _STEPS if reorder is None else _REORDERS
        events.append(
            span(
                start,
                seconds,
                pid=_PROCESS,
                tid=thread,
                cat="reorder" if reorder else row.op,
                name=row.name,
                args=arguments,
            )
        )
    return document(events, profile)
