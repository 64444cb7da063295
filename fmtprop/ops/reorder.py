"""Copying a tensor into another format or floating-point type: oneDNN's reorder primitive."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from fmtprop.ir import Attrs, Bytes, Call, Importer, Onnx, TensorType, Value, Writing
from fmtprop.ir.facets import Numbers
from fmtprop.ir.op import Category, Lowering, NativeAttr, Natives, OpDef, Operand, Sample
from fmtprop.ir.tensors import torch_dtype
from fmtprop.layout import DataType, MemoryDesc
from fmtprop.ops.building import is_native, native, primitive_of
from fmtprop.ops.view_attrs import expanded

# ---------------------------------------------------------------- attributes


@dataclass(frozen=True)
class Reorder(Attrs):
    """Attributes of a reorder; the formats are those of its operands, not attributes.

    oneDNN developer guide, "Reorder"; SPEC M7, M9.
    """

    #: data type of the result; empty keeps the source's
    dtype: str = ""

    def __post_init__(self) -> None:
        if self.dtype:
            DataType.from_any(self.dtype)


# ---------------------------------------------------------------- meaning


def infer(attrs: Reorder, types: Mapping[str, TensorType]) -> tuple[TensorType, ...]:
    """Return src's dimensions in the wanted data type."""
    src = types["src"]
    return (src.with_dtype(DataType.from_any(attrs.dtype)) if attrs.dtype else src,)


def reference(attrs: Reorder, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Evaluate in plain PyTorch: a dense copy."""
    src = tensors["src"]
    dtype = torch_dtype(DataType.from_any(attrs.dtype)) if attrs.dtype else src.dtype
    return (src.to(dtype, copy=True, memory_format=torch.contiguous_format),)


def primitive(attrs: Reorder, descs: Natives, attr: NativeAttr) -> Lowering:
    """Create the reorder primitive descriptor.

    oneDNN's reorder has no `any`: a destination without a format gets its source's, so a pure conversion of the data
    type changes no format.
    """
    src, dst = descs["src"], descs["dst"]
    if dst.is_any:
        wanted = src.desc.with_dtype(dst.data_type)
        # The gaps of a slice and the repetition of an expanded tensor are not kept.
        dst = native(wanted if wanted.is_dense else MemoryDesc(wanted.dims, wanted.dtype))
    return primitive_of("Reorder")(attrs, {"src": src, "dst": dst}, attr)


# ---------------------------------------------------------------- importers


def converted(call: Call, value: Value, dtype: DataType) -> Value | None:
    """Return the value in another floating-point type; None if oneDNN must not convert it.

    Float to integer truncates in PyTorch and rounds in oneDNN, so integers are left to the reference target.
    """
    type_ = call.type(value)
    if type_.dtype is dtype:
        return value
    if not is_native(type_, type_.with_dtype(dtype)):
        return None
    return call.emit("reorder", {"src": value}, Reorder(dtype.value))


def _to(operand: str = "self") -> Importer:
    def importer(call: Call) -> Value | None:
        return converted(call, call[operand], call.results[0].dtype)

    return importer


def _copy(call: Call) -> Value | None:
    """Import a copy into a tensor, as a conversion to its type."""
    value = converted(call, call["src"], call.results[0].dtype)
    return None if value is None else expanded(call, value, call.results[0].dims)


# ---------------------------------------------------------------- ONNX


def _write(attrs: Reorder, w: Writing, operands: Mapping[str, str]) -> str:
    src = operands["src"]
    # ONNX has no formats: they are only in the node's metadata
    return w.cast(src, attrs.dtype) if attrs.dtype not in ("", w.type(src).dtype.value) else w("Identity", src)


# ---------------------------------------------------------------- samples and declaration


def samples() -> Iterable[Sample]:
    """Yield a copy and the conversions between f32 and bf16."""
    for dims in ((2, 17, 5, 7), (3, 40)):
        name = f"{len(dims)}d"
        yield Sample(f"copy_{name}", Reorder(), {"src": TensorType(dims)})
        yield Sample(f"to_bf16_{name}", Reorder("bf16"), {"src": TensorType(dims)})
        yield Sample(f"from_bf16_{name}", Reorder("f32"), {"src": TensorType(dims, "bf16")})


REORDER = OpDef(
    name="reorder",
    attrs=Reorder,
    operands=(Operand("src", "FROM"),),
    category=Category.MULTI_SRC,
    infer=infer,
    reference=reference,
    primitive=primitive,
    results=(Operand("dst", "TO"),),
    numbers=Numbers(bytes=lambda attrs: Bytes.CONVERTED),
    samples=samples,
    torch={
        "aten._to_copy.default": _to(),
        "aten.copy.default": _copy,
        "aten.to.dtype": _to(),
        "aten.to.dtype_layout": _to(),
        "aten.to.device": _to(),
        "aten.to.other": _to(),
        "aten.type_as.default": _to(),
        "prims.convert_element_type.default": _to("a"),
    },
    onnx=Onnx(_write, moves=True),
)
