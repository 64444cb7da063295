"""The executions of a plan's check, as a test sees and changes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch

from fmtprop.ir.node import Node
from fmtprop.ir.tensors import torch_dtype
from fmtprop.runtime import selfcheck
from fmtprop.runtime.constants import run_once
from fmtprop.targets.bound import Place

#: a node and the places of its operands and results
Look = Callable[[Node, Mapping[str, Place]], None]


def _nothing(node: Node, places: Mapping[str, Place]) -> None:
    pass


def around_executions(monkeypatch: pytest.MonkeyPatch, *, before: Look = _nothing, after: Look = _nothing) -> None:
    """Call functions before and after each execution of a check."""

    def run(node, executable, places):
        before(node, places)
        run_once(node, executable, places)
        after(node, places)

    monkeypatch.setattr(selfcheck, "run_once", run)


def numbers(place: Place) -> torch.Tensor:
    """Return the numbers of a place, in the order in which they are in memory."""
    tensor = place.memory.tensor
    if tensor.dtype is not torch.uint8:  # the step has made it
        return tensor
    return tensor[: place.desc.nbytes].view(torch_dtype(place.desc.dtype))


def give_wrong_results(monkeypatch: pytest.MonkeyPatch, is_wrong: Callable[[Node], bool]) -> None:
    """Let the implementations of some nodes give wrong results, when they are checked."""

    def spoil(node: Node, places: Mapping[str, Place]) -> None:
        if is_wrong(node):
            numbers(places["dst"]).add_(1)

    around_executions(monkeypatch, after=spoil)
