"""Pooling over one to three spatial axes: maximum and both kinds of average.

Every implementation of oneDNN 3.2's ``max`` differs from PyTorch's: it skips a NaN in the window instead of passing it
on, and a window of only NaN or -inf gives the lowest finite number. The averages pass NaN on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import prod
from typing import Any

import torch
import torch.nn.functional as F

from fmtprop.errors import ShapeError
from fmtprop.ir import Attrs, Bytes, Call, Cost, Importer, Onnx, Reads, TensorType, Value, Writing, each_image
from fmtprop.ir.facets import Absorbs, ByPyTorch, Numbers
from fmtprop.ir.op import Category, Lowering, NativeAttr, Natives, OpDef, Operand, Sample
from fmtprop.layout import DataType
from fmtprop.ops.arguments import axes_of, batched, computable, first_of, ints, unbatched
from fmtprop.ops.building import FEW_SUMMANDS, Ready, Tensors, check_summands, primitive_of
from fmtprop.ops.reduction import Reduction
from fmtprop.ops.view_attrs import reshaped
from fmtprop.ops.window import check_window, extent, torch_padding, window_count

# ---------------------------------------------------------------- attributes

ALGORITHMS = ("max", "avg_include_padding", "avg_exclude_padding")


@dataclass(frozen=True)
class Pooling(Attrs):
    """Attributes of a pooling, one number per spatial axis.

    oneDNN developer guide, "Pooling".
    """

    #: ``"max"``, ``"avg_include_padding"`` (divide by the whole window) or ``"avg_exclude_padding"`` (divide by the
    #: window's elements inside the source)
    alg: str
    #: size of the window, at least 1
    kernel: tuple[int, ...]
    #: step of the window, at least 1
    strides: tuple[int, ...]
    #: positions skipped between two taps; 0 is dense
    dilates: tuple[int, ...]
    #: `pad_l`, `pad_r`: padding before and after the source; smaller than the window
    pad_l: tuple[int, ...]
    pad_r: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.alg not in ALGORITHMS:
            raise ShapeError(f"pooling has no algorithm {self.alg!r}; it has {', '.join(ALGORITHMS)}")
        others = {"kernel": self.kernel, "dilates": self.dilates, "pad_l": self.pad_l, "pad_r": self.pad_r}
        check_window("pooling", self.strides, **others)
        for axis, kernel in enumerate(self.kernel):
            covered, pad = extent(kernel, self.dilates[axis]), max(self.pad_l[axis], self.pad_r[axis])
            if pad >= covered:
                raise ShapeError(
                    f"pooling padding {pad} on spatial axis {axis} must be smaller than the window, {covered}"
                )

    @classmethod
    def make(
        cls,
        alg: str,
        kernel: Sequence[int],
        strides: int = 1,
        dilates: int = 0,
        pad_l: int = 0,
        pad_r: int | None = None,
    ) -> Pooling:
        """Return attributes with the same step and padding on all axes; symmetric unless `pad_r` is given."""
        ndim, right = len(kernel), pad_l if pad_r is None else pad_r
        return cls(alg, tuple(kernel), (strides,) * ndim, (dilates,) * ndim, (pad_l,) * ndim, (right,) * ndim)


# ---------------------------------------------------------------- meaning


def infer(attrs: Pooling, types: Mapping[str, TensorType]) -> tuple[TensorType, ...]:
    """Return the type of dst, [N, C, …]."""
    src, spatial = types["src"], len(attrs.kernel)
    if src.ndim != spatial + 2:
        raise ShapeError(f"src has {src.ndim} axes but {spatial} spatial axes need {spatial + 2}: [N, C, …]")
    sizes = window_count(src.dims[2:], attrs.kernel, attrs.strides, attrs.dilates, attrs.pad_l, attrs.pad_r)
    return (src.with_dims((*src.dims[:2], *sizes)),)


def windows(attrs: Pooling, src: torch.Tensor, fill: float) -> torch.Tensor:
    """Return src padded with `fill`, as a view [N, C, positions…, window…].

    A single window ends with the source: models write global poolings with windows of any size.
    """
    sizes = src.shape[2:]
    counts = window_count(sizes, attrs.kernel, attrs.strides, attrs.dilates, attrs.pad_l, attrs.pad_r)
    axes = zip(counts, attrs.dilates, sizes, strict=True)
    clipped = [count == 1 and dilate == 0 and size > 0 for count, dilate, size in axes]
    pads = [
        [0 if clip else pad for clip, pad in zip(clipped, side, strict=True)] for side in (attrs.pad_l, attrs.pad_r)
    ]
    found = F.pad(src, torch_padding(*pads), value=fill) if any(map(any, pads)) else src
    for axis, kernel in enumerate(attrs.kernel):
        if clipped[axis]:
            found = found.movedim(axis + 2, -1)[..., : kernel - attrs.pad_l[axis]].unsqueeze(axis + 2)
            continue
        covered = extent(kernel, attrs.dilates[axis])
        found = found.unfold(axis + 2, covered, attrs.strides[axis])[..., :: attrs.dilates[axis] + 1]
    return found


def reference(attrs: Pooling, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Evaluate in plain PyTorch."""
    src = tensors["src"]
    spatial = len(attrs.kernel)
    inner = tuple(range(-spatial, 0))
    if attrs.alg == "max":
        lowest = -torch.inf if src.is_floating_point() else torch.iinfo(src.dtype).min
        return (windows(attrs, src, lowest).amax(inner),)
    total = windows(attrs, src, 0).sum(inner, dtype=src.dtype)
    if attrs.alg == "avg_include_padding":
        return (total / prod(attrs.kernel),)
    inside = src.new_ones((1, 1, *src.shape[2:]))
    return (total / windows(attrs, inside, 0).sum(inner),)


