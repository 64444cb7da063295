"""A run as Chrome's trace events, which Perfetto and ``chrome://tracing`` open."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fmtprop.report.model import Report

__all__ = ["trace"]


def trace(report: Report) -> str:
    """Return the steps of a report's run as trace events.

    Parameters
    ----------
    report : Report
        Report of one policy.

    Returns
    -------
    str
        JSON: complete events (``"ph": "X"``) with ``ts`` and ``dur`` in microseconds since ``baseTimeNanoseconds``, as
        :meth:`torch.profiler.profile.export_chrome_trace` writes them.

    References
    ----------
    Trace Event Format, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
    """
    reorders = {row.name: row for row in report.reorders}
    events: list[dict[str, Any]] = [
        _named("process_name", 0, f"fmtprop: {report.model}, policy {report.policy}"),
        _named("thread_name", 0, "steps"),
        _named("thread_name", 1, "reorders"),
    ]
    now = 0.0
    for row in report.steps:
        arguments = {"implementation": row.impl, "formats": row.formats, "reason": row.reason, "module": row.origin}
        event = {"ph": "X", "pid": "fmtprop", "tid": 0, "ts": now, "dur": row.seconds * 1e6}
        events.append({**event, "cat": row.op, "name": row.name, "args": arguments})
        reorder = reorders.get(row.name)
        if reorder is not None:
            facts = {
                "bytes": reorder.nbytes,
                "kind": reorder.kind,
                "cause": reorder.cause,
                "producer": reorder.producer,
            }
            events.append({**event, "tid": 1, "cat": "reorder", "name": row.name, "args": arguments | facts})
        now += row.seconds * 1e6
    data = {
        "fmtprop": "trace",
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": int(report.measured_at_seconds * 1e9),
        "traceEvents": events,
    }
    return json.dumps(data, allow_nan=False)


def _named(kind: str, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": "fmtprop", "tid": thread, "name": kind, "args": {"name": name}}
