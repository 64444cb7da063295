"""Rows of a matrix of 4- or 8-bit codes by their indices, as numbers: the embedding of a language model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from fmtprop.errors import ShapeError
from fmtprop.ir import Call, Category, OpDef, Operand, Reads, Sample, TensorType, Value
from fmtprop.ir.facets import ByPyTorch, Cost, Numbers
from fmtprop.ir.tensors import data_type, torch_dtype
from fmtprop.layout import DataType
from fmtprop.ops.matmul_nbits import CODES_OPERANDS, DecodeNBits, check_codes, decoded, types_of_codes

# ---------------------------------------------------------------- attributes


@dataclass(frozen=True)
class GatherNBits(DecodeNBits):
    """Attributes of rows of codes by their indices.

    ONNX Runtime's contrib operators, "com.microsoft.GatherBlockQuantized", with codes as those of products.
    """


# ---------------------------------------------------------------- meaning


def infer(attrs: GatherNBits, types: Mapping[str, TensorType]) -> tuple[TensorType, ...]:
    """Return the type of dst, [..., K], from weights [N, K * bits / 8], scales [N, K / group] and indices [...]."""
    check_codes(attrs, types, attrs.depth)
    indices = types["indices"]
    if indices.dtype not in (DataType.S32, DataType.S64):
        raise ShapeError(f"indices are {indices}, but rows have indices of s32 or s64")
    return (TensorType((*indices.dims, attrs.depth), attrs.dtype),)


def reference(attrs: GatherNBits, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Evaluate in plain PyTorch, which raises IndexError at an index without a row."""
    indices = tensors["indices"]
    learned = {name: one for name in ("weights", "scales", "zero_points") if (one := tensors.get(name)) is not None}
    rows = {name: one.index_select(0, indices.flatten()) for name, one in learned.items()}
    numbers = decoded(attrs, rows, attrs.depth).to(torch_dtype(DataType(attrs.dtype)))
    return (numbers.reshape(*indices.shape, attrs.depth),)


# ---------------------------------------------------------------- importer


@torch.library.custom_op("fmtprop::gather_nbits", mutates_args=())
def gather_nbits(
    weights: torch.Tensor,
    scales: torch.Tensor,
    zero_points: torch.Tensor | None,
    indices: torch.Tensor,
    bits: int,
    group: int,
    depth: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the rows as PyTorch computes them; a graph has this as one node."""
    given = {"weights": weights, "scales": scales, "zero_points": zero_points, "indices": indices}
    attrs = GatherNBits(bits, group, depth, data_type(dtype).value)
    return reference(attrs, {name: one for name, one in given.items() if one is not None})[0]


@gather_nbits.register_fake
def _(
    weights: torch.Tensor, scales: object, zero_points: object, indices: torch.Tensor, bits: int, group: int,
    depth: int, dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    return weights.new_empty((*indices.shape, depth), dtype=dtype)


def _import(call: Call) -> Value | None:
    given = {name: call[name] for name in ("weights", "scales", "zero_points", "indices")}
    attrs = GatherNBits(call["bits"], call["group"], call["depth"], call["dtype"].value)
    return call.emit("gather_nbits", given, attrs)


# ---------------------------------------------------------------- samples and declaration


def samples() -> Iterable[Sample]:
    """Yield tables of both widths, with and without zero points; all indices are 0."""
    for name, indices, attrs, optional in (
        ("nibbles", TensorType((2, 3), "s64"), GatherNBits(4, 32, 96), ()),
        ("bytes", TensorType((5,), "s32"), GatherNBits(8, 64, 128, "bf16"), ()),
        ("zero_points", TensorType((1, 7), "s64"), GatherNBits(8, 32, 64), ("zero_points",)),
        ("short_group", TensorType((3,), "s64"), GatherNBits(4, 32, 40), ()),
    ):
        types = types_of_codes(attrs, 19, attrs.depth)
        more = {one: types["scales"] for one in optional}
        yield Sample(name, attrs, {**types, **more, "indices": indices}, low=0.0)


GATHER_NBITS = OpDef(
    name="gather_nbits",
    attrs=GatherNBits,
    operands=(*CODES_OPERANDS, Operand("indices", "")),
    category=Category.HOST,
    infer=infer,
    reference=reference,
    numbers=Numbers(spreads=True),
    cost=Cost(picks=lambda attrs: True),
    pytorch=ByPyTorch(reads=Reads.ROWS, any_strides=lambda attrs: False),
    short="gather",
    samples=samples,
    torch={"fmtprop.gather_nbits.default": _import},
)
