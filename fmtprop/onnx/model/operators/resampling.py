"""Operators that interpolate between elements: resizing and sampling."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from fmtprop.onnx.model.operators.attributes import calling
from fmtprop.onnx.model.operators.values import axes_of, check_places, floats, ints, known

_Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class _Axis:
    """The sizes and the scale of one resized axis."""

    size: int
    result: int
    scale: float
    begin: float = 0.0
    end: float = 1.0


@dataclass(frozen=True)
class _Manner:
    """The operator's attributes, the same for all axes."""

    mode: str
    transformation: str
    nearest: str
    cubic_coefficient: float
    exclude_outside: bool
    antialias: bool
    extrapolation: float


def _coordinates(axis: _Axis, transformation: str) -> _Array:
    """Return the position in the source of each element of the result."""
    check_places(axis.result)
    place = np.arange(axis.result, dtype=np.float64)
    size, length = axis.size, axis.scale * axis.size
    if transformation == "align_corners":
        return np.zeros_like(place) if length == 1 else place * (size - 1) / (length - 1)
    if transformation == "asymmetric":
        return place / axis.scale
    if transformation == "tf_crop_and_resize":
        if length == 1:
            return np.full_like(place, (axis.begin + axis.end) * (size - 1) / 2)
        return place * (axis.end - axis.begin) * (size - 1) / (length - 1) + axis.begin * (size - 1)
    if transformation == "pytorch_half_pixel" and length == 1:
        return np.full_like(place, -0.5)
    if transformation in ("half_pixel", "pytorch_half_pixel"):
        return (place + 0.5) / axis.scale - 0.5
    if transformation == "half_pixel_symmetric":
        offset = size / 2 * (1 - axis.result / length)
        return offset + (place + 0.5) / axis.scale - 0.5
    raise ValueError(f"coordinate_transformation_mode {transformation!r} is not known")


def _nearest(at: _Array, rule: str, size: int) -> _Array:
    rules: dict[str, Callable[[_Array], _Array]] = {
        "floor": np.floor,
        "ceil": np.ceil,
        "round_prefer_floor": lambda x: np.ceil(x - 0.5),
        "round_prefer_ceil": lambda x: np.floor(x + 0.5),
    }
    if rule not in rules:
        raise ValueError(f"nearest_mode {rule!r} is none of {', '.join(rules)}")
    places: _Array = np.clip(rules[rule](at), 0, size - 1).astype(np.int64)
    return places


def _filter(distance: _Array, mode: str, a: float) -> _Array:
    t = np.abs(distance)
    if mode == "linear":
        hat: _Array = np.maximum(1 - t, 0.0)
        return hat
    near = (a + 2) * t**3 - (a + 3) * t**2 + 1
    far = a * t**3 - 5 * a * t**2 + 8 * a * t - 4 * a
    result: _Array = np.where(t <= 1, near, np.where(t < 2, far, 0))
    return result


