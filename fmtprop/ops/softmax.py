"""Softmax and its logarithm along one axis: oneDNN's softmax primitive."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from fmtprop.errors import ShapeError
from fmtprop.ir import Attrs, Call, Category, Importer, Onnx, OpDef, Operand, Sample, TensorType, Value, Writing
from fmtprop.ir.facets import Absorbs, ByPyTorch, Bytes, Cost, Numbers, Reads, each_image_across_axis
from fmtprop.ir.tensors import torch_dtype
from fmtprop.layout import DataType
from fmtprop.ops.building import Ready, Tensors, is_native, normalised_axis, primitive_of
from fmtprop.ops.reorder import converted

# ---------------------------------------------------------------- attributes

ALGORITHMS = ("accurate", "log")


@dataclass(frozen=True)
class Softmax(Attrs):
    """Attributes of a softmax.

    oneDNN developer guide, "Softmax".
    """

    #: the axis along which the results (their exponentials, for ``"log"``) add up to 1, from 0
    axis: int
    #: oneDNN's algorithm name without ``softmax_``
    alg: str = "accurate"
    #: data type of the result; empty keeps the source's
    dtype: str = ""

    def __post_init__(self) -> None:
        if self.dtype:
            DataType.from_any(self.dtype)
        if self.alg not in ALGORITHMS:
            raise ShapeError(f"softmax has no algorithm {self.alg!r}; it has {', '.join(ALGORITHMS)}")
        if self.axis < 0:
            raise ShapeError(f"softmax: axis is {self.axis}; count it from the front, from 0")


# ---------------------------------------------------------------- meaning


def infer(attrs: Softmax, types: Mapping[str, TensorType]) -> tuple[TensorType, ...]:
    """Return the type of src, in the wanted data type."""
    src = types["src"]
    if attrs.axis >= src.ndim:
        raise ShapeError(f"src has {src.ndim} dimensions, so there is no axis {attrs.axis} for softmax")
    return (src.with_dtype(DataType.from_any(attrs.dtype)) if attrs.dtype else src,)


def reference(attrs: Softmax, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Evaluate in plain PyTorch."""
    function = F.log_softmax if attrs.alg == "log" else F.softmax
    dst = function(tensors["src"], dim=attrs.axis)
    return (dst.to(torch_dtype(DataType.from_any(attrs.dtype))) if attrs.dtype else dst,)


def operator(attrs: Softmax, tensors: Tensors, results: Sequence[torch.Tensor]) -> Ready:
    """Return PyTorch's operator for it, which writes its result to a tensor of the source's data type."""
    if results[0].dtype is not tensors["src"].dtype:
        return None
    function = torch.log_softmax if attrs.alg == "log" else torch.softmax
    return partial(function, tensors["src"], attrs.axis, out=results[0])


def loses(attrs: Softmax) -> frozenset[str]:
    """Return the special values that differ: a row with NaN or inf does not become NaN as a whole."""
    return frozenset({"nan", "inf"})


# ---------------------------------------------------------------- importers


def _softmax(alg: str) -> Importer:
    def importer(call: Call) -> Value | None:
        # With a dtype argument PyTorch converts first, so that the sum is as exact as the result.
        src = converted(call, call["self"], call.results[0].dtype)
        if src is None or not is_native(call.type(src)) or call.args.get("half_to_float"):
            return None
        axis = normalised_axis(call["dim"], call.type(src).ndim)
        return call.emit("softmax", {"src": src}, Softmax(axis, alg))

    return importer


# ---------------------------------------------------------------- ONNX


def _write(attrs: Softmax, w: Writing, operands: Mapping[str, str]) -> str:
    dst = w("LogSoftmax" if attrs.alg == "log" else "Softmax", operands["src"], axis=attrs.axis)
    return w.cast(dst, attrs.dtype) if attrs.dtype else dst


# ---------------------------------------------------------------- samples and declaration


def samples() -> Iterable[Sample]:
    """Yield both algorithms along inner, channel and outer axes."""
    for alg in ALGORITHMS:
        yield Sample(f"{alg}_classes", Softmax(1, alg), {"src": TensorType((3, 1000))}, -4.0, 4.0)
        yield Sample(f"{alg}_channels", Softmax(1, alg), {"src": TensorType((2, 17, 5, 7))}, -4.0, 4.0)
        yield Sample(f"{alg}_scores", Softmax(3, alg), {"src": TensorType((1, 4, 9, 33))}, -4.0, 4.0)
    yield Sample("batch", Softmax(0), {"src": TensorType((5, 40))}, -4.0, 4.0)


SOFTMAX = OpDef(
    name="softmax",
    attrs=Softmax,
    operands=(Operand("src", "SRC"),),
    category=Category.BANDWIDTH,
    infer=infer,
    reference=reference,
    pytorch=ByPyTorch(operator, reads=Reads.ROWS),
    primitive=primitive_of("Softmax"),
    sliced=each_image_across_axis,
    numbers=Numbers(bytes=lambda attrs: Bytes.NORMALIZED if attrs.alg == "accurate" else Bytes.NEVER, loses=loses),
    cost=Cost(lambda attrs, gathered: 30.0, pytorch=0.15, across=0.25),
    absorbs=Absorbs(
        # oneDNN takes binary ones too, but then only its slow reference code is left.
        kinds=frozenset({"eltwise"}),
        wanted=False,
    ),
    inplace=frozenset({"src"}),
    samples=samples,
    torch={
        "aten.softmax.int": _softmax("accurate"),
        "aten._softmax.default": _softmax("accurate"),
        "aten.special_softmax.default": _softmax("accurate"),
        "aten.log_softmax.int": _softmax("log"),
        "aten._log_softmax.default": _softmax("log"),
        "aten.special_log_softmax.default": _softmax("log"),
    },
    onnx=Onnx(_write),
)
