"""Convolutions, pooling, and other operators on windows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fmtprop.onnx.model.operators.attributes import calling, passed_to
from fmtprop.onnx.model.operators.shape import pad
from fmtprop.onnx.model.operators.values import ints

_CONV: Final[tuple[Callable[..., Tensor], ...]] = (F.conv1d, F.conv2d, F.conv3d)
_TRANSPOSED: Final[tuple[Callable[..., Tensor], ...]] = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
_MAX: Final[tuple[Callable[..., Any], ...]] = (F.max_pool1d, F.max_pool2d, F.max_pool3d)
_AVERAGE: Final[tuple[Callable[..., Tensor], ...]] = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)


def _by_rank(functions: Sequence[Callable[..., Any]], spatial: int) -> Callable[..., Any]:
    if not 1 <= spatial <= len(functions):
        raise ValueError(f"{spatial} spatial axes; there must be 1 to {len(functions)}")
    return functions[spatial - 1]


class _Windows(NamedTuple):
    """Windows on all spatial axes: sizes, steps, distances within a window, and padding before and after an axis."""

    kernel: list[int]
    steps: list[int]
    spread: list[int]
    begins: list[int]
    ends: list[int]


def _windows(
    sizes: Sequence[int],
    kernel: Sequence[int],
    *,
    auto_pad: str = "NOTSET",
    dilations: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> _Windows:
    """Return the windows that a node's attributes declare."""
    n = len(kernel)
    steps, spread = ([1] * n if given is None else list(given) for given in (strides, dilations))
    return _Windows(list(kernel), steps, spread, *_padding(sizes, kernel, steps, spread, pads, auto_pad))


