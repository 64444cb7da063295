"""Shapes of the results of common calls, from the shapes of their operands.

PyTorch computes these shapes in Python for tensors without data. That takes longer than the rest of a call's record,
and the first one imports PyTorch's compiler, which takes a second. A rule answers only for valid operands of the usual
kind, and returns None for all others: PyTorch then computes the shape, or raises its error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

Dims = list[int] | None


def together(shapes: Sequence[Sequence[int]]) -> list[int]:
    """Return the shape to which others broadcast (``torch.broadcast_shapes`` imports PyTorch's symbolic shapes).

    >>> together([(2, 1), (3,)])
    [2, 3]
    """
    ndim = max(map(len, shapes))
    columns = zip(*((1,) * (ndim - len(shape)) + tuple(shape) for shape in shapes), strict=True)
    found = []
    for axis, sizes in enumerate(columns):
        wanted = {size for size in sizes if size != 1}
        if len(wanted) > 1:
            raise ValueError(f"shapes {', '.join(map(str, map(list, shapes)))} do not broadcast along axis {axis}")
        found.append(wanted.pop() if wanted else 1)
    return found


def _usual(src: Tensor, *others: Tensor | None) -> bool:
    """Return whether src is a dense row-major tensor of floats, and other operands have its type."""
    return src.is_contiguous() and _floats(src, *others)


def _floats(src: Tensor, *others: Tensor | None) -> bool:
    """Return whether src has floats, in any strides, and other operands have its type."""
    same = all(other is None or other.dtype == src.dtype for other in others)
    return same and src.is_floating_point() and src.numel() > 0


def _windows(
    dims: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> Dims:
    """Return the number of positions of a window along each axis; None if an argument is unusual.

    `ceil_mode`: the last window may end behind the padding, but begins before it.
    """
    found = []
    rows = [_each(value, len(dims)) for value in (kernel, stride, padding, dilation)]
    if not all(rows):
        return None
    for size, k, s, p, d in zip(dims, *rows, strict=True):
        room = size + 2 * p - d * (k - 1) - 1
        if min(k, s, d) < 1 or p < 0 or room < 0:
            return None
        places = room // s + 1
        found.append(places + (ceil_mode and room % s > 0 and places * s < size + p))
    return found


def _each(value: Sequence[int], count: int) -> Sequence[int]:
    """Return one number for each axis; nothing for another number of them."""
    return value if len(value) == count else tuple(value) * count if len(value) == 1 else ()


def _in_order(src: Tensor, axes: Sequence[int]) -> bool:
    """Return whether a result with some of src's axes is row-major: their strides fall."""
    strides = [src.stride(axis) for axis in axes if src.shape[axis] > 1]
    return all(a >= b for a, b in pairwise(strides))


def _convolution(axes: int) -> Callable[..., Dims]:
    def rule(
        src: Tensor, weights: Tensor, bias: Tensor | None = None,
        stride: Sequence[int] = (1,), padding: Sequence[int] = (0,), dilation: Sequence[int] = (1,), groups: int = 1,
    ) -> Dims:  # fmt: skip
        if not (_floats(src, weights, bias) and src.ndim == weights.ndim == axes + 2 and groups > 0):
            return None
        oc, ic = weights.shape[:2]
        if oc == 0 or oc % groups or ic * groups != src.shape[1] or (bias is not None and bias.shape != (oc,)):
            return None
        windows = _windows(src.shape[2:], weights.shape[2:], stride, padding, dilation)
        return None if windows is None else [src.shape[0], oc, *windows]

    return rule


def _deconvolution(
    src: Tensor, weights: Tensor, bias: Tensor | None = None, stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0,), output_padding: Sequence[int] = (0,), groups: int = 1,
    dilation: Sequence[int] = (1,),
) -> Dims:  # fmt: skip
    if not (_usual(src, weights, bias) and src.ndim == weights.ndim == 4 and groups > 0 and weights.numel()):
        return None
    if weights.shape[0] != src.shape[1] or weights.shape[0] % groups:
        return None
    channels = weights.shape[1] * groups
    rows = [_each(value, 2) for value in (stride, padding, output_padding, dilation)]
    if not all(rows) or (bias is not None and bias.shape != (channels,)):
        return None
    found = []
    for size, k, s, p, o, d in zip(src.shape[2:], weights.shape[2:], *rows, strict=True):
        if min(s, d) < 1 or min(p, o) < 0 or o >= max(s, d):
            return None
        found.append((size - 1) * s - 2 * p + d * (k - 1) + o + 1)
    return [src.shape[0], channels, *found] if min(found) > 0 else None


