"""Nodes as functions of PyTorch tensors, which give new tensors in the planned format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fmtprop.errors import PlanError
from fmtprop.ir.node import Node
from fmtprop.layout import MemoryDesc
from fmtprop.targets.mkldnn.kernel import Kernel
from fmtprop.targets.pytorch import call_reference

__all__ = ["function_of", "lies_as", "viewed"]


def function_of(node: Node, *, in_place: bool = False) -> Callable[..., Any]:
    """Return what a node of a formatted graph calls.

    Parameters
    ----------
    node : Node
        With its choice.
    in_place : bool
        Whether the result takes over the kernel's residual.

    Returns
    -------
    callable
        From the operands, in the order of the choice, to a tensor or a tuple of tensors, none of which shares memory
        with an operand (but for that residual).

    Raises
    ------
    PlanError
        The node has no choice.
    """
    if node.choice is None:
        raise PlanError(f"{node.label} has no choice: assign formats before planning")
    kernel, names = node.choice.handle, tuple(node.choice.operands)
    if not isinstance(kernel, Kernel):
        return _own(node, lambda *tensors: call_reference(node, dict(zip(names, tensors, strict=True))))
    call = kernel.call_into if in_place and kernel.call_into is not None else kernel.call
    if node.descs[0].kind == "opaque":
        return call
    if node.choice.impl == "aten":
        return _own(node, call)
    return _laid_out(call, node.descs[0]) if len(node.descs) == 1 else call


def viewed(tensor: torch.Tensor, desc: MemoryDesc) -> torch.Tensor:
    """Return what a descriptor says of a tensor's memory: the tensor itself, or a view."""
    if desc.kind == "opaque" or tensor.is_mkldnn or (tuple(tensor.shape) == desc.dims and lies_as(tensor, desc)):
        return tensor
    return tensor.as_strided(desc.dims, desc.strides, tensor.storage_offset() + desc.offset0)


def lies_as(tensor: torch.Tensor, desc: MemoryDesc) -> bool:
    """Whether a tensor of the descriptor's dimensions has its strides."""
    return not desc.offset0 and all(
        size == 1 or a == b for size, a, b in zip(desc.dims, tensor.stride(), desc.strides, strict=True)
    )


def _laid_out(call: Callable[..., torch.Tensor], desc: MemoryDesc) -> Callable[..., torch.Tensor]:
    strides = desc.strides

    def checked(*tensors: torch.Tensor) -> torch.Tensor:
        result = call(*tensors)
        return result if result.stride() == strides or lies_as(result, desc) else _copy(result, desc)

    return checked


def _own(node: Node, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with results that are laid out as planned and share memory with no operand."""
    descs = node.descs

    def owned(*tensors: torch.Tensor) -> Any:
        results = call(*tensors)
        several = isinstance(results, tuple)
        given = {tensor.untyped_storage().data_ptr() for tensor in tensors if not tensor.is_mkldnn}
        found = tuple(
            result
            if lies_as(result, desc) and result.untyped_storage().data_ptr() not in given
            else _copy(result, desc)
            for result, desc in zip(results if several else (results,), descs, strict=True)
        )
        return found if len(found) > 1 else found[0]

    return owned


def _copy(tensor: torch.Tensor, desc: MemoryDesc) -> torch.Tensor:
    return torch.empty_strided(desc.dims, desc.strides, dtype=tensor.dtype, device="cpu").copy_(tensor)
