"""Normalizations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from fmtprop.onnx.model.elements import TORCH_DTYPES
from fmtprop.onnx.model.operators.attributes import calling
from fmtprop.onnx.model.operators.values import axis_of


def _batch_normalization(
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    mean: Tensor,
    variance: Tensor,
    *,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
    spatial: int = 1,
    training_mode: int = 0,
    wanted: int,
) -> Any:
    if not spatial:
        raise NotImplementedError("statistics for each element (spatial=0)")
    if not training_mode:
        if wanted > 1:
            raise NotImplementedError("saved statistics, which only training makes")
        kinds = {tensor.dtype for tensor in (x, scale, bias, mean, variance)}
        if len(kinds) == 1:
            return F.batch_norm(x, mean, variance, scale, bias, False, 0.0, epsilon)
        mean, variance, scale, bias = (tensor.to(torch.float32) for tensor in (mean, variance, scale, bias))
        return F.batch_norm(x.to(torch.float32), mean, variance, scale, bias, False, 0.0, epsilon).to(x.dtype)
    axes = [axis for axis in range(x.ndim) if axis != 1]
    shape = [1, -1, *[1] * (x.ndim - 2)]
    here, spread = x.mean(axes), x.var(axes, correction=0)
    y = (x - here.reshape(shape)) / torch.sqrt(spread.reshape(shape) + epsilon)
    y = y * scale.reshape(shape) + bias.reshape(shape)
    results = (y, mean * momentum + here * (1 - momentum), variance * momentum + spread * (1 - momentum))
    return results[:wanted] if wanted > 1 else y


def _group_normalization(
    x: Tensor, scale: Tensor, bias: Tensor, *, num_groups: int, epsilon: float = 1e-5, stash_type: int = 1
) -> Tensor:
    return torch.group_norm(x, num_groups, scale, bias, epsilon)


def layer_normalization(
    x: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = 1,
    wanted: int,
) -> Any:
    """Normalise over the given axis and all later ones."""
    axis = axis_of(axis, x.ndim)
    shape = list(x.shape[axis:])
    whole = all(v is None or (list(v.shape) == shape and v.dtype == x.dtype) for v in (scale, bias))
    if wanted == 1 and whole:
        return F.layer_norm(x, shape, scale, bias, epsilon)
    wide = x.to(TORCH_DTYPES[stash_type])
    axes = list(range(axis, x.ndim))
    mean = wide.mean(axes, keepdim=True)
    inverse = torch.rsqrt((wide - mean).square().mean(axes, keepdim=True) + epsilon)
    y = ((wide - mean) * inverse).to(x.dtype) * scale
    results = (y if bias is None else y + bias, mean, inverse)
    return results[:wanted] if wanted > 1 else results[0]


def _rms_normalization(
    x: Tensor, scale: Tensor, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> Tensor:
    axis = axis_of(axis, x.ndim)
    if list(scale.shape) == list(x.shape[axis:]) and TORCH_DTYPES[stash_type] == x.dtype == scale.dtype:
        return F.rms_norm(x, scale.shape, scale, epsilon)
    wide = x.to(TORCH_DTYPES[stash_type])
    squares = wide.square().mean(list(range(axis, x.ndim)), keepdim=True)
    return (wide * torch.rsqrt(squares + epsilon)).to(scale.dtype) * scale


def _lp_normalization(x: Tensor, *, axis: int = -1, p: int = 2) -> Tensor:
    if p not in (1, 2):
        raise ValueError(f"p is {p}; it must be 1 or 2")
    norm = x.abs().sum(axis, keepdim=True) if p == 1 else torch.sqrt(x.square().sum(axis, keepdim=True))
    return torch.where(norm == 0, torch.zeros_like(x), x / norm)


def _mean_variance_normalization(x: Tensor, *, axes: Sequence[int] = (0, 2, 3)) -> Tensor:
    dims = list(axes)
    mean = x.mean(dims, keepdim=True)
    variance = x.square().mean(dims, keepdim=True) - mean.square()
    return (x - mean) / (torch.sqrt(variance) + 1e-9)


def _lrn(x: Tensor, *, size: int, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0) -> Tensor:
    if size % 2:
        return F.local_response_norm(x, size, alpha, beta, bias)
    most = x.shape[1] - 1  # there are no further channels on one side
    before, after = min((size - 1) // 2, most), min(size // 2, most)
    squares = F.pad(x.square(), [0] * 2 * (x.ndim - 2) + [before, after])
    sums = torch.stack([squares.narrow(1, start, x.shape[1]) for start in range(before + after + 1)]).sum(0)
    return x / (bias + alpha / size * sums) ** beta


OPERATORS: Final[dict[str, Callable[..., Any]]] = {
    "BatchNormalization": _batch_normalization,
    "InstanceNormalization": calling(
        lambda x, scale, bias, epsilon: torch.group_norm(x, x.shape[1], scale, bias, epsilon), 3, epsilon=1e-5
    ),
    "GroupNormalization": _group_normalization,
    "LayerNormalization": layer_normalization,
    "RMSNormalization": _rms_normalization,
    "LpNormalization": _lp_normalization,
    "MeanVarianceNormalization": _mean_variance_normalization,
    "LRN": _lrn,
}
