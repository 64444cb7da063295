"""Calls without the caller's hooks for saved tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def no_hooks_for_saved_tensors() -> Iterator[None]:
    """Hide the caller's hooks for saved tensors, of checkpointing for instance."""
    autograd: Any = torch._C._autograd
    hooks = []
    while (pair := autograd._top_saved_tensors_default_hooks(False)) is not None:
        hooks.append(pair)
        autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pair in reversed(hooks):
            autograd._push_saved_tensors_default_hooks(*pair)
