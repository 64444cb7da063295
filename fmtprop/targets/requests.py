"""What a request tells before oneDNN is asked: whether it computes in these data types, and in how many threads."""

from __future__ import annotations

from math import prod

from fmtprop import dnnl
from fmtprop.ir import Bytes, Node, opdef
from fmtprop.jit import ALONE_NBYTES, unavailable
from fmtprop.layout import DataType, FormatKind
from fmtprop.ops.building import NATIVE_FLOATS
from fmtprop.ops.recurrent import Recurrent
from fmtprop.passes.target import Request
from fmtprop.targets.scaling import Stored, byte_grids

#: multiplications up to which one thread is faster than several
_ALONE_PRODUCTS = 1 << 16

#: the same for each step of a recurrent layer, after which threads wait for each other: 3 to 6 us of one thread
_ALONE_PRODUCTS_OF_STEP = 1 << 18


def stored_in(request: Request) -> Stored:
    """Return the data types of a request's tensors."""
    return {name: desc.dtype for name, desc in request.items()}


def is_short(node: Node, request: Request) -> bool:
    """Whether a node is so short that one thread computes it sooner than others would start."""
    linear = opdef(node.op).linear
    if linear is not None:
        src, weights, dst = (request[role].dims if role in request else () for role in linear.roles)
        if not (src and weights and dst):
            return False
        products = linear.products(src, weights, dst)
        if isinstance(node.attrs, Recurrent):
            return products <= _ALONE_PRODUCTS_OF_STEP * src[0] and not unavailable()
        if products > _ALONE_PRODUCTS:
            return False
    nbytes = sum(prod(desc.dims) * desc.dtype.nbytes for desc in request.values())
    return nbytes <= 2 * ALONE_NBYTES and not unavailable()  # a row is read and written


def computable(node: Node, request: Request) -> bool:
    """Whether oneDNN computes in these data types at all; a reorder also converts integers that it knows.

    Where the CPU lacks f16 or bf16, oneDNN copies it number by number: 450 us for 9 600 of them, PyTorch takes 2 to 14.
    PyTorch knows no blocks, so blocks of one type remain; a conversion is to or from strides, and f32 becomes blocks.
    """
    declaration, grids = opdef(node.op), byte_grids(node, stored_in(request))
    types = {desc.dtype for name, desc in request.items() if name not in grids}
    if grids:
        # no packing that scales real numbers: its compensation may be that of unrounded ones (a precaution, not shown)
        packs = declaration.numbers.bytes(node.attrs) is Bytes.CONVERTED and request["dst"].kind is FormatKind.OPAQUE
        return types <= NATIVE_FLOATS and not (packs and types)
    if declaration.name == "reorder":
        is_slow = any(dtype in types and not dnnl.supports(dtype) for dtype in (DataType.BF16, DataType.F16))
        if is_slow and (len(types) > 1 or all(desc.is_plain for desc in request.values())):
            return False
        return types <= NATIVE_FLOATS or (len(types) == 1 and types <= {DataType.S32, DataType.S8, DataType.U8})
    if any(one.is_workspace for one in (*declaration.operands, *declaration.results)):
        types.discard(DataType.U8)
    return types <= NATIVE_FLOATS  # nodes of other types run on the reference target
