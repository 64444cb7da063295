"""What PyTorch logs while it reads a model: shown when that succeeds, else the reason in our own error.

PyTorch prints whole tracebacks of what it then raises an error about; some of its errors only say that there was one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["held_back", "reason"]

_held: ContextVar[list[logging.LogRecord] | None] = ContextVar("held", default=None)


class _HoldBack(logging.Filter):
    """Keep records from PyTorch's handlers where this thread asked for it."""

    def filter(self, record: logging.LogRecord) -> bool:
        held = _held.get()
        if held is not None and record not in held[-1:]:  # several handlers of one logger ask about it
            held.append(record)
        return held is None


_FILTER = _HoldBack()


@contextmanager
def held_back() -> Iterator[list[logging.LogRecord]]:
    """Yield a list that takes what PyTorch logs meanwhile; it is shown at the end, unless there was an error."""
    for name in [name for name in logging.root.manager.loggerDict if name.partition(".")[0] == "torch"]:
        for handler in logging.getLogger(name).handlers:
            handler.addFilter(_FILTER)  # once: it is the same
    held: list[logging.LogRecord] = []
    token = _held.set(held)
    try:
        yield held
    finally:
        _held.reset(token)
    for record in held:
        logging.getLogger(record.name).handle(record)


def reason(error: Exception, held: list[logging.LogRecord]) -> str:
    """Return the first line of what went wrong: the last error that PyTorch logged, else the one it raised."""
    logged = [record.exc_info[1] for record in held if record.exc_info and record.exc_info[1]]
    cause = logged[-1] if logged else error
    return (str(cause).strip() or type(cause).__name__).splitlines()[0].rstrip(".")
