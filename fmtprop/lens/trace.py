"""A tracer's records as Chrome's trace events: oneDNN's primitives within the operators that called them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

from fmtprop.report.profile import document, nested, span

if TYPE_CHECKING:
    from fmtprop.lens.tracer import OperatorCall


def trace(calls: Sequence[OperatorCall], profile: str | PathLike[str] | None = None) -> str:
    """Return operators and the primitives within them; or an export of torch.profiler with the primitives added."""
    primitives = [event for call in calls for event in _primitives(call)]
    if profile is not None:
        return document(primitives, profile)
    operators = [
        span(
            call.start_seconds, call.seconds, pid=os.getpid(), tid=call.thread, cat="operator", name=call.operator,
            args=_place(call),
        )
        for call in calls
    ]  # fmt: skip
    return document([*operators, *nested(primitives, operators)])


def _primitives(call: OperatorCall) -> Iterator[dict[str, Any]]:
    now = call.start_seconds
    for one in call.executions:
        # without timestamps they follow each other
        start = now if one.start_seconds is None else one.start_seconds
        now = start + one.seconds
        formats = " -> ".join(operand.tag for operand in one.operands[:2])
        is_reorder = one.kind == "reorder"
        arguments = {
            "implementation": one.impl,
            "operands": [f"{operand.role} {operand.dtype}:{operand.tag}" for operand in one.operands],
            "sizes": one.problem,
            **({"bytes": one.nbytes} if is_reorder else {}),
            **_place(call),
        }
        yield span(
            start, one.seconds, pid=os.getpid(), tid=call.thread, cat="reorder" if is_reorder else "oneDNN",
            name=f"reorder {formats}" if is_reorder else one.kind, args=arguments,
        )  # fmt: skip


def _place(call: OperatorCall) -> dict[str, str]:
    return {"module": call.module, "kind": call.kind, "line": call.line}
