"""Products of groups of rows, each with a matrix of 4- or 8-bit codes: the experts of a language model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from fmtprop.errors import ShapeError
from fmtprop.ir import Category, Cost, OpDef, Operand, Reads, Sample, TensorType
from fmtprop.ir.facets import ByPyTorch, Numbers
from fmtprop.layout import DataType
from fmtprop.ops.grouped_matmul import groups_of
from fmtprop.ops.matmul_nbits import CODES_OPERANDS, MatMulNBits, check_codes, decoded, types_of_codes

# ---------------------------------------------------------------- attributes


@dataclass(frozen=True)
class GroupedNBits(MatMulNBits):
    """Attributes of products of groups of rows with codes."""


# ---------------------------------------------------------------- meaning


def infer(attrs: GroupedNBits, types: Mapping[str, TensorType]) -> tuple[TensorType, ...]:
    """Return the type of dst, [rows, N], from src [rows, K], codes of a matrix [G * N, K], and ends [G]."""
    src, ends = types["src"], types["ends"]
    if src.ndim != 2:
        raise ShapeError(f"src is {src}, but products of groups take rows: (rows, K)")
    outputs = check_codes(attrs, types, src.dims[1])
    if ends.ndim != 1 or ends.dtype not in (DataType.S32, DataType.S64) or not ends.size or outputs % ends.size:
        raise ShapeError(f"ends are {ends}, but each group of {outputs} rows of codes has one, of s32 or s64")
    return (src.with_dims((src.dims[0], outputs // ends.size)),)


def reference(attrs: GroupedNBits, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Evaluate in plain PyTorch, group by group. Raises RuntimeError if ends decrease or exceed the rows."""
    src, ends = tensors["src"], tensors["ends"]
    learned = {name: one for name in ("weights", "scales", "zero_points") if (one := tensors.get(name)) is not None}
    outputs = learned["weights"].shape[0] // ends.shape[0]
    dst = src.new_zeros((src.shape[0], outputs))
    for group, rows in groups_of(ends, src.shape[0]):
        own = slice(group * outputs, (group + 1) * outputs)
        matrix = decoded(attrs, {name: one[own] for name, one in learned.items()}, src.shape[1])
        dst[rows] = src[rows] @ matrix.to(src.dtype).t()
    return (dst,)


# ---------------------------------------------------------------- samples and declaration


def samples() -> Iterable[Sample]:
    """Yield a row for the first group and rows that are nobody's: all ends are 1."""
    for name, attrs, optional in (
        ("nibbles", GroupedNBits(4, 32), ()),
        ("bytes", GroupedNBits(8, 64), ("zero_points",)),
    ):
        types = types_of_codes(attrs, 3 * 17, 128)
        more = {one: types["scales"] for one in optional}
        rows, ends = TensorType((7, 128)), TensorType((3,), "s64")
        yield Sample(name, attrs, {"src": rows, **types, **more, "ends": ends}, low=1.0, high=1.9)


GROUPED_MATMUL_NBITS = OpDef(
    name="grouped_matmul_nbits",
    attrs=GroupedNBits,
    operands=(Operand("src", ""), *CODES_OPERANDS, Operand("ends", "")),
    category=Category.HOST,
    infer=infer,
    reference=reference,
    numbers=Numbers(narrows=lambda attrs: True, spreads=True),
    cost=Cost(pytorch=0.02),
    pytorch=ByPyTorch(reads=Reads.ROWS, any_strides=lambda attrs: False),
    short="experts",
    samples=samples,
)
