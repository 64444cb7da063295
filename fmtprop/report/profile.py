"""Trace events on torch.profiler's clock, alone or added to one of its exports.

Owns the clock, the form of a file, and the rule that a span on a thread lies within one other span or beside it.
"""

from __future__ import annotations

import gzip
import json
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from os import PathLike
from time import time
from typing import Any

from fmtprop.errors import FmtpropError, InputError
from fmtprop.system.files import path_of, read

#: torch.profiler counts from the last multiple of a quarter of a year since 1970: so sums of ``ts`` stay exact
_QUARTER_SECONDS = 7_889_238
#: the largest export that is read
_MOST_NBYTES = 1 << 30

Event = dict[str, Any]


def span(start_seconds: float, seconds: float, **fields: Any) -> Event:
    """Return a complete event.

    `**fields`: ``pid``, ``tid``, ``cat``, ``name`` and ``args``.
    """
    return {"ph": "X", **fields, "ts": (start_seconds - _base_seconds()) * 1e6, "dur": seconds * 1e6}


def named(what: str, pid: int | str, tid: int, name: str) -> Event:
    """Return the event that names a process or a thread."""
    return {"ph": "M", "pid": pid, "tid": tid, "name": what, "args": {"name": name}}


def nested(inner: Iterable[Event], outer: Iterable[Event]) -> list[Event]:
    """Return events, each span cut to the innermost span of its thread that has its middle.

    Clocks of two libraries differ by microseconds, and viewers drop a span that overlaps another one's end.

    >>> outer = span(1e9, 5e-6, pid=1, tid=1)
    >>> (inner,) = nested([span(1e9 - 2e-6, 6e-6, pid=1, tid=1)], [outer])
    >>> inner["ts"] == outer["ts"], round(inner["dur"])
    (True, 4)
    """
    threads: dict[tuple[Any, Any], list[Event]] = {}
    for event in outer:
        if event.get("ph") == "X":
            threads.setdefault((event["pid"], event["tid"]), []).append(event)
    starts = {}
    for thread, spans in threads.items():
        spans.sort(key=lambda event: (event["ts"], -event["dur"]))
        starts[thread] = [event["ts"] for event in spans]
    found = []
    for event in inner:
        thread = (event["pid"], event["tid"])
        around = _around(event, threads[thread], starts[thread]) if event["ph"] == "X" and thread in threads else None
        found.append(event if around is None else _cut(event, around))
    return found


def document(events: Sequence[Event], profile: str | PathLike[str] | None = None) -> str:
    """Return events as a file's text: alone, or with all that torch.profiler wrote.

    Raises FmtpropError if the profile cannot be read, and InputError if it is none.

    Trace Event Format, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
    """
    data: dict[str, Any] = {"displayTimeUnit": "ms", "baseTimeNanoseconds": _base_seconds() * 10**9, "traceEvents": []}
    if profile is not None:
        data = _read(profile)
        shift = _base_seconds() * 1e6 - data.get("baseTimeNanoseconds", 0) / 1e3
        events = [{**event, "ts": event["ts"] + shift} if "ts" in event else event for event in events]
        events = nested(events, data["traceEvents"])
    # the mark is first: by it an earlier trace is known, and replaced
    return json.dumps({"fmtprop": "trace", **data, "traceEvents": [*data["traceEvents"], *events]}, allow_nan=False)


def _base_seconds() -> int:
    return int(time()) // _QUARTER_SECONDS * _QUARTER_SECONDS


def _end(event: Event) -> float:
    return float(event["ts"] + event["dur"])


def _around(event: Event, spans: Sequence[Event], starts: Sequence[float]) -> Event | None:
    """Return the innermost span that has an event's middle: the last one to begin before it, and not over by then."""
    middle = event["ts"] + event["dur"] / 2
    for index in range(bisect_right(starts, middle) - 1, -1, -1):
        if _end(spans[index]) >= middle:
            return spans[index]
    return None


def _cut(event: Event, around: Event) -> Event:
    start = max(event["ts"], around["ts"])
    return {**event, "ts": start, "dur": min(_end(event), _end(around)) - start}


def _read(profile: str | PathLike[str]) -> dict[str, Any]:
    path = path_of(profile)
    try:
        data = read(path, _MOST_NBYTES)
        found = json.loads(gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data)
    except OSError as error:
        raise FmtpropError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, EOFError, zlib.error) as error:
        raise InputError(f"{path} is no trace of torch.profiler: {error}") from error
    if not isinstance(found, dict) or not isinstance(found.get("traceEvents"), list):
        raise InputError(f"{path} is no trace of torch.profiler: it has no list traceEvents")
    return found
