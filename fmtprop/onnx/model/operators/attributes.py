"""Signatures of operators, and functions extended to more element types.

Attributes that go on to another function are not listed again.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, Final, TypeVar

import torch

from fmtprop.onnx.model.operators.values import NotInTorchError

F = TypeVar("F", bound=Callable[..., Any])

#: unsigned types that PyTorch only stores -> the type in which they are computed, modulo their width
WIDER: Final = {torch.uint16: torch.int64, torch.uint32: torch.int64}


def widened(function: Callable[..., Any], *, gives_places: bool = False) -> Callable[..., Any]:
    """Return the function extended to unsigned types that PyTorch only stores.

    `gives_places`: whether its results are no numbers of the first operand's type.
    """

    @wraps(function)
    def wide(*operands: Any, **attributes: Any) -> Any:
        dtype = operands[0].dtype
        if dtype is torch.uint64:
            raise NotInTorchError("uint64")
        if dtype not in WIDER:
            return function(*operands, **attributes)
        whole = (one.to(WIDER[one.dtype]) if getattr(one, "dtype", None) in WIDER else one for one in operands)
        result = function(*whole, **attributes)
        return result if gives_places or result.dtype is torch.bool else result.to(dtype)

    return wide


def passed_to(other: Callable[..., Any]) -> Callable[[F], F]:
    """Declare that a function passes its ``**attributes`` on to another one, so that it takes those of both."""

    def declared(function: F) -> F:
        own = [p for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
        more = [p for p in inspect.signature(other).parameters.values() if p.kind is p.KEYWORD_ONLY]
        function.__signature__ = inspect.Signature([*own, *more])  # type: ignore[attr-defined]
        return function

    return declared


def calling(function: Callable[..., Any], operands: int = 1, **attributes: Any) -> Callable[..., Any]:
    """Return an operator that passes its operands and then its attributes to a function, by position.

    `**attributes`: the attributes in the function's order, with their defaults.
    """

    def operator(*tensors: Any, **given: Any) -> Any:
        if len(tensors) != operands:
            raise TypeError(f"it takes {operands} operands, {len(tensors)} are given")
        return function(*tensors, *(attributes | given).values())

    kinds = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=attributes[name]) for name in attributes]
    operator.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter("tensors", inspect.Parameter.VAR_POSITIONAL), *kinds]
    )
    return operator
