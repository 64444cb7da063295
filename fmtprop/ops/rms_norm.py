"""RMS normalization, in inference: a row divided by the root of the mean of its squares.

oneDNN has it from 3.7 on, as a flag of layer normalization. Here a kernel of this project runs it, or PyTorch. Models
write it out; :mod:`fmtprop.passes.rewrites.recognise_rms_norm` finds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from fmtprop.errors import ShapeError
from fmtprop.ir import Attrs, Bytes, Call, Category, Cost, Onnx, OpDef, Operand, Reads, Sample, Value, Writing
from fmtprop.ir.facets import Absorbs, ByPyTorch, Numbers
from fmtprop.ir.tensors import torch_dtype
from fmtprop.ir.types import TensorType
from fmtprop.ops.arguments import computable
from fmtprop.ops.norm_vectors import SCALE, widened

# ---------------------------------------------------------------- attributes


@dataclass(frozen=True)
class RmsNorm(Attrs):
    """Attributes of RMS normalization over the last axis.

    ``torch.nn.functional.rms_norm``; ONNX, "RMSNormalization".
    """

    epsilon: float = 1e-6


# ---------------------------------------------------------------- meaning


def infer(attrs: RmsNorm, types: Mapping[str, TensorType]) -> tuple[TensorType, ...]:
    """Return the type of src, [..., C]."""
    src, scale = types["src"], types.get("scale")
    if src.ndim < 1:
        raise ShapeError("src is a single number, but RMS normalization takes rows: [..., C]")
    if scale is not None and scale.dims != src.dims[-1:]:
        raise ShapeError(f"scale has dims {scale.dims} but rows of {src.dims[-1]} elements need ({src.dims[-1]},)")
    return (src,)


def reference(attrs: RmsNorm, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Evaluate in plain PyTorch, in the data type of src; bf16 and f16 are normalized in f32."""
    wide, vectors = widened(tensors)
    dst = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + attrs.epsilon)
    return ((dst * vectors["scale"] if vectors else dst).to(tensors["src"].dtype),)


# ---------------------------------------------------------------- importer


def _rms_norm(call: Call) -> Value | None:
    src, scale, dims = call["input"], call["weight"], call["normalized_shape"]
    if len(dims) != 1 or not computable(call, src, scale):
        return None
    epsilon = call["eps"]
    if epsilon is None:
        epsilon = torch.finfo(torch_dtype(call.type(src).dtype)).eps
    return call.emit("rms_normalization", {"src": src, "scale": scale}, RmsNorm(epsilon))


# ---------------------------------------------------------------- ONNX


def _write(attrs: RmsNorm, w: Writing, operands: Mapping[str, str]) -> str:
    src = operands["src"]
    mean = w("ReduceMean", w("Mul", src, src), w.constant([-1], "s64"), keepdims=1)
    normal = w("Div", src, w("Sqrt", w("Add", mean, w.constant(attrs.epsilon))))
    return w("Mul", normal, operands["scale"]) if "scale" in operands else normal


# ---------------------------------------------------------------- samples and declaration


def samples() -> Iterable[Sample]:
    """Yield rows of several lengths, with and without scale."""
    for name, dims, scaled in (
        ("tokens", (2, 9, 48), True),
        ("one_token", (1, 1, 768), True),
        ("no_scale", (4, 64), False),
        ("odd", (2, 3, 17), True),
        ("heads", (1, 5, 6, 7, 32), True),
    ):
        types = {"src": TensorType(dims), **({"scale": TensorType(dims[-1:])} if scaled else {})}
        yield Sample(name, RmsNorm(), types)


RMS_NORMALIZATION = OpDef(
    name="rms_normalization",
    attrs=RmsNorm,
    operands=(Operand("src", "SRC"), SCALE),
    category=Category.BANDWIDTH,
    infer=infer,
    reference=reference,
    numbers=Numbers(spreads=True, bytes=lambda attrs: Bytes.NORMALIZED),
    absorbs=Absorbs(
        # a rounding, by a kernel of our own alone
        kinds=frozenset({"eltwise"}),
        wanted=False,
    ),
    cost=Cost(lambda attrs, gathered: 4.0, pytorch=0.15),
    pytorch=ByPyTorch(reads=Reads.ROWS),
    inplace=frozenset({"src"}),
    short="rms",
    samples=samples,
    onnx=Onnx(_write),
    torch={"aten.rms_norm.default": _rms_norm},
)
