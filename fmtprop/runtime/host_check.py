"""Steps that PyTorch runs are checked where their operands are not row-major: with the strides that they really get.

What is compared is PyTorch with itself, on the same numbers in row-major tensors: its own kernels are not right for all
memory formats.
"""

from __future__ import annotations

import torch

from fmtprop.ir.node import Node
from fmtprop.passes.formats import plain
from fmtprop.runtime.agreement import TOLERANCE, error_of_numbers, small_numbers
from fmtprop.runtime.calls import call_reference
from fmtprop.targets.reference import REFERENCE

__all__ = ["check_strides", "reads_strides"]


def reads_strides(node: Node) -> bool:
    """Say whether PyTorch runs a formatted node on operands that are not row-major."""
    choice = node.choice
    if choice is None or choice.target != REFERENCE or node.op == "reorder":  # which copies
        return False
    return any(desc.at_start() != plain(desc) for desc in choice.operands.values())


def check_strides(node: Node) -> float | None:
    """Run a node on strided and on row-major tensors; return its relative error where it is too large, else None."""
    descs = {} if node.choice is None else node.choice.operands
    dense = {name: small_numbers(node, name, desc) for name, desc in descs.items()}
    strided = {name: _laid_out(dense[name], desc.strides) for name, desc in descs.items()}
    expected = call_reference(node, {name: tensor.contiguous() for name, tensor in dense.items()})
    worst = 0.0
    for got, wanted, type_ in zip(call_reference(node, strided), expected, node.results, strict=True):
        error = error_of_numbers(got, wanted)
        if error > TOLERANCE.get(type_.dtype, 0.0):
            worst = max(worst, error)
    return worst or None


def _laid_out(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """Return the same numbers with these strides; along those of 0, all numbers are equal."""
    lying = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device="cpu")
    once = tuple(slice(0, 1) if not stride else slice(None) for stride in strides)
    lying[once] = tensor[once]
    return lying
