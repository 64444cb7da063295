"""Local response normalization in training, and its gradient, which reads the workspace of the forward pass.

Never on row-major images: oneDNN's kernels for these lose NaN, and those of the gradient are reference loops.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING

import torch

from fmtprop.errors import DnnlError, FormatError
from fmtprop.ir import Call, Category, Cost, Lowering, NativeAttr, Natives, OpDef, Operand, Sample, TensorType, Value
from fmtprop.ir.facets import Numbers
from fmtprop.layout import DataType, MemoryDesc
from fmtprop.ops import lrn
from fmtprop.ops.building import by_autograd, check_alike, create, native
from fmtprop.ops.lrn import Lrn
from fmtprop.ops.workspace import WORKSPACE, WORKSPACE_TYPE, lowering_with_workspace

if TYPE_CHECKING:
    from fmtprop.dnnl import NativeDesc

# ---------------------------------------------------------------- meaning


def infer(attrs: Lrn, types: Mapping[str, TensorType]) -> tuple[TensorType, ...]:
    """Return the types of dst and the workspace."""
    return (*lrn.infer(attrs, types), WORKSPACE_TYPE)


def infer_backward(attrs: Lrn, types: Mapping[str, TensorType]) -> tuple[TensorType, ...]:
    """Return the type of diff_src, that of src."""
    check_alike(types, "diff_dst", "src")
    return lrn.infer(attrs, types)


def reference(attrs: Lrn, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Evaluate in plain PyTorch, which needs no workspace."""
    return (*lrn.reference(attrs, tensors), torch.zeros(1, dtype=torch.uint8))


def reference_backward(attrs: Lrn, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Evaluate by PyTorch's autograd."""
    return by_autograd(lambda src: lrn.reference(attrs, {"src": src})[0], tensors["src"], tensors["diff_dst"])


# ---------------------------------------------------------------- primitives


def primitive(attrs: Lrn, descs: Natives, attr: NativeAttr) -> Lowering:
    """Create the descriptor of the forward pass."""
    images = {"src": _images(attrs, descs["src"]), "dst": descs["dst"]}
    pd = create("Lrn", attrs, images, attr, local_size=attrs.size, prop="forward_training")
    return lowering_with_workspace(pd, descs, pd, is_writer=True)


def primitive_backward(attrs: Lrn, descs: Natives, attr: NativeAttr) -> Lowering:
    """Create the descriptor of the gradient; its hint is the forward descriptor."""
    images = dict.fromkeys(("src", "dst"), _images(attrs, descs["src"]))
    hint = create("Lrn", attrs, images, attr, local_size=attrs.size, prop="forward_training")
    given = {name: descs[name] for name in ("src", "diff_src", "diff_dst")}
    pd = create("Lrn", attrs, given, attr, hint, local_size=attrs.size, prop="backward_data")
    return lowering_with_workspace(pd, descs, hint)


def _images(attrs: Lrn, src: NativeDesc) -> NativeDesc:
    if attrs.size == 1:
        raise FormatError("oneDNN 3.2.0 crashes while it compiles the gradient of a window of one channel (AVX-512)")
    if src.is_any or src.desc == MemoryDesc(src.dims, src.data_type):
        raise FormatError("row-major images lose NaN in oneDNN's local response normalization")
    return src


@cache
def is_compiled(attrs: Lrn, dims: tuple[int, ...]) -> bool:
    """Return whether oneDNN has kernels of both passes on f32 images of these dims, in some format."""
    for tag in ("acdb", "aBcd16b", "aBcd8b") if len(dims) == 4 and all(dims) else ():
        desc = native(MemoryDesc(dims, DataType.F32, tag=tag))
        try:
            found = [
                primitive(attrs, dict.fromkeys(("src", "dst"), desc), None),
                primitive_backward(attrs, dict.fromkeys(("src", "diff_src", "diff_dst"), desc), None),
            ]
            formats = [one.resolve(one.pd) for one in found]
        except (DnnlError, FormatError):
            continue
        if formats and not any(one.pd.is_reference for one in found):
            return True
    return False


# ---------------------------------------------------------------- importers


def _import(call: Call) -> tuple[Value | None, ...]:
    """Import `fmtprop::lrn`."""
    training = 1 in call.used
    dst = call.emit("lrn_training" if training else "lrn", {"src": call["src"]}, _attributes(call))
    return dst, Value(dst.node, 1) if training else None


def _import_backward(call: Call) -> Value:
    """Import `fmtprop::lrn_backward`."""
    given = {name: call[name] for name in ("src", WORKSPACE.name, "diff_dst")}
    return call.emit("lrn_backward", given, _attributes(call))


def _attributes(call: Call) -> Lrn:
    return Lrn(size=int(call["size"]), alpha=float(call["alpha"]), beta=float(call["beta"]), k=float(call["k"]))


# ---------------------------------------------------------------- samples and declarations


def samples_backward() -> Iterable[Sample]:
    """Yield the normalization's own samples with a workspace and a gradient."""
    for sample in lrn.samples():
        types = {**sample.types, WORKSPACE.name: WORKSPACE_TYPE, "diff_dst": sample.types["src"]}
        yield Sample(sample.name, sample.attrs, types)


_COST = Cost(lambda attrs, gathered: 40.0, pytorch=0.02)

LRN_TRAINING = OpDef(
    name="lrn_training",
    attrs=Lrn,
    operands=(Operand("src", "SRC"),),
    results=(Operand("dst", "DST"), WORKSPACE),
    category=Category.BANDWIDTH,
    infer=infer,
    reference=reference,
    primitive=primitive,
    numbers=Numbers(spreads=True),
    cost=_COST,
    short="lrn",
    samples=lrn.samples,
    torch={"fmtprop.lrn.default": _import},
)

LRN_BACKWARD = OpDef(
    name="lrn_backward",
    attrs=Lrn,
    operands=(Operand("src", "SRC"), WORKSPACE, Operand("diff_dst", "DIFF_DST")),
    results=(Operand("diff_src", "DIFF_SRC"),),
    category=Category.BANDWIDTH,
    infer=infer_backward,
    reference=reference_backward,
    primitive=primitive_backward,
    numbers=Numbers(spreads=True, checkable=lambda attrs: False),
    cost=_COST,
    short="lrn_back",
    samples=samples_backward,
    torch={"fmtprop.lrn_backward.default": _import_backward},
)
