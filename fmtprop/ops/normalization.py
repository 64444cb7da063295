"""Batch, layer and group normalization, in inference.

Owns two primitives and the importers of every ATen form, instance normalization included (it is group normalization
with one channel per group). A kernel of this project or PyTorch runs group normalization: oneDNN's primitive, of 3.3
and later, is slower in every format (docs/experiments.md). Training statistics are not computed here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from fmtprop.errors import ShapeError
from fmtprop.ir import Attrs, Bytes, Call, Cost, Onnx, Reads, TensorType, Value, Writing, each_image
from fmtprop.ir.facets import Absorbs, ByPyTorch, Numbers
from fmtprop.ir.op import Category, Lowering, NativeAttr, Natives, OpDef, Operand, Primitive, Sample
from fmtprop.layout import DataType
from fmtprop.ops.arguments import computable
from fmtprop.ops.building import primitive_of
from fmtprop.ops.norm_vectors import MEAN, SCALE, SHIFT, VARIANCE, VECTORS, affine_flags, widened, with_vectors
from fmtprop.ops.reorder import converted
from fmtprop.ops.view_attrs import reshaped

if TYPE_CHECKING:
    from fmtprop.dnnl import NormFlags

# ---------------------------------------------------------------- attributes


@dataclass(frozen=True)
class BatchNorm(Attrs):
    """Attributes of batch normalization with given statistics.

    oneDNN developer guide, "Batch Normalization".
    """

    epsilon: float = 1e-5


@dataclass(frozen=True)
class LayerNorm(Attrs):
    """Attributes of layer normalization over the last axis.

    oneDNN developer guide, "Layer Normalization".
    """

    epsilon: float = 1e-5


@dataclass(frozen=True)
class GroupNorm(Attrs):
    """Attributes of group normalization.

    oneDNN developer guide, "Group Normalization".
    """

    #: number of channel groups; divides the channels
    groups: int
    epsilon: float = 1e-5

    def __post_init__(self) -> None:
        if self.groups < 1:
            raise ShapeError(f"group_normalization groups is {self.groups}, but must be at least 1")


# ---------------------------------------------------------------- meaning


def _checked(kind: str, form: str, types: Mapping[str, TensorType], axis: int) -> tuple[TensorType, ...]:
    """Return the type of src, after a check of its rank, and of each vector's size: that of src along `axis`."""
    src = types["src"]
    if not 2 <= src.ndim <= 5:
        raise ShapeError(f"src has {src.ndim} axes but {kind} normalization takes 2 to 5: {form}")
    axis %= src.ndim
    size = src.dims[axis]
    for name in VECTORS:
        if name in types and types[name].dims != (size,):
            raise ShapeError(
                f"{name} has dims {types[name].dims} but src axis {axis} with {size} elements needs ({size},)"
            )
    return (src,)


def infer_batch(attrs: BatchNorm, types: Mapping[str, TensorType]) -> tuple[TensorType, ...]:
    """Return the type of src, [N, C, …]."""
    return _checked("batch", "[N, C, …]", types, 1)


def infer_layer(attrs: LayerNorm, types: Mapping[str, TensorType]) -> tuple[TensorType, ...]:
    """Return the type of src, [..., C]."""
    return _checked("layer", "[..., C]", types, -1)


def infer_group(attrs: GroupNorm, types: Mapping[str, TensorType]) -> tuple[TensorType, ...]:
    """Return the type of src, [N, C, …]."""
    (src,) = _checked("group", "[N, C, …]", types, 1)
    if src.dims[1] % attrs.groups:
        raise ShapeError(f"src axis 1 has {src.dims[1]} channels, which groups={attrs.groups} does not divide")
    return (src,)


