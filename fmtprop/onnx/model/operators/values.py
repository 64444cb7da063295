"""Numbers that an operator needs before it can run, such as a shape or axes, and the error if they are not constants.

During an import, tensors that depend on the model's inputs have no data (:mod:`fmtprop.ops.without_data`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from fmtprop.errors import ImportModelError
from fmtprop.onnx.model import limits
from fmtprop.ops.pytorch import count_modes, without_modes
from fmtprop.ops.without_data import has_unknown


class DataDependentError(ImportModelError):
    """A number that a graph must know depends on the values of the inputs."""

    def __init__(self, subject: str) -> None:
        super().__init__(
            f"{subject} depends on the values of the inputs, and a plan has fixed shapes; "
            "fmtprop.onnx.InferenceSession runs such a model node by node"
        )


class NotInTorchError(Exception):
    """PyTorch lacks an element type or a function, so ONNX's own reference runs the node."""


def is_known(value: Any) -> bool:
    """Return whether a value has data: it is a constant, computed from constants, or given for a run."""
    return not has_unknown(value)


def check_places(count: int) -> None:
    """Refuse an axis for which an operator would have to list too many elements of its source."""
    if count > limits.PLACES:
        raise ValueError(f"{count} elements along an axis, {limits.PLACES} are allowed")


def is_repeated(value: torch.Tensor) -> bool:
    """Return whether a tensor has one number in memory, which stands for all.

    >>> is_repeated(torch.ones(1).expand(2, 3)), is_repeated(torch.ones(2, 3))
    (True, False)
    """
    steps = zip(value.stride(), value.shape, strict=True)
    return value.numel() > 1 and not any(step for step, size in steps if size > 1)


def data(value: torch.Tensor, subject: str) -> np.ndarray[Any, Any]:
    """Return the data of a tensor that must be known, bf16 as float32. It works under a tracer too."""
    if type(value) is torch.Tensor and not value.is_meta and not count_modes():  # most, in a run
        return _array(value)
    if not is_known(value):
        raise DataDependentError(subject)
    with torch.DisableTorchFunctionSubclass():  # no call of a traced constant
        if not count_modes():
            return _array(value)
        with without_modes():  # numpy() makes a call, too
            return _array(value)


def _array(value: torch.Tensor) -> np.ndarray[Any, Any]:
    return (value.to(torch.float32) if value.dtype is torch.bfloat16 else value).numpy()


def known(value: Any) -> torch.Tensor:
    """Return a number or a list as a tensor that tracers take as a constant."""
    with without_modes():
        return torch.tensor(value)


def ints(value: Any, subject: str) -> list[int]:
    """Return the integers of a tensor that must be known, or of a list.

    Raises DataDependentError if they are computed from the model's inputs.
    """
    items = data(value, subject).reshape(-1).tolist() if isinstance(value, torch.Tensor) else value
    return [int(item) for item in items]


def floats(value: torch.Tensor, subject: str) -> list[float]:
    """Return the numbers of a tensor that must be known.

    Raises DataDependentError if they are computed from the model's inputs.
    """
    return [float(item) for item in data(value, subject).reshape(-1).tolist()]


def number(value: Any) -> Any:
    """Return the number in a known tensor of one element; a computed tensor is returned as it is."""
    if isinstance(value, torch.Tensor) and value.numel() == 1 and is_known(value):
        return data(value, "the number").item()
    return value


def integer(value: Any, subject: str) -> int:
    """Return the integer of a tensor of one element that must be known.

    Raises DataDependentError if it is computed from the model's inputs.
    """
    found = ints(value, subject)
    if len(found) != 1:
        raise ValueError(f"{subject.partition(',')[0]} has {len(found)} elements; it must have one")
    return found[0]


def flag(value: Any, subject: str) -> bool:
    """Return the truth of a known tensor of one element.

    Raises DataDependentError if it is computed from the model's inputs.
    """
    return bool(integer(value, subject))


def axis_of(axis: int, ndim: int) -> int:
    """Return an axis as a non-negative index."""
    if not -ndim <= axis < max(ndim, 1):
        raise ValueError(f"axis {axis} is not one of {ndim}")
    return axis % max(ndim, 1)


def axes_of(axes: Iterable[int], ndim: int) -> list[int]:
    """Return axes as non-negative indices."""
    found = [axis_of(axis, ndim) for axis in axes]
    if len(set(found)) != len(found):
        raise ValueError(f"axes {found} name one twice")
    return found
