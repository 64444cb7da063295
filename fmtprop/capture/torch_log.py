"""PyTorch's log while it reads a model: shown after success; after a failure, its reason goes into fmtprop's error.

PyTorch logs whole tracebacks of the errors that it raises, while some of its errors have no reason of their own.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from fmtprop.system.printable import first_line

_held: ContextVar[list[logging.LogRecord] | None] = ContextVar("held", default=None)


class _HoldBack(logging.Filter):
    """Hide records from PyTorch's handlers if this thread requested it."""

    def filter(self, record: logging.LogRecord) -> bool:
        held = _held.get()
        if held is not None and record not in held[-1:]:  # several handlers of one logger call this
            held.append(record)
        return held is None


_FILTER = _HoldBack()


@contextmanager
def held_back() -> Iterator[list[logging.LogRecord]]:
    """Yield a list that collects PyTorch's log records; they are shown at the end, unless there is an error."""
    for name in [name for name in logging.root.manager.loggerDict if name.partition(".")[0] == "torch"]:
        for handler in logging.getLogger(name).handlers:
            handler.addFilter(_FILTER)  # added once, as it is the same object
    held: list[logging.LogRecord] = []
    token = _held.set(held)
    try:
        yield held
    finally:
        _held.reset(token)
    for record in held:
        logging.getLogger(record.name).handle(record)


def reason(error: Exception, held: list[logging.LogRecord]) -> str:
    """Return the first line of the failure: the last error that PyTorch logged, else the raised one."""
    logged = [record.exc_info[1] for record in held if record.exc_info and record.exc_info[1]]
    cause = logged[-1] if logged else error
    return first_line(cause).rstrip(".")
