"""The vectors of all normalizations: a f32 number for each channel or row, which oneDNN takes in plain formats.

Owns their names, flags and formats. Must not know which statistics a normalization uses.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from fmtprop.errors import UnsupportedOpError
from fmtprop.ir.op import Lowering, NativeAttr, Natives, Operand, Primitive
from fmtprop.layout import MemoryDesc
from fmtprop.ops.building import create, lowering, native

if TYPE_CHECKING:
    from fmtprop.dnnl import NormFlags, PrimitiveDesc

#: operands and results of f32 numbers
VECTORS = ("mean", "variance", "scale", "shift", "diff_scale", "diff_shift")

SCALE, SHIFT = (Operand(name, name.upper(), optional=True, parameter=True) for name in ("scale", "shift"))
MEAN, VARIANCE = (Operand(name, name.upper(), parameter=True) for name in ("mean", "variance"))

DIFF_VECTORS = tuple(Operand(name, name.upper(), parameter=True) for name in ("diff_scale", "diff_shift"))

#: the results of a gradient
GRADIENTS = (Operand("diff_src", "DIFF_SRC"), *DIFF_VECTORS)


def widened(tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return src and the vectors in the data type in which they are computed: f64, or f32."""
    src = tensors["src"]
    dtype = torch.float64 if src.dtype == torch.float64 else torch.float32
    # PyTorch reads vectors as if they had no gaps
    return src.to(dtype), {name: tensors[name].to(dtype).contiguous() for name in VECTORS if name in tensors}


def affine_flags(op: str, descs: Natives) -> NormFlags:
    """Return the flags for the given scale and shift, or their gradients; refuse vectors that are not f32."""
    from fmtprop import dnnl

    for name in VECTORS:
        if name in descs and descs[name].data_type != "f32":
            raise UnsupportedOpError(
                f"{op}: {name} is {descs[name].data_type} but oneDNN takes f32 here: keep it in f32, whatever src is"
            )
    flags = dnnl.NormFlags.NONE
    if "scale" in descs:
        flags |= dnnl.NormFlags.USE_SCALE
    if {"shift", "diff_shift"} & set(descs):
        flags |= dnnl.NormFlags.USE_SHIFT
    return flags


def with_vectors(pd: PrimitiveDesc, images: Iterable[str], descs: Natives) -> Lowering:
    """Return the lowering: these operands in the primitive's formats, all vectors among `descs` plain."""
    own = lowering(pd, images)
    vectors = {name: MemoryDesc(descs[name].dims, "f32") for name in VECTORS if name in descs}
    return Lowering(pd, lambda candidate: {**own.resolve(candidate), **vectors})


def training(problem: str, op: str) -> tuple[Primitive, Primitive]:
    """Return the rules of a normalization in training and of its gradients.

    The hint of the gradients, the forward descriptor, has src in the same format.
    """

    def created(
        attrs: Any, descs: Natives, images: Natives, attr: NativeAttr, prop: str, hint: PrimitiveDesc | None = None
    ) -> PrimitiveDesc:
        mean = native(MemoryDesc(descs["src"].dims[:-1], "f32"))  # of layer normalization: a number for each row
        return create(problem, attrs, images, attr, hint, prop=prop, mean=mean, flags=affine_flags(op, descs))

    def forward(attrs: Any, descs: Natives, attr: NativeAttr) -> Lowering:
        images = {name: descs[name] for name in ("src", "dst")}
        return with_vectors(created(attrs, descs, images, attr, "forward_training"), images, descs)

    def backward(attrs: Any, descs: Natives, attr: NativeAttr) -> Lowering:
        hint = created(attrs, descs, dict.fromkeys(("src", "dst"), descs["src"]), attr, "forward_training")
        images = {name: descs[name] for name in ("src", "diff_src", "diff_dst")}
        prop = "backward" if "scale" in descs else "backward_data"
        return with_vectors(created(attrs, descs, images, attr, prop, hint), images, descs)

    return forward, backward
