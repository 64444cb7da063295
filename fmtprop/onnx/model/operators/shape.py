"""Operators that move elements: views, windows, repetition, padding, and tensors made of nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from fmtprop.onnx.model.elements import TORCH_DTYPES
from fmtprop.onnx.model.operators.attributes import widened
from fmtprop.onnx.model.operators.values import (
    NotInTorchError,
    axes_of,
    axis_of,
    check_places,
    data,
    integer,
    ints,
    number,
)
from fmtprop.ops.shape_rules import together


def _shape(x: Tensor, *, start: int = 0, end: int | None = None) -> Tensor:
    return torch.tensor(list(x.shape)[start:end], dtype=torch.int64)


def _size(x: Tensor) -> Tensor:
    return torch.tensor(x.numel(), dtype=torch.int64)


def _reshape(x: Tensor, shape: Tensor, *, allowzero: int = 0) -> Tensor:
    wanted = ints(shape, "shape")
    if not allowzero:
        if any(n == 0 and axis >= x.ndim for axis, n in enumerate(wanted)):
            raise ValueError(f"shape {wanted} keeps an axis that a tensor of shape {tuple(x.shape)} lacks")
        wanted = [x.shape[axis] if n == 0 else n for axis, n in enumerate(wanted)]
    if -1 in wanted and 0 in wanted:
        others = math.prod(n for n in wanted if n != -1)
        raise ValueError(f"shape {wanted} has a -1 and other axes with {others} elements, so -1 has no value")
    return x.reshape(wanted)


def _transpose(x: Tensor, *, perm: Sequence[int] | None = None) -> Tensor:
    return x.permute(*(range(x.ndim)[::-1] if perm is None else perm)) if x.ndim else x


def _squeeze(x: Tensor, given: Tensor | None = None, *, axes: Sequence[int] | None = None) -> Tensor:
    named = ints(given, "axes") if given is not None else axes
    dims = [i for i, n in enumerate(x.shape) if n == 1] if named is None else axes_of(named, x.ndim)
    for dim in dims:
        if x.shape[dim] != 1:
            raise ValueError(f"axis {dim} has size {x.shape[dim]}; only size 1 can be squeezed")
    return x.reshape([n for axis, n in enumerate(x.shape) if axis not in dims])


def _unsqueeze(x: Tensor, given: Tensor | None = None, *, axes: Sequence[int] | None = None) -> Tensor:
    named = ints(given, "axes") if given is not None else list(axes or ())
    dims = axes_of(named, x.ndim + len(named))
    sizes = iter(x.shape)
    return x.reshape([1 if axis in dims else next(sizes) for axis in range(x.ndim + len(named))])


def _flatten(x: Tensor, *, axis: int = 1) -> Tensor:
    axis = axis if axis == x.ndim else axis_of(axis, x.ndim) if x.ndim else 0
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))


def _concat(*operands: Tensor, axis: int = 1) -> Tensor:
    return torch.cat(operands, axis_of(axis, operands[0].ndim)) if len(operands) > 1 else operands[0]


def _split(
    x: Tensor,
    given: Tensor | None = None,
    *,
    axis: int = 0,
    split: Sequence[int] | None = None,
    num_outputs: int | None = None,
    wanted: int,
) -> Any:
    axis = axis_of(axis, x.ndim)
    if num_outputs not in (None, wanted):
        raise ValueError(f"num_outputs is {num_outputs}, but it has {wanted} outputs")
    sizes = ints(given, "split") if given is not None else split
    if sizes is None:
        each = -(-x.shape[axis] // wanted)
        starts = range(0, each * wanted, each) if each else [0] * wanted
        sizes = [max(min(each, x.shape[axis] - start), 0) for start in starts]
    if sum(sizes) != x.shape[axis] or min(sizes, default=0) < 0:
        raise ValueError(f"parts {list(sizes)} do not make up axis {axis} of size {x.shape[axis]}")
    return tuple(torch.split(x, list(sizes), axis))


def _window(x: Tensor, axis: int, start: int, end: int, step: int) -> Tensor:
    if step == 0:
        raise ValueError("a step is 0")
    places = range(*slice(start, end, step).indices(x.shape[axis]))
    if not places:
        return x.narrow(axis, 0, 0)
    low, high = min(places[0], places[-1]), max(places[0], places[-1])
    every = (slice(None),) * axis
    window = x if (low, high, step) == (0, x.shape[axis] - 1, 1) else x[every + (slice(low, high + 1, abs(step)),)]  # noqa: RUF005
    return window.flip(axis) if step < 0 else window


def _slice_by_attributes(
    x: Tensor, *, starts: Sequence[int], ends: Sequence[int], axes: Sequence[int] | None = None
) -> Tensor:
    dims = range(len(starts)) if axes is None else axes_of(axes, x.ndim)
    for axis, start, end in zip(dims, starts, ends, strict=True):
        x = _window(x, axis, start, end, 1)
    return x


def _slice(x: Tensor, starts: Tensor, ends: Tensor, axes: Tensor | None = None, steps: Tensor | None = None) -> Tensor:
    begin, end = ints(starts, "starts"), ints(ends, "ends")
    dims = list(range(len(begin))) if axes is None else axes_of(ints(axes, "axes"), x.ndim)
    for axis, start, stop, step in zip(
        dims, begin, end, [1] * len(begin) if steps is None else ints(steps, "steps"), strict=True
    ):
        x = _window(x, axis, start, stop, step)
    return x


def _expand(x: Tensor, shape: Tensor) -> Tensor:
    return x.expand(together([x.shape, ints(shape, "shape")]))


def _tile(x: Tensor, repeats: Tensor) -> Tensor:
    counts = ints(repeats, "repeats")
    if len(counts) != x.ndim:
        raise ValueError(f"repeats {counts} must have one number for each of {x.ndim} axes")
    return x.repeat(counts) if counts else x


def _depth_to_space(x: Tensor, *, blocksize: int, mode: str = "DCR") -> Tensor:
    if mode == "CRD":
        return F.pixel_shuffle(x, blocksize)
    n, c, h, w = x.shape
    split = x.reshape(n, blocksize, blocksize, c // blocksize**2, h, w)
    return split.permute(0, 3, 4, 1, 5, 2).reshape(n, c // blocksize**2, h * blocksize, w * blocksize)


def _space_to_depth(x: Tensor, *, blocksize: int, mode: str = "DCR") -> Tensor:
    if mode == "CRD":
        return F.pixel_unshuffle(x, blocksize)
    n, c, h, w = x.shape
    split = x.reshape(n, c, h // blocksize, blocksize, w // blocksize, blocksize)
    return split.permute(0, 3, 5, 1, 2, 4).reshape(n, c * blocksize**2, h // blocksize, w // blocksize)


def _trilu(x: Tensor, k: Tensor | None = None, *, upper: int = 1) -> Tensor:
    diagonal = 0 if k is None else integer(k, "k")
    diagonal = max(min(diagonal, x.shape[-1] + 1), -x.shape[-2] - 1)
    return (torch.triu if upper else torch.tril)(x, diagonal)


def _reverse_sequence(x: Tensor, lengths: Tensor, *, batch_axis: int = 1, time_axis: int = 0) -> Tensor:
    places = torch.arange(x.shape[time_axis]).reshape(-1, 1)
    places = torch.where(places < lengths, lengths - 1 - places, places)  # time, batch
    if batch_axis < time_axis:
        places = places.t()
    shape = [x.shape[i] if i in (batch_axis, time_axis) else 1 for i in range(x.ndim)]
    return torch.gather(x, time_axis, places.reshape(shape).expand(x.shape))


# ---------------------------------------------------------------- padding


def pad(x: Tensor, begins: Sequence[int], ends: Sequence[int], value: Any = 0) -> Tensor:
    """Return a tensor padded with a constant; negative amounts remove elements."""
    if not any(begins) and not any(ends):
        return x
    amounts = [n for pair in reversed(list(zip(begins, ends, strict=True))) for n in pair]
    if x.dtype is torch.bool:
        return F.pad(x.to(torch.uint8), amounts, value=int(value)).to(torch.bool)
    return F.pad(x, amounts, value=value)


#: whole numbers up to this one are exact in f64
_EXACT_IN_F64: Final = 1 << 53


def _source_places(size: int, begin: int, end: int, mode: str) -> Tensor:
    check_places(begin + size + end)
    places = torch.arange(-begin, size + end)
    if mode == "edge":
        return places.clamp(0, size - 1)
    if mode == "wrap":
        return places % size
    period = max(2 * (size - 1), 1)
    return torch.minimum(places % period, period - places % period).clamp(0, size - 1)


def _padded(x: Tensor, amounts: Sequence[int], axes: Sequence[int], mode: str, value: Any) -> Tensor:
    begins, ends = [0] * x.ndim, [0] * x.ndim
    for place, axis in enumerate(axes):
        begins[axis], ends[axis] = amounts[place], amounts[place + len(axes)]
    if mode == "constant":
        if isinstance(value, int) and abs(value) > _EXACT_IN_F64:  # PyTorch takes the number as f64
            value = torch.tensor(value, dtype=x.dtype)
        if isinstance(value, Tensor):
            inside = pad(torch.ones_like(x, dtype=torch.bool), begins, ends, False)
            return torch.where(inside, pad(x, begins, ends), value)
        return pad(x, begins, ends, value)
    if mode not in ("edge", "reflect", "wrap"):
        raise ValueError(f"mode {mode!r} is none of constant, edge, reflect and wrap")
    for axis in axes:
        if begins[axis] or ends[axis]:
            x = x.index_select(axis, _source_places(x.shape[axis], begins[axis], ends[axis], mode))
    return x


def _pad_by_attributes(x: Tensor, *, pads: Sequence[int], mode: str = "constant", value: float = 0.0) -> Tensor:
    return _padded(x, pads, range(x.ndim), mode, value)


def _pad(
    x: Tensor, pads: Tensor, value: Tensor | None = None, axes: Tensor | None = None, *, mode: str = "constant"
) -> Tensor:
    dims = list(range(x.ndim)) if axes is None else axes_of(ints(axes, "axes"), x.ndim)
    amounts = ints(pads, "pads")
    if len(amounts) != 2 * len(dims):
        raise ValueError(f"pads {amounts} must have two numbers for each of {len(dims)} axes")
    return _padded(x, amounts, dims, mode, 0 if value is None else number(value))


def _center_crop_pad(x: Tensor, shape: Tensor, *, axes: Sequence[int] | None = None) -> Tensor:
    dims = list(range(x.ndim)) if axes is None else axes_of(axes, x.ndim)
    begins, ends = [0] * x.ndim, [0] * x.ndim
    for axis, size in zip(dims, ints(shape, "shape"), strict=True):
        extra = size - x.shape[axis]
        begins[axis] = extra // 2 if extra >= 0 else -(-extra // 2)
        ends[axis] = extra - begins[axis]
    return pad(x, begins, ends)


# ---------------------------------------------------------------- made of nothing


def _constant(
    *,
    value: Any = None,
    value_float: float | None = None,
    value_floats: Sequence[float] | None = None,
    value_int: int | None = None,
    value_ints: Sequence[int] | None = None,
    value_string: Any = None,
    value_strings: Any = None,
    sparse_value: Any = None,
) -> Any:
    if value is not None:
        return value
    if value_float is not None or value_floats is not None:
        return torch.tensor(value_float if value_floats is None else list(value_floats), dtype=torch.float32)
    if value_int is not None or value_ints is not None:
        return torch.tensor(value_int if value_ints is None else list(value_ints), dtype=torch.int64)
    raise NotInTorchError("strings or sparse tensors")


def _constant_of_shape(shape: Tensor, *, value: Any = None) -> Tensor:
    dims = ints(shape, "shape")
    if min(dims, default=0) < 0:
        raise ValueError(f"shape {dims} has a negative size")
    if value is None:
        value = torch.zeros(1, dtype=torch.float32)
    if not isinstance(value, Tensor):
        raise NotInTorchError("an element type that PyTorch does not compute with")
    return value.reshape(()).expand(dims)  # one number in memory; nothing writes to a result


def _eye_like(x: Tensor, *, dtype: int | None = None, k: int = 0) -> Tensor:
    kind = x.dtype if dtype is None else TORCH_DTYPES[dtype]
    rows, columns = x.shape
    distance = torch.arange(columns) - torch.arange(rows).reshape(-1, 1)
    return torch.eq(distance, k).to(kind)


def _range(start: Tensor, limit: Tensor, delta: Tensor) -> Tensor:
    first, last, step = (
        data(value, name).reshape(-1).tolist()[0]
        for value, name in ((start, "start"), (limit, "limit"), (delta, "delta"))
    )
    count = max(math.ceil((last - first) / step), 0)
    kind = start.dtype if not start.dtype.is_floating_point else torch.float64
    numbers: Tensor = torch.arange(count, dtype=kind) * step + first
    return numbers.to(start.dtype)


def _one_hot(indices: Tensor, depth: Tensor, values: Tensor, *, axis: int = -1) -> Tensor:
    n = integer(depth, "depth")
    axis = axis_of(axis, indices.ndim + 1)
    places, whole = torch.arange(n).reshape([-1] + [1] * (indices.ndim - axis)), indices.to(torch.int64)
    wrapped = torch.where(whole < 0, whole + n, whole).unsqueeze(axis)
    return torch.where(wrapped == places, values[1], values[0])


def _window_function(*coefficients: float) -> Callable[..., Tensor]:
    def window(size: Tensor, *, output_datatype: int = 1, periodic: int = 1) -> Tensor:
        n = integer(size, "size")
        angle = torch.arange(n, dtype=torch.float64) * (2 * math.pi / max(n if periodic else n - 1, 1))
        terms = (c * torch.cos(k * angle) for k, c in enumerate(coefficients))
        return torch.stack(list(terms)).sum(0).to(TORCH_DTYPES[output_datatype])

    return window


#: operators with results that depend only on the shapes of their operands
SHAPE_ONLY: Final = frozenset({"Shape", "Size", "EyeLike"})
#: operators with a few numbers that decide the size of their results
GROWING: Final = frozenset(
    """CenterCropPad Col2Im ConstantOfShape ConvTranspose EyeLike Expand MaxUnpool OneHot Pad Range Resize Tile Upsample
    AffineGrid BlackmanWindow HammingWindow HannWindow MelWeightMatrix DFT STFT GridSample RoiAlign
    StringConcat StringSplit""".split()
)

OPERATORS: Final[dict[str, Callable[..., Any]]] = {
    "Shape": _shape,
    "Size": _size,
    "Reshape": _reshape,
    "Transpose": _transpose,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Flatten": _flatten,
    "Concat": _concat,
    "Split": _split,
    "Slice": _slice_by_attributes,
    "Slice-10": _slice,
    "Expand": _expand,
    "Tile": _tile,
    "DepthToSpace": _depth_to_space,
    "SpaceToDepth": _space_to_depth,
    "Trilu": widened(_trilu),
    "ReverseSequence": widened(_reverse_sequence),
    "Pad": _pad_by_attributes,
    "Pad-11": _pad,
    "CenterCropPad": _center_crop_pad,
    "Constant": _constant,
    "ConstantOfShape": _constant_of_shape,
    "EyeLike": _eye_like,
    "Range": _range,
    "OneHot": _one_hot,
    "HannWindow": _window_function(0.5, -0.5),
    "HammingWindow": _window_function(25 / 46, -21 / 46),
    "BlackmanWindow": _window_function(0.42, -0.5, 0.08),
}