def _weights(at: _Array, axis: _Axis, manner: _Manner) -> _Array:
    """Return the matrix of result elements by source elements."""
    shrink = min(axis.scale, 1.0) if manner.antialias else 1.0
    reach = 2 if manner.mode == "cubic" else 1
    radius = math.ceil(reach / shrink)
    first = np.floor(at).astype(np.int64)
    taps = first[:, None] + np.arange(-radius + 1, radius + 1)
    amounts = _filter((taps - at[:, None]) * shrink, manner.mode, manner.cubic_coefficient)
    if manner.exclude_outside:
        amounts = np.where((taps < 0) | (taps >= axis.size), 0, amounts)
    if manner.exclude_outside or manner.antialias:
        amounts = amounts / amounts.sum(1, keepdims=True)
    check_places(axis.result * axis.size // 4)  # a larger matrix than other lists
    matrix = np.zeros((axis.result, axis.size))
    np.add.at(matrix, (np.arange(axis.result)[:, None], np.clip(taps, 0, axis.size - 1)), amounts)
    return matrix


def _resized(x: Tensor, axes: dict[int, _Axis], manner: _Manner) -> Tensor:
    quick = _by_pytorch(x, axes, manner)
    if quick is not None:
        return quick
    dtype = x.dtype
    outside: Tensor | None = None
    for number, axis in axes.items():
        at = _coordinates(axis, manner.transformation)
        if manner.transformation == "tf_crop_and_resize":
            beyond = torch.from_numpy((at < 0) | (at > axis.size - 1))
            shaped = beyond.reshape([-1] + [1] * (x.ndim - number - 1))
            outside = shaped if outside is None else outside | shaped
        if manner.mode == "nearest":
            x = x.index_select(number, known(_nearest(at, manner.nearest, axis.size)))
            continue
        matrix = torch.from_numpy(_weights(at, axis, manner))
        wide = x.to(torch.float64) if not x.is_floating_point() else x
        x = (wide.movedim(number, -1) @ matrix.to(wide.dtype).t()).movedim(-1, number)
    if x.dtype != dtype:
        x = x.round().to(dtype)
    if outside is None:
        return x
    return torch.where(outside, known(manner.extrapolation).to(dtype), x)


def _by_pytorch(x: Tensor, axes: dict[int, _Axis], manner: _Manner) -> Tensor | None:
    """Return the result of PyTorch's own function for images; None if it does not compute the same."""
    spatial = list(range(2, x.ndim))
    of_bytes = x.dtype in (torch.uint8, torch.int8) and manner.mode == "nearest"
    plain = not manner.antialias and not manner.exclude_outside and (x.is_floating_point() or of_bytes)
    if x.ndim != 4 or not plain or any(axis not in spatial for axis in axes):
        return None
    sizes = [axes[axis].result if axis in axes else x.shape[axis] for axis in spatial]
    if manner.mode == "nearest":
        if manner.transformation == "tf_crop_and_resize":
            return None
        for axis in axes.values():
            places = _nearest(_coordinates(axis, manner.transformation), manner.nearest, axis.size)
            if not np.array_equal(places, np.arange(axis.result) * axis.size // axis.result):
                return None
        wide = F.interpolate(x.to(torch.float32) if of_bytes else x, size=sizes, mode="nearest")
        return wide.to(x.dtype)
    if any(axis.result != axis.scale * axis.size or axis.result == 1 for axis in axes.values()):
        return None
    corners = manner.transformation == "align_corners"
    if not corners and manner.transformation not in ("half_pixel", "pytorch_half_pixel"):
        return None
    if manner.mode == "cubic" and manner.cubic_coefficient != -0.75:
        return None
    return F.interpolate(
        x, size=sizes, mode="bilinear" if manner.mode == "linear" else "bicubic", align_corners=corners
    )


def _by_scales(x: Tensor, scales: Sequence[float], dims: Sequence[int]) -> dict[int, _Axis]:
    if len(scales) != len(dims):
        raise ValueError(f"{len(scales)} scales for {len(dims)} axes")
    if min(scales, default=1) <= 0:
        raise ValueError(f"scales {list(scales)} must be positive")
    return {
        axis: _Axis(x.shape[axis], math.floor(x.shape[axis] * scale), scale)
        for axis, scale in zip(dims, scales, strict=True)
        if scale != 1
    }


def _resize(
    x: Tensor,
    roi: Tensor | None = None,
    scales: Tensor | None = None,
    sizes: Tensor | None = None,
    *,
    antialias: int = 0,
    axes: Sequence[int] | None = None,
    coordinate_transformation_mode: str = "half_pixel",
    cubic_coeff_a: float = -0.75,
    exclude_outside: int = 0,
    extrapolation_value: float = 0.0,
    keep_aspect_ratio_policy: str = "stretch",
    mode: str = "nearest",
    nearest_mode: str = "round_prefer_floor",
) -> Tensor:
    dims = list(range(x.ndim)) if axes is None else axes_of(axes, x.ndim)
    if sizes is not None:
        found = _by_sizes(x, ints(sizes, "sizes"), dims, keep_aspect_ratio_policy)
    else:
        found = _by_scales(x, floats(scales, "scales") if scales is not None else [], dims)
    if coordinate_transformation_mode == "tf_crop_and_resize":
        window = floats(roi, "roi") if roi is not None else []
        given = {axis: (window[i], window[i + len(dims)]) for i, axis in enumerate(dims)}
        whole = {axis: found.get(axis, _Axis(x.shape[axis], x.shape[axis], 1.0)) for axis in dims}
        found = {
            axis: _Axis(one.size, one.result, one.scale, *given[axis])
            for axis, one in whole.items()
            if axis in found or given[axis] != (0.0, 1.0)
        }
    manner = _Manner(
        mode, coordinate_transformation_mode, nearest_mode, cubic_coeff_a, bool(exclude_outside), bool(antialias),
        extrapolation_value,
    )  # fmt: skip
    return _resized(x, found, manner) if found else x


def _by_sizes(x: Tensor, sizes: Sequence[int], dims: Sequence[int], policy: str) -> dict[int, _Axis]:
    if len(sizes) != len(dims):
        raise ValueError(f"sizes {list(sizes)} for {len(dims)} axes")
    if min(sizes, default=1) < 1:
        raise ValueError(f"sizes {list(sizes)} must be positive")
    ratios = [size / x.shape[axis] for axis, size in zip(dims, sizes, strict=True)]
    if policy == "stretch":
        pairs = list(zip(sizes, ratios, strict=True))
    elif policy in ("not_larger", "not_smaller"):
        scale = (min if policy == "not_larger" else max)(ratios)
        pairs = [(math.floor(scale * x.shape[axis] + 0.5), scale) for axis in dims]
    else:
        raise ValueError(f"keep_aspect_ratio_policy {policy!r} is not known")
    return {
        axis: _Axis(x.shape[axis], size, scale)
        for axis, (size, scale) in zip(dims, pairs, strict=True)
        if size != x.shape[axis] or scale != 1
    }


def _resize_10(x: Tensor, scales: Tensor, *, mode: str = "nearest") -> Tensor:
    return _upsample_by_scales(x, floats(scales, "scales"), mode)


def _upsample(x: Tensor, *, scales: Sequence[float], mode: str = "nearest") -> Tensor:
    return _upsample_by_scales(x, scales, mode)


def _upsample_by_scales(x: Tensor, scales: Sequence[float], mode: str) -> Tensor:
    found = _by_scales(x, scales, list(range(x.ndim)))
    manner = _Manner(mode.replace("bilinear", "linear"), "asymmetric", "floor", -0.75, False, False, 0.0)
    return _resized(x, found, manner) if found else x


# ---------------------------------------------------------------- sampling


_MODES: Final = {
    "bilinear": "bilinear",
    "linear": "bilinear",
    "nearest": "nearest",
    "bicubic": "bicubic",
    "cubic": "bicubic",
}


def _grid_sample(
    x: Tensor, grid: Tensor, *, align_corners: int = 0, mode: str = "linear", padding_mode: str = "zeros"
) -> Tensor:
    if x.ndim == 5 and _MODES[mode] == "bicubic":
        raise NotImplementedError("cubic sampling of volumes")
    return F.grid_sample(x, grid, _MODES[mode], padding_mode, bool(align_corners))


OPERATORS: Final[dict[str, Callable[..., Any]]] = {
    "Resize": _resize_10,
    "Resize-11": _resize,
    "Upsample": _upsample,
    "Upsample-9": _resize_10,
    "GridSample": _grid_sample,
    "AffineGrid": calling(
        lambda theta, size, align: F.affine_grid(theta, ints(size, "size"), bool(align)), 2, align_corners=0
    ),
}
