"""Maximum pooling in training, and its gradient: oneDNN's workspace says where each maximum was.

No importer: PyTorch's calls pass indices, which a graph may read. :mod:`fmtprop.passes.pair_max_poolings` finds those
that only the gradient reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch

from fmtprop.errors import ShapeError
from fmtprop.ir.op import Category, Lowering, NativeAttr, Natives, OpDef, Operand, Sample
from fmtprop.ir.types import TensorType
from fmtprop.layout import MemoryDesc
from fmtprop.ops import pooling
from fmtprop.ops.building import by_autograd, create, native
from fmtprop.ops.pooling import POOLING, Pooling
from fmtprop.ops.workspace import WORKSPACE, WORKSPACE_TYPE, lowering_with_workspace

if TYPE_CHECKING:
    from fmtprop.dnnl import NativeDesc

# ---------------------------------------------------------------- meaning


def infer(attrs: Pooling, types: Mapping[str, TensorType]) -> tuple[TensorType, ...]:
    """Return the types of dst and the workspace."""
    if attrs.alg != "max":
        raise ShapeError(f"{attrs.alg} has no workspace: its gradient is pooling_backward")
    return (*pooling.infer(attrs, types), WORKSPACE_TYPE)


def infer_backward(attrs: Pooling, types: Mapping[str, TensorType]) -> tuple[TensorType, ...]:
    """Return the type of diff_src, that of src."""
    dst, _ = infer(attrs, types)
    if types["diff_dst"].dims != dst.dims:
        raise ShapeError(f"diff_dst has dims {types['diff_dst'].dims} but this pooling's result has {dst.dims}")
    return (types["src"],)


def reference(attrs: Pooling, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Evaluate in plain PyTorch, which needs no workspace."""
    return (*pooling.reference(attrs, tensors), torch.zeros(1, dtype=torch.uint8))


def reference_backward(attrs: Pooling, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Evaluate by PyTorch's autograd: the first maximum of a window gets the gradient."""

    def forward(src: torch.Tensor) -> torch.Tensor:
        windows = pooling.windows(attrs, src, -torch.inf).flatten(-len(attrs.kernel))
        return windows.gather(-1, windows.detach().argmax(-1, keepdim=True)).squeeze(-1)

    return by_autograd(forward, tensors["src"], tensors["diff_dst"])


# ---------------------------------------------------------------- primitives


def primitive(attrs: Pooling, descs: Natives, attr: NativeAttr) -> Lowering:
    """Create the descriptor of the forward pass; without a gradient of oneDNN's, PyTorch runs both."""
    pd = create("Pooling", attrs, descs, attr, prop="forward_training")
    create("Pooling", attrs, {f"diff_{name}": _any(descs[name]) for name in ("src", "dst")}, attr, pd, prop=_BACKWARD)
    return lowering_with_workspace(pd, descs, pd, is_writer=True)


def primitive_backward(attrs: Pooling, descs: Natives, attr: NativeAttr) -> Lowering:
    """Create the descriptor of the gradient; its hint is the forward one, and gradients keep its formats."""
    images = {"src": descs["src"], "dst": _any(descs["diff_dst"])}
    hint = create("Pooling", attrs, images, attr, prop="forward_training")
    gradients = {name: descs[name] for name in ("diff_src", "diff_dst")}
    own = lowering_with_workspace(create("Pooling", attrs, gradients, attr, hint, prop=_BACKWARD), gradients, hint)
    src = descs["src"].desc
    return Lowering(own.pd, lambda candidate: {"src": src, **own.resolve(candidate)})


def _any(desc: NativeDesc) -> NativeDesc:
    return native(MemoryDesc.any(desc.dims, desc.data_type))


_BACKWARD = "backward_data"


# ---------------------------------------------------------------- samples and declarations


def samples() -> Iterable[Sample]:
    """Yield the pooling's own samples that are maxima."""
    return (sample for sample in pooling.samples() if sample.attrs.alg == "max")  # type: ignore[attr-defined]


def samples_backward() -> Iterable[Sample]:
    """Yield the same with a workspace and a gradient."""
    for sample in samples():
        dst, workspace = infer(sample.attrs, sample.types)  # type: ignore[arg-type]
        yield Sample(sample.name, sample.attrs, {**sample.types, WORKSPACE.name: workspace, "diff_dst": dst})


MAX_POOLING_TRAINING = OpDef(
    name="pooling_training",
    attrs=Pooling,
    operands=(Operand("src", "SRC"),),
    results=(Operand("dst", "DST"), WORKSPACE),
    category=Category.BANDWIDTH,
    infer=infer,
    reference=reference,
    primitive=primitive,
    cost=POOLING.cost,
    loses=POOLING.loses,
    short="pool",
    samples=samples,
)

MAX_POOLING_BACKWARD = OpDef(
    name="pooling_max_backward",
    attrs=Pooling,
    # oneDNN's primitive does not read src
    operands=(Operand("src", ""), WORKSPACE, Operand("diff_dst", "DIFF_DST")),
    results=(Operand("diff_src", "DIFF_SRC"),),
    category=Category.BANDWIDTH,
    infer=infer_backward,
    reference=reference_backward,
    primitive=primitive_backward,
    checkable=lambda attrs: False,
    cost=POOLING.cost,
    short="pool_back",
    samples=samples_backward,
)
