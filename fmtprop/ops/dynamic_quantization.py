"""Quantization by scales of the same run: each row of numbers, or a whole tensor, has the scale of its own range.

The integers are a result of real numbers on a grid of step 1, which may be stored as bytes; scales and zeros are two
more results. So a product of the integers may be one of bytes, and the scales multiply its sums.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isfinite

import torch

from fmtprop.errors import ShapeError
from fmtprop.ir import Attrs, Bytes, Call, Category, Cost, Grid, OpDef, Operand, Sample, TensorType, Value
from fmtprop.ir.facets import Numbers
from fmtprop.layout import DataType
from fmtprop.ops.building import Tensors


@dataclass(frozen=True)
class DynamicQuantize(Attrs):
    """Attributes of ``dst = clamp(round(src / scale) + zero, low, high)``, the scale by the numbers' range."""

    #: `low`, `high`: least and largest integer
    low: int
    high: int
    #: the range over the scale. The range is the largest magnitude of `symmetric` numbers, or from the least number to
    #: the largest, or to 0.
    divisor: float
    #: least scale. If it is 0, a range of 0 is divided by 1.
    least: float = 0.0
    #: whether the zero is 0; otherwise it is the integer at which the least number becomes `low`
    symmetric: bool = False
    #: whether the tensor has one scale; otherwise each row along the last axis has one
    whole: bool = False
    #: whether numbers are multiplied by the reciprocal of the scale, which is rounded, too
    multiplies: bool = False
    #: whether scales are rounded to bf16, as those of a model in bf16 are
    rounds: bool = False

    def __post_init__(self) -> None:
        if not (self.divisor > 0 and isfinite(self.divisor) and self.least >= 0 and isfinite(self.least)):
            raise ShapeError(f"divisor {self.divisor} must be positive, and the least scale {self.least} not negative")
        if not self.low <= 0 <= self.high or self.high - self.low > 255:
            raise ShapeError(f"0 must lie between {self.low} and {self.high}, and these differ by at most 255")

    @property
    def grid(self) -> Grid:
        """The integers."""
        return Grid((1.0,), self.low, self.high)


def infer(attrs: DynamicQuantize, types: Mapping[str, TensorType]) -> tuple[TensorType, ...]:
    """Return src's type, and twice that of the scales."""
    src = types["src"]
    if src.dtype is not DataType.F32 or (not attrs.whole and not src.ndim):
        raise ShapeError(f"src is {src}, but must be rows of f32")
    scale = TensorType(() if attrs.whole else (*src.dims[:-1], 1))
    return src, scale, scale


def reference(attrs: DynamicQuantize, tensors: Tensors) -> tuple[torch.Tensor, ...]:
    """Evaluate in plain PyTorch."""
    src = tensors["src"]
    rows = src.reshape(1, -1) if attrs.whole else src
    with_zero = torch.cat([rows, rows.new_zeros((*rows.shape[:-1], 1))], -1)
    low, high = with_zero.amin(-1, keepdim=True), with_zero.amax(-1, keepdim=True)
    return rounded(attrs, src, *(limit.reshape(()) if attrs.whole else limit for limit in (low, high)))


def rounded(
    attrs: DynamicQuantize, src: torch.Tensor, low: torch.Tensor, high: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Return the results for numbers of given least and largest ones, which are not above and not below 0."""
    span = torch.maximum(-low, high) if attrs.symmetric else high - low
    scale = span / torch.tensor(attrs.divisor, dtype=span.dtype)
    scale = (scale.bfloat16().to(span.dtype) if attrs.rounds else scale).clamp(min=attrs.least)
    used = torch.where(scale == 0, torch.ones_like(scale), scale)
    zero = torch.zeros_like(scale)
    if not attrs.symmetric:
        zero = (attrs.low - torch.round(low / used)).clamp(attrs.low, attrs.high).nan_to_num(0.0)
    quotients = src * (1 / used) if attrs.multiplies else src / used
    return (torch.round(quotients) + zero).clamp(attrs.low, attrs.high), scale, zero


# ---------------------------------------------------------------- ONNX's operator

_LIBRARY = torch.library.Library("fmtprop", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("dynamic_quantize(Tensor src) -> (Tensor, Tensor, Tensor)")  # type: ignore[no-untyped-call]

#: DynamicQuantizeLinear
_BYTES = DynamicQuantize(0, 255, 255.0, whole=True)


def _dynamic_quantize(src: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return reference(_BYTES, {"src": src})


def _without_data(src: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return results without data; those of the steps above would need PyTorch's compiler, whose import takes 2 s."""
    dst, scale, zero = (torch.empty(dims, dtype=src.dtype, device="meta") for dims in (src.shape, (), ()))
    return dst, scale, zero


_LIBRARY.impl("dynamic_quantize", _dynamic_quantize, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
_LIBRARY.impl("dynamic_quantize", _without_data, "Meta")  # type: ignore[no-untyped-call]


def _import(call: Call) -> tuple[Value, ...] | None:
    if call.type(call["src"]).dtype is not DataType.F32:
        return None
    dst = call.emit("dynamic_quantize", {"src": call["src"]}, _BYTES)
    return dst, Value(dst.node, 1), Value(dst.node, 2)


def samples() -> Iterable[Sample]:
    """Yield a tensor with one scale, and rows with and without zeros of their own."""
    src = {"src": TensorType((2, 5, 37))}
    yield Sample("whole", _BYTES, src)
    yield Sample("rows", DynamicQuantize(-128, 127, 255.0, 2.0**-23, multiplies=True), src)
    yield Sample("symmetric", DynamicQuantize(-127, 127, 127.0, 2.0**-23, symmetric=True), src)
    yield Sample("scales of bf16", DynamicQuantize(-128, 127, 127.5, 2.0**-23, symmetric=True, rounds=True), src)


DYNAMIC_QUANTIZE = OpDef(
    name="dynamic_quantize",
    attrs=DynamicQuantize,
    operands=(Operand("src", "SRC"),),
    results=(Operand("dst", "DST"), Operand("scale", ""), Operand("zero", "")),
    category=Category.BANDWIDTH,
    infer=infer,
    reference=reference,
    numbers=Numbers(bytes=lambda attrs: Bytes.CONVERTED),
    cost=Cost(lambda attrs, gathered: 6.0, pytorch=0.05),
    short="quantize_rows",
    samples=samples,
    torch={"fmtprop.dynamic_quantize.default": _import},
)
