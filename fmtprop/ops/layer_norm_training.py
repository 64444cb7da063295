"""Layer normalization in training: each row's statistics are results too, and its gradients read them.

PyTorch's call gives the inverse deviation instead of the variance: that is a node of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from fmtprop.errors import ShapeError
from fmtprop.ir import Call, Category, OpDef, Operand, Reads, Sample, TensorType, Value
from fmtprop.ir.facets import ByPyTorch, Numbers
from fmtprop.layout import DataType
from fmtprop.ops.arguments import computable
from fmtprop.ops.eltwise import Eltwise
from fmtprop.ops.norm_vectors import DIFF_VECTORS, MEAN, SCALE, SHIFT, VARIANCE, training, widened
from fmtprop.ops.normalization import (
    LAYER_NORMALIZATION,
    LayerNorm,
    import_layer,
    infer_layer,
    layer_inputs,
    samples_layer,
)
from fmtprop.ops.view_attrs import reshaped

# ---------------------------------------------------------------- meaning


def infer(attrs: LayerNorm, types: Mapping[str, TensorType]) -> tuple[TensorType, ...]:
    """Return the types of dst, and of mean and variance: [...], a number for each row."""
    (dst,) = infer_layer(attrs, types)
    statistics = TensorType(dst.dims[:-1])
    return dst, statistics, statistics


def infer_backward(attrs: LayerNorm, types: Mapping[str, TensorType]) -> tuple[TensorType, ...]:
    """Return the types of diff_src and, where these are operands, of the gradients of scale and shift."""
    affine = {name: types[name] for name in ("scale", "shift") if name in types}
    (src,) = infer_layer(attrs, {"src": types["src"], **affine})
    if "shift" in affine and "scale" not in affine:
        raise ShapeError("there is a shift but no scale: give a scale of ones")
    expected = {"diff_dst": src.dims, "mean": src.dims[:-1], "variance": src.dims[:-1]}
    for name, dims in expected.items():
        if types[name].dims != dims:
            raise ShapeError(f"{name} has dims {types[name].dims} but src with dims {src.dims} needs {dims}")
    return (src, *affine.values())


def reference(attrs: LayerNorm, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Evaluate in plain PyTorch; bf16 and f16 are normalized in f32."""
    src, vectors = widened(tensors)
    src = src.contiguous()
    dst, _, inverse = torch.native_layer_norm(
        src, src.shape[-1:], vectors.get("scale"), vectors.get("shift"), attrs.epsilon
    )
    variance = (inverse.double().pow(-2) - attrs.epsilon).clamp_min(0).to(src.dtype)
    # of infinities, PyTorch's operator says that the mean is NaN
    return dst.to(tensors["src"].dtype), src.mean(-1), variance.squeeze(-1)