def operator(attrs: Pooling, tensors: Tensors, results: Sequence[torch.Tensor]) -> Ready:
    """Return PyTorch's operator for it, which writes its result to a tensor."""
    src, spatial = tensors["src"], len(attrs.kernel)
    window = attrs.kernel, attrs.strides, attrs.pad_l
    uneven = attrs.pad_l != attrs.pad_r or any(
        2 * pad > kernel for pad, kernel in zip(attrs.pad_l, attrs.kernel, strict=True)
    )
    if uneven or (attrs.alg != "max" and any(attrs.dilates)):
        return None
    if attrs.alg == "max":
        pool = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[spatial - 1]
        dilation = tuple(dilate + 1 for dilate in attrs.dilates)
        return lambda: results[0].copy_(pool(src, *window, dilation))
    if attrs.kernel == src.shape[2:] and not any(attrs.pad_l):
        return partial(torch.mean, src, tuple(range(2, src.ndim)), keepdim=True, out=results[0])
    # PyTorch's averages add one number after the other, unlike its means
    if spatial == 1 or prod(attrs.kernel) > FEW_SUMMANDS:
        return None
    # PyTorch 2.13's average over three axes writes row-major and ignores the result's strides
    if spatial == 3 and not results[0].is_contiguous():
        return None
    average: Callable[..., torch.Tensor] = (F.avg_pool2d, F.avg_pool3d)[spatial - 2]
    including = attrs.alg == "avg_include_padding"
    return partial(average, src, *window, ceil_mode=False, count_include_pad=including, out=results[0])


def loses(attrs: Pooling) -> frozenset[str]:
    """Return the special values that maxima lose: NaN is skipped; if all elements are -inf, the result is finite."""
    return frozenset({"nan", "extremum"}) if attrs.alg == "max" else frozenset()


def primitive(attrs: Pooling, descs: Natives, attr: NativeAttr) -> Lowering:
    """Create the pooling's primitive descriptor.

    Raises UnsupportedOpError for an average of too many elements.
    """
    if attrs.alg != "max":
        # a window may reach far beyond its source
        check_summands("pooling", prod(map(min, attrs.kernel, descs["src"].dims[2:])))
    return primitive_of("Pooling")(attrs, descs, attr)


# ---------------------------------------------------------------- importers