def _linear(src: Tensor, weights: Tensor, bias: Tensor | None = None) -> Dims:
    if not (_floats(src, weights, bias) and src.ndim >= 2 == weights.ndim and weights.numel()):
        return None
    oc, ic = weights.shape
    fits = ic == src.shape[-1] and (bias is None or bias.shape == (oc,))
    return [*src.shape[:-1], oc] if fits else None


def _matmul(a: Tensor, b: Tensor) -> Dims:
    # PyTorch transposes the result if b alone has a batch
    if a.dtype != b.dtype or not a.ndim >= b.ndim >= 2 or a.shape[-1] != b.shape[-2] or not a.numel() * b.numel():
        return None
    try:
        batch = together([a.shape[:-2], b.shape[:-2]]) if a.ndim > 2 else []
    except ValueError:
        return None
    return [*batch, a.shape[-2], b.shape[-1]]


def _pooling(
    src: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
) -> Dims:
    windows = _each(kernel, 2)
    if not _usual(src) or src.ndim != 4 or not windows or any(p > k // 2 for p, k in _pairs(padding, windows)):
        return None
    found = _windows(src.shape[2:], windows, stride or windows, padding, dilation, ceil_mode)
    return None if found is None else [*src.shape[:2], *found]


def _pairs(padding: Sequence[int], windows: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip(_each(padding, 2), windows, strict=False))


def _max_pool2d(
    src: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> Dims:
    return _pooling(src, kernel, stride, padding, dilation, ceil_mode)


def _avg_pool2d(
    src: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    *_: Any,
) -> Dims:
    return _pooling(src, kernel, stride, padding, (1,), ceil_mode)


def _adaptive_pooling(src: Tensor, size: Sequence[int]) -> Dims:
    found = _each(size, 2)
    return [*src.shape[:2], *found] if _usual(src) and src.ndim == 4 and found and min(found) > 0 else None


def _embedding(weights: Tensor, indices: Tensor, *_: Any) -> Dims:
    usual = weights.is_floating_point() and weights.ndim == 2 and weights.numel()
    return [*indices.shape, weights.shape[1]] if usual and indices.dtype in (torch.int64, torch.int32) else None


def _index_select(src: Tensor, axis: int, index: Tensor) -> Dims:
    if not (src.is_contiguous() and src.numel() and -src.ndim <= axis < src.ndim and index.ndim == 1):
        return None
    if index.dtype not in (torch.int64, torch.int32):
        return None
    dims = list(src.shape)
    dims[axis] = len(index)
    return dims


def _index(src: Tensor, indices: Sequence[Tensor | None]) -> Dims:
    given = [index for index in indices if index is not None]
    usual = all(index.dtype in (torch.int64, torch.int32) for index in given)
    if not (given and usual and src.is_contiguous() and src.numel()) or len(indices) > src.ndim:
        return None
    places = [place for place, index in enumerate(indices) if index is not None]
    try:
        made = together([index.shape for index in given])
    except ValueError:
        return None
    # positions of axes that are not neighbours come first
    first = places[0] if places[-1] - places[0] == len(places) - 1 else 0
    rest = [size for axis, size in enumerate(src.shape) if axis not in places]
    return [*rest[:first], *made, *rest[first:]] if math.prod(made) else None


def _gather(src: Tensor, axis: int, index: Tensor, *, sparse_grad: bool = False) -> Dims:
    fits = src.ndim == index.ndim > 0 and -src.ndim <= axis < src.ndim and index.dtype == torch.int64
    if not fits or sparse_grad or not src.numel():
        return None
    sizes = enumerate(zip(index.shape, src.shape, strict=True))
    return list(index.shape) if all(one <= most or at == axis % src.ndim for at, (one, most) in sizes) else None


def _reduction(
    src: Tensor, axes: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Dims:
    return _along(src, axes, keepdim) if _floats(src) and dtype is None and axes else None


def _along(src: Tensor, axes: Sequence[int] | None, keepdim: bool) -> Dims:
    """Return the shape of what a reduction along axes leaves."""
    if not axes or not src.numel() or any(not -src.ndim <= axis < src.ndim for axis in axes):
        return None
    gone = {axis % src.ndim for axis in axes}
    if len(gone) != len(axes) or not _in_order(src, [axis for axis in range(src.ndim) if axis not in gone]):
        return None
    return [1 if axis in gone else size for axis, size in enumerate(src.shape) if keepdim or axis not in gone]


def _extremum(src: Tensor, axes: Sequence[int] = (), keepdim: bool = False) -> Dims:
    return _reduction(src, axes or range(src.ndim), keepdim) if src.ndim else None


def _upsampling(axes: int) -> Callable[..., Dims]:
    def rule(src: Tensor, size: Sequence[int] | None, *others: Any) -> Dims:
        scales = others[-1]
        if size is None and scales is not None and len(scales) == axes and src.ndim == axes + 2:
            size = [int(one * scale) for one, scale in zip(src.shape[2:], scales, strict=True)]
        fits = _usual(src) and size is not None and src.ndim == len(size) + 2 == axes + 2 and min(size) > 0
        return [*src.shape[:2], *size] if fits and size is not None else None

    return rule


def _grid_sampler(src: Tensor, grid: Tensor, *_: Any) -> Dims:
    fits = _usual(src, grid) and src.ndim == grid.ndim == 4 and src.shape[0] == grid.shape[0] and grid.shape[3] == 2
    return [*src.shape[:2], *grid.shape[1:3]] if fits and grid.numel() else None


def _im2col(
    src: Tensor, kernel: Sequence[int], dilation: Sequence[int], padding: Sequence[int], stride: Sequence[int]
) -> Dims:
    if not _usual(src) or src.ndim != 4 or len(kernel) != 2:
        return None
    places = _windows(src.shape[2:], kernel, stride, padding, dilation)
    return None if places is None else [src.shape[0], src.shape[1] * math.prod(kernel), math.prod(places)]


def _flip(src: Tensor, axes: Sequence[int]) -> Dims:
    found = {axis % src.ndim for axis in axes if -src.ndim <= axis < src.ndim}
    return list(src.shape) if src.is_contiguous() and len(found) == len(axes) else None


def _triangle(src: Tensor, diagonal: int = 0) -> Dims:
    return list(src.shape) if src.is_contiguous() and src.ndim > 1 else None


def _scatter(src: Tensor, axis: int, index: Tensor, values: Any, **_: Any) -> Dims:
    others = [values] if isinstance(values, Tensor) else []
    if not src.is_contiguous() or index.dtype != torch.int64 or not -src.ndim <= axis < src.ndim:
        return None
    if any(one.dtype != src.dtype for one in others) or any(one.ndim != src.ndim for one in (index, *others)):
        return None
    along = axis % src.ndim  # there, an index has as many numbers as the caller likes
    inside = all(one <= most for at, (one, most) in enumerate(zip(index.shape, src.shape, strict=True)) if at != along)
    fits = inside and all(one <= most for other in others for one, most in zip(index.shape, other.shape, strict=True))
    return list(src.shape) if fits and index.numel() else None


def _index_put(src: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> Dims:
    # PyTorch's function in Python takes no axis without an index
    dims = _index(src, indices) if values.dtype == src.dtype and all(isinstance(at, Tensor) for at in indices) else None
    try:
        fits = dims is not None and together([dims, values.shape]) == dims
    except ValueError:
        return None
    return list(src.shape) if fits else None


def _stack(tensors: Sequence[Tensor], axis: int = 0) -> Dims:
    if not tensors or any(one.shape != tensors[0].shape or one.dtype != tensors[0].dtype for one in tensors):
        return None
    if not all(one.is_contiguous() for one in tensors) or not -tensors[0].ndim - 1 <= axis <= tensors[0].ndim:
        return None
    dims = list(tensors[0].shape)
    dims.insert(axis % (len(dims) + 1), len(tensors))
    return dims


def _histogram(src: Tensor, bins: int = 100, *_: Any, **__: Any) -> Dims:
    return [bins] if src.is_floating_point() and bins > 0 else None


def _position(src: Tensor, axis: int | None = None, keepdim: bool = False) -> Dims:
    return _along(src, range(src.ndim) if axis is None else [axis], keepdim)


def _truth(src: Tensor, axes: int | Sequence[int] = (), keepdim: bool = False) -> Dims:
    return _along(src, [axes] if isinstance(axes, int) else axes or range(src.ndim), keepdim)


def _norm(
    src: Tensor, order: float = 2, axes: Sequence[int] | None = None, keepdim: bool = False, *, dtype: Any = None
) -> Dims:
    return _extremum(src, axes or (), keepdim) if dtype is None else None


def _variance_of(src: Tensor, axes: Sequence[int] | None, unbiased: bool = True, keepdim: bool = False) -> Dims:
    return _extremum(src, axes or (), keepdim)


def _variance(src: Tensor, axes: Sequence[int] | None = None, *, correction: Any = None, keepdim: bool = False) -> Dims:
    return _extremum(src, axes or (), keepdim)


def _cat(tensors: Sequence[Tensor], axis: int = 0) -> Dims:
    if not tensors:
        return None
    first, ndim = tensors[0], tensors[0].ndim
    strided = ndim in (4, 5)  # for images and volumes, the result has the channels where the operands have them
    usual = all(
        at.dtype == first.dtype and at.ndim == ndim and at.numel() and (_in_order(at, range(ndim)) or not strided)
        for at in tensors
    )
    if not usual or not -ndim <= axis < ndim:
        return None
    dims, axis = list(first.shape), axis % ndim
    for other in tensors[1:]:
        if any(size != dims[at] for at, size in enumerate(other.shape) if at != axis):
            return None
        dims[axis] += other.shape[axis]
    return dims


def _softmax(src: Tensor, axis: int, dtype: torch.dtype | None = None) -> Dims:
    return list(src.shape) if _usual(src) and dtype is None and -src.ndim <= axis < src.ndim else None


def _batch_norm(src: Tensor, *statistics: Any) -> Dims:
    factors, training = statistics[:4], statistics[4]
    if training or src.ndim < 2 or not _usual(src, *factors):
        return None
    return list(src.shape) if all(factor is None or factor.shape == src.shape[1:2] for factor in factors) else None


def _layer_norm(
    src: Tensor, dims: Sequence[int], weights: Tensor | None = None, bias: Tensor | None = None, *_: Any
) -> Dims:
    if not (_floats(src, weights, bias) and dims and tuple(src.shape[-len(dims) :]) == tuple(dims)):
        return None
    return list(src.shape) if all(at is None or tuple(at.shape) == tuple(dims) for at in (weights, bias)) else None


def _reshape(src: Tensor, dims: Sequence[int]) -> Dims:
    wanted = list(dims)
    if not src.is_contiguous() or not src.numel() or wanted.count(-1) > 1 or any(size < -1 for size in wanted):
        return None
    if -1 in wanted:
        rest = -math.prod(wanted)
        if rest <= 0 or src.numel() % rest:
            return None
        wanted[wanted.index(-1)] = src.numel() // rest
    return wanted if math.prod(wanted) == src.numel() else None


_ATEN = torch.ops.aten

#: the rules, by overload; a result has the type of the first operand or of its tensors, or one of TYPES, and is dense
#: and row-major
RULES: dict[Any, Callable[..., Dims]] = {
    _ATEN.conv1d.default: _convolution(1),
    _ATEN.conv2d.default: _convolution(2),
    _ATEN.conv3d.default: _convolution(3),
    _ATEN.conv_transpose2d.input: _deconvolution,
    _ATEN.linear.default: _linear,
    _ATEN.matmul.default: _matmul,
    _ATEN.max_pool2d.default: _max_pool2d,
    _ATEN.avg_pool2d.default: _avg_pool2d,
    _ATEN.adaptive_avg_pool2d.default: _adaptive_pooling,
    _ATEN.embedding.default: _embedding,
    _ATEN.index_select.default: _index_select,
    _ATEN.index.Tensor: _index,
    _ATEN.gather.default: _gather,
    _ATEN.mean.dim: _reduction,
    _ATEN.sum.dim_IntList: _reduction,
    _ATEN.amax.default: _extremum,
    _ATEN.amin.default: _extremum,
    _ATEN.upsample_nearest1d.vec: _upsampling(1),
    _ATEN.upsample_nearest2d.vec: _upsampling(2),
    _ATEN.upsample_nearest3d.vec: _upsampling(3),
    _ATEN._upsample_nearest_exact2d.vec: _upsampling(2),
    _ATEN.upsample_linear1d.vec: _upsampling(1),
    _ATEN.upsample_bilinear2d.vec: _upsampling(2),
    _ATEN.upsample_trilinear3d.vec: _upsampling(3),
    _ATEN.upsample_bicubic2d.vec: _upsampling(2),
    _ATEN._upsample_bilinear2d_aa.vec: _upsampling(2),
    _ATEN._upsample_bicubic2d_aa.vec: _upsampling(2),
    _ATEN.grid_sampler.default: _grid_sampler,
    _ATEN.grid_sampler_2d.default: _grid_sampler,
    _ATEN.im2col.default: _im2col,
    _ATEN.flip.default: _flip,
    _ATEN.tril.default: _triangle,
    _ATEN.triu.default: _triangle,
    _ATEN.scatter.src: _scatter,
    _ATEN.scatter.value: _scatter,
    _ATEN.scatter_add.default: _scatter,
    _ATEN.index_put.default: _index_put,
    _ATEN.stack.default: _stack,
    _ATEN.histc.default: _histogram,
    _ATEN.argmax.default: _position,
    _ATEN.argmin.default: _position,
    _ATEN.any.default: _truth,
    _ATEN.any.dim: _truth,
    _ATEN.all.default: _truth,
    _ATEN.all.dim: _truth,
    _ATEN.linalg_vector_norm.default: _norm,
    _ATEN.logsumexp.default: _reduction,
    _ATEN.var.correction: _variance,
    _ATEN.std.correction: _variance,
    _ATEN.var.dim: _variance_of,
    _ATEN.std.dim: _variance_of,
    _ATEN.softmax.int: _softmax,
    _ATEN.log_softmax.int: _softmax,
    _ATEN.batch_norm.default: _batch_norm,
    _ATEN.layer_norm.default: _layer_norm,
    _ATEN.reshape.default: _reshape,
    _ATEN.cat.default: _cat,
}


def _recurrent(
    src: Tensor, state: Tensor | Sequence[Tensor], parameters: Sequence[Tensor], has_biases: bool, layers: int,
    dropout: float, training: bool, bidirectional: bool, batch_first: bool,
) -> list[list[int]] | None:  # fmt: skip
    """Return the shapes of a sequence's results and of the last states."""
    states, directions = [state] if isinstance(state, Tensor) else list(state), 1 + bidirectional
    if not _floats(src, *states, *parameters) or src.ndim != 3 or any(one.ndim != 3 for one in states):
        return None
    batch, length = (src.shape[0], src.shape[1]) if batch_first else (src.shape[1], src.shape[0])
    first, per_layer = parameters[0], (4 if has_biases else 2) * directions  # without projections
    gates = first.shape[0] // max(states[0].shape[2], 1)
    fits = (
        len(parameters) == layers * per_layer
        and first.shape == (gates * states[0].shape[2], src.shape[2])
        and all(one.shape == (layers * directions, batch, states[0].shape[2]) for one in states)
    )
    if not fits or (training and dropout):
        return None
    width = directions * states[0].shape[2]
    whole = [batch, length, width] if batch_first else [length, batch, width]
    return [whole, *(list(one.shape) for one in states)]


def _sorted(src: Tensor, axis: int = -1, descending: bool = False) -> list[list[int]] | None:
    fits = src.is_contiguous() and src.numel() and -src.ndim <= axis < src.ndim
    return [list(src.shape)] * 2 if fits else None


def _best(src: Tensor, k: int, axis: int = -1, *_: bool) -> list[list[int]] | None:
    if not (src.is_contiguous() and src.numel() and -src.ndim <= axis < src.ndim and 0 < k <= src.shape[axis]):
        return None
    dims = list(src.shape)
    dims[axis] = k
    return [dims] * 2


#: rules of calls with several results, each of the first operand's type unless TYPES has another
SEVERAL: dict[Any, Callable[..., list[list[int]] | None]] = {
    _ATEN.gru.input: _recurrent,
    _ATEN.lstm.input: _recurrent,
    _ATEN.rnn_tanh.input: _recurrent,
    _ATEN.rnn_relu.input: _recurrent,
    _ATEN.sort.default: _sorted,
    _ATEN.topk.default: _best,
}

#: types of results that are not of the first operand's; the last result's, where there are several
TYPES: dict[Any, torch.dtype] = {
    **dict.fromkeys((_ATEN.argmax.default, _ATEN.argmin.default, _ATEN.sort.default, _ATEN.topk.default), torch.int64),
    **dict.fromkeys((_ATEN.any.default, _ATEN.any.dim, _ATEN.all.default, _ATEN.all.dim), torch.bool),
}
