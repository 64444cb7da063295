"""Operators that choose elements by index or by value."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fmtprop.onnx.model.operators.attributes import calling, widened
from fmtprop.onnx.model.operators.values import DataDependentError, axis_of, data, integer, is_known, number

_Array = np.ndarray[Any, Any]


def _wrapped(indices: Tensor, size: int) -> Tensor:
    """Return indices as non-negative numbers."""
    if is_known(indices) and not (data(indices, "indices") < 0).any():
        return indices.to(torch.int64)
    indices = indices.to(torch.int64)
    return torch.where(indices < 0, indices + size, indices)


def gather(x: Tensor, indices: Tensor, *, axis: int = 0) -> Tensor:
    """Return the parts of a tensor at the indices along an axis."""
    axis = axis_of(axis, x.ndim)
    if is_known(indices) and indices.numel() == 1:
        place = integer(indices, "indices")
        if not -x.shape[axis] <= place < x.shape[axis]:
            raise ValueError(f"index {place} is outside axis {axis} of size {x.shape[axis]}")
        one = x.select(axis, place)
        return one if indices.ndim == 0 else one.reshape(x.shape[:axis] + indices.shape + x.shape[axis + 1 :])
    if not is_known(indices):  # negative ones count from the end, as PyTorch's do; it would read a scalar's number
        chosen = x[(slice(None),) * axis + (indices.reshape(indices.shape or (1,)),)]
        return chosen if indices.ndim else chosen.squeeze(axis)
    places = _wrapped(indices, x.shape[axis])
    if axis == 0 and x.ndim == 2 and x.is_floating_point():
        return F.embedding(places, x)
    chosen = x.index_select(axis, places.reshape(-1))
    return chosen.reshape(x.shape[:axis] + indices.shape + x.shape[axis + 1 :])


def _linear(indices: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return row-major positions of tuples of indices along the last axis; one beyond the end for a wrong one."""
    position = torch.zeros_like(indices[..., 0], dtype=torch.int64)
    outside = torch.zeros_like(position, dtype=torch.bool)
    for place, size in enumerate(shape):
        index = _wrapped(indices[..., place], size)
        outside = outside | (index != index.clamp(0, size - 1))
        position = position * size + index
    return torch.where(outside, math.prod(shape), position)


def _depth(x: Tensor, indices: Tensor, batch_dims: int) -> int:
    """Return the number of axes that each tuple of indices names."""
    depth = indices.shape[-1]
    if not 0 <= batch_dims <= batch_dims + depth <= x.ndim:
        raise ValueError(f"{depth} indices for each element, and {batch_dims} axes of a batch, of {x.ndim} axes")
    return depth


def _gather_nd(x: Tensor, indices: Tensor, *, batch_dims: int = 0) -> Tensor:
    depth = _depth(x, indices, batch_dims)
    batch, inner = tuple(x.shape[:batch_dims]), tuple(x.shape[batch_dims + depth :])
    named = tuple(x.shape[batch_dims : batch_dims + depth])
    rows, count = math.prod(batch), math.prod(indices.shape[batch_dims:-1])  # not -1: a size may be 0
    places = _linear(indices, named).reshape(rows, count)
    flat = x.reshape(rows, math.prod(named), *inner)
    chosen = flat[torch.arange(rows).reshape(-1, 1), places]
    return chosen.reshape(tuple(indices.shape[:-1]) + inner)


_REDUCE: Final = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


def _scatter_elements(x: Tensor, indices: Tensor, updates: Tensor, *, axis: int = 0, reduction: str = "none") -> Tensor:
    if indices.shape != updates.shape:  # PyTorch would take a part of the updates
        raise ValueError(f"indices have the shape {tuple(indices.shape)}, updates {tuple(updates.shape)}")
    places = _wrapped(indices, x.shape[axis])
    if reduction == "none":
        return torch.scatter(x, axis, places, updates)
    return torch.scatter_reduce(x, axis, places, updates, _REDUCE[reduction], include_self=True)


def _scatter_nd(x: Tensor, indices: Tensor, updates: Tensor, *, reduction: str = "none") -> Tensor:
    depth = _depth(x, indices, 0)
    named, n = tuple(x.shape[:depth]), math.prod(x.shape[depth:])
    places = _linear(indices, named).reshape(-1, 1)
    rows = x.reshape(math.prod(named), n)
    places, values = places.expand(places.shape[0], n), updates.reshape(places.shape[0], n)
    if reduction == "none":
        return torch.scatter(rows, 0, places, values).reshape(x.shape)
    return torch.scatter_reduce(rows, 0, places, values, _REDUCE[reduction], include_self=True).reshape(x.shape)


def _tensor_scatter(
    cache: Tensor, update: Tensor, starts: Tensor | None = None, *, axis: int = -2, mode: str = "linear"
) -> Tensor:
    axis = axis_of(axis, cache.ndim)
    length, size = update.shape[axis], cache.shape[axis]
    first = torch.zeros(cache.shape[0], dtype=torch.int64) if starts is None else starts
    places = first.reshape(-1, 1) + torch.arange(length)
    if mode == "circular":
        places = places % size
    shape = [1] * cache.ndim
    shape[0], shape[axis] = cache.shape[0], length
    return torch.scatter(cache, axis, places.reshape(shape).expand(update.shape), update)


