"""Constant padding, for which oneDNN has no primitive.

A rewrite pass folds padding by 0 into the convolution that reads it (and padding by -inf into max pooling); other
padding runs in PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from fmtprop.errors import ShapeError
from fmtprop.ir import Attrs, Call, Category, Onnx, OpDef, Operand, Sample, TensorType, Value, Writing
from fmtprop.ir.facets import ByPyTorch
from fmtprop.ops.building import Ready, Tensors, is_native
from fmtprop.ops.host_call import host_call

# ---------------------------------------------------------------- attributes


@dataclass(frozen=True)
class Pad(Attrs):
    """Attributes of constant padding."""

    #: `pads_l`, `pads_r`: elements added before and after each axis, from axis 0; not negative
    pads_l: tuple[int, ...]
    pads_r: tuple[int, ...]
    value: float = 0.0

    def __post_init__(self) -> None:
        for name in ("pads_l", "pads_r"):
            for axis, size in enumerate(getattr(self, name)):
                if size < 0:
                    raise ShapeError(f"pad: {name}[{axis}] is {size}; padding cannot be negative (use slice)")


# ---------------------------------------------------------------- meaning


def infer(attrs: Pad, types: Mapping[str, TensorType]) -> tuple[TensorType, ...]:
    """Return the type of src with the padding added to its dimensions."""
    src = types["src"]
    if not len(attrs.pads_l) == len(attrs.pads_r) == src.ndim:
        raise ShapeError(
            f"pads_l {attrs.pads_l} and pads_r {attrs.pads_r} must have one entry per axis of src, which has {src.ndim}"
        )
    sizes = zip(src.dims, attrs.pads_l, attrs.pads_r, strict=True)
    return (src.with_dims([size + before + after for size, before, after in sizes]),)


def reference(attrs: Pad, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Evaluate in plain PyTorch."""
    # PyTorch lists (before, after) from the last axis on.
    pairs = zip(attrs.pads_l[::-1], attrs.pads_r[::-1], strict=True)
    return (F.pad(tensors["src"], [size for pair in pairs for size in pair], value=attrs.value),)


def operator(attrs: Pad, tensors: Tensors, results: Sequence[torch.Tensor]) -> Ready:
    """Return calls of PyTorch's operators that write both parts of the result; its padding makes another tensor."""
    src = tensors["src"]
    inside = tuple(slice(before, before + size) for before, size in zip(attrs.pads_l, src.shape, strict=True))
    return partial(_write_padded, results[0], attrs.value, inside, src)


def _write_padded(dst: torch.Tensor, value: float, inside: tuple[slice, ...], src: torch.Tensor) -> None:
    dst.fill_(value)
    dst[inside].copy_(src)


# ---------------------------------------------------------------- importers


#: modes of padding -> names of functions with an overload for given memory, without their numbers of axes
_NAMED = {"reflect": "reflection_pad", "replicate": "replication_pad"}


def _pad(call: Call) -> Value | None:
    src: Value = call["self"]
    flat = list(call["pad"])
    if not any(flat):  # in any mode
        return src
    mode, axes = call.args.get("mode", "constant"), len(flat) // 2
    if mode in _NAMED and 1 <= axes <= 3 and call.type(src).ndim in (axes + 1, axes + 2):
        named, inputs = host_call(f"aten.{_NAMED[mode]}{axes}d.default", {"self": src, "padding": flat})
        return call.emit("aten", inputs, named)
    if mode != "constant" or not is_native(call.type(src)) or min(flat, default=0) < 0:
        return None
    unpadded = [0] * (call.type(src).ndim - len(flat) // 2)
    attrs = Pad((*unpadded, *flat[-2::-2]), (*unpadded, *flat[::-2]), float(call["value"] or 0.0))
    return call.emit("pad", {"src": src}, attrs)


# ---------------------------------------------------------------- ONNX


def _write(attrs: Pad, w: Writing, operands: Mapping[str, str]) -> str:
    pads = w.constant([*attrs.pads_l, *attrs.pads_r], "s64")
    return w("Pad", operands["src"], pads, w.constant(attrs.value))


# ---------------------------------------------------------------- samples and declaration


def samples() -> Iterable[Sample]:
    """Yield symmetric, asymmetric and non-zero padding."""
    image = {"src": TensorType((2, 17, 5, 7))}
    yield Sample("spatial", Pad((0, 0, 1, 1), (0, 0, 1, 1)), image)
    yield Sample("asymmetric", Pad((0, 0, 0, 2), (0, 0, 1, 3)), image)
    yield Sample("channels", Pad((0, 3, 0, 0), (0, 12, 0, 0), 1.5), image)
    yield Sample("rows", Pad((1, 0), (0, 2), -1.0), {"src": TensorType((3, 40))})


PAD = OpDef(
    name="pad",
    attrs=Pad,
    operands=(Operand("src", "SRC"),),
    category=Category.HOST,
    infer=infer,
    reference=reference,
    pytorch=ByPyTorch(operator),
    samples=samples,
    torch={"aten.constant_pad_nd.default": _pad, "aten.pad.default": _pad},
    onnx=Onnx(_write, moves=True),
)
