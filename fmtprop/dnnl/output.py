"""Output of C libraries that is still in a buffer."""

from __future__ import annotations

import ctypes


def flush_output() -> None:
    """Write the buffer of C's ``stdout``: it has the logs of all oneDNN libraries in this process."""
    ctypes.CDLL(None).fflush(None)
