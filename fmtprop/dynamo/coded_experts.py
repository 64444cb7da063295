"""Experts of transformers' models that keep their weights as codes, in place of floating numbers.

Such a module has the matrices of all experts in one parameter, [experts, outputs, depth] or its transposition, and its
forward pass multiplies groups of rows by them. A captured graph decodes the codes in front of these products, where
:mod:`~fmtprop.passes.precision.codes_of_experts` finds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from fmtprop.ops.matmul_nbits import encoded
from fmtprop.passes.precision.compress_weights import group_of
from fmtprop.targets.memory import aligned

#: the forward pass, of those of transformers, that multiplies groups of rows; others would decode all experts for one
_GROUPED = "grouped_mm"


def is_experts(layer: nn.Module) -> bool:
    """Return whether a module is the experts of a layer, as transformers has them."""
    config: Any = getattr(layer, "config", None)
    return hasattr(layer, "is_transposed") and getattr(config, "_experts_implementation", None) == _GROUPED


def keep_codes_of_experts(layer: Any, bits: int) -> int:
    """Keep the matrices of a layer's experts as codes, and free the floating numbers; return their bytes."""
    nbytes, numbers = 0, {}
    for name, weight, group in list(_matrices(layer)):
        experts = weight.transpose(1, 2) if layer.is_transposed else weight
        codes, scales = encoded(experts.reshape(-1, experts.shape[2]), bits, group)
        if not bool(scales.isfinite().all()):
            continue
        delattr(layer, name)
        layer.register_buffer(f"{name}_codes", aligned(codes))
        layer.register_buffer(f"{name}_scales", aligned(scales))
        numbers[name] = property(_numbers(name, bits, group, tuple(experts.shape), weight.dtype))
        nbytes += weight.nbytes
    if numbers:
        kind = type(layer)
        layer.__class__ = type(f"Coded{kind.__name__}", (kind,), numbers)  # its forward pass stays
    return nbytes


def _matrices(layer: Any) -> Iterator[tuple[str, nn.Parameter, int]]:
    """Yield the parameters with the matrices of all experts, by name, and how many numbers share a scale."""
    for name, weight in layer._parameters.items():
        if type(weight) is not nn.Parameter or weight.ndim != 3 or weight.device.type != "cpu":
            continue
        depth = weight.shape[1 if layer.is_transposed else 2]
        group = group_of(weight.numel() // max(1, depth), depth)
        if group is not None and weight.dtype in (torch.float32, torch.bfloat16, torch.float16):
            yield name, weight, group


def _numbers(
    name: str, bits: int, group: int, dims: tuple[int, ...], dtype: torch.dtype
) -> Callable[[Any], torch.Tensor]:
    """Return what computes the numbers that a parameter's codes stand for, shaped as the parameter was.

    `dims`: experts, outputs and depth.
    """

    def numbers(layer: Any) -> torch.Tensor:
        codes, scales = getattr(layer, f"{name}_codes"), getattr(layer, f"{name}_scales")
        matrix: torch.Tensor = torch.ops.fmtprop.decode_nbits(codes, scales, None, bits, group, dims[2], dtype)
        experts = matrix.view(dims)
        return experts.transpose(1, 2) if layer.is_transposed else experts

    return numbers
