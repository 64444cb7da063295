"""Quantization: real numbers as integers of a few bits, and back; and real numbers rounded to those.

``quantize`` and ``dequantize`` are ONNX's QuantizeLinear and DequantizeLinear, and PyTorch's ``quantized_decomposed``
operators. A pair of them is ``fake_quantize``, from real numbers to real numbers: its result lies on a grid
(:class:`~fmtprop.ir.grid.Grid`), and may be stored as bytes. Quotients are rounded to the nearest integer, half to
even.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any

import torch

from fmtprop.errors import ShapeError, UnsupportedOpError
from fmtprop.ir import Attrs, Bytes, Call, Cost, Grid, Onnx, TensorType, Value, Writing
from fmtprop.ir.facets import Numbers
from fmtprop.ir.op import Category, Lowering, NativeAttr, Natives, OpDef, Operand, PostOpForm, Sample
from fmtprop.ir.tensors import data_type, tensor_type, torch_dtype
from fmtprop.layout import DataType
from fmtprop.ops.building import Tensors
from fmtprop.ops.reorder import primitive as reorder

if TYPE_CHECKING:
    from fmtprop.dnnl import NativeDesc, PostOps

#: types of quantized numbers
_INTEGERS = frozenset({DataType.U8, DataType.S8, DataType.U16, DataType.S16, DataType.S32})

# ---------------------------------------------------------------- attributes


@dataclass(frozen=True)
class Quantize(Attrs):
    """Attributes of a quantization: ``dst = clamp(round(src / scale) + zero_point, low, high)``."""

    dtype: str
    #: `low`, `high`: least and largest integer
    low: int
    high: int
    #: axis along which scales and zero points vary, if there are several
    axis: int = 0

    def __post_init__(self) -> None:
        if DataType.from_any(self.dtype) not in _INTEGERS:
            raise ShapeError(f"quantized numbers are integers of at most 32 bits, not {self.dtype}")
        if not self.low < self.high:
            raise ShapeError(f"the least integer, {self.low}, must be smaller than the largest, {self.high}")


@dataclass(frozen=True)
class Dequantize(Attrs):
    """Attributes of a dequantization: ``dst = (src - zero_point) * scale``."""

    #: axis along which scales and zero points vary, if there are several
    axis: int = 0


@dataclass(frozen=True)
class FakeQuantize(Attrs):
    """Attributes of rounding to a grid: ``dst = clamp(round(src / scale), low, high) * scale``."""

    scale: float
    #: `low`, `high`: least and largest multiple of it
    low: int
    high: int

    def __post_init__(self) -> None:
        if not (self.scale > 0 and isfinite(self.scale)):
            raise ShapeError(f"scale is {self.scale}, but must be positive and finite")
        if not self.low <= 0 <= self.high:
            raise ShapeError(f"0 must lie between the least multiple, {self.low}, and the largest, {self.high}")

    @property
    def grid(self) -> Grid:
        """The grid."""
        return Grid((self.scale,), self.low, self.high)


# ---------------------------------------------------------------- meaning


def _check_parameters(types: Mapping[str, TensorType], axis: int) -> None:
    """Check that there is one scale, or one for each index of an axis, and as many zero points."""
    src, scale, zero = types["src"], types["scale"], types.get("zero_point")
    if scale.size != 1 or scale.ndim > 1:
        if not 0 <= axis < src.ndim:
            raise ShapeError(f"axis {axis} does not exist in src, which has {src.ndim} dimensions")
        if scale.dims != (src.dims[axis],):
            raise ShapeError(f"scale has dims {scale.dims} but src axis {axis} has size {src.dims[axis]}")
    if zero is not None and zero.size != scale.size:
        raise ShapeError(f"zero_point has dims {zero.dims} but scale has dims {scale.dims}")


def infer_quantize(attrs: Quantize, types: Mapping[str, TensorType]) -> tuple[TensorType, ...]:
    """Return src's dims in the integer type."""
    _check_parameters(types, attrs.axis)
    zero = types.get("zero_point")
    if zero is not None and zero.dtype not in (DataType.from_any(attrs.dtype), DataType.S64):
        raise ShapeError(f"zero_point is {zero.dtype} but the integers are {attrs.dtype}")
    return (types["src"].with_dtype(attrs.dtype),)


