"""Products of groups of rows, each with a matrix of its own: the layers of a mixture of experts. PyTorch runs them.

Rows are sorted by expert, and `ends` says where each expert's rows end: ``[2, 2, 5]`` gives the first expert rows 0 and
1, the second none, the third rows 2 to 4. Rows behind the last end are nobody's, and their results are 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from fmtprop.errors import ShapeError
from fmtprop.ir.facets import ByPyTorch, Linear, Numbers
from fmtprop.ir.importing import Call
from fmtprop.ir.node import Attrs, Value
from fmtprop.ir.op import Category, OpDef, Operand, Sample
from fmtprop.ir.types import TensorType
from fmtprop.layout import DataType
from fmtprop.ops.building import Ready, Tensors, is_native

# ---------------------------------------------------------------- attributes


@dataclass(frozen=True)
class GroupedMatmul(Attrs):
    """Attributes of a grouped product: it has none.

    ``torch.nn.functional.grouped_mm``.
    """


# ---------------------------------------------------------------- meaning


def infer(attrs: GroupedMatmul, types: Mapping[str, TensorType]) -> tuple[TensorType, ...]:
    """Return the type of dst, [rows, N]: from src [rows, K], weights [groups, K, N] and ends [groups]."""
    src, weights, ends = types["src"], types["weights"], types["ends"]
    if src.ndim != 2 or weights.ndim != 3 or src.dims[1] != weights.dims[1]:
        raise ShapeError(f"src is {src} and weights are {weights}, but products of groups take (rows, K) and (G, K, N)")
    if src.dtype != weights.dtype:
        raise ShapeError(f"src has {src.dtype} numbers and weights have {weights.dtype}: they must be of one type")
    if ends.dims != weights.dims[:1] or ends.dtype not in (DataType.S32, DataType.S64):
        raise ShapeError(f"ends are {ends}, but each of {weights.dims[0]} groups has one, of s32 or s64")
    return (src.with_dims((src.dims[0], weights.dims[2])),)


def reference(attrs: GroupedMatmul, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Evaluate group by group."""
    src, weights = tensors["src"], tensors["weights"]
    dst = src.new_empty((src.shape[0], weights.shape[2]))
    _multiply(src, weights, tensors["ends"], dst)
    return (dst,)


def operator(attrs: GroupedMatmul, tensors: Tensors, results: Sequence[torch.Tensor | None]) -> Ready:
    """Return PyTorch's products, ready to write to dst."""
    src, weights, ends, dst = tensors["src"], tensors["weights"], tensors["ends"], results[0]

    def run() -> None:
        if dst is not None:
            _multiply(src, weights, ends, dst)

    return run


def _multiply(src: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor, dst: torch.Tensor) -> None:
    """Write the products of all groups."""
    end = 0
    for group, rows in groups_of(ends, src.shape[0]):
        torch.mm(src[rows], weights[group], out=dst[rows])
        end = rows.stop
    dst[end:] = 0


def groups_of(ends: torch.Tensor, rows: int) -> Iterator[tuple[int, slice]]:
    """Yield the groups that have rows, with these. Raises RuntimeError if ends decrease or exceed the rows."""
    start = 0
    for group, end in enumerate(ends.tolist()):
        if not start <= end <= rows:
            raise RuntimeError(
                f"group {group} ends at row {end}, but ends must not decrease, and there are {rows} rows"
            )
        if start != end:
            yield group, slice(start, end)
        start = end


# ---------------------------------------------------------------- importers


def _import(call: Call) -> Value | None:
    """Import PyTorch's call and that of transformers, with a matrix for each group."""
    src, weights, ends = call["input"], call["weight"], call.args.get("offs")
    return _products(call, src, weights, ends)


def _import_aten(call: Call) -> Value | None:
    if call.args.get("bias") is not None or call.args.get("out_dtype") is not None:
        return None
    return _products(call, call["self"], call["mat2"], call.args.get("offs"))


def _products(call: Call, src: Value, weights: Value, ends: Value | None) -> Value | None:
    if ends is None or call.type(src).ndim != 2 or call.type(weights).ndim != 3:
        return None
    if not is_native(call.type(src)) or call.type(src).dtype != call.type(weights).dtype:
        return None
    return call.emit("grouped_matmul", {"src": src, "weights": weights, "ends": ends}, GroupedMatmul())


# ---------------------------------------------------------------- samples and declaration


def samples() -> Iterable[Sample]:
    """Yield a row for the first group and rows that are nobody's: all ends are 1."""
    types = {"src": TensorType((7, 20)), "weights": TensorType((3, 20, 17)), "ends": TensorType((3,), "s64")}
    yield Sample("rows", GroupedMatmul(), types, low=1.0, high=1.9)


GROUPED_MATMUL = OpDef(
    name="grouped_matmul",
    attrs=GroupedMatmul,
    operands=(Operand("src", ""), Operand("weights", ""), Operand("ends", "")),
    category=Category.HOST,
    infer=infer,
    reference=reference,
    pytorch=ByPyTorch(operator),
    linear=Linear(lambda src, weights, dst: float(prod(dst) * src[-1]), by_columns=True),
    numbers=Numbers(narrows=lambda attrs: True, spreads=True),
    short="experts",
    samples=samples,
    torch={
        "aten._grouped_mm.default": _import_aten,
        "transformers.grouped_mm_fallback.default": _import,
    },
)
