"""Limits on the numbers that a caller may ask for."""

from __future__ import annotations

import os

#: most threads: far more than are useful, far fewer than would make OpenMP end the process
MAX_THREADS = max(256, 4 * (os.cpu_count() or 1))

#: most runs of a model per measurement: the records of more runs would fill the memory, and a median needs only tens
MAX_RUNS = 100_000