def reference_batch(attrs: BatchNorm, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Evaluate in plain PyTorch, in the data type of src; bf16 and f16 are normalized in f32."""
    src = tensors["src"]
    wide, vectors = widened(tensors)
    mean, variance = vectors["mean"], vectors["variance"]
    dst = F.batch_norm(
        wide, mean, variance, vectors.get("scale"), vectors.get("shift"), training=False, eps=attrs.epsilon
    )
    return (dst.to(src.dtype),)


def reference_layer(attrs: LayerNorm, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Evaluate in plain PyTorch, in the data type of src; bf16 and f16 are normalized in f32."""
    wide, vectors = widened(tensors)
    dst = F.layer_norm(wide, wide.shape[-1:], vectors.get("scale"), vectors.get("shift"), attrs.epsilon)
    return (dst.to(tensors["src"].dtype),)


def reference_group(attrs: GroupNorm, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Evaluate in plain PyTorch, in the data type of src; bf16 and f16 are normalized in f32."""
    wide, vectors = widened(tensors)
    # row-major: PyTorch's code for channels-last loses four digits if a mean is large relative to the deviation
    wide = wide.contiguous()
    dst = torch.group_norm(wide, attrs.groups, vectors.get("scale"), vectors.get("shift"), attrs.epsilon)
    return (dst.to(tensors["src"].dtype),)


# ---------------------------------------------------------------- primitives


def _flags(op: str, descs: Natives) -> NormFlags:
    """Return the flags for the given operands, statistics included."""
    from fmtprop import dnnl

    return affine_flags(op, descs) | (dnnl.NormFlags.USE_GLOBAL_STATS if "mean" in descs else dnnl.NormFlags.NONE)


def _primitive(problem: str, op: str) -> Primitive:
    """Return the rule of a normalization: src and dst in the primitive's formats, all vectors plain."""

    def primitive(attrs: Attrs, descs: Natives, attr: NativeAttr) -> Lowering:
        images = {name: descs[name] for name in ("src", "dst")}
        own = primitive_of(problem, lambda attrs: {"flags": _flags(op, descs)})(attrs, images, attr)
        return with_vectors(own.pd, images, descs)

    return primitive


# ---------------------------------------------------------------- importers


def _in_f32(call: Call, **vectors: Value | None) -> dict[str, Value | None] | None:
    """Return vectors in f32, as oneDNN reads them; None if one cannot be converted."""
    wide = {name: None if v is None else converted(call, v, DataType.F32) for name, v in vectors.items()}
    return wide if all((wide[name] is None) == (vectors[name] is None) for name in wide) else None


def _batch(call: Call) -> Value | None:
    src, mean, variance = call["input"], call["running_mean"], call["running_var"]
    if call.args.get("training", False) or mean is None or variance is None or not computable(call, src):
        return None
    vectors = _in_f32(call, mean=mean, variance=variance, scale=call["weight"], shift=call["bias"])
    if vectors is None:
        return None
    return call.emit("batch_normalization", {"src": src, **vectors}, BatchNorm(call["eps"]))


def _batch_with_statistics(call: Call) -> tuple[Value | None, ...] | None:
    dst = _batch(call)
    if dst is None:
        return None
    # the other results are statistics, which a gradient does not read outside of training
    return (dst, *(call.constant([0.0] * type_.size) for type_ in call.results[1:]))


def layer_inputs(call: Call) -> tuple[Value, dict[str, Value | None]] | None:
    """Return src as rows, and scale and shift as vectors; None if oneDNN takes no such tensors."""
    vectors = {"scale": call["weight"], "shift": call["bias"]}
    if any(value is not None and call.type(value).dtype is not DataType.F32 for value in vectors.values()):
        return None
    return _layer_inputs(call, vectors)


def _layer_inputs(call: Call, vectors: dict[str, Value | None]) -> tuple[Value, dict[str, Value | None]] | None:
    src = call["input"]
    if not computable(call, src):
        return None
    dims, inner = call.type(src).dims, len(call["normalized_shape"])
    size = prod(dims[len(dims) - inner :])
    lead = dims[: len(dims) - inner]
    # oneDNN normalizes the last of 2 to 5 axes
    work = (*lead, size) if 1 <= len(lead) <= 4 else (prod(lead), size)
    return reshaped(call, src, work), {
        name: None if vector is None else reshaped(call, vector, (size,)) for name, vector in vectors.items()
    }


def import_layer(call: Call) -> Value | None:
    """Import a layer normalization without readers of its statistics."""
    vectors = _in_f32(call, scale=call["weight"], shift=call["bias"])
    inputs = None if vectors is None else _layer_inputs(call, vectors)
    if inputs is None:
        return None
    src, affine = inputs
    dst = call.emit("layer_normalization", {"src": src, **affine}, LayerNorm(call["eps"]))
    return reshaped(call, dst, call.type(call["input"]).dims)


def _emit_group(call: Call, src: Value, groups: int) -> Value | None:
    if not computable(call, src) or not 2 <= call.type(src).ndim <= 5:
        return None
    vectors = _in_f32(call, scale=call["weight"], shift=call["bias"])
    if vectors is None:
        return None
    return call.emit("group_normalization", {"src": src, **vectors}, GroupNorm(groups, call["eps"]))


def _group(call: Call) -> Value | None:
    return _emit_group(call, call["input"], call["num_groups"])


def _group_with_statistics(call: Call) -> tuple[Value | None, ...] | None:
    dst = _emit_group(call, call["input"], call["group"])
    return None if dst is None else (dst, None, None)


def _instance(call: Call) -> Value | None:
    if not call["use_input_stats"] or call["running_mean"] is not None or call["running_var"] is not None:
        return None
    return _emit_group(call, call["input"], call.type(call["input"]).dims[1])


# ---------------------------------------------------------------- ONNX


def _vector(w: Writing, operands: Mapping[str, str], name: str, axis: int) -> str:
    """Return the operand; an absent one becomes its neutral numbers, as ONNX demands it."""
    if name in operands:
        return operands[name]
    return w.constant([float(name == "scale")] * w.type(operands["src"]).dims[axis])


def _write_batch(attrs: BatchNorm, w: Writing, operands: Mapping[str, str]) -> str:
    affine = [_vector(w, operands, name, 1) for name in ("scale", "shift")]
    statistics = operands["mean"], operands["variance"]
    return w("BatchNormalization", operands["src"], *affine, *statistics, epsilon=attrs.epsilon)


def _write_layer(attrs: LayerNorm, w: Writing, operands: Mapping[str, str]) -> str:
    scale = _vector(w, operands, "scale", -1)
    return w("LayerNormalization", operands["src"], scale, operands.get("shift"), epsilon=attrs.epsilon)


def _write_group(attrs: GroupNorm, w: Writing, operands: Mapping[str, str]) -> str:
    affine = [_vector(w, operands, name, 1) for name in ("scale", "shift")]
    return w("GroupNormalization", operands["src"], *affine, num_groups=attrs.groups, epsilon=attrs.epsilon)


# ---------------------------------------------------------------- samples and declarations


def _problem(src: tuple[int, ...], axis: int, *vectors: str) -> dict[str, TensorType]:
    return {"src": TensorType(src), **{name: TensorType((src[axis],)) for name in vectors}}


def samples_batch() -> Iterable[Sample]:
    """Yield 1-D to 3-D images with and without scale and shift; a range that suits variances."""
    everything = ("mean", "variance", "scale", "shift")
    yield Sample("2d", BatchNorm(), _problem((2, 16, 6, 7), 1, *everything), 0.1, 2.0)
    yield Sample("2d_odd", BatchNorm(1e-3), _problem((2, 17, 6, 7), 1, *everything), 0.1, 2.0)
    yield Sample("no_affine", BatchNorm(), _problem((2, 32, 5, 5), 1, "mean", "variance"), 0.1, 2.0)
    yield Sample("scale_only", BatchNorm(), _problem((2, 8, 5, 5), 1, "mean", "variance", "scale"), 0.1, 2.0)
    yield Sample("rows", BatchNorm(), _problem((4, 24), 1, *everything), 0.1, 2.0)
    yield Sample("1d", BatchNorm(), _problem((2, 16, 9), 1, *everything), 0.1, 2.0)
    yield Sample("3d", BatchNorm(), _problem((1, 16, 3, 4, 5), 1, *everything), 0.1, 2.0)


def samples_layer() -> Iterable[Sample]:
    """Yield matrices to images, with and without scale and shift."""
    yield Sample("rows", LayerNorm(), _problem((4, 64), 1, "scale", "shift"))
    yield Sample("tokens", LayerNorm(1e-6), _problem((2, 9, 48), 2, "scale", "shift"))
    yield Sample("odd", LayerNorm(), _problem((2, 3, 17), 2, "scale", "shift"))
    yield Sample("no_affine", LayerNorm(), _problem((2, 5, 32), 2))
    yield Sample("scale_only", LayerNorm(), _problem((2, 5, 32), 2, "scale"))
    yield Sample("channels_last", LayerNorm(), _problem((1, 6, 7, 24), 3, "scale", "shift"))


def samples_group() -> Iterable[Sample]:
    """Yield several groupings, instance normalization among them."""
    yield Sample("groups", GroupNorm(4), _problem((2, 16, 6, 5), 1, "scale", "shift"))
    yield Sample("one_group", GroupNorm(1), _problem((2, 17, 4, 4), 1, "scale", "shift"))
    yield Sample("instance", GroupNorm(8), _problem((2, 8, 7, 7), 1))
    yield Sample("1d", GroupNorm(2), _problem((2, 6, 11), 1, "scale", "shift"))


BATCH_NORMALIZATION = OpDef(
    name="batch_normalization",
    attrs=BatchNorm,
    operands=(Operand("src", "SRC"), MEAN, VARIANCE, SCALE, SHIFT),
    category=Category.BANDWIDTH,
    infer=infer_batch,
    reference=reference_batch,
    primitive=_primitive("BatchNormalization", "batch_normalization"),
    numbers=Numbers(spreads=True, positive=lambda attrs: frozenset({"variance"})),
    sliced=each_image,
    cost=Cost(pace=0.5, pytorch=0.25),
    pytorch=ByPyTorch(reads=Reads.ROWS_OR_CHANNELS_LAST),
    absorbs=Absorbs(
        kinds=frozenset({"eltwise"}),
        # leaky or not; oneDNN answers "unimplemented" to every other algorithm
        algs=frozenset({"relu"}),
    ),
    inplace=frozenset({"src"}),
    short="bn",
    samples=samples_batch,
    onnx=Onnx(_write_batch),
    torch={
        "aten.batch_norm.default": _batch,
        "aten._native_batch_norm_legit_no_training.default": _batch_with_statistics,
        "aten.native_batch_norm.default": _batch_with_statistics,
    },
)

LAYER_NORMALIZATION = OpDef(
    name="layer_normalization",
    attrs=LayerNorm,
    operands=(Operand("src", "SRC"), SCALE, SHIFT),
    category=Category.BANDWIDTH,
    infer=infer_layer,
    reference=reference_layer,
    primitive=_primitive("LayerNormalization", "layer_normalization"),
    numbers=Numbers(spreads=True, bytes=lambda attrs: Bytes.NORMALIZED),
    cost=Cost(lambda attrs, gathered: 8.0, pytorch=0.2),
    pytorch=ByPyTorch(reads=Reads.ROWS),
    absorbs=Absorbs(
        # a rounding, by a kernel of our own alone
        kinds=frozenset({"eltwise"}),
        wanted=False,
    ),
    inplace=frozenset({"src"}),
    short="ln",
    samples=samples_layer,
    onnx=Onnx(_write_layer),
    torch={"aten.layer_norm.default": import_layer},
)

GROUP_NORMALIZATION = OpDef(
    name="group_normalization",
    attrs=GroupNorm,
    operands=(Operand("src", "SRC"), SCALE, SHIFT),
    category=Category.BANDWIDTH,
    infer=infer_group,
    reference=reference_group,
    numbers=Numbers(spreads=True),
    cost=Cost(pytorch=0.2, across=0.25),
    pytorch=ByPyTorch(reads=Reads.ROWS_OR_CHANNELS_LAST),
    inplace=frozenset({"src"}),
    short="gn",
    samples=samples_group,
    onnx=Onnx(_write_group),
    torch={
        "aten.group_norm.default": _group,
        "aten.native_group_norm.default": _group_with_statistics,
        "aten.instance_norm.default": _instance,
    },
)
