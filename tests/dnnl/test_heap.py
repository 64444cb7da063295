"""Freed memory goes back to the system."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fmtprop import dnnl


def resident() -> int:
    """Return this process's resident bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_trim_returns_what_was_freed():
    # chunks below malloc's mmap threshold stay in the heap when they are freed behind one that is alive
    chunks = [np.ones(60_000, np.uint8) for _ in range(2_000)]
    last = chunks[-1]
    before = resident()
    del chunks[:-1]
    assert dnnl.trim_heap()
    assert before - resident() > 60e6
    assert last.sum() == 60_000
