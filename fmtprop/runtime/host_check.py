"""Steps that PyTorch runs are checked as they run: by the operator that writes to the plan's memory, on its strides.

What they are compared with is the op's reference, on the same numbers in row-major tensors: PyTorch's kernels are not
right for all memory formats, and not all that write to given memory write there alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fmtprop.errors import PlanError
from fmtprop.ir.node import Node
from fmtprop.ir.op import opdef
from fmtprop.layout import MemoryDesc
from fmtprop.runtime.agreement import TOLERANCE, error_of_numbers, small_numbers
from fmtprop.runtime.calls import PyTorchCalls, as_planned, bind, call_reference
from fmtprop.runtime.cut_down import cut_down
from fmtprop.targets.memory import view
from fmtprop.targets.reference import MEANING, REFERENCE, ReferenceTarget, reads_strides

__all__ = ["check_call", "check_strides", "is_run_by_pytorch", "needs_check"]

#: bytes behind a result's place that must stay as they are, and what they are
_GUARD_NBYTES, _GUARD = 4096, 0x55

#: stands for a result that is wrong as a whole
_NOTHING = torch.empty(0, 0, device="cpu")


def is_run_by_pytorch(node: Node) -> bool:
    """Say whether PyTorch computes a formatted node."""
    return node.choice is not None and node.choice.target == REFERENCE and node.op != "reorder"  # which copies


def needs_check(node: Node) -> bool:
    """Say whether PyTorch runs a formatted node otherwise than its reference does: by an operator, or on strides."""
    if node.choice is None or not is_run_by_pytorch(node):
        return False
    by_operator = opdef(node.op).operator is not None and node.choice.impl != MEANING
    return reads_strides(node) or (by_operator and bool(node.choice.operands))


def check_call(node: Node) -> float | None:
    """Run a node as a plan does; return its relative error where it is too large, else None.

    A large node runs cut down. What takes none of the numbers that are made for it is not checked.
    """
    node = cut_down(node, ReferenceTarget()) or node
    descs = {} if node.choice is None else node.choice.operands
    for numbers in (_small, _zeros):
        dense = {name: numbers(node, name, desc) for name, desc in descs.items()}
        try:
            expected = call_reference(node, dense)
        except PlanError:
            continue  # they may be indices, or a matrix of some kind
        tensors = {name: _laid_out(dense[name], desc.strides) for name, desc in descs.items()}
        return _worst(node, _results(node, tensors, expected), expected)
    return None


def check_strides(node: Node) -> float | None:
    """Run a node's reference on strided and on row-major tensors; return its relative error where it is too large."""
    descs = {} if node.choice is None else node.choice.operands
    dense = {name: _small(node, name, desc) for name, desc in descs.items()}
    strided = {name: _laid_out(dense[name], desc.strides) for name, desc in descs.items()}
    return _worst(node, call_reference(node, strided), call_reference(node, dense))


def _small(node: Node, name: str, desc: MemoryDesc) -> torch.Tensor:
    return small_numbers(node, name, desc).contiguous()


def _zeros(node: Node, name: str, desc: MemoryDesc) -> torch.Tensor:
    return torch.zeros_like(_small(node, name, desc))


def _results(
    node: Node, tensors: dict[str, torch.Tensor], expected: tuple[torch.Tensor, ...]
) -> list[torch.Tensor | None]:
    """Return what a plan's call leaves in its memory; nothing for a result that nobody can read."""
    flats = [torch.full((desc.nbytes + _GUARD_NBYTES,), _GUARD, dtype=torch.uint8, device="cpu") for desc in node.descs]
    # what is of another shape than the exporter says fails the run where anybody reads it
    places = [
        view(flat, desc.at_start(), 0) if wanted.shape == torch.Size(desc.dims) else None
        for flat, desc, wanted in zip(flats, node.descs, expected, strict=True)
    ]
    try:
        with as_planned():
            PyTorchCalls([(node, bind(node, tensors, places))])()
    except PlanError:
        return [_NOTHING for _ in places]
    # some resize what they are given to hold what they make on the way
    whole = all((flat[-_GUARD_NBYTES:] == _GUARD).all() for flat in flats)
    return [place if whole or place is None else _NOTHING for place in places]


def _worst(node: Node, results: Sequence[torch.Tensor | None], expected: Sequence[torch.Tensor]) -> float | None:
    worst = 0.0
    for got, wanted, type_ in zip(results, expected, node.results, strict=True):
        error = 0.0 if got is None else error_of_numbers(got, wanted)
        if error > TOLERANCE.get(type_.dtype, 0.0):
            worst = max(worst, error)
    return worst or None


def _laid_out(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """Return the same numbers with these strides; along those of 0, all numbers are equal."""
    lying = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device="cpu")
    once = tuple(slice(0, 1) if not stride else slice(None) for stride in strides)
    lying[once] = tensor[once]
    return lying
