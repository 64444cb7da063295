"""Matrices of codes by kernels of our own: products of a few rows with them, their decoding, and rows by indices."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from fmtprop.ir.node import Node
from fmtprop.jit import DecodeKernel, GatherNBitsKernel, NBitsKernel
from fmtprop.layout import DataType, MemoryDesc
from fmtprop.ops.gather_nbits import GatherNBits
from fmtprop.ops.matmul_nbits import DecodeNBits, MatMulNBits
from fmtprop.passes.assignment.formats import plain
from fmtprop.passes.target import Request
from fmtprop.targets.gemv import row_step, tail_of

#: operands that are row-major
_LEARNED = frozenset({"weights", "scales", "zero_points", "bias"})

#: blocks of a decoded matrix: transposed, ``BA16a64b``, and in bf16 ``BA16a64b2a``
_BLOCKED = {DataType.F32: "AB16b64a", DataType.BF16: "AB16b64a2b"}


def nbits_kernels(node: Node, request: Request) -> Iterator[tuple[NBitsKernel, Request, tuple[MemoryDesc]]]:
    """Yield the kernel, the formats that it reads, and the one that it writes; perhaps this machine has none.

    Codes, scales and zero points are row-major, as files have them; src and dst have rows of numbers that lie side by
    side.
    """
    attrs = node.attrs
    assert isinstance(attrs, MatMulNBits)
    formats = {name: plain(desc) if desc.kind == "any" else desc for name, desc in request.items()}
    if any(formats[name] != plain(formats[name]) for name in _LEARNED & formats.keys()):
        return
    if any(0 in desc.dims for desc in formats.values()):
        return
    dst, others = formats["dst"], {name: desc for name, desc in formats.items() if name not in _LEARNED}
    if not all(desc.kind == "blocked" and desc.is_plain and _is_consecutive(desc) for desc in others.values()):
        return
    steps = {name: row_step(desc, dst, range(dst.ndim - 1)) for name, desc in others.items()}
    tail = [tail_of(post_op, formats, dst.dims[-1]) for post_op in node.post_ops]
    if None in steps.values() or None in tail:
        return
    bias = formats.get("bias")
    kernel = NBitsKernel(
        *(dst.dims[-1], formats["src"].dims[-1], attrs.bits, attrs.group, formats["src"].dtype, dst.dtype),
        has_zero_points="zero_points" in formats,
        bias=None if bias is None else bias.dtype,
        tail=tuple(one for one in tail if one is not None),
        rows=prod(dst.dims[:-1]),
        row_steps=tuple((name, step) for name, step in steps.items() if step),
        is_exact=node.exact,
    )
    yield kernel, {name: formats[name] for name in request if name != "dst"}, (dst,)


def decode_kernels(attrs: DecodeNBits, request: Request) -> Iterator[tuple[DecodeKernel, Request, tuple[MemoryDesc]]]:
    """Yield the kernels that decode a matrix, into the blocks in which oneDNN's products read it, and row-major."""
    formats = {name: plain(desc) for name, desc in request.items()}
    codes = {name: formats[name] for name in request if name != "dst"}
    if any(request[name].kind != "any" and request[name] != desc for name, desc in codes.items()):
        return
    dims, dtype = formats["dst"].dims, DataType(attrs.dtype)
    for is_blocked in (True, False):
        kernel = DecodeKernel(
            dims[0], dims[1], attrs.bits, attrs.group, dtype, "zero_points" in formats, is_blocked=is_blocked
        )
        if not kernel.is_offered:
            continue
        dst = MemoryDesc(dims, dtype, tag=_BLOCKED[dtype]) if is_blocked else formats["dst"]
        if request["dst"].kind == "any" or request["dst"] == dst:
            yield kernel, codes, (dst,)


def gather_kernels(
    attrs: GatherNBits, request: Request
) -> Iterator[tuple[GatherNBitsKernel, Request, tuple[MemoryDesc]]]:
    """Yield the kernel where all tensors are row-major."""
    formats = {name: plain(desc) if desc.kind == "any" else desc for name, desc in request.items()}
    if any(desc.at_start() != plain(desc) for desc in formats.values()):
        return
    indices = formats["indices"]
    kernel = GatherNBitsKernel(
        *(formats["weights"].dims[0], attrs.depth, attrs.bits, attrs.group, DataType(attrs.dtype)),
        "zero_points" in formats,
        count=prod(indices.dims),
        index_nbytes=indices.dtype.nbytes,
    )
    yield kernel, {name: formats[name] for name in request if name != "dst"}, (formats["dst"],)


def _is_consecutive(desc: MemoryDesc) -> bool:
    """Return whether the numbers of a row follow one another."""
    return desc.dims[-1] == 1 or desc.strides[-1] == 1
