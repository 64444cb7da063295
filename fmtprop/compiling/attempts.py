"""Steps that may fail without a failed compilation: a failed alternative is dropped and reported, the next one used.

Only this module catches errors of alternatives. Native failures and errors of PyTorch's operators arrive here as
fmtprop's errors; any other exception is a bug of this program and is not caught.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TypeVar

from fmtprop.errors import FmtpropError

T = TypeVar("T")


class Attempts:
    """Steps of alternatives, and the alternatives that are dropped because a step failed."""

    def __init__(self) -> None:
        #: name of a dropped alternative -> its first error
        self.failed: dict[str, FmtpropError] = {}

    def of(self, name: str, step: Callable[[], T]) -> T | None:
        """Return the result of a step; None if it fails, which drops the alternative."""
        try:
            return step()
        except FmtpropError as error:
            self.failed.setdefault(name, error)
            return None

    def settle(self, model: str, kept: str, stacklevel: int) -> dict[str, str]:
        """Return the reason of each drop, warn the user, and forget the errors: their frames keep objects alive."""
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
