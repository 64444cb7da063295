"""Products of bytes by a kernel of our own, where the CPU has no exact ones: which node and which formats have it."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from fmtprop.errors import FormatError, UnsupportedOpError
from fmtprop.ir import Node, loses_special_values
from fmtprop.jit import ByteProductsKernel
from fmtprop.jit.byte_products import BLOCK, DEPTH, TailOperand, TailStep
from fmtprop.jit.grouped_convolution import Row
from fmtprop.layout import DataType, MemoryDesc
from fmtprop.ops import Binary, Conv, Eltwise, InnerProduct, MatMul
from fmtprop.passes.assignment.formats import channels_last, plain
from fmtprop.passes.target import Request
from fmtprop.targets.as_rows import BYTES
from fmtprop.targets.gemv import row_step
from fmtprop.targets.requests import stored_in
from fmtprop.targets.scaling import Function, Kept, chain_of, scaling_of

#: format of weights by the attributes' type and the number of axes: 16 outputs have pairs of inputs side by side
_WEIGHTS = {
    (InnerProduct, 2): f"AB{BLOCK}a{DEPTH}b",
    (MatMul, 2): f"BA{BLOCK}b{DEPTH}a",
    (MatMul, 3): f"aCB{BLOCK}c{DEPTH}b",
    (MatMul, 4): f"abDC{BLOCK}d{DEPTH}c",
    (Conv, 3): f"AcB{BLOCK}a{DEPTH}b",
    (Conv, 4): f"AcdB{BLOCK}a{DEPTH}b",
}

#: an axis of one position
_ONE = Row(1, 1, 1, 1, 1, 0)


def byte_products(node: Node, request: Request) -> Iterator[tuple[ByteProductsKernel, Request, tuple[MemoryDesc]]]:
    """Yield the kernel, the formats that it reads, and the one that it writes; perhaps this machine has none."""
    src, weights = request["src"], request["weights"]
    tag = _WEIGHTS.get((type(node.attrs), weights.ndim))
    if tag is None or not {src.dtype, weights.dtype} <= {*BYTES} or any(0 in desc.dims for desc in request.values()):
        return
    if node.exact and loses_special_values(node):
        return
    is_convolution = isinstance(node.attrs, Conv)
    if src.ndim != weights.ndim and (is_convolution or weights.ndim != 2):
        return
    if not is_convolution and prod(weights.dims[:-2]) != 1:  # each item has a matrix of its own
        return
    own = {name: channels_last(plain(desc)) if is_convolution else plain(desc) for name, desc in request.items()}
    own["weights"] = MemoryDesc(weights.dims, weights.dtype, tag=tag)
    formats = {name: desc if request[name].kind == "any" else request[name] for name, desc in own.items()}
    if any(formats[name].at_start() != own[name] for name in ("src", "weights")):
        return
    try:
        kernel = _kernel(node, formats)
    except (FormatError, UnsupportedOpError):
        return
    if kernel is not None:
        yield kernel, {name: formats[name] for name in request if name != "dst"}, (formats["dst"],)


def _kernel(node: Node, formats: Request) -> ByteProductsKernel | None:
    """Return the kernel; None if it has none for these formats.

    Raises UnsupportedOpError if a scale cannot be an argument of products of bytes.
    """
    scaling, stored = scaling_of(node, stored_in(formats)), stored_in(formats)
    attrs, dst = node.attrs, formats["dst"]
    order = (0, *range(2, dst.ndim), 1) if isinstance(attrs, Conv) else tuple(range(dst.ndim))
    others = {name: desc for name, desc in formats.items() if name not in ("src", "weights")}
    rows = {name: desc.transpose(order) if desc.ndim == dst.ndim else desc for name, desc in others.items()}
    ends = {name: _operand(desc, rows["dst"]) for name, desc in rows.items()}
    tail = [_step(node, step, ends) for step in chain_of(node, stored).steps]
    tail += [TailStep("linear", 1 / scale) for scale in scaling.scales.get("dst", ())]
    result, *places, outputs = ends["dst"], *rows["dst"].dims
    if not scaling.masks or None in tail or result is None:
        return None
    if "bias" in ends and ends["bias"] != TailOperand(DataType.F32, 0, is_number=outputs == 1):
        return None
    images, height, width = _extents(attrs, formats) if isinstance(attrs, Conv) else (1, _ONE, _row(prod(places)))
    return ByteProductsKernel(
        images=images,
        inputs=formats["src"].dims[1 if isinstance(attrs, Conv) else -1],
        outputs=outputs,
        height=height,
        width=width,
        src=formats["src"].dtype,
        weights=formats["weights"].dtype,
        dst=dst.dtype,
        zero=scaling.zeros.get("src", 0),
        weights_zero=scaling.zeros.get("weights", 0),
        dst_step=result.step,
        has_bias="bias" in ends,
        tail=tuple(one for one in tail if one is not None),
    )


def _row(positions: int) -> Row:
    return Row(positions, positions, 1, 1, 1, 0)


def _extents(attrs: Conv, formats: Request) -> tuple[int, Row, Row]:
    """Return the number of images and their axes; windows of one position see a row of positions."""
    src, dst, window = formats["src"].dims, formats["dst"].dims[2:], formats["weights"].dims[2:]
    sizes = zip(src[2:], dst, window, attrs.strides, attrs.dilates, attrs.pad_l, strict=True)
    *above, width = (Row(of, to, taps, by, skipped + 1, pad) for of, to, taps, by, skipped, pad in sizes)
    (height,) = above or [_ONE]
    if all(one == _row(one.dst) for one in (height, width)):
        return 1, _ONE, _row(src[0] * height.dst * width.dst)
    return src[0], height, width


def _operand(desc: MemoryDesc, dst: MemoryDesc) -> TailOperand | None:
    """Return a tensor at the outputs, its axes as those of dst; None if its numbers are not in rows of outputs."""
    step = row_step(desc, dst, range(dst.ndim - 1)) if desc.kind == "blocked" and desc.is_plain else None
    is_number = desc.dims[-1] == 1
    if step is None or not (is_number or desc.strides[-1] == 1):
        return None
    return TailOperand(desc.dtype, step, is_number)


def _step(node: Node, step: Function | Kept, ends: dict[str, TailOperand | None]) -> TailStep | None:
    """Return a post-op as the kernel sees it; None if it has no form for it."""
    if isinstance(step, Function):
        return TailStep(step.alg, step.alpha, step.beta)
    post_op = node.post_ops[step.index]
    attrs = post_op.attrs
    if isinstance(attrs, Eltwise):
        return TailStep(attrs.alg, attrs.alpha, attrs.beta)
    operand = ends.get(post_op.operand or "")
    return TailStep(attrs.alg, operand=operand, number=step.index) if isinstance(attrs, Binary) and operand else None
