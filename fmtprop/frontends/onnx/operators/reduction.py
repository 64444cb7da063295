"""Reductions over axes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from fmtprop.frontends.onnx.operators.values import axes_of, axis_of, ints

_Reduce = Callable[[Tensor, list[int], bool], Tensor]


def _reduction(function: _Reduce, each: Callable[[Tensor], Tensor] | None = None) -> Callable[..., Tensor]:
    """Return the operator for both definitions of its axes: as an attribute, and later as an input.

    Parameters
    ----------
    function : callable
        The reduction; takes a tensor, the axes, and whether these are kept.
    each : callable, optional
        The function of each element if no axis is reduced; the identity by default.
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


def _lowest(dtype: torch.dtype) -> Any:
    if dtype is torch.bool:
        return False
    return -torch.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def _highest(dtype: torch.dtype) -> Any:
    if dtype is torch.bool:
        return True
    return torch.inf if dtype.is_floating_point else torch.iinfo(dtype).max


def _extreme(function: Callable[..., Tensor], bound: Callable[[torch.dtype], Any]) -> _Reduce:
    def extreme(x: Tensor, dims: list[int], keep: bool) -> Tensor:
        if any(x.shape[dim] == 0 for dim in dims):
            shape = [1 if axis in dims else n for axis, n in enumerate(x.shape) if keep or axis not in dims]
            return torch.full(shape, bound(x.dtype), dtype=x.dtype)
        return function(x, dims, keep)

    return extreme


def _prod(x: Tensor, dims: list[int], keep: bool) -> Tensor:
    for dim in reversed(dims):
        x = torch.prod(x, dim, keep, dtype=x.dtype)
    return x


def _sum(x: Tensor, dims: list[int], keep: bool) -> Tensor:
    return torch.sum(x, dims, keep)


def _mean(x: Tensor, dims: list[int], keep: bool) -> Tensor:
    if x.is_floating_point():
        return torch.mean(x, dims, keep)
    return torch.mean(x.to(torch.float64), dims, keep)


def _l1(x: Tensor, dims: list[int], keep: bool) -> Tensor:
    return torch.sum(torch.abs(x), dims, keep)


def _l2(x: Tensor, dims: list[int], keep: bool) -> Tensor:
    squares = torch.sum(x * x, dims, keep)
    return torch.sqrt(squares if x.is_floating_point() else squares.to(torch.float64))


def _log_sum(x: Tensor, dims: list[int], keep: bool) -> Tensor:
    return torch.log(torch.sum(x, dims, keep))


def _log_sum_exp(x: Tensor, dims: list[int], keep: bool) -> Tensor:
    return torch.logsumexp(x if x.is_floating_point() else x.to(torch.float64), dims, keep)


def _sum_square(x: Tensor, dims: list[int], keep: bool) -> Tensor:
    return torch.sum(x * x, dims, keep)


def _arg(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def arg(x: Tensor, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Tensor:
        axis = axis_of(axis, x.ndim)
        if not select_last_index:
            return function(x, axis, bool(keepdims))
        return x.shape[axis] - 1 - function(x.flip(axis), axis, bool(keepdims))

    return arg


OPERATORS: Final[dict[str, Callable[..., Any]]] = {
    "ReduceSum": _reduction(_sum),
    "ReduceMean": _reduction(_mean),
    "ReduceMax": _reduction(_extreme(torch.amax, _lowest)),
    "ReduceMin": _reduction(_extreme(torch.amin, _highest)),
    "ReduceProd": _reduction(_prod),
    "ReduceL1": _reduction(_l1, torch.abs),
    "ReduceL2": _reduction(_l2, torch.abs),
    "ReduceLogSum": _reduction(_log_sum, torch.log),
    "ReduceLogSumExp": _reduction(_log_sum_exp),
    "ReduceSumSquare": _reduction(_sum_square, torch.square),
    "ArgMax": _arg(torch.argmax),
    "ArgMin": _arg(torch.argmin),
}