def _ceil_padding(size: int, covered: int, stride: int, pad: int) -> int:
    """Return the right padding with as many positions as PyTorch's ``ceil_mode``; `pad` if it adds none."""
    count = -(-(size + 2 * pad - covered) // stride) + 1
    if (count - 1) * stride >= size + pad:
        # PyTorch: the last window must start inside the source or its left padding
        count -= 1
    return max(pad, (count - 1) * stride + covered - size - pad)


def _emit(call: Call, attrs: Pooling) -> Value:
    """Emit the pooling of ``self``; nothing if every window is one element and none is left out."""
    src: Value = call["self"]
    spatial = len(attrs.kernel)
    if {*attrs.kernel, *attrs.strides} == {1} and not any((*attrs.pad_l, *attrs.pad_r)):
        return src
    dst = call.emit("pooling", {"src": batched(call, src, spatial + 2)}, attrs)
    return unbatched(call, dst, like=src)


def attributes(args: Mapping[str, Any], dims: Sequence[int], alg: str, spatial: int) -> Pooling | None:
    """Return the pooling of a call on src with these dims; None if there is none.

    Arguments are ``kernel_size``, ``stride``, ``padding``, ``ceil_mode`` and, of maxima, ``dilation``.
    """
    kernel, pad_l = ints(args["kernel_size"], spatial), ints(args["padding"], spatial)
    strides = ints(args["stride"], spatial) if args["stride"] else kernel
    dilates = tuple(size - 1 for size in ints(args.get("dilation", 1), spatial))
    pad_r = pad_l
    if args["ceil_mode"]:
        covered = map(extent, kernel, dilates)
        pad_r = tuple(map(_ceil_padding, dims[-spatial:], covered, strides, pad_l))
    if alg == "avg_include_padding" and pad_r != pad_l:
        # PyTorch counts the padding but not ceil_mode's addition; oneDNN counts both or neither
        if any(pad_l):
            return None
        alg = "avg_exclude_padding"
    return Pooling(alg, kernel, strides, dilates, pad_l, pad_r)


def average_attributes(call: Call, spatial: int) -> Pooling | None:
    """Return the average pooling of a call's arguments; None if oneDNN has none."""
    if call.args.get("divisor_override") is not None:
        return None
    alg = "avg_include_padding" if call["count_include_pad"] else "avg_exclude_padding"
    return attributes(call.args, call.type(call["self"]).dims, alg, spatial)


def _pool(call: Call, attrs: Pooling | None) -> Value | None:
    if attrs is None or not (computable(call, call["self"]) or _is_of_bytes(call, attrs)):
        return None
    return _emit(call, attrs)


def _is_of_bytes(call: Call, attrs: Pooling) -> bool:
    """Return whether it is a maximum of integers of a quantized model, which PyTorch has for images and volumes."""
    is_maximum = attrs.alg == "max" and len(attrs.kernel) > 1 and attrs.pad_l == attrs.pad_r
    return is_maximum and call.type(call["self"]).dtype in (DataType.U8, DataType.S8)


def _max(spatial: int) -> Importer:
    return lambda call: _pool(call, attributes(call.args, call.type(call["self"]).dims, "max", spatial))


def _average(spatial: int) -> Importer:
    return lambda call: _pool(call, average_attributes(call, spatial))


def uniform_windows(size: int, count: int) -> tuple[int, int] | None:
    """Return (kernel, stride) if the windows of adaptive pooling are equal and equidistant, else None.

    >>> uniform_windows(14, 7), uniform_windows(7, 1), uniform_windows(7, 3), uniform_windows(1, 7)
    ((2, 2), (7, 7), (3, 2), None)
    """
    starts = [i * size // count for i in range(count)]
    lengths = {-(-(i + 1) * size // count) - start for i, start in enumerate(starts)}
    steps = {after - before for before, after in pairwise(starts)} or set(lengths)
    if len(lengths) > 1 or len(steps) > 1 or steps == {0}:
        return None
    return lengths.pop(), steps.pop()


def adaptive_attributes(alg: str, sizes: Sequence[int], counts: Sequence[int]) -> Pooling | None:
    """Return the pooling from spatial sizes to others, such as adaptive ones; None if its windows are not alike."""
    windows = list(map(uniform_windows, sizes, counts))
    if None in windows:
        return None
    kernel, strides = zip(*(window for window in windows if window), strict=True)
    zeros = (0,) * len(kernel)
    return Pooling(alg, kernel, strides, zeros, zeros, zeros)


def _adaptive(alg: str, spatial: int) -> Importer:
    def importer(call: Call) -> Value | None:
        sizes, counts = call.type(call["self"]).dims[-spatial:], ints(call["output_size"], spatial)
        return _pool(call, adaptive_attributes(alg, sizes, counts))

    return importer


def _mean(call: Call) -> Value | None:
    """Import a mean: global average pooling over exactly the spatial axes, else a reduction."""
    src = call["self"]
    if not computable(call, src) or call["dtype"] not in (None, call.type(src).dtype):
        return None
    dims = call.type(src).dims
    axes = axes_of(call["dim"], len(dims))
    if len(dims) in (4, 5) and axes == tuple(range(2, len(dims))) and 0 not in dims[2:]:
        dst = call.emit("pooling", {"src": src}, Pooling.make("avg_include_padding", dims[2:]))
    else:
        dst = call.emit("reduction", {"src": src}, Reduction("mean", axes))
    if call["keepdim"]:
        return dst
    return reshaped(call, dst, [size for axis, size in enumerate(dims) if axis not in axes])


def _operations(attrs: Pooling, gathered: float) -> float:
    return max(gathered, prod(attrs.kernel))


# ---------------------------------------------------------------- ONNX


def _write(attrs: Pooling, w: Writing, operands: Mapping[str, str]) -> str:
    window: dict[str, object] = {
        "kernel_shape": list(attrs.kernel),
        "strides": list(attrs.strides),
        "dilations": [dilate + 1 for dilate in attrs.dilates],
        "pads": [*attrs.pad_l, *attrs.pad_r],
    }
    if attrs.alg == "max":
        return w("MaxPool", operands["src"], **window)
    return w("AveragePool", operands["src"], **window, count_include_pad=int(attrs.alg == "avg_include_padding"))


# ---------------------------------------------------------------- samples and declaration


def samples() -> Iterable[Sample]:
    """Yield every algorithm in 1-D to 3-D, with padding, tails and dilation."""
    image = {"src": TensorType((2, 17, 9, 8))}
    for alg in ALGORITHMS:
        yield Sample(f"{alg}_2d", Pooling.make(alg, (3, 3), 2, pad_l=1), {"src": TensorType((2, 16, 9, 8))})
        yield Sample(f"{alg}_odd", Pooling.make(alg, (2, 3)), image)
        yield Sample(f"{alg}_asymmetric", Pooling.make(alg, (3, 3), 2, pad_l=0, pad_r=1), image)
        yield Sample(f"{alg}_global", Pooling.make(alg, (7, 7)), {"src": TensorType((2, 32, 7, 7))})
        yield Sample(f"{alg}_1d", Pooling.make(alg, (3,), 2, pad_l=1), {"src": TensorType((2, 16, 11))})
        yield Sample(f"{alg}_3d", Pooling.make(alg, (2, 3, 2), 2, pad_l=1), {"src": TensorType((1, 8, 5, 6, 7))})
    yield Sample("max_dilated", Pooling.make("max", (3, 3), 1, 1, pad_l=1), image)


POOLING = OpDef(
    name="pooling",
    attrs=Pooling,
    operands=(Operand("src", "SRC"),),
    category=Category.BANDWIDTH,
    infer=infer,
    reference=reference,
    pytorch=ByPyTorch(operator, reads=Reads.ROWS_OR_CHANNELS_LAST),
    primitive=primitive,
    sliced=each_image,
    cost=Cost(_operations, lambda attrs: prod(attrs.kernel), pace=0.8),
    numbers=Numbers(bytes=lambda attrs: Bytes.MOVED if attrs.alg == "max" else Bytes.NORMALIZED, loses=loses),
    absorbs=Absorbs(frozenset({"eltwise", "binary"})),
    short="pool",
    samples=samples,
    torch={
        "aten.max_pool1d.default": _max(1),
        "aten.max_pool2d.default": _max(2),
        "aten.max_pool3d.default": _max(3),
        "aten.max_pool1d_with_indices.default": first_of(_max(1)),
        "aten.max_pool2d_with_indices.default": first_of(_max(2)),
        "aten.max_pool3d_with_indices.default": first_of(_max(3)),
        "aten.avg_pool1d.default": _average(1),
        "aten.avg_pool2d.default": _average(2),
        "aten.avg_pool3d.default": _average(3),
        "aten.adaptive_avg_pool1d.default": _adaptive("avg_include_padding", 1),
        "aten.adaptive_avg_pool2d.default": _adaptive("avg_include_padding", 2),
        "aten.adaptive_avg_pool3d.default": _adaptive("avg_include_padding", 3),
        "aten._adaptive_avg_pool2d.default": _adaptive("avg_include_padding", 2),
        "aten._adaptive_avg_pool3d.default": _adaptive("avg_include_padding", 3),
        "aten.adaptive_max_pool1d.default": first_of(_adaptive("max", 1)),
        "aten.adaptive_max_pool2d.default": first_of(_adaptive("max", 2)),
        "aten.adaptive_max_pool3d.default": first_of(_adaptive("max", 3)),
        "aten.mean.dim": _mean,
    },
    onnx=Onnx(_write),
)
