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
from fmtprop.ir.exporting import Onnx, Writing
from fmtprop.ir.importing import Call
from fmtprop.ir.node import Attrs, Value
from fmtprop.ir.op import Category, OpDef, Operand, Sample
from fmtprop.ir.types import TensorType
from fmtprop.ops.building import Ready, Tensors, copied, is_native

# ---------------------------------------------------------------- attributes


@dataclass(frozen=True)
class Pad(Attrs):
    """Attributes of constant padding.

    Parameters
    ----------
    pads_l, pads_r : tuple of int
        Elements added before and after each axis, from axis 0; not negative.
    value : float
        Value of the added elements.
    """

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
    return (F.pad(tensors["src"], _sizes(attrs), value=attrs.value),)


def operator(attrs: Pad, tensors: Tensors, results: Sequence[torch.Tensor]) -> Ready:
    """Return PyTorch's operator for it, whose result is copied to a tensor."""
    return partial(copied, results[0], torch.constant_pad_nd, tensors["src"], _sizes(attrs), attrs.value)


def _sizes(attrs: Pad) -> list[int]:
    """Return the padding as PyTorch lists it: before and after each axis, from the last one on."""
    pairs = zip(attrs.pads_l[::-1], attrs.pads_r[::-1], strict=True)
    return [size for pair in pairs for size in pair]


# ---------------------------------------------------------------- importers


def _pad(call: Call) -> Value | None:
    src: Value = call["self"]
    flat = list(call["pad"])
    if not any(flat):  # in any mode
        return src
    if call.args.get("mode", "constant") != "constant" or not is_native(call.type(src)) or min(flat, default=0) < 0:
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
    operator=operator,
    samples=samples,
    torch={"aten.constant_pad_nd.default": _pad, "aten.pad.default": _pad},
    onnx=Onnx(_write, moves=True),
)
