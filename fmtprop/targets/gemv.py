"""Products of one row and a matrix by a kernel of our own: of a token with weights, and of a query with its keys."""

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
from fmtprop.passes.formats import by_columns, plain
from fmtprop.passes.target import Request

__all__ = ["gemv_kernels"]


def gemv_kernels(node: Node, request: Request) -> Iterator[tuple[GemvKernel, Request, MemoryDesc]]:
    """Yield the kernel, the formats that it reads, and the one that it writes.

    The weights of every output follow one another in memory: a matrix that is asked for as `any` gets this format.

    Parameters
    ----------
    node : Node
        An inner product or a matrix product, with its post-ops.
    request : mapping of str to MemoryDesc
        See :meth:`fmtprop.passes.target.Target.candidates`.
    """
    if any(0 in desc.dims for desc in request.values()):
        return
    is_matmul = not isinstance(node.attrs, InnerProduct)
    formats = {name: plain(desc) if desc.kind == "any" else desc for name, desc in request.items()}
    if is_matmul and request["weights"].kind == "any":
        formats["weights"] = by_columns(request["weights"])
    if not all(desc.kind == "blocked" and desc.is_plain for desc in formats.values()):
        return
    src, weights, dst = (formats[name] for name in ("src", "weights", "dst"))
    outputs, items = dst.dims[-1], prod(dst.dims[:-1])
    if is_matmul:
        depth, pitch = src.dims[-1], weights.strides[-1]
        steps = {"src": _step(src, -1, dst), "weights": _step(weights, -2, dst)}
        # a matrix for all items is one for several rows: the kernel would read it for each
        is_row = dst.dims[-2] == 1 and pitch >= depth and (items == 1 or bool(steps["weights"]))
    else:
        depth, pitch, steps = prod(src.dims), 0, {}
        is_row = items == 1 and _is_row_major(src) and _is_row_major(weights)
    tail = [_tail(post_op, formats, outputs) for post_op in node.post_ops]
    if not is_row or src.dtype != weights.dtype or None in tail:
        return
    steps |= {name: _step(desc, -1, dst) for name, desc in formats.items() if name not in ("src", "weights")}
    bias = formats.get("bias")
    if None in steps.values() or (bias is not None and bias.dims[-1] != outputs):
        return
    kernel = gemv_kernel_for(
        GemvKernel(
            *(outputs, depth, src.dtype, dst.dtype),
            bias=None if bias is None else bias.dtype,
            tail=tuple(one for one in tail if one is not None),
            items=items,
            steps=tuple((name, step) for name, step in steps.items() if step),
            pitch=pitch,
        )
    )
    if kernel is not None:
        yield kernel, {name: formats[name] for name in request if name != "dst"}, dst


def _step(desc: MemoryDesc, row: int, dst: MemoryDesc) -> int | None:
    """Return the numbers from item to item of dst's batch, 0 for one row or matrix for all; None if steps are uneven.

    The numbers along the axis `row` must follow one another, too.
    """
    if desc.dims[row] > 1 and desc.strides[row] != 1:
        return None
    if desc.ndim < dst.ndim:  # a vector or one matrix; others have the axes of dst's batch
        return 0 if prod(desc.dims[:-2]) == 1 else None
    sizes = zip(dst.dims[:-2], desc.dims, desc.strides, strict=False)
    axes = [(size, 0 if own == 1 else step) for size, own, step in sizes if size > 1]
    expected = first = axes[-1][1] if axes else 0
    for size, step in reversed(axes):
        if step != expected:
            return None
        expected *= size
    return first


def _is_row_major(desc: MemoryDesc) -> bool:
    """Return whether a tensor's numbers follow one another row by row."""
    steps = zip(desc.dims, desc.strides, plain(desc).strides, strict=True)
    return all(size == 1 or here == there for size, here, there in steps)


def _tail(post_op: PostOp, formats: Request, outputs: int) -> Tail | None:
    """Return a post-op as the kernel sees it; None if it has none such."""
    if isinstance(post_op.attrs, Eltwise):
        return Tail(post_op.attrs.alg, post_op.attrs.alpha, post_op.attrs.beta)
    adds = isinstance(post_op.attrs, Sum) and post_op.attrs.scales == (1.0,)
    alg = "add" if adds else post_op.attrs.alg if isinstance(post_op.attrs, Binary) else None
    if post_op.operand is None or alg is None:
        return None
    operand = formats[post_op.operand]
    return Tail(alg, dtype=operand.dtype, is_number=operand.dims[-1] == 1 < outputs)
