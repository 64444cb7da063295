"""Settings of the whole process: made by commands and benchmarks, which own it, never by a compiled model."""

from __future__ import annotations

import torch


def use_threads(threads: int | None) -> None:
    """Set the threads of torch, and with them oneDNN's, for the whole process; ``None`` leaves them."""
    if threads is not None:
        torch.set_num_threads(threads)
