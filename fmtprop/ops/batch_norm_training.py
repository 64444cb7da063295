"""Batch normalization in training, which also returns the statistics of the batch, and its gradients.

A ReLU or a clip behind it may be a part of both (:mod:`fmtprop.passes.variants.norm_with_function`). The other results
of PyTorch's call, the running averages and the inverse deviation, are separate nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf, prod

import torch

from fmtprop.errors import ShapeError, UnsupportedOpError
from fmtprop.ir import Attrs, Call, Cost, TensorType, Value
from fmtprop.ir.facets import Numbers
from fmtprop.ir.op import Category, Lowering, NativeAttr, Natives, OpDef, Operand, Primitive, Sample
from fmtprop.layout import DataType
from fmtprop.ops.arguments import computable
from fmtprop.ops.building import check_alike
from fmtprop.ops.eltwise import Eltwise
from fmtprop.ops.norm_vectors import GRADIENTS, MEAN, SCALE, SHIFT, VARIANCE, training, widened
from fmtprop.ops.normalization import BATCH_NORMALIZATION, BatchNorm, infer_batch
from fmtprop.ops.sum import Sum

# ---------------------------------------------------------------- attributes


@dataclass(frozen=True)
class BatchStatistics(Attrs):
    """Attributes of batch normalization by the batch's own statistics, and of its gradients.

    oneDNN developer guide, "Batch Normalization", forward training and backward propagation.
    """

    epsilon: float = 1e-5
    #: the function of the normalized numbers. It gives the result; the gradient is by the normalized numbers.
    function: str = ""
    alpha: float = 0.0
    beta: float = 0.0

    def __post_init__(self) -> None:
        if self.function not in ("", "relu", "clip") or (self.function == "relu" and self.alpha):
            raise ShapeError(f"batch normalization has no function {self.function!r}: relu with slope 0, and clip")

    @property
    def limits(self) -> tuple[float, float] | None:
        """The least and the largest result; None without a function."""
        return {"": None, "relu": (0.0, inf), "clip": (self.alpha, self.beta)}[self.function]


# ---------------------------------------------------------------- meaning


def infer(attrs: BatchStatistics, types: Mapping[str, TensorType]) -> tuple[TensorType, ...]:
    """Return the types of dst, mean and variance."""
    (dst,) = infer_batch(BatchNorm(attrs.epsilon), types)
    vector = TensorType((dst.dims[1],))
    return dst, vector, vector


def infer_backward(attrs: BatchStatistics, types: Mapping[str, TensorType]) -> tuple[TensorType, ...]:
    """Return the types of diff_src and, with a scale, of diff_scale and diff_shift."""
    (src,) = infer_batch(BatchNorm(attrs.epsilon), types)
    check_alike(types, "diff_dst", "src")
    if (attrs.limits is not None and "scale" in types) != ("shift" in types):
        raise ShapeError("the gradient reads a shift where there are a scale and a function, and only there")
    vectors = (types["scale"],) * 2 if "scale" in types else ()
    return (src, *vectors)


def reference(attrs: BatchStatistics, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Evaluate in plain PyTorch; bf16 and f16 are normalized in f32."""
    src, vectors = widened(tensors)
    # row-major: PyTorch's code for channels-last loses digits if a mean is large relative to the deviation
    dst, mean, inverse = torch.native_batch_norm(
        src.contiguous(), vectors.get("scale"), vectors.get("shift"), None, None, True, 0.0, attrs.epsilon
    )
    # PyTorch's operator for the variance takes twice as long as all this
    variance = (inverse.double().pow(-2) - attrs.epsilon).clamp_min(0).to(src.dtype)
    if attrs.limits is not None:
        dst = dst.clamp(*attrs.limits)
    return dst.to(tensors["src"].dtype), mean, variance


