"""Rectifier with a learned slope: oneDNN's prelu primitive."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fmtprop.errors import ShapeError
from fmtprop.ir.exporting import Onnx
from fmtprop.ir.facets import Cost
from fmtprop.ir.importing import Call
from fmtprop.ir.node import Attrs, Value
from fmtprop.ir.op import Category, OpDef, Operand, PostOpForm, Sample
from fmtprop.ir.types import TensorType
from fmtprop.layout import DataType
from fmtprop.ops.building import is_native, primitive_of
from fmtprop.ops.eltwise import Eltwise
from fmtprop.ops.view_attrs import reshaped

if TYPE_CHECKING:
    from fmtprop.dnnl import NativeDesc, PostOps

# ---------------------------------------------------------------- attributes


@dataclass(frozen=True)
class Prelu(Attrs):
    """Attributes of prelu: none, as the slopes are an operand.

    References
    ----------
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


def operator(
    attrs: Prelu, tensors: Mapping[str, torch.Tensor], results: Sequence[torch.Tensor]
) -> Callable[[], object] | None:
    """Return PyTorch's operator for it; its result is copied."""
    src, weights = tensors["src"], tensors["weights"]
    return lambda: results[0].copy_(torch._prelu_kernel(src, weights))


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
        # One slope per channel, axis 1 of whatever rank.
        dims = (1, *dims, *(1,) * (type_.ndim - len(dims) - 1))
    dims = (1,) * (type_.ndim - len(dims)) + dims
    return call.emit("prelu", {"src": src, "weights": reshaped(call, weights, dims)}, Prelu())


# ---------------------------------------------------------------- samples and declaration


def samples() -> Iterable[Sample]:
    """Yield one slope for all, one per channel and one per element."""
    for name, weights in (("shared", (1, 1, 1, 1)), ("channel", (1, 17, 1, 1)), ("element", (2, 17, 5, 7))):
        yield Sample(name, Prelu(), {"src": TensorType((2, 17, 5, 7)), "weights": TensorType(weights)})
    yield Sample("rows", Prelu(), {"src": TensorType((3, 40)), "weights": TensorType((1, 40))})
    yield Sample("volume", Prelu(), {"src": TensorType((1, 8, 3, 4, 5)), "weights": TensorType((1, 8, 1, 1, 1))})


PRELU = OpDef(
    name="prelu",
    attrs=Prelu,
    operands=(Operand("src", "SRC"), Operand("weights", "WEIGHTS", parameter=True)),
    category=Category.BANDWIDTH,
    infer=infer,
    reference=reference,
    operator=operator,
    primitive=primitive_of("Prelu"),
    cost=Cost(pytorch=0.35),
    as_post_op=PostOpForm("prelu", _append),
    samples=samples,
    torch={"aten.prelu.default": _prelu, "aten._prelu_kernel.default": _prelu},
    onnx=Onnx(lambda attrs, w, operands: w("PRelu", operands["src"], operands["weights"])),
)
