"""Kernels of normalizations and softmax, along rows, groups of channels, or a batch."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from fmtprop.ir import Bytes, Grid, Node, loses_special_values, opdef
from fmtprop.jit import BatchNormKernel, GivenNormKernel, GroupNormKernel, RowNormKernel, SoftmaxKernel, Tail
from fmtprop.layout import DataType, MemoryDesc
from fmtprop.ops import Eltwise, RmsNorm
from fmtprop.ops.batch_norm_training import BatchStatistics
from fmtprop.ops.normalization import BatchNorm, GroupNorm, LayerNorm
from fmtprop.ops.softmax import Softmax
from fmtprop.passes.assignment.formats import channels_last, even_step, plain
from fmtprop.passes.target import Request
from fmtprop.targets.as_rows import BYTES, Way, as_asked, is_in_rows, rounding_of

#: stands for the grid of numbers that are on none
_REALS = Grid((1.0,), 0, 1)


def normalized_rows(node: Node, attrs: LayerNorm | RmsNorm | Softmax, request: Request) -> Iterator[Way]:
    """Yield the kernel for row-major tensors: of bytes or reals, perhaps with a rounding behind it."""
    if opdef(node.op).numbers.bytes(attrs) is not Bytes.NORMALIZED:
        return
    own, tail = plain(request["src"]), [post_op.attrs for post_op in node.post_ops]
    rounding = rounding_of(node, tail)
    src, dst = as_asked(request["src"], own), as_asked(request["dst"], own.with_dtype(request["dst"].dtype))
    vectors = {name: plain(request[name]) for name in ("scale", "shift") if name in request}
    if src is None or dst is None or (tail and rounding is None):
        return
    if node.exact and loses_special_values(node):
        return
    if DataType.BF16 in (src.dtype, dst.dtype) and (src.dtype is not dst.dtype or rounding is not None):
        return
    if any(desc.dtype is not DataType.F32 for desc in vectors.values()) or not own.ndim:
        return
    grid = node.grids["src"] if src.dtype in BYTES else _REALS
    if grid.varies:
        return
    scale = grid.scale
    rows, columns = prod(own.dims[:-1]), own.dims[-1]
    if not isinstance(attrs, Softmax):
        centred = isinstance(attrs, LayerNorm)
        kernel = RowNormKernel(
            *(rows, columns, attrs.epsilon / scale**2, src.dtype, dst.dtype),
            centred=centred,
            offset=0.0 if centred else grid.zero,
            rounding=rounding,
        )
        yield kernel, {"src": src, **vectors}, (dst,)
    elif attrs.axis == own.ndim - 1:
        yield SoftmaxKernel(rows, columns, scale, src.dtype, dst.dtype, rounding), {"src": src}, (dst,)


def group_normalized(node: Node, attrs: GroupNorm, request: Request) -> Iterator[Way]:
    """Yield the kernel where channels are innermost."""
    src, dst = request["src"], request["dst"]
    if src.ndim < 3 or src.at_start() != channels_last(plain(src)) or dst.dtype != src.dtype:
        return
    images, channels, *places = src.dims
    if prod(places) * channels == attrs.groups:
        return  # a group of one number has no deviation: only rounding errors would be multiplied
    vectors = {name: plain(request[name]) for name in ("scale", "shift") if name in request}
    result = as_asked(dst, src.at_start())
    if result is not None and all(desc.dtype is DataType.F32 for desc in vectors.values()):
        kernel = GroupNormKernel(images, prod(places), channels, attrs.groups, attrs.epsilon, src.dtype)
        yield kernel, {"src": src, **vectors}, (result,)


def batch_normalized(node: Node, attrs: BatchStatistics, request: Request) -> Iterator[Way]:
    """Yield the kernel of a batch normalization in training, or of its gradient: with channels innermost."""
    gradient = "diff_dst" in request
    src, result = request["src"], "diff_src" if gradient else "dst"
    formats = {name: plain(desc) for name, desc in request.items() if desc.ndim == 1}
    tensors = [name for name in ("src", result, "diff_dst") if name in request]
    own = channels_last(plain(src))
    formats |= {name: own if request[name].kind == "any" else request[name] for name in tensors}
    pitches = tuple(_channels_pitch(formats[name]) for name in tensors)
    if len({request[name].dtype for name in tensors}) > 1 or 0 in pitches or src.kind == "any":
        return
    if any(formats[name].dtype is not DataType.F32 for name in formats if name not in tensors):
        return
    size, channels = prod(src.dims) // max(src.dims[1], 1), src.dims[1]
    kernel = BatchNormKernel(size, channels, pitches, attrs.epsilon, attrs.limits, src.dtype, gradient=gradient)
    results = ("diff_src", "diff_scale", "diff_shift") if gradient else ("dst", "mean", "variance")
    operands = {name: desc for name, desc in formats.items() if name not in results}
    yield kernel, operands, tuple(formats[name] for name in results if name in request)


def normalized_as_given(node: Node, attrs: BatchNorm, request: Request) -> Iterator[Way]:
    """Yield the kernel of a batch normalization with given statistics: with channels innermost."""
    src, dst = request["src"], request["dst"]
    own = channels_last(plain(src))
    result = as_asked(dst, own)
    functions = [post_op.attrs for post_op in node.post_ops if isinstance(post_op.attrs, Eltwise)]
    if src.ndim < 3 or src.at_start() != own or result is None or dst.dtype != src.dtype or 0 in src.dims:
        return
    vectors = {name: plain(desc) for name, desc in request.items() if desc.ndim == 1}
    if len(functions) < len(node.post_ops) or any(desc.dtype is not DataType.F32 for desc in vectors.values()):
        return
    kernel = GivenNormKernel(
        *(prod(src.dims[2:-1]) * src.dims[0], src.dims[-1], src.dims[1], attrs.epsilon, src.dtype),
        has_scale="scale" in vectors,
        has_shift="shift" in vectors,
        tail=tuple(Tail(one.alg, one.alpha, one.beta) for one in functions),
    )
    yield kernel, {"src": src, **vectors}, (result,)


def _channels_pitch(desc: MemoryDesc) -> int:
    """Return the elements from place to place of a tensor with its channels innermost; 0 if it is no such tensor."""
    if not is_in_rows(desc) or desc.ndim < 2 or (desc.strides[1] != 1 and desc.dims[1] > 1):
        return 0
    axes = enumerate(zip(desc.dims, desc.strides, strict=True))
    places = [(size, step) for axis, (size, step) in axes if axis != 1 and size > 1]
    return (even_step(places) or 0) if places else desc.dims[1]
