"""A layer of an LSTM whose state is rounded to bytes in each step, and multiplied with bytes as integers.

It is the part of ONNX Runtime's contrib operator "com.microsoft.DynamicQuantizeLSTM" that must be step by step; the
products of the input are those of any rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import ceil, log2
from typing import Final

import torch

from fmtprop.errors import ShapeError
from fmtprop.ir import Attrs, Call, Category, Cost, OpDef, Operand, Reads, Sample, TensorType, Value
from fmtprop.ir.facets import ByPyTorch, Numbers
from fmtprop.layout import DataType
from fmtprop.ops.building import Tensors
from fmtprop.ops.dynamic_quantization import DynamicQuantize
from fmtprop.ops.dynamic_quantization import reference as quantized

#: the rounding of a state: all of its rows have one scale
ROUNDING: Final = DynamicQuantize(0, 255, 255.0, whole=True)


@dataclass(frozen=True)
class LstmBytes(Attrs):
    """Attributes of a layer of one direction; its gates are input, output, forget and cell."""

    #: whether it goes through the sequence from its end
    reverse: bool = False
    #: whether no weight is -128, which has no opposite among bytes: products are faster where they are of 16 bits
    symmetric_weights: bool = False


def infer(attrs: LstmBytes, types: Mapping[str, TensorType]) -> tuple[TensorType, ...]:
    """Return the types of dst, (T, N, H), and of the states after the last step, (N, H).

    src, (T, N, 4 H), has the gates' part from the input, and weights, (4 H, H), a row for each gate of each state;
    sums are those of its rows.
    """
    src, weights = types["src"], types["weights"]
    if src.ndim != 3 or weights.ndim != 2 or not src.dims[2] == weights.dims[0] == 4 * weights.dims[1]:
        raise ShapeError(f"src is {src} and weights are {weights}, but must be (T, N, 4 H) and (4 H, H)")
    states = src.with_dims((src.dims[1], weights.dims[1]))
    gates = TensorType(weights.dims[:1])
    expected = {"src": src.dims, "src_h": states.dims, "src_c": states.dims, "scales": gates.dims}
    for name, dims in expected.items():
        if types[name].dims != dims or types[name].dtype is not DataType.F32:
            raise ShapeError(f"{name} is {types[name]} but must be f32 numbers {dims}")
    if weights.dtype is not DataType.S8 or types["sums"] != gates.with_dtype(DataType.S32):
        raise ShapeError(f"weights are {weights}, sums {types['sums']}; they must be of s8 and s32, a sum for each row")
    return src.with_dims((*src.dims[:2], weights.dims[1])), states, states


def reference(attrs: LstmBytes, tensors: Tensors) -> tuple[torch.Tensor, ...]:
    """Evaluate in plain PyTorch: the integers are exact."""
    src, h, c = (tensors[name] for name in ("src", "src_h", "src_c"))
    weights, sums = tensors["weights"].double().t(), tensors["sums"].double()
    outputs: list[torch.Tensor] = []
    for part in src.flip(0) if attrs.reverse else src:
        codes, scale, zero = quantized(ROUNDING, {"src": h})
        whole = (codes.double() @ weights - zero.double() * sums).to(src.dtype)
        i, o, f, g = (part + whole * (tensors["scales"] * scale)).chunk(4, -1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        outputs.append(h)
    dst = torch.stack(outputs[::-1] if attrs.reverse else outputs) if outputs else src.new_zeros((0, *h.shape))
    return dst, h.clone(), c.clone()


def _factor(operand: str, dims: tuple[int, ...]) -> float:
    """Return a factor for the numbers of a check.

    A state that is rounded the other way then changes the gates by less than its tolerance.
    """
    return 2.0 ** -(10 + ceil(log2(max(dims[0], 1)) / 2)) if operand == "scales" else 1.0


def _sums(weights: torch.Tensor) -> torch.Tensor:
    return weights.sum(1, dtype=torch.int32)


# ---------------------------------------------------------------- importer

_LIBRARY = torch.library.Library("fmtprop", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "lstm_bytes(Tensor src, Tensor src_h, Tensor src_c, Tensor weights, Tensor scales, Tensor sums, bool reverse, "
    "bool symmetric_weights) -> (Tensor, Tensor, Tensor)"
)
_OPERANDS = ("src", "src_h", "src_c", "weights", "scales", "sums")


def _lstm_bytes(*tensors: torch.Tensor | bool) -> tuple[torch.Tensor, ...]:
    *given, reverse, symmetric_weights = tensors
    return reference(LstmBytes(bool(reverse), bool(symmetric_weights)), dict(zip(_OPERANDS, given, strict=True)))  # type: ignore[arg-type]


def _without_data(src: torch.Tensor, h: torch.Tensor, c: torch.Tensor, *others: object) -> tuple[torch.Tensor, ...]:
    return src.new_empty((src.shape[0], *h.shape)), torch.empty_like(h), torch.empty_like(c)


_LIBRARY.impl("lstm_bytes", _lstm_bytes, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
_LIBRARY.impl("lstm_bytes", _without_data, "Meta")  # type: ignore[no-untyped-call]


def _import(call: Call) -> tuple[Value, ...]:
    attrs = LstmBytes(bool(call["reverse"]), bool(call["symmetric_weights"]))
    dst = call.emit("lstm_bytes", {name: call[name] for name in _OPERANDS}, attrs)
    return dst, Value(dst.node, 1), Value(dst.node, 2)


# ---------------------------------------------------------------- samples and declaration


def samples() -> Iterable[Sample]:
    """Yield one and several sequences, both directions, and states that fill no vector."""
    for name, times, batch, states, reverse in (
        ("one", 5, 1, 16, False),
        ("several", 3, 7, 48, True),
        ("odd", 2, 3, 5, False),
    ):
        gates, state = TensorType((4 * states,)), TensorType((batch, states))
        types = {
            "src": TensorType((times, batch, 4 * states)),
            **{"src_h": state, "src_c": state, "weights": TensorType((4 * states, states), "s8")},
            **{"scales": gates, "sums": gates.with_dtype(DataType.S32)},
        }
        yield Sample(name, LstmBytes(reverse), types)


#: operations of the functions of a state's gates; its products are left out, as their number is in no attribute
_OPERATIONS: Final = 100.0

LSTM_BYTES = OpDef(
    name="lstm_bytes",
    attrs=LstmBytes,
    operands=(
        *(Operand(name, "", wide=True) for name in ("src", "src_h", "src_c")),
        *(Operand(name, "", parameter=True) for name in ("weights", "scales", "sums")),
    ),
    results=tuple(Operand(name, "", wide=True) for name in ("dst", "dst_h", "dst_c")),
    category=Category.BANDWIDTH,
    infer=infer,
    reference=reference,
    numbers=Numbers(factor=_factor, made_of=(("sums", "weights", _sums),), spreads=True),
    cost=Cost(lambda attrs, gathered: _OPERATIONS, pytorch=0.02),
    pytorch=ByPyTorch(reads=Reads.ROWS, any_strides=lambda attrs: False),
    short="lstm",
    samples=samples,
    torch={"fmtprop.lstm_bytes.default": _import},
)