def infer_dequantize(attrs: Dequantize, types: Mapping[str, TensorType]) -> tuple[TensorType, ...]:
    """Return src's dims in f32."""
    _check_parameters(types, attrs.axis)
    zero = types.get("zero_point")
    if zero is not None and zero.dtype not in (types["src"].dtype, DataType.S64):
        raise ShapeError(f"zero_point is {zero.dtype} but src is {types['src'].dtype}")
    return (types["src"].with_dtype(DataType.F32),)


def infer_fake_quantize(attrs: FakeQuantize, types: Mapping[str, TensorType]) -> tuple[TensorType, ...]:
    """Return src's type."""
    return (types["src"],)


def along(vector: torch.Tensor, src: torch.Tensor, axis: int) -> torch.Tensor:
    """Return scales or zero points in a shape that broadcasts to a tensor."""
    if vector.numel() == 1:
        return vector.reshape(())
    return vector.reshape([-1 if place == axis else 1 for place in range(src.ndim)])


def reference_quantize(attrs: Quantize, tensors: Tensors) -> tuple[torch.Tensor, ...]:
    """Evaluate in plain PyTorch."""
    src, zero = tensors["src"].float(), tensors.get("zero_point")
    rounded = torch.round(src / along(tensors["scale"].float(), src, attrs.axis))
    if zero is not None:
        rounded = rounded + along(zero.float(), src, attrs.axis)
    return (rounded.clamp(attrs.low, attrs.high).to(torch.int32).to(torch_dtype(DataType.from_any(attrs.dtype))),)


def reference_dequantize(attrs: Dequantize, tensors: Tensors) -> tuple[torch.Tensor, ...]:
    """Evaluate in plain PyTorch."""
    src, zero = tensors["src"], tensors.get("zero_point")
    numbers = src.float()
    if zero is not None:
        numbers = numbers - along(zero.float(), src, attrs.axis)
    return (numbers * along(tensors["scale"].float(), src, attrs.axis),)


def reference_fake_quantize(attrs: FakeQuantize, tensors: Tensors) -> tuple[torch.Tensor, ...]:
    """Evaluate in plain PyTorch."""
    scale = torch.tensor(attrs.scale, dtype=torch.float32)
    return (torch.round(tensors["src"] / scale).clamp_(attrs.low, attrs.high).mul_(scale),)


