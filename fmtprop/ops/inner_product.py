"""Inner product: every output is a dot product of one batch item with one row of the weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import torch
import torch.nn.functional as F

from fmtprop.errors import ShapeError
from fmtprop.ir import Attrs, Bytes, Call, Linear, Onnx, TensorType, Value, Writing
from fmtprop.ir.facets import Absorbs, ByPyTorch, Numbers
from fmtprop.ir.op import Category, Lowering, NativeAttr, Natives, OpDef, Sample
from fmtprop.ops.arguments import computable, transposed
from fmtprop.ops.building import WEIGHTED, Ready, Tensors, primitive_of
from fmtprop.ops.linear import make_matmul, make_pointwise
from fmtprop.ops.matmul import import_product
from fmtprop.ops.regrouping import Regrouping

# ---------------------------------------------------------------- attributes


@dataclass(frozen=True)
class InnerProduct(Attrs):
    """Attributes of an inner product: none.

    oneDNN developer guide, "Inner Product".
    """


# ---------------------------------------------------------------- meaning


def infer(attrs: InnerProduct, types: Mapping[str, TensorType]) -> tuple[TensorType, ...]:
    """Return the type of dst, [N, O]."""
    src, weights = types["src"], types["weights"].dims
    if not 2 <= src.ndim <= 5:
        raise ShapeError(f"src has {src.ndim} axes but an inner product takes 2 to 5: [N, C, …]")
    if len(weights) != src.ndim:
        raise ShapeError(f"weights has {len(weights)} axes but src has {src.ndim}; they must have the same number")
    for axis in range(1, src.ndim):
        if src.dims[axis] != weights[axis]:
            raise ShapeError(
                f"src axis {axis} has {src.dims[axis]} elements but weights axis {axis} has {weights[axis]}"
            )
    bias = types.get("bias")
    if bias is not None and bias.dims != weights[:1]:
        raise ShapeError(f"bias has dims {bias.dims} but the {weights[0]} outputs need ({weights[0]},)")
    return (src.with_dims((src.dims[0], weights[0])),)


def reference(attrs: InnerProduct, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Evaluate in plain PyTorch, in the data type of src."""
    src, bias = tensors["src"], tensors.get("bias")
    weights = tensors["weights"].to(src.dtype)
    return (F.linear(src.flatten(1), weights.flatten(1), None if bias is None else bias.to(src.dtype)),)


def operator(attrs: InnerProduct, tensors: Tensors, results: Sequence[torch.Tensor]) -> Ready:
    """Return PyTorch's operator for it, which writes its result to a tensor."""
    src, weights, bias = tensors["src"].flatten(1), tensors["weights"].flatten(1).t(), tensors.get("bias")
    if src.data_ptr() != tensors["src"].data_ptr() or weights.data_ptr() != tensors["weights"].data_ptr():
        return None  # copies, made once
    if bias is None:
        return partial(torch.mm, src, weights, out=results[0])
    return partial(torch.addmm, bias, src, weights, out=results[0])


def _as_matmul(attrs: InnerProduct, descs: Natives, attr: NativeAttr) -> Lowering:
    """Create the product of the batch items, each a row, with the transposed weights."""
    inputs = tuple(range(1, len(descs["src"].dims)))
    tensors = {"src": ((0,), inputs), "weights": (inputs, (0,)), "bias": ((), (0,)), "dst": ((0,), (1,))}
    return Regrouping("inner_product", tensors).lower(descs, attr, make_matmul)


def _as_convolution(attrs: InnerProduct, descs: Natives, attr: NativeAttr) -> Lowering:
    """Create the 1x1 convolution over the batch items as the positions of one image."""
    inputs = tuple(range(1, len(descs["src"].dims)))
    weights, dst = ((0,), inputs, (), ()), ((), (1,), (0,), ())
    tensors = {"src": ((), inputs, (0,), ()), "weights": weights, "bias": ((0,),), "dst": dst}
    return Regrouping("inner_product", tensors, "acdb").lower(descs, attr, make_pointwise)


# ---------------------------------------------------------------- importers


def _linear(call: Call) -> Value | None:
    src, weights, bias = call["input"], call["weight"], call["bias"]
    if not computable(call, src, weights, bias) or call.type(weights).ndim != 2:
        return None
    if call.type(src).ndim == 2:
        return call.emit("inner_product", {"src": src, "weights": weights, "bias": bias}, InnerProduct())
    return import_product(call, src, transposed(call, weights), bias)


def _addmm(call: Call) -> Value | None:
    bias, src, weights = call["self"], call["mat1"], call["mat2"]
    if not computable(call, src, weights, bias) or call["alpha"] != 1 or call["beta"] != 1:
        return None
    if call.tensor(bias) is not None and call.type(bias).dims == call.type(weights).dims[1:]:
        inputs = {"src": src, "weights": transposed(call, weights), "bias": bias}
        return call.emit("inner_product", inputs, InnerProduct())
    return import_product(call, src, weights, bias)


# ---------------------------------------------------------------- ONNX


def _write(attrs: InnerProduct, w: Writing, operands: Mapping[str, str]) -> str:
    src, weights = operands["src"], operands["weights"]
    outputs, *inputs = w.type(weights).dims
    rows = w.reshaped(src, (w.type(src).dims[0], prod(inputs)))
    return w("Gemm", rows, w.reshaped(weights, (outputs, prod(inputs))), operands.get("bias"), transB=1)


# ---------------------------------------------------------------- samples and declaration


def _problem(src: tuple[int, ...], outputs: int, bias: bool = True) -> dict[str, TensorType]:
    types = {"src": TensorType(src), "weights": TensorType((outputs, *src[1:]))}
    return {**types, "bias": TensorType((outputs,))} if bias else types


def samples() -> Iterable[Sample]:
    """Yield matrices and images, with tails, with and without bias."""
    yield Sample("2d", InnerProduct(), _problem((4, 64), 32))
    yield Sample("2d_odd", InnerProduct(), _problem((3, 17), 19))
    yield Sample("one_row", InnerProduct(), _problem((1, 128), 10))
    yield Sample("one_output", InnerProduct(), _problem((5, 40), 1, bias=False))
    yield Sample("one_input", InnerProduct(), _problem((5, 1), 9))
    yield Sample("3d", InnerProduct(), _problem((2, 16, 9), 8))
    yield Sample("4d", InnerProduct(), _problem((2, 17, 3, 5), 16))
    yield Sample("5d_no_bias", InnerProduct(), _problem((2, 8, 2, 3, 4), 17, bias=False))


INNER_PRODUCT = OpDef(
    name="inner_product",
    attrs=InnerProduct,
    operands=WEIGHTED,
    category=Category.COMPUTE,
    infer=infer,
    reference=reference,
    pytorch=ByPyTorch(operator),
    primitive=primitive_of("InnerProduct"),
    equivalents=(_as_matmul, _as_convolution),
    linear=Linear(lambda src, weights, dst: float(prod(src) * dst[1])),
    numbers=Numbers(bytes=lambda attrs: Bytes.MULTIPLIED, spreads=True),
    absorbs=Absorbs(frozenset({"eltwise", "binary", "sum"})),
    short="fc",
    samples=samples,
    torch={"aten.linear.default": _linear, "aten.addmm.default": _addmm},
    onnx=Onnx(_write),
)
