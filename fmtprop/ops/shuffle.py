"""Interleaving the groups of an axis: oneDNN's shuffle primitive.

PyTorch models write it as reshape → permute → reshape; a rewrite pass turns that pattern into this op.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from fmtprop.errors import ShapeError
from fmtprop.ir import Attrs, Bytes, Call, Cost, Onnx, TensorType, Value, Writing, each_image_across_axis
from fmtprop.ir.facets import Numbers
from fmtprop.ir.op import Category, Lowering, NativeAttr, Natives, OpDef, Operand, Sample
from fmtprop.layout import MemoryDesc
from fmtprop.ops.building import create, is_native, native, primitive_of

# ---------------------------------------------------------------- attributes


@dataclass(frozen=True)
class Shuffle(Attrs):
    """Attributes of a shuffle.

    oneDNN developer guide, "Shuffle".
    """

    #: the axis that is shuffled, from 0
    axis: int
    #: number of groups, as in ``torch.nn.ChannelShuffle``: the axis is seen as (groups, size / groups) and transposed.
    #: (oneDNN's ``group_size`` is size / groups.)
    groups: int

    def __post_init__(self) -> None:
        if self.axis < 0 or self.groups < 1:
            raise ShapeError(f"shuffle: axis is {self.axis} and groups {self.groups}; they must be at least 0 and 1")


# ---------------------------------------------------------------- meaning


def infer(attrs: Shuffle, types: Mapping[str, TensorType]) -> tuple[TensorType, ...]:
    """Return the type of src."""
    src = types["src"]
    if attrs.axis >= src.ndim:
        raise ShapeError(f"src has {src.ndim} dimensions, so there is no axis {attrs.axis} to shuffle")
    if src.dims[attrs.axis] % attrs.groups:
        raise ShapeError(
            f"src axis {attrs.axis} has size {src.dims[attrs.axis]}, which is not divisible by groups {attrs.groups}"
        )
    return (src,)


def reference(attrs: Shuffle, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Evaluate in plain PyTorch."""
    src, axis = tensors["src"], attrs.axis
    grouped = (*src.shape[:axis], attrs.groups, src.shape[axis] // attrs.groups, *src.shape[axis + 1 :])
    return (src.reshape(grouped).transpose(axis, axis + 1).reshape(src.shape),)


def primitive(attrs: Shuffle, descs: Natives, attr: NativeAttr) -> Lowering:
    """Create the shuffle primitive descriptor, or on strided formats the reorder that does the same.

    oneDNN v3.2 shuffles blocked channels well and has only a reference loop for all else, while a reorder between the
    two transposed views of the axis runs as generated code.
    """
    if descs["src"].desc.is_plain and (descs["dst"].is_any or descs["dst"].desc.is_plain):
        return _as_reorder(attrs, descs, attr)
    size = descs["src"].dims[attrs.axis] // attrs.groups
    return primitive_of("Shuffle", lambda attrs: {"group_size": size})(attrs, descs, attr)


def _as_reorder(attrs: Shuffle, descs: Natives, attr: NativeAttr) -> Lowering:
    src, axis = descs["src"].desc, attrs.axis
    dst = descs["dst"].desc if not descs["dst"].is_any else src
    if not dst.is_packed:
        dst = MemoryDesc(dst.dims, dst.dtype)
    grouped = (*src.dims[:axis], attrs.groups, src.dims[axis] // attrs.groups, *src.dims[axis + 1 :])
    order = list(range(len(grouped)))
    order[axis], order[axis + 1] = axis + 1, axis
    read = src.reshape(grouped).transpose(order)
    written = dst.reshape(read.dims)
    pd = create("Reorder", None, {"src": native(read), "dst": native(written)}, attr)
    return Lowering(pd, lambda _: {"src": src, "dst": dst})


# ---------------------------------------------------------------- importers


def _channel_shuffle(call: Call) -> Value | None:
    src = call["self"]
    if not is_native(call.type(src)):
        return None
    # Channels are axis 1 for any rank; PyTorch has no form without a batch.
    return call.emit("shuffle", {"src": src}, Shuffle(1, call["groups"]))


# ---------------------------------------------------------------- ONNX


def _write(attrs: Shuffle, w: Writing, operands: Mapping[str, str]) -> str:
    dims, axis = w.type(operands["src"]).dims, attrs.axis
    grouped = w.reshaped(operands["src"], (*dims[:axis], attrs.groups, dims[axis] // attrs.groups, *dims[axis + 1 :]))
    order = list(range(len(dims) + 1))
    order[axis], order[axis + 1] = axis + 1, axis
    return w.reshaped(w.transposed(grouped, order), dims)


# ---------------------------------------------------------------- samples and declaration


def samples() -> Iterable[Sample]:
    """Yield channel shuffles of whole and odd channel counts, and of another axis."""
    yield Sample("two_groups", Shuffle(1, 2), {"src": TensorType((2, 16, 5, 7))})
    yield Sample("three_groups", Shuffle(1, 3), {"src": TensorType((2, 51, 5, 7))})
    yield Sample("width", Shuffle(3, 4), {"src": TensorType((2, 17, 5, 8))})
    yield Sample("rows", Shuffle(1, 8), {"src": TensorType((3, 40))})


SHUFFLE = OpDef(
    name="shuffle",
    attrs=Shuffle,
    operands=(Operand("src", "SRC"),),
    category=Category.BANDWIDTH,
    infer=infer,
    reference=reference,
    primitive=primitive,
    sliced=each_image_across_axis,
    cost=Cost(pace=0.65),
    numbers=Numbers(bytes=lambda attrs: Bytes.MOVED),
    samples=samples,
    torch={
        "aten.channel_shuffle.default": _channel_shuffle,
        "aten.native_channel_shuffle.default": _channel_shuffle,
    },
    onnx=Onnx(_write, moves=True),
)