def reference_backward(attrs: BatchStatistics, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Evaluate in plain PyTorch; bf16 and f16 are computed in f32."""
    src, vectors = widened(tensors)
    scale, inverse = vectors.get("scale"), (vectors["variance"] + attrs.epsilon).rsqrt()
    affine, diff_dst = scale is not None, tensors["diff_dst"].to(src.dtype)
    if attrs.limits is not None:
        # rounded like the kernels, which have the same numbers at a limit
        shape = (1, -1, *(1,) * (src.ndim - 2))
        dst = src - vectors["mean"].reshape(shape)
        factor = (vectors["variance"] + attrs.epsilon).sqrt().reciprocal()
        dst = dst * (factor if scale is None else factor * scale).reshape(shape)
        dst = dst if scale is None else dst + vectors["shift"].reshape(shape)
        low, high = attrs.limits
        # NaN passes, and an infinite result is not limited
        diff_dst = diff_dst.masked_fill((dst <= low) | ((dst >= high) & (high < inf)), 0.0)
    diff_src, *others = torch.ops.aten.native_batch_norm_backward(
        diff_dst.contiguous(), src.contiguous(), scale, None, None, vectors["mean"], inverse,
        True, attrs.epsilon, [True, affine, affine],
    )  # fmt: skip
    return (diff_src.to(tensors["src"].dtype), *(others if affine else ()))


# ---------------------------------------------------------------- primitives


def _bare(lower: Primitive) -> Primitive:
    """Return a rule for normalizations without a function, for which oneDNN needs a workspace: kernels do these."""

    def primitive(attrs: BatchStatistics, descs: Natives, attr: NativeAttr) -> Lowering:
        if attrs.function:
            raise UnsupportedOpError(f"oneDNN has no batch normalization with {attrs.function} without a workspace")
        return lower(attrs, descs, attr)

    return primitive


_FORWARD, _BACKWARD = map(_bare, training("BatchNormalization", "batch_normalization"))


# ---------------------------------------------------------------- importers


def _fits(call: Call, src: Value, *vectors: Value | None) -> bool:
    """Return whether oneDNN takes these operands: with both a scale and a shift, or neither."""
    scale, shift = vectors[:2]
    types = [call.type(value) for value in vectors if value is not None]
    small = all(type_.dtype is DataType.F32 for type_ in types)
    return computable(call, src) and small and (scale is None) == (shift is None) and 2 <= call.type(src).ndim <= 5


def _functional(call: Call) -> tuple[Value | None, ...] | None:
    src, scale, shift = call["input"], call["weight"], call["bias"]
    running_mean, running_variance = call["running_mean"], call["running_var"]
    if not call["training"] or not _fits(call, src, scale, shift, running_mean, running_variance):
        return None
    epsilon, momentum, type_ = float(call["eps"]), float(call["momentum"]), call.type(src)
    count = type_.size // type_.dims[1]
    if count < 2:
        return None  # PyTorch has the error message
    dst = call.emit(
        "batch_normalization_training", {"src": src, "scale": scale, "shift": shift}, BatchStatistics(epsilon)
    )
    mean, variance = Value(dst.node, 1), Value(dst.node, 2)
    averages = []
    for running, now, factor in ((running_mean, mean, 1.0), (running_variance, variance, count / (count - 1))):
        scales = Sum((1.0 - momentum, momentum * factor))
        averages.append(call.emit("sum", {"src_0": running, "src_1": now}, scales))
    above = call.emit("eltwise", {"src": variance}, Eltwise("linear", 1.0, epsilon))
    return dst, mean, call.emit("eltwise", {"src": above}, Eltwise("pow", 1.0, -0.5)), *averages


def _backward(call: Call) -> tuple[Value | None, ...] | None:
    src, diff_dst, scale = call["input"], call["grad_out"], call["weight"]
    mean, inverse = call["save_mean"], call["save_invstd"]
    wants_src, *wanted = call["output_mask"]
    affine = [scale, scale] if scale is not None else [None, None]
    if not call["train"] or mean is None or inverse is None or not _fits(call, src, *affine, mean, inverse):
        return None
    if (any(wanted) and scale is None) or call.type(diff_dst) != call.type(src):
        return None
    epsilon = float(call["eps"])
    above = call.emit("eltwise", {"src": inverse}, Eltwise("pow", 1.0, -2.0))
    variance = call.emit("eltwise", {"src": above}, Eltwise("linear", 1.0, -epsilon))
    inputs = {"src": src, "mean": mean, "variance": variance, "scale": scale, "diff_dst": diff_dst}
    diff_src = call.emit("batch_normalization_backward", inputs, BatchStatistics(epsilon))
    vectors = (Value(diff_src.node, index + 1) if wants else None for index, wants in enumerate(wanted))
    return diff_src if wants_src else None, *vectors


# ---------------------------------------------------------------- samples and declarations


def _problem(src: tuple[int, ...], *names: str) -> dict[str, TensorType]:
    return {name: TensorType(src) if name in ("src", "diff_dst") else TensorType((src[1],)) for name in names}


def samples() -> Iterable[Sample]:
    """Yield 1-D to 3-D images with and without scale and shift."""
    yield Sample("2d", BatchStatistics(), _problem((2, 16, 6, 7), "src", "scale", "shift"), 0.1, 2.0)
    yield Sample("2d_odd", BatchStatistics(1e-3), _problem((2, 17, 6, 7), "src", "scale", "shift"), 0.1, 2.0)
    yield Sample("no_affine", BatchStatistics(), _problem((2, 32, 5, 5), "src"), 0.1, 2.0)
    yield Sample("rows", BatchStatistics(), _problem((4, 24), "src", "scale", "shift"), 0.1, 2.0)
    yield Sample("1d", BatchStatistics(), _problem((2, 16, 9), "src", "scale", "shift"), 0.1, 2.0)
    yield Sample("3d", BatchStatistics(), _problem((1, 16, 3, 4, 5), "src", "scale", "shift"), 0.1, 2.0)


def samples_backward() -> Iterable[Sample]:
    """Yield the same images with a gradient; any statistics will do."""
    for sample in samples():
        affine = ("scale",) if "scale" in sample.types else ()
        names = ("src", "mean", "variance", *affine, "diff_dst")
        yield Sample(sample.name, sample.attrs, _problem(sample.types["src"].dims, *names), 0.1, 2.0)


def summands(dims: Mapping[str, tuple[int, ...]]) -> int:
    """Return the elements of a channel."""
    src = dims["src"]
    return prod(src) // src[1]


BATCH_NORMALIZATION_TRAINING = OpDef(
    name="batch_normalization_training",
    attrs=BatchStatistics,
    operands=(Operand("src", "SRC"), SCALE, SHIFT),
    results=(Operand("dst", "DST"), MEAN, VARIANCE),
    category=Category.BANDWIDTH,
    infer=infer,
    reference=reference,
    primitive=_FORWARD,
    numbers=Numbers(spreads=True, summands=summands),
    cost=Cost(pace=0.5, pytorch=0.05),
    short="bn",
    samples=samples,
    torch={"aten._native_batch_norm_legit_functional.default": _functional},
)

BATCH_NORMALIZATION_BACKWARD = OpDef(
    name="batch_normalization_backward",
    attrs=BatchStatistics,
    operands=(Operand("src", "SRC"), MEAN, VARIANCE, SCALE, SHIFT, Operand("diff_dst", "DIFF_DST")),
    results=GRADIENTS,
    category=Category.BANDWIDTH,
    infer=infer_backward,
    reference=reference_backward,
    primitive=_BACKWARD,
    numbers=Numbers(spreads=True, positive=BATCH_NORMALIZATION.numbers.positive, summands=summands),
    cost=Cost(pace=0.5, pytorch=0.1),
    short="bn_back",
    samples=samples_backward,
    torch={"aten.native_batch_norm_backward.default": _backward},
)
