"""Embedding bags: sums, means or maxima of a table's rows. A kernel of this project runs them, or PyTorch.

PyTorch reads outside its tensors if offsets decrease, or if there are indices and no bags. Here the first is an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from fmtprop.errors import ShapeError
from fmtprop.ir import Attrs, Call, Category, OpDef, Operand, Sample, TensorType, Value
from fmtprop.ir.facets import ByPyTorch
from fmtprop.layout import DataType
from fmtprop.ops.building import Ready, Tensors, is_native

#: PyTorch's modes, at its numbers
_MODES = ("sum", "mean", "max")

#: messages about numbers
OUTSIDE = "index out of range in self"
DISORDERED = "offsets must start with 0, must not decrease, and must not exceed the number of indices"

# ---------------------------------------------------------------- attributes


@dataclass(frozen=True)
class EmbeddingBag(Attrs):
    """Attributes of an embedding bag.

    ``torch.nn.functional.embedding_bag``.
    """

    #: ``"sum"``, ``"mean"`` or ``"max"`` of a bag's rows; an empty bag gives 0
    mode: str
    #: index that bags leave out; -1 if there is none
    padding: int = -1
    #: whether the last offset is the end of the last bag; otherwise all indices are
    has_last: bool = False

    def __post_init__(self) -> None:
        if self.mode not in _MODES:
            raise ShapeError(f"mode is {self.mode!r}; an embedding bag has one of {', '.join(_MODES)}")


# ---------------------------------------------------------------- meaning


def infer(attrs: EmbeddingBag, types: Mapping[str, TensorType]) -> tuple[TensorType, ...]:
    """Return the type of dst, [bags, C]: from a table [N, C], indices [I] and offsets [bags].

    Offsets have one more number if the last one is an end. Factors are [I].
    """
    table, indices, offsets, factors = (types.get(operand.name) for operand in _OPERANDS)
    assert table is not None and indices is not None and offsets is not None  # the graph checks operands
    if table.ndim != 2:
        raise ShapeError(f"table has dims {table.dims}, but an embedding bag takes rows: (N, C)")
    for name, type_ in (("indices", indices), ("offsets", offsets)):
        if type_.ndim != 1 or type_.dtype not in (DataType.S32, DataType.S64) or type_.dtype != indices.dtype:
            raise ShapeError(f"{name} are {type_}, but indices and offsets are vectors of s32 or of s64")
    if attrs.has_last and not offsets.dims[0]:
        raise ShapeError("offsets are empty, but the last of them is the end of the last bag")
    if factors is not None and (attrs.mode != "sum" or factors != TensorType(indices.dims, table.dtype)):
        raise ShapeError(
            f"factors are {factors} in mode {attrs.mode!r}, but sums alone have them, one of the table's type for each "
            f"of {indices.dims[0]} indices"
        )
    return (table.with_dims((offsets.dims[0] - attrs.has_last, table.dims[1])),)


def reference(attrs: EmbeddingBag, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Evaluate by PyTorch, on offsets in order."""
    table, indices, offsets, factors = (tensors.get(operand.name) for operand in _OPERANDS)
    assert table is not None and indices is not None and offsets is not None  # the graph checks operands
    if offsets.shape[0] == attrs.has_last:
        return (table.new_zeros((0, table.shape[1])),)
    if attrs.has_last and attrs.padding >= 0:  # PyTorch's last bag would have all other indices, too
        end = int(offsets[-1])
        indices, factors = indices[:end], None if factors is None else factors[:end]
    padding = None if attrs.padding < 0 else attrs.padding
    how = _MODES.index(attrs.mode), False, factors, attrs.has_last, padding
    return (torch.embedding_bag(table, indices, offsets, False, *how)[0],)


def operator(attrs: EmbeddingBag, tensors: Tensors, results: Sequence[torch.Tensor | None]) -> Ready:
    """Return PyTorch's call behind a check of its numbers."""
    table, indices, offsets, dst = tensors["table"], tensors["indices"], tensors["offsets"], results[0]

    def run() -> None:
        if offsets.shape[0] and (int(offsets[0]) or bool((offsets.diff() < 0).any()) or offsets[-1] > len(indices)):
            raise RuntimeError(DISORDERED)
        read = indices[: offsets[-1]] if attrs.has_last else indices
        if read.shape[0] and (int(read.min()) < 0 or int(read.max()) >= table.shape[0]):
            raise IndexError(OUTSIDE)
        if dst is not None:
            dst.copy_(reference(attrs, tensors)[0])

    return run


# ---------------------------------------------------------------- importers


def _import(call: Call) -> Value | None:
    """Import PyTorch's call, unless the model reads the results that it saves for its gradient."""
    if call.used - {0}:
        return None
    return _bags(call, call["weight"], call["include_last_offset"], call.args.get("padding_idx"))


def _import_whole(call: Call) -> Value | None:
    """Import `fmtprop::embedding_bag`."""
    return _bags(call, call["weight"], call["has_last"], call["padding"])


def _bags(call: Call, table: Value, has_last: bool, padding: int | None) -> Value | None:
    factors = call.args.get("per_sample_weights", call.args.get("factors"))
    indices, offsets = call.type(call["indices"]), call.type(call["offsets"])
    if not is_native(call.type(table)) or indices.ndim != 1 or indices.dtype != offsets.dtype:
        return None
    if factors is not None and call.type(factors).dtype != call.type(table).dtype:
        return None
    rows = call.type(table).dims[0]
    whole = call.target.startswith("aten._")  # to these calls -1 means none, to others the last row
    if padding is None or (whole and padding < 0):
        padding = -1
    elif padding < 0:
        padding += rows
    given = {"table": table, "indices": call["indices"], "offsets": call["offsets"], "factors": factors}
    return call.emit("embedding_bag", given, EmbeddingBag(_MODES[call["mode"]], padding, has_last))


# ---------------------------------------------------------------- samples and declaration


def samples() -> Iterable[Sample]:
    """Yield bags of the first row: all indices are 0."""
    types = {"table": TensorType((9, 20)), "indices": TensorType((7,), "s64"), "offsets": TensorType((3,), "s64")}
    for mode in _MODES:
        yield Sample(mode, EmbeddingBag(mode, padding=2), types, low=0.0)
    yield Sample("factors", EmbeddingBag("sum"), {**types, "factors": TensorType((7,))}, low=0.0)


_OPERANDS = (
    *(Operand(name, "") for name in ("table", "indices", "offsets")),
    Operand("factors", "", optional=True),
)

EMBEDDING_BAG = OpDef(
    name="embedding_bag",
    attrs=EmbeddingBag,
    operands=_OPERANDS,
    category=Category.HOST,
    infer=infer,
    reference=reference,
    pytorch=ByPyTorch(operator, any_strides=lambda attrs: False),
    short="bag",
    samples=samples,
    torch={
        "aten.embedding_bag.default": _import,
        "aten.embedding_bag.padding_idx": _import,
        "aten._embedding_bag.default": _import,
        "aten._embedding_bag_forward_only.default": _import,
        "fmtprop.embedding_bag.default": _import_whole,
    },
)
