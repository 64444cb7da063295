"""Weighted sum of tensors of one shape: oneDNN's sum primitive."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from fmtprop.errors import ShapeError
from fmtprop.ir import Attrs, Category, Cost, Onnx, OpDef, Operand, PostOpForm, Sample, TensorType, Writing, each_image
from fmtprop.ir.facets import ByPyTorch
from fmtprop.layout import DataType
from fmtprop.ops.building import Ready, Tensors, operand_list, primitive_of, promoted

if TYPE_CHECKING:
    from fmtprop.dnnl import NativeDesc, PostOps

# ---------------------------------------------------------------- attributes


@dataclass(frozen=True)
class Sum(Attrs):
    """Attributes of a weighted sum.

    oneDNN developer guide, "Sum".
    """

    #: factor of each source; finite
    scales: tuple[float, ...]

    def __post_init__(self) -> None:
        for index, scale in enumerate(self.scales):
            if not math.isfinite(scale):
                raise ShapeError(f"sum: scales[{index}] is {scale}; a scale must be finite")


# ---------------------------------------------------------------- meaning


def infer(attrs: Sum, types: Mapping[str, TensorType]) -> tuple[TensorType, ...]:
    """Return the common dimensions of all sources; data types promote as in PyTorch."""
    sources = operand_list("src", types)
    if len(sources) != len(attrs.scales):
        raise ShapeError(f"sum has {len(sources)} sources but {len(attrs.scales)} scales; each source needs one")
    for index, source in enumerate(sources):
        if source.dims != sources[0].dims:
            raise ShapeError(
                f"src_{index} has dimensions {source.dims} but src_0 has {sources[0].dims}; sum does not broadcast"
            )
    return (TensorType(sources[0].dims, promoted(*sources)),)


def reference(attrs: Sum, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Evaluate in plain PyTorch; accumulates in f32 as the primitive does."""
    sources = operand_list("src", tensors)
    dtype = sources[0].dtype
    for source in sources[1:]:
        dtype = torch.promote_types(dtype, source.dtype)
    wide = torch.promote_types(dtype, torch.float32)
    total = sources[0].to(wide) * attrs.scales[0]
    for source, scale in zip(sources[1:], attrs.scales[1:], strict=True):
        total = total.add(source.to(wide), alpha=scale)
    return (total.to(dtype),)


def operator(attrs: Sum, tensors: Tensors, results: Sequence[torch.Tensor]) -> Ready:
    """Return PyTorch's operator for it, which writes its result to a tensor."""
    if len(attrs.scales) != 2 or attrs.scales[0] != 1.0:
        return None
    return partial(torch.add, tensors["src_0"], tensors["src_1"], alpha=attrs.scales[1], out=results[0])


def _append(attrs: Sum, tail: PostOps, operands: Sequence[NativeDesc], dtype: DataType) -> None:
    tail.append_sum(attrs.scales[0])


# ---------------------------------------------------------------- ONNX


def _write(attrs: Sum, w: Writing, operands: Mapping[str, str]) -> str:
    sources = zip(operand_list("src", operands), attrs.scales, strict=True)
    terms = [source if scale == 1 else w("Mul", source, w.constant(scale)) for source, scale in sources]
    return w("Add", *terms) if len(terms) == 2 else w("Sum", *terms)


# ---------------------------------------------------------------- samples and declaration


def samples() -> Iterable[Sample]:
    """Yield sums of one, two and four sources."""
    for count in (1, 2, 4):
        scales = tuple(1.0 + 0.5 * i for i in range(count))
        yield Sample(f"of_{count}", Sum(scales), {f"src_{i}": TensorType((2, 17, 5, 7)) for i in range(count)})
    yield Sample("difference", Sum((1.0, -1.0)), {"src_0": TensorType((3, 40)), "src_1": TensorType((3, 40))})


#: it has no importer: PyTorch's additions are imported as `binary`, or as a sum if they have a factor
SUM = OpDef(
    name="sum",
    attrs=Sum,
    operands=(Operand("src", "MULTIPLE_SRC", variadic=True),),
    category=Category.MULTI_SRC,
    infer=infer,
    reference=reference,
    pytorch=ByPyTorch(operator),
    primitive=primitive_of("Sum"),
    elementwise=True,
    sliced=each_image,
    cost=Cost(pace=0.75, pytorch=0.6),
    as_post_op=PostOpForm("sum", _append),
    inplace=frozenset({"src_0"}),
    samples=samples,
    onnx=Onnx(_write),
)
