"""Nodes that kernels of our own compute instead of a primitive: broadcasts, reductions, norms, products of one row.

Owns how a node's tensors, as they lie in memory, become rows: axes that one could stand for are one.
:mod:`fmtprop.targets.kernel` runs the kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from fmtprop.errors import UnsupportedOpError
from fmtprop.ir import Bytes, Grid, Node, loses_special_values, opdef
from fmtprop.jit import (
    AverageBytesKernel,
    AverageKernel,
    BagKernel,
    BatchNormKernel,
    BroadcastKernel,
    CombineKernel,
    FoldKernel,
    GatherKernel,
    GivenNormKernel,
    GroupNormKernel,
    LookupKernel,
    PutKernel,
    Quantized,
    QuantizeRowsKernel,
    RotaryKernel,
    Rounding,
    RoundKernel,
    RowNormKernel,
    SoftmaxKernel,
    StandaloneKernel,
    Tail,
    broadcast_kernel_for,
    offered,
)
from fmtprop.layout import DataType, MemoryDesc
from fmtprop.ops import Attention, Binary, Conv, DynamicQuantize, Eltwise, Lookup, MatMul, Pooling, Reduction, RmsNorm
from fmtprop.ops.batch_norm_training import BatchStatistics
from fmtprop.ops.building import FEW_SUMMANDS, check_summands, normalised_axis
from fmtprop.ops.embedding_bag import EmbeddingBag
from fmtprop.ops.gather_nbits import GatherNBits
from fmtprop.ops.host_call import HostCall, arguments_of
from fmtprop.ops.inner_product import InnerProduct
from fmtprop.ops.matmul_nbits import DecodeNBits, MatMulNBits
from fmtprop.ops.normalization import BatchNorm, GroupNorm, LayerNorm
from fmtprop.ops.quantization import FakeQuantize
from fmtprop.ops.rotary_embedding import RotaryEmbedding
from fmtprop.ops.softmax import Softmax
from fmtprop.passes.assignment.formats import channels_last, dense, even_step, like, plain
from fmtprop.passes.target import Candidate, Request
from fmtprop.targets.attention import attention_kernels
from fmtprop.targets.depthwise import depthwise_kernels
from fmtprop.targets.gemv import gemv_kernels
from fmtprop.targets.grouped_convolution import grouped_convolution_kernels
from fmtprop.targets.kernel import JIT, KernelImplementation
from fmtprop.targets.nbits import decode_kernels, gather_kernels, nbits_kernels

#: how many numbers of a row a kernel adds up side by side, at least
_SIDE_BY_SIDE = 32

#: oneDNN's algorithm -> the kernel's
_FOLDS = {"sum": "sum", "mean": "mean", "max": "max", "min": "min", "norm_lp_sum": "norm"}

#: the call of PyTorch that puts rows into a tensor
_PUT = "aten.index_copy.default"

#: calls of PyTorch that may copy rows of a table
_EMBEDDING, _SELECT, _INDEX = "aten.embedding.default", "aten.index_select.default", "aten.index.Tensor"

_BYTES = (DataType.U8, DataType.S8)
_INDICES = (DataType.S32, DataType.S64)

#: stands for the grid of numbers that are on none
_REALS = Grid((1.0,), 0, 1)

#: a kernel, the formats that it reads, and those that it writes
_Way = tuple[StandaloneKernel, Request, tuple[MemoryDesc, ...]]


def kernel_candidates(node: Node, request: Request) -> Iterator[Candidate]:
    """Yield the way to run a node by a kernel, if there is one for it and for these formats."""
    for kernel, operands, results in _ways(node, request):
        if kernel.is_offered:
            yield Candidate(JIT, kernel.impl, operands, results, handle=KernelImplementation(kernel))


def _ways(node: Node, request: Request) -> Iterator[_Way]:
    """Yield the kernels for a node and these formats; perhaps this machine has none of such sizes."""
    attrs = node.attrs
    if isinstance(attrs, InnerProduct | MatMul):
        yield from gemv_kernels(node, request)
    elif isinstance(attrs, GatherNBits):
        yield from gather_kernels(attrs, request)
    elif isinstance(attrs, DecodeNBits):
        yield from decode_kernels(attrs, request)
    elif type(attrs) is MatMulNBits:
        yield from nbits_kernels(node, request)
    elif isinstance(attrs, Conv):
        yield from grouped_convolution_kernels(node, request)
        yield from depthwise_kernels(node, request)
    elif isinstance(attrs, BatchNorm):
        yield from _given_norm(node, attrs, request)
    elif isinstance(attrs, Binary) and request["src_0"].dtype in _BYTES:
        yield from _combined(node, attrs, request)
    elif isinstance(attrs, Pooling) and "src" in request and (node.post_ops or request["src"].dtype in _BYTES):
        yield from _average_of_bytes(node, attrs, request)
    elif isinstance(attrs, FakeQuantize):
        yield from _rounded(node, attrs, request)
    elif isinstance(attrs, LayerNorm | RmsNorm | Softmax) and opdef(node.op).numbers.bytes(attrs) is Bytes.NORMALIZED:
        yield from _normalized_rows(node, attrs, request)
    elif node.post_ops:
        return
    elif isinstance(attrs, GroupNorm):
        yield from _group_normalization(attrs, request)
    elif isinstance(attrs, RotaryEmbedding):
        yield from _rotary_embedding(attrs, request)
    elif isinstance(attrs, Lookup):
        yield from _looked_up(attrs, request)
    elif isinstance(attrs, DynamicQuantize):
        yield from _quantized(attrs, request)
    elif isinstance(attrs, HostCall):
        if _copies_rows(attrs):
            yield from _rows(attrs, request)
        elif attrs.target == _PUT:
            yield from _put_rows(attrs, request)
    elif isinstance(attrs, EmbeddingBag):
        yield from _bags(attrs, request)
    elif isinstance(attrs, BatchStatistics):
        yield from _batch_normalization(attrs, request)
    elif len({desc.dtype for desc in request.values()}) != 1:
        return
    elif isinstance(attrs, Attention):
        yield from attention_kernels(attrs, request)
    elif isinstance(attrs, Binary):
        yield from _binary(attrs, request)
    elif isinstance(attrs, Reduction):
        if attrs.alg in _FOLDS and (not attrs.alg.startswith("norm") or _is_euclidean(attrs)):
            yield from _reduction(_FOLDS[attrs.alg], attrs.axes, request)
    elif isinstance(attrs, Pooling) and _is_global(attrs, request["src"]):
        yield from _global_pooling(attrs.alg, request)


def _binary(attrs: Binary, request: Request) -> Iterator[_Way]:
    """Yield the kernel where an operand is broadcast or is a slice; oneDNN serves dense tensors of the same dims."""
    src, other = request["src_0"], request["src_1"]
    if not _is_in_rows(src):
        return
    if src.dims == other.dims and src.at_start().is_packed and (other.kind == "any" or other.at_start().is_packed):
        return
    yield from _broadcast(attrs, request)


def _combined(node: Node, attrs: Binary, request: Request) -> Iterator[_Way]:
    """Yield the kernel for bytes whose result is only rounded; a ReLU before may be the least number."""
    functions = [post_op.attrs for post_op in node.post_ops]
    before, last = functions[:-1], functions[-1] if functions else None
    grids = [node.grids.get(name) for name in ("src_0", "src_1", "dst")]
    if not isinstance(last, FakeQuantize) or None in grids or {*map(str, before)} - {str(Eltwise("relu"))}:
        return
    if (before and last.low) or any(request[name].dtype is not node.grids[name].stored for name in request):
        return
    first, second, dst = (Quantized(grid.stored, grid.scale, grid.zero) for grid in grids if grid is not None)
    for kernel, operands, results in _broadcast(attrs, request):
        if isinstance(kernel, BroadcastKernel):
            yield CombineKernel(kernel, first, second, dst, last.low, last.high), operands, results


def _broadcast(attrs: Binary, request: Request) -> Iterator[_Way]:
    """Yield the kernel for two operands, as rows of real numbers."""
    src, other, dst = (request[name] for name in ("src_0", "src_1", "dst"))
    if not _is_in_rows(src) or src.dims != dst.dims:
        return
    own = dense(src.at_start())
    if other.kind == "any":
        other = (like(other, own) or plain(other)).with_dtype(other.dtype)
    result = _as_asked(dst, own.with_dtype(dst.dtype))
    if result is None or not _is_in_rows(other):
        return
    steps = [0 if size == 1 else step for size, step in zip(other.dims, other.strides, strict=True)]
    axes = _merged(src, steps, src.strides)
    pitch = _pitch(tuple((size, step) for size, _, step in axes))
    if pitch is None:
        return
    dtype = DataType.F32 if src.dtype in _BYTES else src.dtype
    kernel = broadcast_kernel_for(attrs.alg, tuple((size, step) for size, step, _ in axes), dtype, pitch)
    if kernel is not None:
        yield kernel, {"src_0": src, "src_1": other}, (result,)


def _looked_up(attrs: Lookup, request: Request) -> Iterator[_Way]:
    """Yield the kernel for bytes in any order without gaps."""
    src = request["src"]
    if src.dtype not in _BYTES or request["dst"].dtype not in _BYTES or not _is_row_of_numbers(src):
        return
    result = _as_asked(request["dst"], src.at_start().with_dtype(request["dst"].dtype))
    if result is not None:
        yield LookupKernel(prod(src.dims), attrs.table), {"src": src}, (result,)


def _quantized(attrs: DynamicQuantize, request: Request) -> Iterator[_Way]:
    """Yield the kernel for row-major tensors; if the tensor has one scale, for any order without gaps."""
    src, dst = request["src"], request["dst"]
    if not _is_row_of_numbers(src) or (not attrs.whole and src.at_start() != plain(src)):
        return
    if src.dtype is not DataType.F32 or dst.dtype not in (DataType.F32, attrs.grid.stored):
        return
    result = _as_asked(dst, src.at_start().with_dtype(dst.dtype))
    scales = [plain(request[name]) for name in ("scale", "zero")]
    if result is None or any(desc.kind == "any" for desc in (result, *scales)):
        return
    columns = prod(src.dims) if attrs.whole else src.dims[-1]
    kernel = QuantizeRowsKernel(
        *(prod(src.dims) // columns, columns, attrs.low, attrs.high, attrs.divisor, attrs.least),
        symmetric=attrs.symmetric,
        multiplies=attrs.multiplies,
        rounds=attrs.rounds,
        dtype=dst.dtype,
    )
    yield kernel, {"src": src}, (result, *scales)


def _pitch(axes: tuple[tuple[int, int], ...]) -> int | None:
    """Return the elements from row to row, a row being the last axis: size and stride of each. None if uneven."""
    *outer, (length, step) = axes or ((0, 0),)
    if step != 1:
        return None
    return even_step(outer) if outer else length


def _is_euclidean(attrs: Reduction) -> bool:
    return (attrs.p, attrs.eps) == (2.0, 0.0)


def _is_global(attrs: Pooling, src: MemoryDesc) -> bool:
    """Whether one window is all of the source."""
    return attrs.kernel == src.dims[2:] and not any((*attrs.pad_l, *attrs.pad_r, *attrs.dilates))


def _global_pooling(alg: str, request: Request) -> Iterator[_Way]:
    """Yield the kernel for averages of channels, or else a reduction of the spatial axes."""
    src, dst = request["src"], request["dst"]
    kernel = None if alg == "max" else _average(src)
    result = _as_asked(dst, channels_last(plain(dst)))
    if kernel is not None and result is not None:
        yield kernel, {"src": src}, (result,)
        return
    yield from _reduction("max" if alg == "max" else "mean", tuple(range(2, src.ndim)), request)


def _average_of_bytes(node: Node, attrs: Pooling, request: Request) -> Iterator[_Way]:
    """Yield the kernel for averages of channels, of bytes or with a rounding behind it."""
    src, rounding = request["src"], _rounding(node, [post_op.attrs for post_op in node.post_ops])
    if attrs.alg == "max" or (src.dtype in _BYTES and "src" not in node.grids):
        return  # whole numbers that stand for no others have a maximum, but no average
    grid = node.grids["src"] if src.dtype in _BYTES else None
    result = _as_asked(request["dst"], channels_last(plain(request["dst"])))
    if not _is_global(attrs, src) or result is None or (node.post_ops and rounding is None):
        return
    if src.at_start() != channels_last(plain(src)) or not {src.dtype, result.dtype} <= {DataType.F32, *_BYTES}:
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


def _group_normalization(attrs: GroupNorm, request: Request) -> Iterator[_Way]:
    src, dst = request["src"], request["dst"]
    if src.ndim < 3 or src.at_start() != channels_last(plain(src)) or dst.dtype != src.dtype:
        return
    images, channels, *places = src.dims
    if prod(places) * channels == attrs.groups:
        return  # a group of one number has no deviation: only rounding errors would be multiplied
    vectors = {name: plain(request[name]) for name in ("scale", "shift") if name in request}
    result = _as_asked(dst, src.at_start())
    if result is not None and all(desc.dtype is DataType.F32 for desc in vectors.values()):
        kernel = GroupNormKernel(images, prod(places), channels, attrs.groups, attrs.epsilon, src.dtype)
        yield kernel, {"src": src, **vectors}, (result,)


def _rounded(node: Node, attrs: FakeQuantize, request: Request) -> Iterator[_Way]:
    """Yield the kernel for tensors without gaps, or in rows with even gaps, in any order of axes."""
    src, asked, rounding = request["src"], request["dst"], _rounding(node, [attrs])
    if rounding is None or node.post_ops or (node.exact and loses_special_values(node)) or not _is_in_rows(src):
        return
    if src.dtype not in (DataType.F32, *_BYTES) or asked.dtype not in (DataType.F32, *_BYTES):
        return
    grid = node.grids["src"] if src.dtype in _BYTES else None
    own = dense(src.at_start())
    result = _as_asked(asked, own.with_dtype(asked.dtype))
    axes = tuple((size, step) for size, step in _merged(src, src.strides))
    pitch = _pitch(axes)
    if result is None or pitch is None or (grid is not None and grid.varies):
        return
    length = axes[-1][0]
    read = None if grid is None else Quantized(grid.stored, grid.scale, grid.zero)
    yield RoundKernel(prod(src.dims) // length, length, pitch, read, result.dtype, rounding), {"src": src}, (result,)


def _normalized_rows(node: Node, attrs: LayerNorm | RmsNorm | Softmax, request: Request) -> Iterator[_Way]:
    """Yield the kernel for row-major tensors: of bytes or reals, perhaps with a rounding behind it."""
    own, tail = plain(request["src"]), [post_op.attrs for post_op in node.post_ops]
    rounding = _rounding(node, tail)
    src, dst = _as_asked(request["src"], own), _as_asked(request["dst"], own.with_dtype(request["dst"].dtype))
    vectors = {name: plain(request[name]) for name in ("scale", "shift") if name in request}
    if src is None or dst is None or (tail and rounding is None):
        return
    if node.exact and loses_special_values(node):
        return
    if DataType.BF16 in (src.dtype, dst.dtype) and (src.dtype is not dst.dtype or rounding is not None):
        return
    if any(desc.dtype is not DataType.F32 for desc in vectors.values()) or not own.ndim:
        return
    grid = node.grids["src"] if src.dtype in _BYTES else _REALS
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


def _rounding(node: Node, tail: Sequence[object]) -> Rounding | None:
    """Return the only function of a node's results, if it is a rounding to bytes."""
    if len(tail) != 1 or not isinstance(tail[0], FakeQuantize) or "dst" not in node.grids:
        return None
    return Rounding(tail[0].scale, tail[0].low, tail[0].high, node.grids["dst"].zero)


