"""Operators that interpolate between elements: resizing and sampling."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from fmtprop.onnx.model.operators.attributes import calling, passed_to
from fmtprop.onnx.model.operators.values import axes_of, check_places, data, floats, ints, known

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
    if transformation == "tf_half_pixel_for_nn":
        return (place + 0.5) / axis.scale
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
    # in f32, as PyTorch, ONNX Runtime and OpenVINO multiply: 5 elements by 2.8 are 14, by the f32 nearest to 2.8 13.99…
    return {
        axis: _Axis(x.shape[axis], math.floor(np.float32(x.shape[axis]) * np.float32(scale)), scale)
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


#: bytes of one corner's samples that are computed at a time
_SAMPLES_NBYTES: Final = 1 << 26


@dataclass(frozen=True)
class _Samples:
    """Places along one axis between two elements each: (boxes, places)."""

    low: Tensor
    high: Tensor
    #: share of the higher element, and whether the place is in the image
    share: Tensor
    is_inside: Tensor

    @classmethod
    def of(cls, start: Tensor, step: Tensor, cells: int, each: int, size: int) -> _Samples:
        """Return `each` places in each of some cells of boxes, in the middle of equal parts."""
        parts = (torch.arange(cells * each).to(start.dtype) + 0.5) / each
        at = start[:, None] + parts * step[:, None]
        inside, at = (at >= -1) & (at <= size), at.clamp(0, size - 1)
        low = at.to(torch.int64)
        return cls(low, (low + 1).clamp(max=size - 1), at - low, inside)


def _roi_align(
    x: Tensor,
    rois: Tensor,
    places: Tensor,
    *,
    coordinate_transformation_mode: str = "half_pixel",
    mode: str = "avg",
    output_height: int = 1,
    output_width: int = 1,
    sampling_ratio: int = 0,
    spatial_scale: float = 1.0,
) -> Tensor:
    """Sample boxes of images, as torchvision's ``roi_align``; `places`: of each box, the number of its image."""
    cells = output_height, output_width
    is_half = coordinate_transformation_mode == "half_pixel"
    corners = rois * spatial_scale - (0.5 if is_half else 0)
    starts, sizes = corners[:, :2], corners[:, 2:] - corners[:, :2]
    sizes = sizes if is_half else sizes.clamp(min=1)
    rows = x.movedim(1, -1).contiguous()  # a place's channels together
    made = partial(_sampled, rows, cells, mode)
    if sampling_ratio > 0:
        return made(starts, sizes, places, (sampling_ratio, sampling_ratio))
    # as many samples as elements in a cell: boxes of as many together
    counts = np.ceil(data(sizes, "the number of samples of a box")[:, ::-1] / np.array(cells)).astype(int).clip(0)
    result = x.new_zeros(len(rois), x.shape[1], *cells)
    for count in np.unique(counts[(counts > 0).all(1)], axis=0):
        (found,) = np.nonzero((counts == count).all(1))
        of = torch.from_numpy(found)
        result[of] = made(starts[of], sizes[of], places[of], (int(count[0]), int(count[1])))
    return result


@passed_to(_roi_align)
def _roi_align_10(x: Tensor, rois: Tensor, places: Tensor, **attributes: Any) -> Tensor:
    return _roi_align(x, rois, places, coordinate_transformation_mode="output_half_pixel", **attributes)


def _sampled(
    rows: Tensor, cells: tuple[int, int], mode: str, starts: Tensor, sizes: Tensor, places: Tensor,
    each: tuple[int, int],
) -> Tensor:  # fmt: skip
    """Return the cells of boxes, (boxes, channels, height, width), with so many samples in each."""
    of_box = math.prod(cells) * math.prod(each) * rows.shape[-1] * rows.dtype.itemsize
    most = max(_SAMPLES_NBYTES // max(of_box, 1), 1)
    if len(starts) > most:
        parts = [slice(first, first + most) for first in range(0, len(starts), most)]
        return torch.cat([_sampled(rows, cells, mode, starts[p], sizes[p], places[p], each) for p in parts])
    y, x = (
        _Samples.of(starts[:, column], sizes[:, column] / cells[axis], cells[axis], each[axis], rows.shape[1 + axis])
        for axis, column in ((0, 1), (1, 0))
    )
    weighted = []
    for of_y, row in ((1 - y.share, y.low), (y.share, y.high)):
        for of_x, column in ((1 - x.share, x.low), (x.share, x.high)):
            amount = (of_y * y.is_inside)[:, :, None] * (of_x * x.is_inside)[:, None, :]
            weighted.append(rows[places[:, None, None], row[:, :, None], column[:, None, :]] * amount[..., None])
    join, over = (torch.add, torch.mean) if mode == "avg" else (torch.maximum, torch.amax)
    count, channels = len(starts), rows.shape[-1]
    samples = reduce(join, weighted).reshape(count, cells[0], each[0], cells[1], each[1], channels)
    return over(samples, (2, 4)).movedim(-1, 1)


OPERATORS: Final[dict[str, Callable[..., Any]]] = {
    "RoiAlign": _roi_align_10,
    "RoiAlign-16": _roi_align,
    "Resize": _resize_10,
    "Resize-11": _resize,
    "Upsample": _upsample,
    "Upsample-9": _resize_10,
    "GridSample": _grid_sample,
    "AffineGrid": calling(
        lambda theta, size, align: F.affine_grid(theta, ints(size, "size"), bool(align)), 2, align_corners=0
    ),
}
