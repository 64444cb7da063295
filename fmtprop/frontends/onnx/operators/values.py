"""Numbers that an operator needs before it can run, such as a shape or axes, and what is said where they are computed.

While a model is imported, tensors that depend on its inputs have no data yet: PyTorch's fake tensors stand for them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from fmtprop.errors import ImportModelError

__all__ = [
    "DataDependentError",
    "NotInTorchError",
    "axes_of",
    "axis_of",
    "data",
    "flag",
    "floats",
    "ints",
    "is_known",
    "known",
    "number",
]


class DataDependentError(ImportModelError):
    """Something that a graph has to know depends on what the inputs hold."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what} depends on what the inputs hold, and a plan has fixed shapes; "
            "fmtprop.onnx.InferenceSession runs such a model node by node"
        )


class NotInTorchError(Exception):
    """PyTorch lacks an element type or a function: ONNX's own reference runs the node."""


def is_known(value: Any) -> bool:
    """Tell whether a value has its data: a constant, or computed from constants, or given for a run."""
    from torch._subclasses.fake_tensor import FakeTensor

    if isinstance(value, list | tuple):
        return all(map(is_known, value))
    return not isinstance(value, FakeTensor)


def data(value: torch.Tensor, what: str) -> np.ndarray[Any, Any]:
    """Return what a tensor holds that must be known, whoever is tracing meanwhile; bf16 as float32.

    Raises
    ------
    DataDependentError
        It is computed from the model's inputs.
    """
    if not is_known(value):
        raise DataDependentError(what)
    with _disable_current_modes():
        plain = value.detach()
        return (plain.to(torch.float32) if plain.dtype is torch.bfloat16 else plain).numpy()


def known(value: Any) -> torch.Tensor:
    """Return a tensor of a number or a list that is a constant for a tracer too."""
    with _disable_current_modes():
        return torch.tensor(value)


def ints(value: Any, what: str) -> list[int]:
    """Return the integers in a tensor that must be known; of a list, itself.

    Raises
    ------
    DataDependentError
        They are computed from the model's inputs.
    """
    items = data(value, what).reshape(-1).tolist() if isinstance(value, torch.Tensor) else value
    return [int(item) for item in items]


def floats(value: torch.Tensor, what: str) -> list[float]:
    """Return the numbers in a tensor that must be known.

    Raises
    ------
    DataDependentError
        They are computed from the model's inputs.
    """
    return [float(item) for item in data(value, what).reshape(-1).tolist()]


def number(value: Any) -> Any:
    """Return the number in a known tensor of one element, or the value itself where it is computed."""
    if isinstance(value, torch.Tensor) and value.numel() == 1 and is_known(value):
        return data(value, "the number").reshape(-1).tolist()[0]
    return value


def flag(value: Any, what: str) -> bool:
    """Return the truth of a known tensor of one element.

    Raises
    ------
    DataDependentError
        It is computed from the model's inputs.
    """
    return bool(ints(value, what)[0])


def axis_of(axis: int, ndim: int) -> int:
    """Return an axis counted from the first.

    Raises
    ------
    ValueError
        There is no such axis.
    """
    if not -ndim <= axis < max(ndim, 1):
        raise ValueError(f"axis {axis} is not one of {ndim}")
    return axis % max(ndim, 1)


def axes_of(axes: Iterable[int], ndim: int) -> list[int]:
    """Return axes counted from the first.

    Raises
    ------
    ValueError
        There is no such axis, or one is given twice.
    """
    found = [axis_of(axis, ndim) for axis in axes]
    if len(set(found)) != len(found):
        raise ValueError(f"axes {found} name one twice")
    return found