def _copies_rows(attrs: HostCall) -> bool:
    """Return whether a call copies what its first operand has at each index, along the first axis."""
    if attrs.target not in (_EMBEDDING, _SELECT, _INDEX):
        return False
    given = arguments_of(attrs)
    if attrs.target == _SELECT:
        return bool(given["dim"] == 0) and given["self"] != given["index"]
    if attrs.target == _INDEX:
        first, *others = given["indices"]
        return first is not None and first != given["self"] and others == [None] * len(others)
    return True


def _rows(attrs: HostCall, request: Request) -> Iterator[_Way]:
    """Yield the kernel where each row of the table lies side by side; indices and result are row-major."""
    formats = {name: plain(desc) if desc.kind == "any" else desc for name, desc in request.items()}
    table, indices, dst = (formats[name] for name in ("src_0", "src_1", "dst"))
    if not _is_in_rows(table) or indices.dtype not in _INDICES:
        return
    if table.strides[1:] != plain(table).strides[1:] or not table.ndim:
        return
    if indices.at_start() != plain(indices) or dst.at_start() != plain(dst):
        return
    nbytes = table.dtype.nbytes
    kernel = GatherKernel(
        *(prod(indices.dims), table.dims[0], prod(table.dims[1:]) * nbytes, table.strides[0] * nbytes),
        index_nbytes=indices.dtype.nbytes,
        from_end=attrs.target == _INDEX,
    )
    yield kernel, {"src_0": table, "src_1": indices}, (dst,)


