"""Joining tensors along an axis: oneDNN's concat primitive."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import torch

from fmtprop.errors import ShapeError
from fmtprop.ir import Attrs, Bytes, Call, Category, Cost, Onnx, OpDef, Operand, Sample, Value, each_image_across_axis
from fmtprop.ir.facets import ByPyTorch, Numbers
from fmtprop.ir.types import TensorType
from fmtprop.layout import MemoryDesc
from fmtprop.layout.parts import in_place_parts
from fmtprop.ops.building import Ready, Tensors, is_native, normalised_axis, operand_list, primitive_of, promoted
from fmtprop.ops.view_attrs import permuted, reshaped, windowed

# ---------------------------------------------------------------- attributes


@dataclass(frozen=True)
class Concat(Attrs):
    """Attributes of a concatenation.

    oneDNN developer guide, "Concat".
    """

    #: the axis along which the sources follow each other, from 0
    axis: int

    def __post_init__(self) -> None:
        if self.axis < 0:
            raise ShapeError(f"concat: axis is {self.axis}; count it from the front, from 0")


# ---------------------------------------------------------------- meaning


def infer(attrs: Concat, types: Mapping[str, TensorType]) -> tuple[TensorType, ...]:
    """Return the sources' dimensions, those along the axis added up."""
    sources, axis = operand_list("src", types), attrs.axis
    dims = list(sources[0].dims)
    if axis >= len(dims):
        raise ShapeError(f"src_0 has {len(dims)} dimensions, so there is no axis {axis} to concatenate")
    for index, source in enumerate(sources[1:], 1):
        if source.ndim != len(dims):
            raise ShapeError(f"src_{index} has {source.ndim} dimensions but src_0 has {len(dims)}")
        for other, (have, want) in enumerate(zip(source.dims, dims, strict=True)):
            if other != axis and have != want:
                raise ShapeError(
                    f"src_{index} axis {other} has size {have} but src_0 axis {other} has {want}; "
                    f"only axis {axis} may differ"
                )
        dims[axis] += source.dims[axis]
    return (TensorType(dims, promoted(*sources)),)


def reference(attrs: Concat, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Evaluate in plain PyTorch."""
    return (torch.cat(operand_list("src", tensors), attrs.axis),)


def operator(attrs: Concat, tensors: Tensors, results: Sequence[torch.Tensor]) -> Ready:
    """Return PyTorch's operator for it, which writes its result to a tensor."""
    return partial(torch.cat, operand_list("src", tensors), attrs.axis, out=results[0])


def parts(attrs: Concat, whole: MemoryDesc, types: Mapping[str, TensorType]) -> Mapping[str, MemoryDesc] | None:
    """Return each source's part of the result; None if one would not be dense there."""
    names = [f"src_{index}" for index in range(len(types))]
    if any(types[name].dtype is not whole.dtype for name in names):
        return None
    found = in_place_parts(whole, attrs.axis, [types[name].dims[attrs.axis] for name in names])
    return None if found is None else dict(zip(names, found, strict=True))


# ---------------------------------------------------------------- importers

#: numbers of each tensor from which several tensors are put side by side by a reorder, which moves whole vectors. A
#: concat copies one number after the other (stack of [32, 64, 64] along a new last axis: 1 748 us, with a reorder 104,
#: PyTorch 421)
_MANY_RUNS = 256


def _joined(call: Call, values: list[Value], axis: int) -> Value | None:
    types = [call.type(value) for value in values]
    # PyTorch skips tensors of shape [0] for any rank of the others; oneDNN has no mixed data types here.
    if not is_native(*types) or len({(t.ndim, t.dtype) for t in types}) > 1:
        return None
    if len(values) == 1:
        return values[0]
    outer = types[0].dims[:-1]
    if axis == len(outer) and all(t.dims[axis] == 1 for t in types) and prod(outer) >= _MANY_RUNS:
        rows = _concat(call, [reshaped(call, value, (1, *outer)) for value in values], 0)
        return permuted(call, rows, (*range(1, axis + 1), 0))
    return _concat(call, values, axis)


def _concat(call: Call, values: list[Value], axis: int) -> Value:
    return call.emit("concat", {f"src_{i}": value for i, value in enumerate(values)}, Concat(axis))


def _cat(call: Call) -> Value | None:
    values, result = call["tensors"], call.results[0]
    # a cache of keys and values starts empty
    full: list[Value] = [value for value in values if call.type(value).size]
    if not full or any(call.type(value).dtype is not result.dtype for value in full):
        full = values
    if len(full) == 1 and call.type(full[0]) == result:
        return full[0]
    return _joined(call, full, normalised_axis(call["dim"], result.ndim))


def _roll(call: Call) -> Value | None:
    """Decompose a roll: the last elements of an axis come first. PyTorch's operator copies number by number."""
    value: Value = call["self"]
    dims = call["dims"]
    if not dims or not is_native(call.type(value)):
        return None
    for shift, dim in zip(call["shifts"], dims, strict=True):
        axis = normalised_axis(dim, call.type(value).ndim)
        size = call.type(value).dims[axis]
        first = -shift % size if size else 0
        if first:
            parts = windowed(call, value, axis, first, size - first), windowed(call, value, axis, 0, first)
            value = call.emit("concat", {f"src_{i}": part for i, part in enumerate(parts)}, Concat(axis))
    return value


def _stack(call: Call) -> Value | None:
    values, axis = call["tensors"], normalised_axis(call["dim"], call.results[0].ndim)
    if not is_native(*(call.type(value) for value in values), call.results[0]):
        return None
    dims = call.type(values[0]).dims
    return _joined(call, [reshaped(call, value, (*dims[:axis], 1, *dims[axis:])) for value in values], axis)


# ---------------------------------------------------------------- samples and declaration


def samples() -> Iterable[Sample]:
    """Yield whole and odd channel counts, other axes and many sources."""

    def types(*dims: tuple[int, ...]) -> dict[str, TensorType]:
        return {f"src_{i}": TensorType(d) for i, d in enumerate(dims)}

    yield Sample("channels", Concat(1), types((2, 16, 5, 7), (2, 32, 5, 7)))
    yield Sample("odd_channels", Concat(1), types((2, 17, 5, 7), (2, 3, 5, 7), (2, 8, 5, 7)))
    yield Sample("batch", Concat(0), types((1, 17, 5, 7), (2, 17, 5, 7)))
    yield Sample("width", Concat(3), types((2, 17, 5, 7), (2, 17, 5, 2)))
    yield Sample("rows", Concat(0), types((3, 40), (1, 40)))
    yield Sample("many", Concat(1), types(*[(1, 8, 3, 3)] * 9))
    yield Sample("volume", Concat(1), types((1, 8, 3, 4, 5), (1, 16, 3, 4, 5)))


CONCAT = OpDef(
    name="concat",
    attrs=Concat,
    operands=(Operand("src", "MULTIPLE_SRC", variadic=True),),
    category=Category.MULTI_SRC,
    infer=infer,
    reference=reference,
    pytorch=ByPyTorch(operator),
    primitive=primitive_of("Concat"),
    parts=parts,
    sliced=each_image_across_axis,
    numbers=Numbers(bytes=lambda attrs: Bytes.MOVED),
    cost=Cost(pace=0.65, pytorch=0.6),
    samples=samples,
    torch={
        "aten.cat.default": _cat,
        "aten.concat.default": _cat,
        "aten.concatenate.default": _cat,
        "aten.stack.default": _stack,
        "aten.roll.default": _roll,
    },
    onnx=Onnx(lambda attrs, w, operands: w("Concat", *operand_list("src", operands), axis=attrs.axis), moves=True),
)
