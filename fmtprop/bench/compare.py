"""Comparison of a callable's outputs with the expected ones, before anything is timed. Must not know timing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from fmtprop.ir.tensors import tensors_in
from fmtprop.runtime.agreement import relative_error


@dataclass(frozen=True)
class Agreement:
    """Difference between the outputs of a callable and of the oracle (PyTorch in f32)."""

    #: whether every output has the oracle's shape and is within the tolerance
    passed: bool
    #: largest absolute difference over largest absolute value, the worst of all outputs; infinite if they cannot be
    #: compared
    error: float
    tolerance: float
    #: the reason of a failure; empty if the comparison passed
    message: str = ""
    #: whether there were outputs to compare
    ran: bool = True


def compare_outputs(actual: Any, expected: Any, tolerance: float) -> Agreement:
    """Compare outputs with the expected ones.

    >>> compare_outputs(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5]), tolerance=0.1).error
    0.2
    """
    left, right = tensors_of(actual), tensors_of(expected)
    if len(left) != len(right):
        return Agreement(False, math.inf, tolerance, f"{len(left)} outputs, expected {len(right)}")
    worst = 0.0
    for index, (a, b) in enumerate(zip(left, right, strict=True)):
        if a.shape != b.shape:
            message = f"output {index}: shape {tuple(a.shape)}, expected {tuple(b.shape)}"
            return Agreement(False, math.inf, tolerance, message)
        error = relative_error(a, b)
        worst = max(worst, error)
        if error > tolerance:
            message = f"output {index}: largest relative error {error:.3g} exceeds the tolerance {tolerance:g}"
            return Agreement(False, worst, tolerance, message)
    return Agreement(True, worst, tolerance)


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return the tensors in nested tuples, lists and mappings, depth first; other objects are ignored."""
    return list(tensors_in(value))
