"""What no machine is asked for, whatever the caller says."""

from __future__ import annotations

import os

__all__ = ["MAX_RUNS", "MAX_THREADS"]

#: threads that may be asked for: far more than serve anyone, far fewer than make OpenMP end the process
MAX_THREADS = max(256, 4 * (os.cpu_count() or 1))

#: runs of a model that one measurement may ask for: what is kept of each would fill the memory, and a median needs tens
MAX_RUNS = 100_000
