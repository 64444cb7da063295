"""Products of one row and a matrix by a kernel of our own: inner products and matrix products of one token."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from fmtprop.ir.node import Node, PostOp
from fmtprop.jit import GemvKernel, Tail, gemv_kernel_for
from fmtprop.layout import MemoryDesc
from fmtprop.ops.binary import Binary
from fmtprop.ops.eltwise import Eltwise
from fmtprop.ops.inner_product import InnerProduct
from fmtprop.ops.sum import Sum
from fmtprop.passes.formats import plain
from fmtprop.passes.target import Request

__all__ = ["gemv_kernels"]


def gemv_kernels(node: Node, request: Request) -> Iterator[tuple[GemvKernel, Request, MemoryDesc]]:
    """Yield the kernel, the formats that it reads, and the one that it writes.

    Every output's weights follow one another in memory: weights that are asked for as `any` get this format.

    Parameters
    ----------
    node : Node
        An inner product or a matrix product, with its post-ops.
    request : mapping of str to MemoryDesc
        See :meth:`fmtprop.passes.target.Target.candidates`.
    """
    src, weights, dst = (request[name] for name in ("src", "weights", "dst"))
    outputs = dst.dims[-1]
    if prod(dst.dims) != outputs or 0 in weights.dims or prod(weights.dims) != outputs * prod(src.dims):
        return
    formats = {name: plain(desc) for name, desc in request.items()}
    formats["weights"] = plain(weights) if isinstance(node.attrs, InnerProduct) else _by_columns(weights)
    if any(desc.kind != "any" and not _lies_like(desc, formats[name]) for name, desc in request.items()):
        return
    tail = [_tail(post_op, request, outputs) for post_op in node.post_ops]
    bias = request.get("bias")
    if src.dtype != weights.dtype or None in tail or (bias is not None and prod(bias.dims) != outputs):
        return
    kernel = gemv_kernel_for(
        GemvKernel(
            *(outputs, prod(src.dims), src.dtype, dst.dtype),
            bias=None if bias is None else bias.dtype,
            tail=tuple(one for one in tail if one is not None),
        )
    )
    if kernel is not None:
        formats |= {name: desc for name, desc in request.items() if desc.kind != "any"}
        yield kernel, {name: formats[name] for name in request if name != "dst"}, formats["dst"]


def _by_columns(desc: MemoryDesc) -> MemoryDesc:
    """Return the format of a matrix whose columns lie one after another."""
    order = (*range(desc.ndim - 2), desc.ndim - 1, desc.ndim - 2)
    return MemoryDesc(tuple(desc.dims[axis] for axis in order), desc.dtype).transpose(order)


def _lies_like(desc: MemoryDesc, dense: MemoryDesc) -> bool:
    """Return whether a tensor's numbers follow one another as in a dense one."""
    if desc.kind != "blocked" or not desc.is_plain:
        return False
    return all(
        size == 1 or here == there for size, here, there in zip(desc.dims, desc.strides, dense.strides, strict=True)
    )


def _tail(post_op: PostOp, request: Request, outputs: int) -> Tail | None:
    """Return a post-op as the kernel sees it; None if it has none such."""
    if isinstance(post_op.attrs, Eltwise):
        return Tail(post_op.attrs.alg, post_op.attrs.alpha, post_op.attrs.beta)
    adds = isinstance(post_op.attrs, Sum) and post_op.attrs.scales == (1.0,)
    alg = "add" if adds else post_op.attrs.alg if isinstance(post_op.attrs, Binary) else None
    if post_op.operand is None or alg is None:
        return None
    operand = request[post_op.operand]
    if prod(operand.dims) not in (1, outputs):
        return None
    return Tail(alg, dtype=operand.dtype, is_number=prod(operand.dims) == 1)