def _padding(
    sizes: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
    pads: Sequence[int] | None,
    auto_pad: str,
) -> tuple[list[int], list[int]]:
    """Return the amounts of padding before and after each spatial axis."""
    n = len(kernel)
    if len(strides) != n or len(dilations) != n:
        raise ValueError(f"strides {[*strides]} and dilations {[*dilations]} must have {n} numbers, one for each axis")
    if min((*kernel, *strides, *dilations), default=1) < 1:
        raise ValueError(f"kernel {[*kernel]}, strides {[*strides]} and dilations {[*dilations]} must be positive")
    if auto_pad == "NOTSET":
        given = list(pads or [0] * 2 * n)
        if len(given) != 2 * n or min(given, default=0) < 0:
            raise ValueError(f"pads {given} must have two numbers, not negative, for each of {n} spatial axes")
        return given[:n], given[n:]
    if auto_pad == "VALID":
        return [0] * n, [0] * n
    if auto_pad not in ("SAME_UPPER", "SAME_LOWER"):
        raise ValueError(f"auto_pad {auto_pad!r} is none of NOTSET, VALID, SAME_UPPER and SAME_LOWER")
    total = [
        max((-(-size // stride) - 1) * stride + (k - 1) * dilation + 1 - size, 0)
        for size, k, stride, dilation in zip(sizes, kernel, strides, dilations, strict=True)
    ]
    less, more = [t // 2 for t in total], [t - t // 2 for t in total]
    return (less, more) if auto_pad == "SAME_UPPER" else (more, less)


def _kernel_of(w: Tensor, declared: Sequence[int] | None) -> list[int]:
    """Return the spatial sizes of weights, which a node may declare, too."""
    kernel = list(w.shape[2:])
    if declared is not None and list(declared) != kernel:
        raise ValueError(f"kernel_shape is {list(declared)}, but W has shape {tuple(w.shape)}")
    return kernel


@passed_to(_windows)
def conv(
    x: Tensor,
    w: Tensor,
    b: Tensor | None = None,
    *,
    group: int = 1,
    kernel_shape: Sequence[int] | None = None,
    **attributes: Any,
) -> Tensor:
    """Convolve: (n, ic, …), (oc, ic / group, …) and (oc,) to (n, oc, …)."""
    n = w.ndim - 2
    _, steps, spread, begins, ends = _windows(x.shape[2:], _kernel_of(w, kernel_shape), **attributes)
    if begins != ends:
        x, begins = pad(x, [0, 0, *begins], [0, 0, *ends]), [0] * n
    result: Tensor = _by_rank(_CONV, n)(x, w, b, steps, begins, spread, group)
    return result


def _conv_transpose(
    x: Tensor,
    w: Tensor,
    b: Tensor | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: Sequence[int] | None = None,
    group: int = 1,
    kernel_shape: Sequence[int] | None = None,
    output_padding: Sequence[int] | None = None,
    output_shape: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Tensor:
    kernel, n = _kernel_of(w, kernel_shape), w.ndim - 2
    steps, spread = list(strides or [1] * n), list(dilations or [1] * n)
    extra = list(output_padding or [0] * n)
    function = _by_rank(_TRANSPOSED, n)
    # the sizes of the result without padding
    full = [(i - 1) * s + (k - 1) * d + 1 for i, k, s, d in zip(x.shape[2:], kernel, steps, spread, strict=True)]
    if output_shape is not None or auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        wanted = list(output_shape or [i * s for i, s in zip(x.shape[2:], steps, strict=True)])[-n:]
        total = [f + e - size for f, e, size in zip(full, extra, wanted, strict=True)]
        # in this operator the upper end gets the odd element of SAME_UPPER, and of no mode
        begins = [t // 2 if auto_pad == "SAME_UPPER" else t - t // 2 for t in total]
        ends = [t - begin for t, begin in zip(total, begins, strict=True)]
    else:
        begins, ends = _padding(x.shape[2:], kernel, steps, spread, pads, auto_pad)
    small = all(e < max(s, d) for e, s, d in zip(extra, steps, spread, strict=True))
    if begins == ends and min(begins) >= 0 and small:
        whole: Tensor = function(x, w, b, steps, begins, extra, group, spread)
        return whole
    plain = function(x, w, None, steps, 0, 0, group, spread)
    ends = [end - e for end, e in zip(ends, extra, strict=True)]
    plain = pad(plain, [0, 0, *(-begin for begin in begins)], [0, 0, *(-end for end in ends)])
    return plain if b is None else plain + b.reshape(-1, *[1] * n)


def _deform_conv(
    x: Tensor,
    w: Tensor,
    offset: Tensor,
    b: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    dilations: Sequence[int] | None = None,
    group: int = 1,
    kernel_shape: Sequence[int] | None = None,
    offset_group: int = 1,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Tensor:
    n, channels, height, width = x.shape
    kh, kw = w.shape[2:]
    sy, sx = strides or (1, 1)
    dy, dx = dilations or (1, 1)
    top, left = (pads or (0, 0, 0, 0))[:2]
    oh, ow = offset.shape[2:]
    shift = offset.reshape(n * offset_group, kh, kw, 2, oh, ow)
    ys = shift[:, :, :, 0] + (torch.arange(kh) * dy - top).reshape(-1, 1, 1, 1) + torch.arange(oh).reshape(-1, 1) * sy
    xs = shift[:, :, :, 1] + (torch.arange(kw) * dx - left).reshape(-1, 1, 1) + torch.arange(ow) * sx
    # grid_sample counts from -1 to 1 between the centers of the outer elements
    grid = torch.stack([2 * xs / max(width - 1, 1) - 1, 2 * ys / max(height - 1, 1) - 1], -1)
    if height == 1 or width == 1:
        raise NotImplementedError("deformable convolution of a source of one row or column")
    source = x.reshape(n * offset_group, channels // offset_group, height, width)
    taken = F.grid_sample(
        source,
        grid.reshape(n * offset_group, kh * kw * oh, ow, 2).to(x.dtype),
        padding_mode="zeros",
        align_corners=True,
    ).reshape(n, offset_group, channels // offset_group, kh * kw, oh, ow)
    if mask is not None:
        taken = taken * mask.reshape(n, offset_group, 1, kh * kw, oh, ow)
    columns = taken.reshape(n, group, channels // group * kh * kw, oh * ow)
    result = (w.reshape(group, w.shape[0] // group, -1) @ columns).reshape(n, w.shape[0], oh, ow)
    return result if b is None else result + b.reshape(-1, 1, 1)


# ---------------------------------------------------------------- pooling


def _ceil_pads(sizes: Sequence[int], windows: _Windows) -> list[int]:
    """Return the padding after each axis that completes its last window."""
    found = []
    for size, k, stride, dilation, begin, end in zip(sizes, *windows, strict=True):
        reach = dilation * (k - 1) + 1
        count = -(-(size + begin + end - reach) // stride) + 1
        if (count - 1) * stride >= size + begin:  # a window must not begin in the padding after the axis
            count -= 1
        found.append(max((count - 1) * stride + reach - size - begin, end))
    return found


def _is_even(windows: _Windows) -> bool:
    """Return whether PyTorch's poolings have this padding: as much at both ends, and at most half a window."""
    narrow = all(2 * begin <= k for begin, k in zip(windows.begins, windows.kernel, strict=True))
    return windows.begins == windows.ends and narrow


@passed_to(_windows)
def _max_pool(
    x: Tensor,
    *,
    kernel_shape: Sequence[int],
    ceil_mode: int = 0,
    storage_order: int = 0,
    wanted: int,
    **attributes: Any,
) -> Any:
    windows = _windows(x.shape[2:], kernel_shape, **attributes)
    kernel, steps, spread, begins, ends = windows
    function = _by_rank(_MAX, len(kernel))
    if len(kernel) == 1 and not x.is_floating_point() and wanted == 1:  # PyTorch has none on one axis
        plane: dict[str, Any] = {"kernel_shape": [1, *kernel], "strides": [1, *steps], "dilations": [1, *spread]}
        pads = [0, *begins, 0, *ends]
        return _max_pool(x.unsqueeze(2), ceil_mode=ceil_mode, pads=pads, wanted=1, **plane).squeeze(2)
    if _is_even(windows) and wanted == 1:
        result: Tensor = function(x, kernel, steps, begins, spread, bool(ceil_mode))
        return result
    if ceil_mode:
        ends = _ceil_pads(x.shape[2:], windows)
    lowest = -math.inf if x.is_floating_point() else torch.iinfo(x.dtype).min
    padded = pad(x, [0, 0, *begins], [0, 0, *ends], lowest)
    if wanted == 1:
        return function(padded, kernel, steps, 0, spread)
    values, places = function(padded, kernel, steps, 0, spread, return_indices=True)
    return values, _indices(places, x.shape, padded.shape[2:], begins, storage_order)


def _indices(
    places: Tensor, shape: Sequence[int], padded: Sequence[int], begins: Sequence[int], storage_order: int
) -> Tensor:
    """Return positions in the whole source of positions in one channel's padded plane."""
    along = []
    for size in reversed(padded):
        along.append(places % size)
        places = torch.div(places, size, rounding_mode="floor")
    inside = [index - begin for index, begin in zip(reversed(along), begins, strict=True)]
    sizes = list(shape[2:])
    order = list(range(len(sizes)))[:: -1 if storage_order else 1]
    position = torch.zeros_like(inside[0])
    for axis in order:
        position = position * sizes[axis] + inside[axis]
    planes = torch.arange(shape[0] * shape[1]).reshape(shape[0], shape[1], *[1] * len(sizes))
    return position + planes * math.prod(sizes)


def _window_sums(x: Tensor, windows: _Windows) -> Tensor:
    kernel, steps, spread, begins, ends = windows
    n = len(kernel)
    padded = pad(x, [0, 0, *begins], [0, 0, *ends])
    flat = padded.reshape(-1, 1, *padded.shape[2:])
    sums = _by_rank(_CONV, n)(flat, torch.ones(1, 1, *kernel, dtype=x.dtype), None, steps, 0, spread)
    result: Tensor = sums.reshape(*x.shape[:2], *sums.shape[2:])
    return result


@passed_to(_windows)
def average_pool(
    x: Tensor, *, kernel_shape: Sequence[int], ceil_mode: int = 0, count_include_pad: int = 0, **attributes: Any
) -> Tensor:
    """Average over windows of the spatial axes."""
    windows = _windows(x.shape[2:], kernel_shape, **attributes)
    kernel, steps, spread, begins, ends = windows
    n = len(kernel)
    # PyTorch's on three axes refuses a window that reaches over an axis and both of its paddings
    fits = n < 3 or all(window <= size for window, size in zip(kernel, x.shape[2:], strict=True))
    if _is_even(windows) and max(spread) == 1 and fits:
        result: Tensor = _by_rank(_AVERAGE, n)(x, kernel, steps, begins, bool(ceil_mode), bool(count_include_pad))
        return result
    whole = _ceil_pads(x.shape[2:], windows) if ceil_mode else ends
    sums = _window_sums(x, windows._replace(ends=whole))
    counted = torch.ones(1, 1, *x.shape[2:], dtype=x.dtype)
    if count_include_pad:  # padding that only completes the last window never counts
        counted = pad(counted, [0, 0, *begins], [0, 0, *ends], 1)
        whole, begins = [w - e for w, e in zip(whole, ends, strict=True)], [0] * n
    return sums / _window_sums(counted, windows._replace(begins=begins, ends=whole))


@passed_to(_windows)
def _lp_pool(x: Tensor, *, kernel_shape: Sequence[int], ceil_mode: int = 0, p: float = 2, **attributes: Any) -> Tensor:
    windows = _windows(x.shape[2:], kernel_shape, **attributes)
    whole = _ceil_pads(x.shape[2:], windows) if ceil_mode else windows.ends
    return _window_sums(torch.abs(x) ** p, windows._replace(ends=whole)) ** (1 / p)


def _max_roi_pool(x: Tensor, rois: Tensor, *, pooled_shape: Sequence[int], spatial_scale: float = 1.0) -> Tensor:
    """Return the largest number in each cell of regions (batch, x1, y1, x2, y2), which hold whole places."""
    left, top, right, bottom = torch.floor(rois[:, 1:] * spatial_scale + 0.5).to(torch.int64).unbind(1)

    def inside(first: Tensor, last: Tensor, count: int, size: int) -> Tensor:
        """Return which places along an axis are in each of a region's cells."""
        length, cells = (last - first + 1).clamp(min=1).unsqueeze(1), torch.arange(count)
        begins = torch.div(cells * length, count, rounding_mode="floor")
        ends = -torch.div(-(cells + 1) * length, count, rounding_mode="floor")
        places = torch.arange(size) - first.reshape(-1, 1, 1)
        return (places >= begins.unsqueeze(2)) & (places < ends.unsqueeze(2))

    rows, columns = inside(top, bottom, pooled_shape[0], x.shape[2]), inside(left, right, pooled_shape[1], x.shape[3])
    images = x.index_select(0, rois[:, 0].to(torch.int64)).unsqueeze(2)
    lines = torch.where(rows[:, None, :, :, None], images, -math.inf).amax(3)
    cells = torch.where(columns[:, None, None], lines.unsqueeze(3), -math.inf).amax(4)
    empty = ~(rows.any(2)[:, None, :, None] & columns.any(2)[:, None, None])
    return torch.where(empty, 0.0, cells)


def global_average_pool(x: Tensor) -> Tensor:
    """Average over all spatial axes."""
    if x.ndim == 4:
        return F.adaptive_avg_pool2d(x, 1)
    return x.mean(list(range(2, x.ndim)), keepdim=True)


def _max_unpool(
    x: Tensor,
    indices: Tensor,
    output_shape: Tensor | None = None,
    *,
    kernel_shape: Sequence[int],
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Tensor:
    n = len(kernel_shape)
    steps, around = list(strides or [1] * n), list(pads or [0] * 2 * n)
    sizes = [
        (size - 1) * stride + k - around[i] - around[i + n]
        for i, (size, stride, k) in enumerate(zip(x.shape[2:], steps, kernel_shape, strict=True))
    ]
    flat = torch.zeros(math.prod(x.shape[:2]) * math.prod(sizes), dtype=x.dtype)
    small = torch.scatter(flat, 0, indices.reshape(-1), x.reshape(-1)).reshape(*x.shape[:2], *sizes)
    if output_shape is None:
        return small
    # indices are positions in the default output shape, even if another shape is requested
    wanted = ints(output_shape, "output_shape")
    return pad(small, [0] * x.ndim, [want - have for want, have in zip(wanted, small.shape, strict=True)])


def _col2im(
    x: Tensor,
    image_shape: Tensor,
    block_shape: Tensor,
    *,
    dilations: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Tensor:
    image, block = ints(image_shape, "image_shape"), ints(block_shape, "block_shape")
    n = len(image)
    steps, spread, around = list(strides or [1] * n), list(dilations or [1] * n), list(pads or [0] * 2 * n)
    channels = x.shape[1] // math.prod(block)
    padded = [size + around[i] + around[i + n] for i, size in enumerate(image)]
    counts = [(size - d * (k - 1) - 1) // s + 1 for size, d, k, s in zip(padded, spread, block, steps, strict=True)]
    position = torch.zeros([*block, *counts], dtype=torch.int64)
    for i in range(n):
        along = (torch.arange(block[i]) * spread[i]).reshape(-1, 1) + torch.arange(counts[i]) * steps[i]
        shape = [1] * (2 * n)
        shape[i], shape[n + i] = block[i], counts[i]
        position = position * padded[i] + along.reshape(shape)
    places = position.reshape(1, 1, -1).expand(x.shape[0], channels, -1)
    flat = torch.zeros(x.shape[0], channels, math.prod(padded), dtype=x.dtype)
    whole = torch.scatter_add(flat, 2, places, x.reshape(x.shape[0], channels, -1))
    return pad(
        whole.reshape(x.shape[0], channels, *padded),
        [0, 0, *(-a for a in around[:n])],
        [0, 0, *(-a for a in around[n:])],
    )


OPERATORS: Final[dict[str, Callable[..., Any]]] = {
    "Conv": conv,
    "ConvTranspose": _conv_transpose,
    "DeformConv": _deform_conv,
    "MaxPool": _max_pool,
    "AveragePool": average_pool,
    "LpPool": _lp_pool,
    "MaxRoiPool": _max_roi_pool,
    "GlobalAveragePool": global_average_pool,
    "GlobalMaxPool": calling(lambda x: x.amax(list(range(2, x.ndim)), keepdim=True)),
    "GlobalLpPool": calling(lambda x, p: (torch.abs(x) ** p).sum(list(range(2, x.ndim)), keepdim=True) ** (1 / p), p=2),
    "MaxUnpool": _max_unpool,
    "Col2Im": _col2im,
}