def _top_k(
    x: Tensor,
    count: Tensor | None = None,
    *,
    axis: int = -1,
    k: int | None = None,
    largest: int = 1,
    sorted: int = 1,
) -> tuple[Tensor, Tensor]:
    n = integer(count, "K") if count is not None else int(k or 0)
    if not 0 <= n <= x.shape[axis]:
        raise ValueError(f"K is {n}, but axis {axis} has {x.shape[axis]} elements")
    values, places = torch.sort(x, dim=axis, descending=bool(largest), stable=True)  # equal elements keep their order
    return values.narrow(axis, 0, n), places.narrow(axis, 0, n)


# ---------------------------------------------------------------- the data decides on the shape


def _needs_data(*values: Any) -> None:
    if not is_known(values):
        raise DataDependentError("the result's shape")


def _non_zero(x: Tensor) -> Tensor:
    _needs_data(x)
    return torch.nonzero(x.reshape(1) if x.ndim == 0 else x).t().contiguous()


def _compress(x: Tensor, condition: Tensor, *, axis: int | None = None) -> Tensor:
    _needs_data(condition)
    if axis is None:
        x, axis = x.reshape(-1), 0
    return x.index_select(axis, torch.nonzero(condition).reshape(-1))


def _unique(x: Tensor, *, axis: int | None = None, sorted: int = 1) -> tuple[Tensor, ...]:
    _needs_data(x)
    if x.dtype is torch.bfloat16:
        values, *rest = _unique(x.to(torch.float32), axis=axis, sorted=sorted)
        return values.to(torch.bfloat16), *rest
    found, first, inverse, counts = np.unique(
        x.numpy(), return_index=True, return_inverse=True, return_counts=True, axis=axis
    )
    inverse = inverse.reshape(-1)
    if not sorted:
        order = np.argsort(first)
        rank = np.argsort(order)
        found = np.take(found, order, axis=0 if axis is None else axis)
        first, counts, inverse = first[order], counts[order], rank[inverse]
    return tuple(torch.from_numpy(np.ascontiguousarray(part)) for part in (found, first, inverse, counts))


def _corners(boxes: Tensor, center: bool) -> tuple[_Array, ...]:
    """Return top, left, bottom and right of boxes, each y1, x1, y2, x2 or x, y, width, height."""
    a, b, c, d = data(boxes, "boxes").T
    if center:
        return b - d / 2, a - c / 2, b + d / 2, a + c / 2
    return np.minimum(a, c), np.minimum(b, d), np.maximum(a, c), np.maximum(b, d)


def _kept(corners: tuple[_Array, ...], order: _Array, limit: int, threshold: float) -> list[int]:
    """Return the boxes that overlap none of the kept ones before them; `order`: the best first."""
    top, left, bottom, right = corners
    areas, kept = (bottom - top) * (right - left), list[int]()
    while order.size and len(kept) < limit:
        best, rest = order[0], order[1:]
        kept.append(int(best))
        height = np.minimum(bottom[best], bottom[rest]) - np.maximum(top[best], top[rest])
        width = np.minimum(right[best], right[rest]) - np.maximum(left[best], left[rest])
        shared = height.clip(0) * width.clip(0)
        union = areas[best] + areas[rest] - shared
        order = rest[np.divide(shared, union, out=np.zeros_like(shared), where=union > 0) <= threshold]
    return kept


def _non_max_suppression(
    boxes: Tensor,
    scores: Tensor,
    most: Tensor | None = None,
    iou_threshold: Tensor | None = None,
    score_threshold: Tensor | None = None,
    *,
    center_point_box: int = 0,
) -> Tensor:
    _needs_data(boxes, scores, most, iou_threshold, score_threshold)
    limit = 0 if most is None else integer(most, "max_output_boxes_per_class")
    threshold = 0.0 if iou_threshold is None else float(number(iou_threshold))
    chosen: list[list[int]] = []
    for batch in range(scores.shape[0]):
        corners = _corners(boxes[batch], bool(center_point_box))
        for kind in range(scores.shape[1]):
            order = torch.argsort(scores[batch, kind], descending=True, stable=True)
            if score_threshold is not None:
                order = order[scores[batch, kind][order] > float(number(score_threshold))]
            chosen += ([batch, kind, box] for box in _kept(corners, data(order, "order"), limit, threshold))
    return torch.tensor(chosen, dtype=torch.int64).reshape(-1, 3)


#: operators that refuse some integers in their second operand: indices beyond the end, and a divisor of 0
REFUSING: Final = frozenset("Gather GatherElements GatherND Scatter ScatterElements ScatterND Div Mod".split())

OPERATORS: Final[dict[str, Callable[..., Any]]] = {
    "Gather": gather,
    "GatherElements": calling(
        lambda x, indices, axis: torch.gather(x, axis, _wrapped(indices, x.shape[axis])), 2, axis=0
    ),
    "GatherND": _gather_nd,
    "Scatter": widened(_scatter_elements),
    "ScatterElements": widened(_scatter_elements),
    "ScatterND": widened(_scatter_nd),
    "TensorScatter": _tensor_scatter,
    "TopK": _top_k,
    "NonZero": widened(_non_zero, gives_places=True),
    "Compress": _compress,
    "Unique": _unique,
    "NonMaxSuppression": _non_max_suppression,
}
