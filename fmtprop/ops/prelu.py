"""Rectifier with a learned slope, and its gradients: oneDNN's prelu primitive."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from fmtprop.errors import ShapeError
from fmtprop.ir import Attrs, Call, Cost, Onnx, TensorType, Value
from fmtprop.ir.facets import ByPyTorch, Numbers
from fmtprop.ir.op import Category, Lowering, NativeAttr, Natives, OpDef, Operand, PostOpForm, Sample
from fmtprop.layout import DataType
from fmtprop.ops.arguments import computable
from fmtprop.ops.building import Copying, Ready, Tensors, check_alike, create, is_native, lowering, only, primitive_of
from fmtprop.ops.eltwise import Eltwise
from fmtprop.ops.pytorch import prelu_kernel, prelu_kernel_backward, prelu_overload
from fmtprop.ops.view_attrs import reshaped

if TYPE_CHECKING:
    from fmtprop.dnnl import NativeDesc, PostOps

# ---------------------------------------------------------------- attributes


@dataclass(frozen=True)
class Prelu(Attrs):
    """Attributes of prelu: none, as the slopes are an operand.

    oneDNN developer guide, "PReLU".
    """


# ---------------------------------------------------------------- meaning


def infer(attrs: Prelu, types: Mapping[str, TensorType]) -> tuple[TensorType, ...]:
    """Return the type of src, to which the weights broadcast."""
    src, weights = types["src"], types["weights"]
    if src.ndim != weights.ndim:
        raise ShapeError(f"src has {src.ndim} dimensions but weights {weights.ndim}; give weights dimensions of size 1")
    for axis, (size, slopes) in enumerate(zip(src.dims, weights.dims, strict=True)):
        if slopes not in (1, size):
            raise ShapeError(
                f"src axis {axis} has size {size} but weights axis {axis} has {slopes}; it must be that or 1"
            )
    return (src,)


def reference(attrs: Prelu, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Evaluate in plain PyTorch."""
    src, weights = tensors["src"], tensors["weights"]
    return (torch.where(src > 0, src, src * weights.to(src.dtype)),)


def operator(attrs: Prelu, tensors: Tensors, results: Sequence[torch.Tensor]) -> Ready:
    """Return PyTorch's operator for it, and a copy of its result."""
    src, weights = tensors["src"], tensors["weights"]
    return Copying(partial(prelu_kernel, src, weights), results, overload=prelu_overload)


def infer_backward(attrs: Prelu, types: Mapping[str, TensorType]) -> tuple[TensorType, ...]:
    """Return the types of diff_src and diff_weights: those of src and weights."""
    infer(attrs, types)
    check_alike(types, "diff_dst", "src")
    return only(types, "src", "weights")


