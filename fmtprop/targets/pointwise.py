"""Kernels that compute number by number: broadcasts, sums of bytes, tables, roundings, rotary embeddings."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from fmtprop.ir import Node, loses_special_values
from fmtprop.jit import (
    BroadcastKernel,
    CombineKernel,
    DequantizeKernel,
    EltwiseKernel,
    LookupKernel,
    Quantized,
    QuantizeRowsKernel,
    RotaryKernel,
    RoundKernel,
    broadcast_kernel_for,
)
from fmtprop.layout import DataType
from fmtprop.ops import Binary, DynamicQuantize, Eltwise, Lookup
from fmtprop.ops.quantization import Dequantize, FakeQuantize
from fmtprop.ops.rotary_embedding import RotaryEmbedding
from fmtprop.passes.assignment.formats import dense, like, plain
from fmtprop.passes.target import Request
from fmtprop.targets.as_rows import BYTES, Way, as_asked, is_in_rows, is_row_of_numbers, merged, pitch_of, rounding_of


def applied(node: Node, attrs: Eltwise, request: Request) -> Iterator[Way]:
    """Yield the kernel of a function of numbers that lie side by side, in any order of the axes."""
    src = request["src"]
    if node.post_ops or not is_row_of_numbers(src) or (node.exact and loses_special_values(node)):
        return
    result = as_asked(request["dst"], src.at_start())
    if result is not None and result.dtype is src.dtype:
        yield EltwiseKernel(attrs.alg, attrs.alpha, attrs.beta, prod(src.dims), src.dtype), {"src": src}, (result,)


def broadcasts(node: Node, attrs: Binary, request: Request) -> Iterator[Way]:
    """Yield the kernel where an operand is broadcast or is a slice; oneDNN serves dense tensors of the same dims."""
    src, other = request["src_0"], request["src_1"]
    if not is_in_rows(src) or src.dtype in BYTES:
        return
    if src.dims == other.dims and src.at_start().is_packed and (other.kind == "any" or other.at_start().is_packed):
        return
    yield from _broadcast(attrs, request)


def combined(node: Node, attrs: Binary, request: Request) -> Iterator[Way]:
    """Yield the kernel for bytes whose result is only rounded; a ReLU before may be the least number."""
    if request["src_0"].dtype not in BYTES:
        return
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


def _broadcast(attrs: Binary, request: Request) -> Iterator[Way]:
    """Yield the kernel for two operands, as rows of real numbers."""
    src, other, dst = (request[name] for name in ("src_0", "src_1", "dst"))
    if not is_in_rows(src) or src.dims != dst.dims:
        return
    own = dense(src.at_start())
    if other.kind == "any":
        other = (like(other, own) or plain(other)).with_dtype(other.dtype)
    result = as_asked(dst, own.with_dtype(dst.dtype))
    if result is None or not is_in_rows(other):
        return
    steps = [0 if size == 1 else step for size, step in zip(other.dims, other.strides, strict=True)]
    axes = merged(src, steps, src.strides)
    pitch = pitch_of(tuple((size, step) for size, _, step in axes))
    if pitch is None:
        return
    dtype = DataType.F32 if src.dtype in BYTES else src.dtype
    kernel = broadcast_kernel_for(attrs.alg, tuple((size, step) for size, step, _ in axes), dtype, pitch)
    if kernel is not None:
        yield kernel, {"src_0": src, "src_1": other}, (result,)


def looked_up(node: Node, attrs: Lookup, request: Request) -> Iterator[Way]:
    """Yield the kernel for bytes in any order without gaps."""
    src = request["src"]
    if src.dtype not in BYTES or request["dst"].dtype not in BYTES or not is_row_of_numbers(src):
        return
    result = as_asked(request["dst"], src.at_start().with_dtype(request["dst"].dtype))
    if result is not None:
        yield LookupKernel(prod(src.dims), attrs.table), {"src": src}, (result,)


def quantized(node: Node, attrs: DynamicQuantize, request: Request) -> Iterator[Way]:
    """Yield the kernel for row-major tensors; if the tensor has one scale, for any order without gaps."""
    src, dst = request["src"], request["dst"]
    if not is_row_of_numbers(src) or (not attrs.whole and src.at_start() != plain(src)):
        return
    if src.dtype is not DataType.F32 or dst.dtype not in (DataType.F32, attrs.grid.stored):
        return
    result = as_asked(dst, src.at_start().with_dtype(dst.dtype))
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


def rounded(node: Node, attrs: FakeQuantize, request: Request) -> Iterator[Way]:
    """Yield the kernel for tensors without gaps, or in rows with even gaps, in any order of axes."""
    src, asked, rounding = request["src"], request["dst"], rounding_of(node, [attrs])
    if rounding is None or node.post_ops or (node.exact and loses_special_values(node)) or not is_in_rows(src):
        return
    if src.dtype not in (DataType.F32, *BYTES) or asked.dtype not in (DataType.F32, *BYTES):
        return
    grid = node.grids["src"] if src.dtype in BYTES else None
    own = dense(src.at_start())
    result = as_asked(asked, own.with_dtype(asked.dtype))
    axes = tuple((size, step) for size, step in merged(src, src.strides))
    pitch = pitch_of(axes)
    if result is None or pitch is None or (grid is not None and grid.varies):
        return
    length = axes[-1][0]
    read = None if grid is None else Quantized(grid.stored, grid.scale, grid.zero)
    yield RoundKernel(prod(src.dims) // length, length, pitch, read, result.dtype, rounding), {"src": src}, (result,)


def dequantized(node: Node, attrs: Dequantize, request: Request) -> Iterator[Way]:
    """Yield the kernel for bytes without gaps, in any order of axes, which have one scale and one zero point."""
    src, zero = request["src"], request.get("zero_point")
    parameters = {name: plain(desc) for name, desc in request.items() if name not in ("src", "dst")}
    if any(prod(one.dims) != 1 for one in parameters.values()):
        return
    if src.dtype not in BYTES or not src.at_start().is_packed:
        return
    if parameters["scale"].dtype is not DataType.F32 or (zero is not None and zero.dtype is not src.dtype):
        return
    result = as_asked(request["dst"], src.at_start().with_dtype(DataType.F32))
    if result is not None:
        yield DequantizeKernel(prod(src.dims), src.dtype, zero is not None), {"src": src, **parameters}, (result,)


def rotated(node: Node, attrs: RotaryEmbedding, request: Request) -> Iterator[Way]:
    """Yield the kernel where each row lies side by side; the angles are row-major."""
    src, dst, angles = request["src"], request["dst"], {name: plain(request[name]) for name in ("cos", "sin")}
    if not is_in_rows(src) or src.strides[-1] != 1 or dst.dtype != src.dtype:
        return
    own = dense(src.at_start())
    result = as_asked(dst, own)
    wide = all(desc.dtype is DataType.F32 and as_asked(request[name], desc) for name, desc in angles.items())
    if not wide or angles["cos"].dims != angles["sin"].dims or own.strides[-1] != 1 or result is None:
        return
    of_angles = angles["cos"]
    steps = [0 if size == 1 else step for size, step in zip(of_angles.dims, of_angles.strides, strict=True)]
    order = sorted(range(src.ndim - 1), key=lambda axis: -own.strides[axis])
    axes = tuple((src.dims[axis], steps[axis], src.strides[axis]) for axis in order)
    kernel = RotaryKernel(axes, src.dims[-1] // 2, src.dtype, interleaved=attrs.interleaved)
    yield kernel, {"src": src, **angles}, (result,)
