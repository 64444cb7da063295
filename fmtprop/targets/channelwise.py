"""Nodes that kernels of our own compute instead of a primitive: global averages, and a factor for each channel.

Owns which nodes and formats these are: channels-last tensors, whose rows of channels are dense.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from fmtprop.errors import UnsupportedOpError
from fmtprop.ir.node import Node
from fmtprop.jit import ChannelKernel, channel_kernel_for
from fmtprop.layout import MemoryDesc
from fmtprop.ops.binary import Binary
from fmtprop.ops.building import check_summands
from fmtprop.ops.pooling import Pooling
from fmtprop.passes.formats import channels_last
from fmtprop.passes.target import Candidate, Request

__all__ = ["JIT", "channel_candidates"]

#: who executes, in choices and reports
JIT = "jit"


def channel_candidates(node: Node, request: Request) -> Iterator[Candidate]:
    """Yield the way to run a node by a kernel, if there is one for it and for these formats.

    Parameters
    ----------
    node : Node
        The op, its attributes and post-ops.
    request : mapping of str to MemoryDesc
        See :meth:`fmtprop.passes.target.Target.candidates`.
    """
    kernel = _kernel_of(node, request)
    if kernel is None:
        return
    formats = {}
    for name, desc in request.items():
        last = channels_last(MemoryDesc(desc.dims, desc.dtype))
        if desc.at_start() != last and desc.kind != "any":
            return
        formats[name] = last if desc.kind == "any" else desc  # a slice of whole images stays one
    dst = formats.pop("dst")
    yield Candidate(JIT, kernel.impl, formats, (dst,), handle=kernel)


def _kernel_of(node: Node, request: Request) -> ChannelKernel | None:
    if node.post_ops or len({desc.dtype for desc in request.values()}) != 1:
        return None
    if isinstance(node.attrs, Pooling):
        return _average(node.attrs, request["src"])
    if isinstance(node.attrs, Binary):
        return _scale(node.attrs, request["src_0"], request["src_1"])
    return None


def _average(attrs: Pooling, src: MemoryDesc) -> ChannelKernel | None:
    """Return the kernel of an average over one window that is all of the source."""
    images, channels, *places = src.dims
    if attrs.alg == "max" or attrs.kernel != tuple(places) or any((*attrs.pad_l, *attrs.pad_r, *attrs.dilates)):
        return None
    try:
        check_summands("pooling", prod(places))
    except UnsupportedOpError:
        return None
    return channel_kernel_for("average", images, prod(places), channels, src.dtype)


def _scale(attrs: Binary, src: MemoryDesc, factors: MemoryDesc) -> ChannelKernel | None:
    """Return the kernel of a product with a number for each channel, of all images or of each."""
    if attrs.alg != "mul" or src.ndim < 3 or factors.dims[0] not in (1, src.dims[0]):
        return None
    images, channels, *places = src.dims
    if factors.dims[1:] != (channels, *(1 for _ in places)) or prod(places) == 1:
        return None
    return channel_kernel_for("scale", images, prod(places), channels, src.dtype, shared=factors.dims[0] == 1)
