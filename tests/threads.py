"""Numbers of threads of torch, as they were after a test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def torch_threads(number: int | None = None) -> Iterator[None]:
    """Let torch use so many threads; by default as many as it does."""
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
