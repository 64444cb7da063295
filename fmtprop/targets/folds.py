"""Kernels of reductions, and of poolings with one window."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from fmtprop.errors import UnsupportedOpError
from fmtprop.ir import Node, loses_special_values
from fmtprop.jit import AverageBytesKernel, AverageKernel, FoldKernel, Quantized, StandaloneKernel, offered
from fmtprop.layout import DataType, MemoryDesc
from fmtprop.ops import Pooling, Reduction
from fmtprop.ops.building import FEW_SUMMANDS, check_summands
from fmtprop.passes.assignment.formats import channels_last, like, plain
from fmtprop.passes.target import Request
from fmtprop.targets.as_rows import BYTES, Way, as_asked, is_row_of_numbers, merged, rounding_of

#: how many numbers of a row a kernel adds up side by side, at least
_SIDE_BY_SIDE = 32

#: oneDNN's algorithm -> the kernel's
_FOLDS = {"sum": "sum", "mean": "mean", "max": "max", "min": "min", "norm_lp_sum": "norm"}


def reductions(node: Node, attrs: Reduction, request: Request) -> Iterator[Way]:
    """Yield the kernel for sums, means, extrema and Euclidean norms."""
    if attrs.alg in _FOLDS and (not attrs.alg.startswith("norm") or _is_euclidean(attrs)):
        yield from _reduction(_FOLDS[attrs.alg], attrs.axes, request)


def global_poolings(node: Node, attrs: Pooling, request: Request) -> Iterator[Way]:
    """Yield the kernel for averages of channels, or else a reduction of the spatial axes."""
    src, dst = request["src"], request["dst"]
    if src.dtype in BYTES or not _is_global(attrs, src):
        return
    kernel = None if attrs.alg == "max" else _average(src)
    result = as_asked(dst, channels_last(plain(dst)))
    if kernel is not None and result is not None:
        yield kernel, {"src": src}, (result,)
        return
    yield from _reduction("max" if attrs.alg == "max" else "mean", tuple(range(2, src.ndim)), request)


def averages_of_bytes(node: Node, attrs: Pooling, request: Request) -> Iterator[Way]:
    """Yield the kernel for averages of channels, of bytes or with a rounding behind it."""
    if not node.post_ops and request["src"].dtype not in BYTES:
        return
    src, rounding = request["src"], rounding_of(node, [post_op.attrs for post_op in node.post_ops])
    if attrs.alg == "max" or (src.dtype in BYTES and "src" not in node.grids):
        return  # whole numbers that stand for no others have a maximum, but no average
    grid = node.grids["src"] if src.dtype in BYTES else None
    result = as_asked(request["dst"], channels_last(plain(request["dst"])))
    if not _is_global(attrs, src) or result is None or (node.post_ops and rounding is None):
        return
    if src.at_start() != channels_last(plain(src)) or not {src.dtype, result.dtype} <= {DataType.F32, *BYTES}:
        return
    if (node.exact and loses_special_values(node)) or (grid is not None and grid.varies):
        return
    images, channels, *places = src.dims
    read = None if grid is None else Quantized(grid.stored, grid.scale, grid.zero)
    yield AverageBytesKernel(images, prod(places), channels, read, result.dtype, rounding), {"src": src}, (result,)


def _average(src: MemoryDesc) -> StandaloneKernel | None:
    images, channels, *places = src.dims
    if src.at_start() != channels_last(plain(src)):
        return None
    try:
        check_summands("pooling", prod(places))
    except UnsupportedOpError:
        return None
    return offered(AverageKernel(images, prod(places), channels, src.dtype))


def _is_global(attrs: Pooling, src: MemoryDesc) -> bool:
    """Whether one window is all of the source."""
    return attrs.kernel == src.dims[2:] and not any((*attrs.pad_l, *attrs.pad_r, *attrs.dilates))


def _is_euclidean(attrs: Reduction) -> bool:
    return (attrs.p, attrs.eps) == (2.0, 0.0)


def _reduction(alg: str, axes: tuple[int, ...], request: Request) -> Iterator[Way]:
    src, dst = request["src"], request["dst"]
    own = like(MemoryDesc(dst.dims, dst.dtype), src)
    result = None if own is None else as_asked(dst, own)
    if own is None or result is None or not is_row_of_numbers(src):
        return
    steps = [0 if axis in axes else step for axis, step in enumerate(own.strides)]
    kernel = _fold(alg, merged(src, steps), src)
    if kernel is not None:
        yield kernel, {"src": src}, (result,)


def _fold(alg: str, axes: tuple[tuple[int, ...], ...], src: MemoryDesc) -> FoldKernel | None:
    """Return the kernel where one run of axes is folded: all of the tensor, its last, its first, or between two."""
    folded = [index for index, (_, step) in enumerate(axes) if step == 0]
    if len(folded) != 1 or len(axes) > 3:
        return None
    (index,) = folded
    before, count, after = axes[:index], axes[index][0], axes[index + 1 :]
    if len(before) > 1 or len(after) > 1:
        return None
    images, columns = (run[0][0] if run else 1 for run in (before, after))
    if alg not in ("max", "min") and (count if columns > 1 else count // _SIDE_BY_SIDE) > FEW_SUMMANDS:
        return None
    return FoldKernel(alg, images, count, columns, src.dtype)
