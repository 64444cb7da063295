"""Convolutions in groups of few channels by a kernel of our own: which node and which formats have one."""

from __future__ import annotations

from collections.abc import Iterator

from fmtprop.ir.node import Node
from fmtprop.jit import GroupedConvolutionKernel, Tail
from fmtprop.jit.grouped_convolution import Row
from fmtprop.jit.kernel import isa
from fmtprop.layout import DataType, MemoryDesc
from fmtprop.ops import Conv, Eltwise
from fmtprop.passes.assignment.formats import plain
from fmtprop.passes.target import Request


def grouped_convolution_kernels(
    node: Node, request: Request
) -> Iterator[tuple[GroupedConvolutionKernel, Request, tuple[MemoryDesc]]]:
    """Yield the kernel, the formats that it reads, and the one that it writes: channels in blocks of a vector."""
    attrs = node.attrs
    src, weights, dst = (request[name] for name in ("src", "weights", "dst"))
    if (
        not isinstance(attrs, Conv)
        or (src.ndim, weights.ndim) != (4, 5)
        or any(0 in desc.dims for desc in request.values())
    ):
        return
    functions = [post_op.attrs for post_op in node.post_ops if isinstance(post_op.attrs, Eltwise)]
    if {desc.dtype for desc in request.values()} != {DataType.F32} or len(functions) < len(node.post_ops):
        return
    groups, outputs, inputs, *window = weights.dims
    sizes = zip(src.dims[2:], dst.dims[2:], window, attrs.strides, attrs.dilates, attrs.pad_l, strict=True)
    heights, row = ((*of, stride, skipped + 1, pad) for *of, stride, skipped, pad in sizes)
    kernel = GroupedConvolutionKernel(
        *(src.dims[0], groups, inputs, outputs, heights, Row(*row)),
        has_bias="bias" in request,
        tail=tuple(Tail(one.alg, one.alpha, one.beta) for one in functions),
    )
    if not kernel.is_offered:
        return
    lanes = isa().lanes
    blocked = f"aBcd{lanes}b"
    own = {
        "src": MemoryDesc(src.dims, src.dtype, tag=blocked),
        "weights": MemoryDesc(
            weights.dims,
            weights.dtype,
            tag=f"ABdec{lanes // outputs}a{outputs}b" if kernel.is_few else f"aBCde{lanes}c{lanes}b",
        ),
        "dst": MemoryDesc(dst.dims, dst.dtype, tag=blocked),
    }
    own |= {name: plain(desc) for name, desc in request.items() if name == "bias"}
    if all(request[name].kind == "any" or request[name].at_start() == desc for name, desc in own.items()):
        formats = {name: desc if request[name].kind == "any" else request[name] for name, desc in own.items()}
        yield kernel, {name: formats[name] for name in request if name != "dst"}, (formats["dst"],)
