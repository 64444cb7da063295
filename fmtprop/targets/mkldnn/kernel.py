"""What a step of this target calls: a function of torch tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["Kernel"]


@dataclass(frozen=True)
class Kernel:
    """A way to compute a node from torch tensors; the handle of this target's candidates.

    Parameters
    ----------
    call : callable
        Takes the operands in the order of the candidate's operands; gives a new tensor, or several.
    residual : str, optional
        An operand that ``call_into`` overwrites with the result: it adds into it.
    call_into : callable, optional
        Like ``call``, in place.
    """

    call: Callable[..., Any]
    residual: str | None = None
    call_into: Callable[..., Any] | None = None