def _put_rows(attrs: HostCall, request: Request) -> Iterator[_Way]:
    """Yield the kernel for row-major tensors; the rows may lie anywhere."""
    given = arguments_of(attrs)
    whole, index, rows = (given[name].name for name in ("self", "index", "source"))
    if opdef("aten").pytorch.changed(attrs) is None or (whole, index, rows) != ("src_0", "src_1", "src_2"):
        return  # complex numbers, or a tensor into itself
    formats = {name: plain(desc) if desc.kind == "any" else desc for name, desc in request.items()}
    dst, indices, source = formats["dst"], formats[index], formats[rows]
    axis = normalised_axis(given["dim"], dst.ndim)
    own, sizes = plain(dst), dst.dims[axis + 1 :]
    if any(desc.at_start() != own for desc in (formats[whole], dst)) or indices.dtype not in _INDICES:
        return
    if not _is_in_rows(source) or indices.at_start() != plain(indices):
        return
    if any(
        n > 1 and a != b for n, a, b in zip(sizes, source.strides[axis + 1 :], own.strides[axis + 1 :], strict=True)
    ):
        source = plain(source)
    nbytes = dst.dtype.nbytes
    kernel = PutKernel(
        *(prod(indices.dims), dst.dims[axis], prod(sizes) * nbytes),
        tuple((n, step * nbytes) for n, step in zip(dst.dims[:axis], source.strides, strict=False)),
        *(source.strides[axis] * nbytes, indices.dtype.nbytes),
    )
    yield kernel, {whole: formats[whole], index: indices, rows: source}, (dst,)


