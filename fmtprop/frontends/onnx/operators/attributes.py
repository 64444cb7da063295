"""Attributes that an operator's function passes on to another one, and so does not list again."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["passed_to"]

F = TypeVar("F", bound=Callable[..., Any])


def passed_to(other: Callable[..., Any]) -> Callable[[F], F]:
    """Declare that a function passes its ``**attributes`` on to another one, so that it takes those of both.

    Parameters
    ----------
    other : callable
        Its keyword-only parameters are added to the function's signature.
    """

    def declared(function: F) -> F:
        own = [p for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
        more = [p for p in inspect.signature(other).parameters.values() if p.kind is p.KEYWORD_ONLY]
        function.__signature__ = inspect.Signature([*own, *more])  # type: ignore[attr-defined]
        return function

    return declared
