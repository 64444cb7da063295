"""What may fail without taking a compilation down: it is dropped, told of at the end, and what comes next is taken.

The one place where errors of alternatives are caught. A native failure and an error of PyTorch's operators are errors
of ours by the time they get here; anything else is a bug of this program and goes through.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TypeVar

from fmtprop.errors import FmtpropError

__all__ = ["Attempts"]

T = TypeVar("T")


class Attempts:
    """Steps on behalf of alternatives, and which of these are dropped because a step failed."""

    def __init__(self) -> None:
        #: name of what is dropped -> its first error
        self.failed: dict[str, FmtpropError] = {}

    def of(self, name: str, step: Callable[[], T]) -> T | None:
        """Return what a step gives; None where it fails, which drops the alternative."""
        try:
            return step()
        except FmtpropError as error:
            self.failed.setdefault(name, error)
            return None

    def settle(self, model: str, kept: str, stacklevel: int) -> dict[str, str]:
        """Return why each was dropped, and tell the user; forget the errors, whose frames hold what was made there.

        Parameters
        ----------
        model, kept : str
            What is compiled, and the alternative that is taken.
        stacklevel : int
            As :func:`warnings.warn` takes it.
        """
        dropped = {name: f"{type(error).__name__}: {error}" for name, error in self.failed.items()}
        self.failed.clear()
        if dropped:
            what = "; ".join(f"{name} ({why})" for name, why in dropped.items())
            warnings.warn(
                f"model {model} runs by {kept!r}, without what failed: {what}; report it with the model",
                RuntimeWarning,
                stacklevel=stacklevel,
            )
        return dropped