def to_bytes(numbers: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Return the bytes of the grid's numbers that are nearest to given numbers."""
    rounded = torch.round(_wide(numbers) / _scales(grid)).clamp_(grid.low, grid.high) + grid.zero
    return rounded.to(torch_dtype(grid.stored))


def to_reals(numbers: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Return the numbers of a grid for which bytes stand."""
    return (_wide(numbers) - grid.zero) * _scales(grid)


def _wide(numbers: torch.Tensor) -> torch.Tensor:
    return numbers if numbers.dtype is torch.float64 else numbers.float()


def _scales(grid: Grid) -> torch.Tensor:
    return torch.tensor(grid.scales, dtype=torch.float32).reshape(grid.shape)


def _primitive(attrs: FakeQuantize, descs: Natives, attr: NativeAttr) -> Lowering:
    """Create the reorder to bytes."""
    if descs["dst"].data_type not in (DataType.U8, DataType.S8):
        raise UnsupportedOpError("fake_quantize: oneDNN rounds in a reorder to bytes, not in one to f32")
    return reorder(attrs, descs, attr)  # type: ignore[arg-type]  # a reorder's formats are its only attributes


def _append(attrs: FakeQuantize, tail: PostOps, operands: Sequence[NativeDesc], dtype: DataType) -> None:
    tail.append_eltwise("eltwise_linear", 1 / attrs.scale, 0.0).append_eltwise("eltwise_round")
    tail.append_eltwise("eltwise_clip", attrs.low, attrs.high).append_eltwise("eltwise_linear", attrs.scale, 0.0)


# ---------------------------------------------------------------- importers

#: calls that stand for ONNX's operators: PyTorch's own compute with the reciprocal of the scale
_LIBRARY = torch.library.Library("fmtprop", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "quantize(Tensor src, Tensor scale, Tensor? zero_point, int axis, int low, int high, ScalarType dtype) -> Tensor"
)
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "dequantize(Tensor src, Tensor scale, Tensor? zero_point, int axis) -> Tensor"
)


def _operands_of_quantize(
    src: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    axis: int,
    low: int,
    high: int,
    dtype: torch.dtype,
) -> tuple[Quantize, dict[str, torch.Tensor]]:
    """Return the op of a call and its tensors, whose shapes fit."""
    attrs, tensors = Quantize(data_type(dtype).value, low, high, axis), _present(src=src, scale=scale, zero_point=zero)
    infer_quantize(attrs, {name: tensor_type(tensor) for name, tensor in tensors.items()})
    return attrs, tensors


def _operands_of_dequantize(
    src: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, axis: int
) -> tuple[Dequantize, dict[str, torch.Tensor]]:
    """Return the op of a call and its tensors, whose shapes fit."""
    attrs, tensors = Dequantize(axis), _present(src=src, scale=scale, zero_point=zero)
    infer_dequantize(attrs, {name: tensor_type(tensor) for name, tensor in tensors.items()})
    return attrs, tensors


def _quantize(*call: Any) -> torch.Tensor:
    return reference_quantize(*_operands_of_quantize(*call))[0]


def _dequantize(*call: Any) -> torch.Tensor:
    return reference_dequantize(*_operands_of_dequantize(*call))[0]


def _quantize_without_data(*call: Any) -> torch.Tensor:
    attrs, tensors = _operands_of_quantize(*call)
    return torch.empty(tensors["src"].shape, dtype=torch_dtype(DataType(attrs.dtype)), device="meta")


def _dequantize_without_data(*call: Any) -> torch.Tensor:
    _, tensors = _operands_of_dequantize(*call)
    return torch.empty(tensors["src"].shape, dtype=torch.float32, device="meta")


def _present(**tensors: torch.Tensor | None) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


_LIBRARY.impl("quantize", _quantize, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
_LIBRARY.impl("dequantize", _dequantize, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
# the steps of a meaning without data would need PyTorch's compiler, whose import takes 2 s
_LIBRARY.impl("quantize", _quantize_without_data, "Meta")  # type: ignore[no-untyped-call]
_LIBRARY.impl("dequantize", _dequantize_without_data, "Meta")  # type: ignore[no-untyped-call]


def _import_quantize(call: Call) -> Value | None:
    attrs = Quantize(call["dtype"].value, call["low"], call["high"], call["axis"])
    inputs = {"src": call["src"], "scale": call["scale"], "zero_point": call["zero_point"]}
    return call.emit("quantize", inputs, attrs)


def _import_dequantize(call: Call) -> Value | None:
    inputs = {"src": call["src"], "scale": call["scale"], "zero_point": call["zero_point"]}
    return call.emit("dequantize", inputs, Dequantize(call["axis"]))


#: types of numbers that stand for a scale and a zero point
_KINDS = {"scale": "f32", "zero_point": "s64"}


def _vectors(call: Call, scale: str, zero: str) -> dict[str, Value]:
    """Return scale and zero point of one of PyTorch's calls: numbers, or vectors."""
    found = {name: one for name, one in (("scale", call[scale]), ("zero_point", call[zero])) if one is not None}
    return {name: one if isinstance(one, Value) else call.constant(one, _KINDS[name]) for name, one in found.items()}


def _from_pytorch(scale: str, zero: str) -> Callable[[Call], Value | None]:
    def importer(call: Call) -> Value | None:
        src, dtype = call["input"], call["dtype"]
        if call.type(src).dtype is not DataType.F32 or dtype not in _INTEGERS:
            return None
        attrs = Quantize(dtype.value, call["quant_min"], call["quant_max"], call.args.get("axis", 0))
        return call.emit("quantize", {"src": src, **_vectors(call, scale, zero)}, attrs)

    return importer


def _to_pytorch(scale: str, zero: str) -> Callable[[Call], Value | None]:
    def importer(call: Call) -> Value | None:
        src = call["input"]
        if call.type(src).dtype not in _INTEGERS or call.results[0].dtype is not DataType.F32:
            return None
        attrs = Dequantize(call.args.get("axis", 0))
        return call.emit("dequantize", {"src": src, **_vectors(call, scale, zero)}, attrs)

    return importer


#: limits of integers of a byte
_LIMITS = {DataType.U8: (0, 255), DataType.S8: (-128, 127)}


def _simulated(call: Call) -> Value | None:
    """Import PyTorch's own pair, as modules of NNCF and of quantization-aware training have it."""
    src, low, high = call["self"], call["quant_min"], call["quant_max"]
    fitting = [dtype for dtype, (least, largest) in _LIMITS.items() if least <= low < high <= largest]
    if call.type(src).dtype is not DataType.F32 or not fitting:
        return None
    if "fake_quant_enabled" in call.args and call.scalar(call["fake_quant_enabled"]) != 1:
        return None
    parameters, axis = _vectors(call, "scale", "zero_point"), call.args.get("axis", 0)
    if call.type(parameters["zero_point"]).dtype is not DataType.S64:
        zeros = call.tensor(parameters["zero_point"])
        if zeros is None:
            return None
        parameters["zero_point"] = call.constant(zeros.long().tolist(), "s64")
    stored = call.emit("quantize", {"src": src, **parameters}, Quantize(fitting[0].value, low, high, axis))
    return call.emit("dequantize", {"src": stored, **parameters}, Dequantize(axis))


def decompressed(call: Call, alg: str, a: Value, b: Value) -> Value | None:
    """Import a product of constant integers and scales, or what zeros of integers leave, as NNCF writes weights."""
    result, second = call.results[0], call.tensor(b)
    if second is None or result.dtype is not DataType.F32 or call.type(a).dims != result.dims:
        return None
    if alg == "sub" and call.type(a) == result and not second.any():
        return a
    dims = (1,) * (result.ndim - second.ndim) + tuple(second.shape)
    axes = [axis for axis, size in enumerate(dims) if size > 1]
    is_scale = second.dtype is torch.float32 and len(axes) <= 1 and bool((second.isfinite() & (second > 0)).all())
    if alg != "mul" or call.type(a).dtype not in _LIMITS or call.tensor(a) is None or not is_scale:
        return None
    scale = call.constant(second.flatten().tolist() if axes else second.item())
    return call.emit("dequantize", {"src": a, "scale": scale}, Dequantize(axes[0] if axes else 0))


# ---------------------------------------------------------------- ONNX


def _write_quantize(attrs: Quantize, w: Writing, operands: Mapping[str, str]) -> str:
    axis = None if w.type(operands["scale"]).size == 1 else attrs.axis
    zero = operands.get("zero_point")
    if zero is None:
        dims = w.type(operands["scale"]).dims
        zero = w.constant([0] * dims[0] if dims else 0, attrs.dtype)
    zero = w.cast(zero, attrs.dtype)
    dst = w("QuantizeLinear", operands["src"], operands["scale"], zero, axis=axis)
    whole = torch.iinfo(torch_dtype(DataType.from_any(attrs.dtype)))
    if (attrs.low, attrs.high) == (whole.min, whole.max):
        return dst
    return w("Clip", dst, w.constant(attrs.low, attrs.dtype), w.constant(attrs.high, attrs.dtype))


def _write_dequantize(attrs: Dequantize, w: Writing, operands: Mapping[str, str]) -> str:
    axis = None if w.type(operands["scale"]).size == 1 else attrs.axis
    src, zero = operands["src"], operands.get("zero_point")
    zero = None if zero is None else w.cast(zero, w.type(src).dtype.value)
    return w("DequantizeLinear", src, operands["scale"], zero, axis=axis)


def _write_fake_quantize(attrs: FakeQuantize, w: Writing, operands: Mapping[str, str]) -> str:
    grid = attrs.grid
    scale, zero = w.constant(attrs.scale, "f32"), w.constant(grid.zero, grid.stored.value)
    dst = w("QuantizeLinear", operands["src"], scale, zero)
    if not grid.is_full:
        ends = (attrs.low + grid.zero, attrs.high + grid.zero)
        dst = w("Clip", dst, *(w.constant(end, grid.stored.value) for end in ends))
    return w("DequantizeLinear", dst, scale, zero)


# ---------------------------------------------------------------- samples and declarations


def _parameters(src: TensorType, count: int, zero: DataType | None) -> dict[str, TensorType]:
    dims = (count,) if count > 1 else ()
    types = {"src": src, "scale": TensorType(dims)}
    return types if zero is None else {**types, "zero_point": TensorType(dims, zero)}


def samples_quantize() -> Iterable[Sample]:
    """Yield one scale, and one per channel, with and without zero points."""
    src = TensorType((2, 17, 5, 7))
    yield Sample("u8", Quantize("u8", 0, 255), _parameters(src, 1, DataType.U8), 0.5, 2.0)
    yield Sample("s8_channels", Quantize("s8", -128, 127, 1), _parameters(src, 17, None), 0.5, 2.0)


def samples_dequantize() -> Iterable[Sample]:
    """Yield one scale, and one per channel, with and without zero points."""
    yield Sample("u8", Dequantize(), _parameters(TensorType((2, 17, 5, 7), "u8"), 1, DataType.U8))
    yield Sample("s8_channels", Dequantize(0), _parameters(TensorType((17, 5), "s8"), 17, None))


def samples_fake_quantize() -> Iterable[Sample]:
    """Yield signed, unsigned and shifted grids."""
    src = {"src": TensorType((2, 17, 5, 7))}
    yield Sample("unsigned", FakeQuantize(0.0625, 0, 255), src)
    yield Sample("signed", FakeQuantize(0.0625, -128, 127), src)
    yield Sample("shifted", FakeQuantize(0.0625, -117, 138), src)


_PARAMETERS = (Operand("scale", "", parameter=True), Operand("zero_point", "", optional=True, parameter=True))

QUANTIZE = OpDef(
    name="quantize",
    attrs=Quantize,
    operands=(Operand("src", "SRC"), *_PARAMETERS),
    category=Category.BANDWIDTH,
    infer=infer_quantize,
    reference=reference_quantize,
    numbers=Numbers(positive=lambda attrs: frozenset({"scale"})),
    cost=Cost(lambda attrs, gathered: 4.0, pytorch=0.1),
    samples=samples_quantize,
    torch={
        "fmtprop.quantize.default": _import_quantize,
        "quantized_decomposed.quantize_per_tensor.default": _from_pytorch("scale", "zero_point"),
        "quantized_decomposed.quantize_per_tensor.tensor": _from_pytorch("scale", "zero_point"),
        "quantized_decomposed.quantize_per_channel.default": _from_pytorch("scales", "zero_points"),
    },
    onnx=Onnx(_write_quantize),
)

DEQUANTIZE = OpDef(
    name="dequantize",
    attrs=Dequantize,
    operands=(Operand("src", "SRC"), *_PARAMETERS),
    category=Category.BANDWIDTH,
    infer=infer_dequantize,
    reference=reference_dequantize,
    cost=Cost(lambda attrs, gathered: 2.0, pytorch=0.2),
    samples=samples_dequantize,
    torch={
        "fmtprop.dequantize.default": _import_dequantize,
        "quantized_decomposed.dequantize_per_tensor.default": _to_pytorch("scale", "zero_point"),
        "quantized_decomposed.dequantize_per_tensor.tensor": _to_pytorch("scale", "zero_point"),
        "quantized_decomposed.dequantize_per_channel.default": _to_pytorch("scales", "zero_points"),
        "aten.fake_quantize_per_tensor_affine.default": _simulated,
        "aten.fake_quantize_per_tensor_affine.tensor_qparams": _simulated,
        "aten.fake_quantize_per_tensor_affine_cachemask.default": _simulated,
        "aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default": _simulated,
        "aten.fake_quantize_per_channel_affine.default": _simulated,
        "aten.fake_quantize_per_channel_affine_cachemask.default": _simulated,
    },
    onnx=Onnx(_write_dequantize),
)

FAKE_QUANTIZE = OpDef(
    name="fake_quantize",
    attrs=FakeQuantize,
    operands=(Operand("src", "FROM"),),
    category=Category.BANDWIDTH,
    infer=infer_fake_quantize,
    reference=reference_fake_quantize,
    primitive=_primitive,
    results=(Operand("dst", "TO"),),
    elementwise=True,
    numbers=Numbers(bytes=lambda attrs: Bytes.CONVERTED, loses=lambda attrs: frozenset({"nan"})),
    cost=Cost(lambda attrs, gathered: 4.0, pytorch=0.1),
    as_post_op=PostOpForm("eltwise", _append),
    short="round",
    samples=samples_fake_quantize,
    onnx=Onnx(_write_fake_quantize),
)
