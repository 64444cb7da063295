"""What C libraries have printed and not written yet."""

from __future__ import annotations

import ctypes

__all__ = ["flush_output"]


def flush_output() -> None:
    """Write what C's ``stdout`` still holds: oneDNN's log among it, of whichever library in this process."""
    ctypes.CDLL(None).fflush(None)