def reference_backward(attrs: Prelu, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Evaluate in plain PyTorch."""
    src, weights, diff_dst = (tensors[name] for name in ("src", "weights", "diff_dst"))
    diff_src, slopes = prelu_kernel_backward(diff_dst, src, weights.to(src.dtype))
    return diff_src, slopes.to(weights.dtype).sum_to_size(weights.shape)


def primitive_backward(attrs: Prelu, descs: Natives, attr: NativeAttr) -> Lowering:
    """Create the descriptor of the gradients; its hint, the forward descriptor, has src in the same format."""
    operands = {"src": descs["src"], "weights": descs["weights"], "dst": descs["src"]}
    hint = create("Prelu", attrs, operands, attr, prop="forward_training")
    return lowering(create("Prelu", attrs, descs, attr, hint, prop="backward"), descs)


def summands(dims: Mapping[str, tuple[int, ...]]) -> int:
    """Return the elements that share a slope."""
    return math.prod(dims["src"]) // math.prod(dims["weights"])


def _append(attrs: Prelu, tail: PostOps, operands: Sequence[NativeDesc], dtype: DataType) -> None:
    tail.append_prelu(sum(1 << axis for axis, size in enumerate(operands[0].dims) if size > 1))


# ---------------------------------------------------------------- importers


def _prelu(call: Call) -> Value | None:
    src, weights = call["self"], call["weight"]
    type_ = call.type(src)
    if not is_native(type_) or not is_native(call.type(weights).with_dims(type_.dims)):
        return None
    slope = call.scalar(weights)
    if slope is not None and math.isfinite(slope):
        # oneDNN has only its slow reference for a single slope
        return call.emit("eltwise", {"src": src}, Eltwise("relu", slope))
    dims = call.type(weights).dims
    if len(dims) < 2 <= type_.ndim:
        # One slope per channel, axis 1 for any rank.
        dims = (1, *dims, *(1,) * (type_.ndim - len(dims) - 1))
    dims = (1,) * (type_.ndim - len(dims)) + dims
    return call.emit("prelu", {"src": src, "weights": reshaped(call, weights, dims)}, Prelu())


def _backward(call: Call) -> tuple[Value | None, ...] | None:
    src, weights, diff_dst = call["src"], call["weights"], call["diff_dst"]
    if not computable(call, src, weights, diff_dst) or call.type(diff_dst) != call.type(src):
        return None
    diff_src = call.emit("prelu_backward", {"src": src, "weights": weights, "diff_dst": diff_dst}, Prelu())
    return diff_src, Value(diff_src.node, 1)


# ---------------------------------------------------------------- samples and declarations


def samples() -> Iterable[Sample]:
    """Yield one slope for all, one per channel and one per element."""
    for name, weights in (("shared", (1, 1, 1, 1)), ("channel", (1, 17, 1, 1)), ("element", (2, 17, 5, 7))):
        yield Sample(name, Prelu(), {"src": TensorType((2, 17, 5, 7)), "weights": TensorType(weights)})
    yield Sample("rows", Prelu(), {"src": TensorType((3, 40)), "weights": TensorType((1, 40))})
    yield Sample("volume", Prelu(), {"src": TensorType((1, 8, 3, 4, 5)), "weights": TensorType((1, 8, 1, 1, 1))})


def samples_backward() -> Iterable[Sample]:
    """Yield the same with a gradient."""
    for sample in samples():
        yield Sample(sample.name, sample.attrs, {**sample.types, "diff_dst": sample.types["src"]})


_WEIGHTS = Operand("weights", "WEIGHTS", parameter=True)

PRELU = OpDef(
    name="prelu",
    attrs=Prelu,
    operands=(Operand("src", "SRC"), _WEIGHTS),
    category=Category.BANDWIDTH,
    infer=infer,
    reference=reference,
    pytorch=ByPyTorch(operator),
    primitive=primitive_of("Prelu"),
    cost=Cost(pytorch=0.35),
    as_post_op=PostOpForm("prelu", _append),
    samples=samples,
    torch={"aten.prelu.default": _prelu, "aten._prelu_kernel.default": _prelu},
    onnx=Onnx(lambda attrs, w, operands: w("PRelu", operands["src"], operands["weights"])),
)

PRELU_BACKWARD = OpDef(
    name="prelu_backward",
    attrs=Prelu,
    operands=(Operand("src", "SRC"), _WEIGHTS, Operand("diff_dst", "DIFF_DST")),
    results=(Operand("diff_src", "DIFF_SRC"), Operand("diff_weights", "DIFF_WEIGHTS", parameter=True)),
    category=Category.BANDWIDTH,
    infer=infer_backward,
    reference=reference_backward,
    primitive=primitive_backward,
    numbers=Numbers(
        summands=summands,
        # of a NaN in src, the gradient of its slope is a number; with AVX2, of an infinity it may be NaN
        loses=lambda attrs: frozenset({"nan", "inf"}),
    ),
    # PyTorch writes a gradient of the slopes for each element, and sums these afterwards
    cost=Cost(pytorch=0.05),
    short="prelu_back",
    samples=samples_backward,
    torch={"fmtprop.prelu_backward.default": _backward},
)
