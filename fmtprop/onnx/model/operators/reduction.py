"""Reductions over axes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from fmtprop.onnx.model.operators.attributes import widened
from fmtprop.onnx.model.operators.values import axes_of, axis_of, ints

_Reduce = Callable[[Tensor, list[int], bool], Tensor]


def _reduction(function: _Reduce, each: Callable[[Tensor], Tensor] | None = None) -> Callable[..., Tensor]:
    """Return the operator for both definitions of its axes: as an attribute, and later as an input.

    `each`: the function of each element if no axis is reduced; the identity by default.
    """

    def reduction(
        x: Tensor, given: Tensor | None = None, *, axes: Any = None, keepdims: int = 1, noop_with_empty_axes: int = 0
    ) -> Tensor:
        named = ints(given, "axes") if given is not None else list(axes or ())
        if not named and noop_with_empty_axes:
            return x if each is None else each(x)
        dims = sorted(axes_of(named, x.ndim)) or list(range(x.ndim))
        # a scalar has no axes, but one element
        result = function(x, dims, bool(keepdims)) if x.ndim else function(x.reshape(1), [0], False)
        return result.to(x.dtype)

    return reduction


def _bound(dtype: torch.dtype, least: bool) -> Any:
    """Return the least or the largest number of a type."""
    if dtype is torch.bool:
        return not least
    if dtype.is_floating_point:
        return -torch.inf if least else torch.inf
    return torch.iinfo(dtype).min if least else torch.iinfo(dtype).max


def _extreme(function: Callable[..., Tensor], least: bool) -> _Reduce:
    def extreme(x: Tensor, dims: list[int], keep: bool) -> Tensor:
        if any(x.shape[dim] == 0 for dim in dims):
            shape = [1 if axis in dims else n for axis, n in enumerate(x.shape) if keep or axis not in dims]
            return torch.full(shape, _bound(x.dtype, least), dtype=x.dtype)
        return function(x, dims, keep)

    return extreme


def _prod(x: Tensor, dims: list[int], keep: bool) -> Tensor:
    for dim in reversed(dims):
        x = torch.prod(x, dim, keep, dtype=x.dtype)
    return x


def _wide(x: Tensor) -> Tensor:
    return x if x.is_floating_point() else x.to(torch.float64)


def _arg(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def arg(x: Tensor, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Tensor:
        axis = axis_of(axis, x.ndim)
        if not select_last_index:
            return function(x, axis, bool(keepdims))
        return x.shape[axis] - 1 - function(x.flip(axis), axis, bool(keepdims))

    return widened(arg, gives_places=True)


OPERATORS: Final[dict[str, Callable[..., Any]]] = {
    "ReduceSum": _reduction(torch.sum),
    "ReduceMean": _reduction(lambda x, dims, keep: torch.mean(_wide(x), dims, keep)),
    "ReduceMax": widened(_reduction(_extreme(torch.amax, True))),
    "ReduceMin": widened(_reduction(_extreme(torch.amin, False))),
    "ReduceProd": widened(_reduction(_prod)),
    "ReduceL1": widened(_reduction(lambda x, dims, keep: torch.sum(torch.abs(x), dims, keep), torch.abs)),
    "ReduceL2": _reduction(lambda x, dims, keep: torch.sqrt(_wide(torch.sum(x * x, dims, keep))), torch.abs),
    "ReduceLogSum": _reduction(lambda x, dims, keep: torch.log(torch.sum(x, dims, keep)), torch.log),
    "ReduceLogSumExp": _reduction(lambda x, dims, keep: torch.logsumexp(_wide(x), dims, keep)),
    "ReduceSumSquare": _reduction(lambda x, dims, keep: torch.sum(x * x, dims, keep), torch.square),
    "ArgMax": _arg(torch.argmax),
    "ArgMin": _arg(torch.argmin),
}