def _bags(attrs: EmbeddingBag, request: Request) -> Iterator[_Way]:
    """Yield the kernel where each row of the table lies side by side; all else is row-major."""
    formats = {name: plain(desc) if desc.kind == "any" else desc for name, desc in request.items()}
    table, indices, offsets, dst = (formats[name] for name in ("table", "indices", "offsets", "dst"))
    others = [desc for name, desc in formats.items() if name != "table"]
    if not _is_in_rows(table) or (table.dims[1] > 1 and table.strides[1] != 1) or table.dtype != dst.dtype:
        return
    if any(desc.at_start() != plain(desc) for desc in others):
        return
    kernel = BagKernel(
        count=indices.dims[0],
        starts=offsets.dims[0],
        limit=table.dims[0],
        columns=table.dims[1],
        pitch_nbytes=table.strides[0] * table.dtype.nbytes,
        index_nbytes=indices.dtype.nbytes,
        dtype=table.dtype,
        mode=attrs.mode,
        padding=attrs.padding,
        has_last=attrs.has_last,
        has_factors="factors" in request,
    )
    yield kernel, {name: desc for name, desc in formats.items() if name != "dst"}, (dst,)


def _rotary_embedding(attrs: RotaryEmbedding, request: Request) -> Iterator[_Way]:
    """Yield the kernel where each row lies side by side; the angles are row-major."""
    src, dst, angles = request["src"], request["dst"], {name: plain(request[name]) for name in ("cos", "sin")}
    if not _is_in_rows(src) or src.strides[-1] != 1 or dst.dtype != src.dtype:
        return
    own = dense(src.at_start())
    result = _as_asked(dst, own)
    wide = all(desc.dtype is DataType.F32 and _as_asked(request[name], desc) for name, desc in angles.items())
    if not wide or angles["cos"].dims != angles["sin"].dims or own.strides[-1] != 1 or result is None:
        return
    of_angles = angles["cos"]
    steps = [0 if size == 1 else step for size, step in zip(of_angles.dims, of_angles.strides, strict=True)]
    order = sorted(range(src.ndim - 1), key=lambda axis: -own.strides[axis])
    axes = tuple((src.dims[axis], steps[axis], src.strides[axis]) for axis in order)
    kernel = RotaryKernel(axes, src.dims[-1] // 2, src.dtype, interleaved=attrs.interleaved)
    yield kernel, {"src": src, **angles}, (result,)


def _batch_normalization(attrs: BatchStatistics, request: Request) -> Iterator[_Way]:
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


def _given_norm(node: Node, attrs: BatchNorm, request: Request) -> Iterator[_Way]:
    """Yield the kernel of a batch normalization with given statistics: with channels innermost."""
    src, dst = request["src"], request["dst"]
    own = channels_last(plain(src))
    result = _as_asked(dst, own)
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
    if not _is_in_rows(desc) or desc.ndim < 2 or (desc.strides[1] != 1 and desc.dims[1] > 1):
        return 0
    axes = enumerate(zip(desc.dims, desc.strides, strict=True))
    places = [(size, step) for axis, (size, step) in axes if axis != 1 and size > 1]
    return (even_step(places) or 0) if places else desc.dims[1]


def _reduction(alg: str, axes: tuple[int, ...], request: Request) -> Iterator[_Way]:
    src, dst = request["src"], request["dst"]
    own = like(MemoryDesc(dst.dims, dst.dtype), src)
    result = None if own is None else _as_asked(dst, own)
    if own is None or result is None or not _is_row_of_numbers(src):
        return
    steps = [0 if axis in axes else step for axis, step in enumerate(own.strides)]
    kernel = _fold(alg, _merged(src, steps), src)
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


def _merged(desc: MemoryDesc, *steps: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the axes of a tensor from the outermost in: size, and steps of other tensors along it.

    Neighbours along which each other tensor goes on evenly, or stands still, are one; axes of size 1 are none.
    """
    order = sorted((axis for axis, size in enumerate(desc.dims) if size > 1), key=lambda axis: -desc.strides[axis])
    merged: list[tuple[int, ...]] = []
    for axis in reversed(order):
        size, here = desc.dims[axis], tuple(step[axis] for step in steps)
        if merged and here == tuple(merged[0][0] * step for step in merged[0][1:]):
            merged[0] = (size * merged[0][0], *merged[0][1:])
        else:
            merged.insert(0, (size, *here))
    return tuple(merged)


def _is_in_rows(desc: MemoryDesc) -> bool:
    return desc.kind == "blocked" and desc.is_plain and 0 not in desc.dims


def _is_row_of_numbers(desc: MemoryDesc) -> bool:
    return _is_in_rows(desc) and desc.at_start().is_packed


def _as_asked(asked: MemoryDesc, own: MemoryDesc) -> MemoryDesc | None:
    """Return the kernel's own format, at the place that is asked for; None if another format is asked for."""
    if asked.kind == "any":
        return own
    return asked if asked.at_start() == own else None
