"""Calls without the caller's hooks for saved tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fmtprop.training.pytorch import pop_hooks, push_hooks, top_hooks


@contextmanager
def no_hooks_for_saved_tensors() -> Iterator[None]:
    """Hide the caller's hooks for saved tensors, of checkpointing for instance."""
    hooks = []
    while (pair := top_hooks(False)) is not None:
        hooks.append(pair)
        pop_hooks()
    try:
        yield
    finally:
        for pair in reversed(hooks):
            push_hooks(*pair)
