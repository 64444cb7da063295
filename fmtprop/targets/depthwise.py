"""Depthwise convolutions by a kernel of our own: which node and which formats have one."""

from __future__ import annotations

from collections.abc import Iterator

from fmtprop.ir.node import Node
from fmtprop.jit import DepthwiseKernel, Tail
from fmtprop.jit.grouped_convolution import Row
from fmtprop.layout import DataType, MemoryDesc
from fmtprop.ops import Conv, Eltwise
from fmtprop.passes.assignment.formats import channels_last, plain
from fmtprop.passes.target import Request


def depthwise_kernels(node: Node, request: Request) -> Iterator[tuple[DepthwiseKernel, Request, tuple[MemoryDesc]]]:
    """Yield the kernel, the formats that it reads, and the one that it writes: channels are innermost."""
    attrs = node.attrs
    src, weights, dst = (request[name] for name in ("src", "weights", "dst"))
    if not isinstance(attrs, Conv) or (src.ndim, weights.ndim) != (4, 5) or weights.dims[1:3] != (1, 1):
        return
    functions = [post_op.attrs for post_op in node.post_ops if isinstance(post_op.attrs, Eltwise)]
    if any(0 in desc.dims for desc in request.values()) or len(functions) < len(node.post_ops):
        return
    bias = request.get("bias")
    if {src.dtype, weights.dtype} != {dst.dtype} or (bias is not None and bias.dtype is not DataType.F32):
        return
    sizes = zip(
        *(src.dims[2:], dst.dims[2:], weights.dims[3:]),
        *(attrs.strides, attrs.dilates, attrs.pad_l),
        strict=True,
    )
    heights, row = ((*of, stride, skipped + 1, pad) for *of, stride, skipped, pad in sizes)
    kernel = DepthwiseKernel(
        *(src.dims[0], src.dims[1], heights, Row(*row), dst.dtype),
        has_bias=bias is not None,
        tail=tuple(Tail(one.alg, one.alpha, one.beta) for one in functions),
    )
    if not kernel.is_offered:
        return
    own = {
        "src": channels_last(plain(src)),
        "weights": MemoryDesc(weights.dims, weights.dtype, tag="deabc"),
        "dst": channels_last(plain(dst)),
    }
    own |= {name: plain(desc) for name, desc in request.items() if name == "bias"}
    if all(request[name].kind == "any" or request[name].at_start() == desc for name, desc in own.items()):
        formats = {name: desc if request[name].kind == "any" else request[name] for name, desc in own.items()}
        yield kernel, {name: formats[name] for name in request if name != "dst"}, (formats["dst"],)
