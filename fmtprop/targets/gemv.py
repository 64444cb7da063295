"""Products of a few rows and a matrix by a kernel of our own: of tokens with weights, of queries with their keys."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod

from fmtprop.errors import FormatError
from fmtprop.ir.node import Node, PostOp
from fmtprop.jit import GemvKernel, Tail
from fmtprop.layout import MemoryDesc
from fmtprop.ops import Binary, Eltwise, InnerProduct, Sum
from fmtprop.passes.assignment.formats import by_columns, even_step, plain
from fmtprop.passes.target import Request


def gemv_kernels(node: Node, request: Request) -> Iterator[tuple[GemvKernel, Request, tuple[MemoryDesc]]]:
    """Yield the kernel, the formats that it reads, and the one that it writes; perhaps this machine has none.

    The weights of every output follow one another in memory: a matrix that is asked for as `any` gets this format.
    """
    if any(0 in desc.dims for desc in request.values()):
        return
    is_matmul = not isinstance(node.attrs, InnerProduct)
    formats = {name: plain(desc) if desc.kind == "any" else desc for name, desc in request.items()}
    if is_matmul and request["weights"].kind == "any":
        formats["weights"] = by_columns(request["weights"])
    if not all(desc.kind == "blocked" and desc.is_plain for desc in formats.values()):
        return
    try:
        kernel = _kernel(node, formats if is_matmul else _as_matmul(formats))
    except FormatError:  # the inputs of an item do not follow one another
        return
    if kernel is not None:
        yield kernel, {name: formats[name] for name in request if name != "dst"}, (formats["dst"],)


def _as_matmul(formats: Request) -> Request:
    """Return the formats of an inner product as those of a matrix product.

    Raises FormatError if a format cannot express the inputs of an item as one axis.
    """
    src, weights = (
        formats[name].reshape((formats[name].dims[0], prod(formats[name].dims[1:]))) for name in ("src", "weights")
    )
    return {**formats, "src": src, "weights": weights.transpose((1, 0))}


def _kernel(node: Node, formats: Request) -> GemvKernel | None:
    """Return the kernel of a matrix product; None if it has none for these formats."""
    src, weights, dst = (formats[name] for name in ("src", "weights", "dst"))
    depth, outputs, bias = src.dims[-1], dst.dims[-1], formats.get("bias")
    tail = [tail_of(post_op, formats, outputs) for post_op in node.post_ops]
    by_column = weights.strides[-2] == 1 and weights.strides[-1] >= depth
    if not by_column or src.dtype != weights.dtype or None in tail or (bias is not None and bias.dims[-1] != outputs):
        return None
    # all items that share a matrix are rows of one product
    matrices = (1,) * (dst.ndim - weights.ndim) + weights.dims
    first = next((axis + 1 for axis in reversed(range(dst.ndim - 2)) if matrices[axis] > 1), 0)
    others = {name: desc for name, desc in formats.items() if name != "weights"}
    rows = {name: row_step(desc, dst, range(first, dst.ndim - 1)) for name, desc in others.items()}
    items = {name: row_step(desc, dst, range(first)) for name, desc in formats.items()}
    if None in (*rows.values(), *items.values()) or not all(map(_is_consecutive, others.values())):
        return None
    return GemvKernel(
        *(outputs, depth, src.dtype, dst.dtype),
        bias=None if bias is None else bias.dtype,
        tail=tuple(one for one in tail if one is not None),
        items=prod(dst.dims[:first]),
        steps=tuple((name, step) for name, step in items.items() if step),
        pitch=weights.strides[-1],
        rows=prod(dst.dims[first:-1]),
        row_steps=tuple((name, step) for name, step in rows.items() if step),
    )


def row_step(desc: MemoryDesc, dst: MemoryDesc, axes: Iterable[int]) -> int | None:
    """Return the numbers from one to the next along axes of dst taken together; 0 if it is always the same.

    None if steps are uneven.
    """
    missing = dst.ndim - desc.ndim
    return even_step(
        [
            (dst.dims[axis], 0 if axis < missing or desc.dims[axis - missing] == 1 else desc.strides[axis - missing])
            for axis in axes
            if dst.dims[axis] > 1
        ]
    )


def _is_consecutive(desc: MemoryDesc) -> bool:
    """Return whether the numbers of a row follow one another."""
    return desc.dims[-1] == 1 or desc.strides[-1] == 1


def tail_of(post_op: PostOp, formats: Request, outputs: int) -> Tail | None:
    """Return a post-op as the kernel sees it; None if it has no form for it."""
    if isinstance(post_op.attrs, Eltwise):
        return Tail(post_op.attrs.alg, post_op.attrs.alpha, post_op.attrs.beta)
    adds = isinstance(post_op.attrs, Sum) and post_op.attrs.scales == (1.0,)
    alg = "add" if adds else post_op.attrs.alg if isinstance(post_op.attrs, Binary) else None
    if post_op.operand is None or alg is None:
        return None
    operand = formats[post_op.operand]
    return Tail(alg, dtype=operand.dtype, is_number=operand.dims[-1] == 1 < outputs)