def reference_backward(attrs: LayerNorm, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Evaluate in plain PyTorch; bf16 and f16 are computed with in f32."""
    src, vectors = widened(tensors)
    src = src.contiguous()
    inverse = (vectors["variance"] + attrs.epsilon).rsqrt()
    scale, shift = vectors.get("scale"), vectors.get("shift")
    diff_src, *others = torch.ops.aten.native_layer_norm_backward(
        tensors["diff_dst"].to(src.dtype).contiguous(), src, src.shape[-1:], vectors["mean"].unsqueeze(-1),
        inverse.unsqueeze(-1), scale, shift, [True, scale is not None, shift is not None],
    )  # fmt: skip
    affine = (scale, shift)
    found = [diff for diff, vector in zip(others, affine, strict=True) if vector is not None]
    return (diff_src.to(tensors["src"].dtype), *found)


# ---------------------------------------------------------------- importers


def _native(call: Call) -> tuple[Value | None, ...] | None:
    if not call.used & {1, 2}:
        dst = import_layer(call)
        return None if dst is None else (dst, None, None)
    inputs = layer_inputs(call)
    if inputs is None or (call["weight"] is None and call["bias"] is not None):
        return None
    rows, affine = inputs
    epsilon, statistics = float(call["eps"]), call.results[1].dims
    dst = call.emit("layer_normalization_training", {"src": rows, **affine}, LayerNorm(epsilon))
    above = call.emit("eltwise", {"src": Value(dst.node, 2)}, Eltwise("linear", 1.0, epsilon))
    inverse = call.emit("eltwise", {"src": above}, Eltwise("pow", 1.0, -0.5))
    mean = reshaped(call, Value(dst.node, 1), statistics)
    return reshaped(call, dst, call.results[0].dims), mean, reshaped(call, inverse, statistics)


def _backward(call: Call) -> tuple[Value | None, ...] | None:
    src, diff_dst, mean, inverse = call["input"], call["grad_out"], call["mean"], call["rstd"]
    wants = call["output_mask"]
    inputs = layer_inputs(call)
    if inputs is None or (call["weight"] is None and call["bias"] is not None):
        return None
    rows, affine = inputs
    mean, inverse = call.unrounded(mean), call.unrounded(inverse)
    plain = all(call.type(value).dtype is DataType.F32 for value in (mean, inverse))
    if not plain or not computable(call, diff_dst) or call.type(diff_dst) != call.type(src):
        return None
    work = call.type(rows).dims
    # gradients depend on the sum of variance and epsilon, and PyTorch's call does not say which part is which
    both = call.emit("eltwise", {"src": reshaped(call, inverse, work[:-1])}, Eltwise("pow", 1.0, -2.0))
    operands = {
        "src": rows,
        **affine,
        "mean": reshaped(call, mean, work[:-1]),
        "variance": both,
        "diff_dst": reshaped(call, diff_dst, work),
    }
    diff_src = call.emit("layer_normalization_backward", operands, LayerNorm(0.0))
    found: list[Value | None] = [reshaped(call, diff_src, call.type(src).dims) if wants[0] else None]
    for index, name in ((1, "weight"), (2, "bias")):
        wanted = wants[index] and call[name] is not None
        gradient = Value(diff_src.node, index)
        found.append(reshaped(call, gradient, call.type(call[name]).dims) if wanted else None)
    return tuple(found)


# ---------------------------------------------------------------- samples and declarations

#: rounded to bf16 before each layer, the tokens of an encoder would lose more digits than by its products
_SRC = Operand("src", "SRC", wide=True)


def samples_backward() -> Iterable[Sample]:
    """Yield the same rows with a gradient; any statistics will do."""
    for sample in samples_layer():
        src = sample.types["src"]
        statistics = TensorType(src.dims[:-1])
        types = {**sample.types, "mean": statistics, "variance": statistics, "diff_dst": src}
        yield Sample(sample.name, sample.attrs, types, 0.1, 2.0)


_FORWARD, _BACKWARD = training("LayerNormalization", "layer_normalization")

LAYER_NORMALIZATION_TRAINING = OpDef(
    name="layer_normalization_training",
    attrs=LayerNorm,
    operands=(_SRC, SCALE, SHIFT),
    results=(Operand("dst", "DST"), MEAN, VARIANCE),
    category=Category.BANDWIDTH,
    infer=infer,
    reference=reference,
    primitive=_FORWARD,
    numbers=Numbers(spreads=True),
    cost=LAYER_NORMALIZATION.cost,
    pytorch=ByPyTorch(reads=Reads.ROWS),
    short="ln",
    samples=samples_layer,
    torch={"aten.native_layer_norm.default": _native},
)

LAYER_NORMALIZATION_BACKWARD = OpDef(
    name="layer_normalization_backward",
    attrs=LayerNorm,
    operands=(_SRC, MEAN, VARIANCE, SCALE, SHIFT, Operand("diff_dst", "DIFF_DST", wide=True)),
    results=(Operand("diff_src", "DIFF_SRC"), *DIFF_VECTORS),
    category=Category.BANDWIDTH,
    infer=infer_backward,
    reference=reference_backward,
    primitive=_BACKWARD,
    numbers=Numbers(spreads=True, positive=lambda attrs: frozenset({"variance"})),
    cost=LAYER_NORMALIZATION.cost,
    pytorch=ByPyTorch(reads=Reads.ROWS),
    short="ln_back",
    samples=samples_backward,
    torch={"aten.native_layer_norm_backward.default": _backward},
)
