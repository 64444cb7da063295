"""Matrix product of (batches of) matrices.

A matrix that multiplies a whole batch is lowered to one product over all the rows of the batch; that product is also
offered as inner product and as 1x1 convolution.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import torch

from fmtprop.errors import ShapeError, UnsupportedOpError
from fmtprop.ir import Attrs, Bytes, Call, Importer, Linear, Onnx, TensorType, Value, Writing
from fmtprop.ir.facets import Absorbs, ByPyTorch, Numbers
from fmtprop.ir.op import Category, Lowering, NativeAttr, Natives, OpDef, Operand, Sample
from fmtprop.layout import DataType
from fmtprop.ops.arguments import computable, transposed
from fmtprop.ops.binary import Binary
from fmtprop.ops.building import Ready, Tensors, primitive_of
from fmtprop.ops.einsum import import_einsum
from fmtprop.ops.eltwise import Eltwise
from fmtprop.ops.linear import make_inner_product, make_matmul, make_pointwise
from fmtprop.ops.reduction import Reduction
from fmtprop.ops.regrouping import Regrouping
from fmtprop.ops.reorder import Reorder
from fmtprop.ops.softmax import Softmax
from fmtprop.ops.view_attrs import reshaped

#: a number that is finite in all data types of oneDNN's products
_LARGEST = float(torch.finfo(torch.bfloat16).max)

#: larger than 2^-64 times that number
_HIDDEN = 1e30

# ---------------------------------------------------------------- attributes


@dataclass(frozen=True)
class MatMul(Attrs):
    """Attributes of a matrix product: none; transposition is a `permute` view of the operand.

    oneDNN developer guide, "Matrix Multiplication".
    """


# ---------------------------------------------------------------- meaning


def infer(attrs: MatMul, types: Mapping[str, TensorType]) -> tuple[TensorType, ...]:
    """Return the type of dst, [..., M, N].

    ``src`` is [..., M, K], ``weights`` [..., K, N]: as many axes, batch sizes equal or 1; or two axes, and then the
    same matrix multiplies the whole batch. ``bias`` has dst's number of axes, each of dst's size or 1.
    """
    src, weights = types["src"], types["weights"].dims
    if src.ndim < 2 or len(weights) < 2:
        raise ShapeError(f"src has {src.ndim} and weights {len(weights)} axes; both need 2 or more: reshape vectors")
    if len(weights) not in (2, src.ndim):
        raise ShapeError(f"weights has {len(weights)} axes but src has {src.ndim}: expected 2 or {src.ndim}")
    if src.dims[-1] != weights[-2]:
        raise ShapeError(
            f"src axis {src.ndim - 1} has {src.dims[-1]} elements but weights axis {len(weights) - 2} has {weights[-2]}"
        )
    batch = src.dims[:-2]
    if len(weights) > 2:
        batch = tuple(_broadcast(axis, *sizes) for axis, sizes in enumerate(zip(batch, weights, strict=False)))
    dst = (*batch, src.dims[-2], weights[-1])
    bias = types.get("bias")
    if bias is not None:
        fits = bias.ndim == len(dst) and all(b in (1, d) for b, d in zip(bias.dims, dst, strict=True))
        if not fits:
            raise ShapeError(f"bias has dims {bias.dims} but dst {dst} needs as many axes, each of the same size or 1")
    return (src.with_dims(dst),)


def _broadcast(axis: int, left: int, right: int) -> int:
    if left != right and 1 not in (left, right):
        raise ShapeError(
            f"src axis {axis} has {left} elements but weights axis {axis} has {right}; equal or 1 is needed"
        )
    return right if left == 1 else left


def reference(attrs: MatMul, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Evaluate in plain PyTorch, in the data type of src."""
    src = tensors["src"]
    dst = torch.matmul(src, tensors["weights"].to(src.dtype))
    return (dst + tensors["bias"].to(src.dtype) if "bias" in tensors else dst,)


def operator(attrs: MatMul, tensors: Tensors, results: Sequence[torch.Tensor]) -> Ready:
    """Return PyTorch's operator for it, which writes its result to a tensor."""
    src, weights, bias = tensors["src"], tensors["weights"], tensors.get("bias")
    if bias is None:
        return partial(torch.matmul, src, weights, out=results[0])
    return partial(torch.addmm, bias, src, weights, out=results[0]) if src.ndim == 2 else None


# ---------------------------------------------------------------- primitive


def primitive(attrs: MatMul, descs: Natives, attr: NativeAttr) -> Lowering:
    """Create the matrix product's primitive descriptor.

    If one matrix multiplies a whole batch, all leading axes of src, bias, dst and the second sources of binary post-ops
    become one axis; `any` means row-major for src and dst then.

    Raises FormatError if the format of src or dst cannot express its leading axes as one.
    """
    ndim = len(descs["src"].dims)
    if 0 in descs["weights"].dims[-2:-1]:
        raise UnsupportedOpError("matmul: sums of nothing are 0, which oneDNN does not write; PyTorch does")
    if len(descs["weights"].dims) == ndim:
        return primitive_of("Matmul")(attrs, descs, attr)
    rows = (tuple(range(ndim - 1)), (ndim - 1,))
    tensors = {"src": rows, "weights": ((0,), (1,)), "bias": rows, "dst": rows}
    return Regrouping("matmul", tensors).lower(descs, attr, make_matmul)


def _as_inner_product(attrs: MatMul, descs: Natives, attr: NativeAttr) -> Lowering:
    """Create the inner product over the rows of src."""
    _check_linear(descs)
    last = len(descs["src"].dims) - 1
    rows = (tuple(range(last)), (last,))
    tensors = {"src": rows, "weights": ((1,), (0,)), "bias": (tuple(range(last + 1)),), "dst": rows}
    return Regrouping("matmul", tensors).lower(descs, attr, make_inner_product)


def _as_convolution(attrs: MatMul, descs: Natives, attr: NativeAttr) -> Lowering:
    """Create the convolution over the rows of src as the positions of one image."""
    _check_linear(descs)
    last = len(descs["src"].dims) - 1
    image = ((), (last,), tuple(range(last)), ())
    weights = ((1,), (0,), (), ())
    tensors = {"src": image, "weights": weights, "bias": (tuple(range(last + 1)),), "dst": image}
    return Regrouping("matmul", tensors, "acdb").lower(descs, attr, make_pointwise)


def _check_linear(descs: Natives) -> None:
    """Check that one matrix multiplies all rows and that the bias is one row."""
    weights, bias = descs["weights"].dims, descs.get("bias")
    if len(weights) != 2:
        raise UnsupportedOpError(f"matmul: weights of dims {weights} differ from batch to batch; only matmul has that")
    if bias is not None and prod(bias.dims) != weights[1]:
        raise UnsupportedOpError(f"matmul: a bias of dims {bias.dims} is no row of {weights[1]}; only matmul has that")
    if bias is not None and bias.dims[-1] != weights[1]:
        raise UnsupportedOpError(f"matmul: a bias of dims {bias.dims} is a column; only matmul has that")


# ---------------------------------------------------------------- importers


def with_rank(call: Call, value: Value, ndim: int) -> Value:
    """Return the value with ones in front up to `ndim` axes."""
    dims = call.type(value).dims
    return reshaped(call, value, (*(1,) * (ndim - len(dims)), *dims))


def _batch(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
    """Return the sizes of the batch axes after broadcasting."""
    ndim = max(len(left), len(right))
    padded = ((1,) * (ndim - len(dims)) + dims for dims in (left, right))
    return tuple(_broadcast(axis, *sizes) for axis, sizes in enumerate(zip(*padded, strict=True)))


def import_product(call: Call, src: Value, weights: Value, bias: Value | None = None) -> Value | None:
    """Emit a matrix product with the meaning of ``torch.matmul``: vectors, broadcast of missing batch axes.

    `src`, `weights`: left and right factor, of rank 1 or more.
    """
    if not computable(call, src, weights, bias) or call.type(src).dims[-1] == 0:
        return None  # oneDNN does not write sums without summands
    left, right = call.type(src).dims, call.type(weights).dims
    result = (*_batch(left[:-2], right[:-2]), *left[-2:-1], *(right[-1:] if len(right) > 1 else ()))
    if len(right) == 1:
        weights = reshaped(call, weights, (*right, 1))
    ndim = max(len(left), call.type(weights).ndim)
    src = with_rank(call, src, ndim)
    if call.type(weights).ndim != 2:
        weights = with_rank(call, weights, ndim)
    if bias is None:
        return reshaped(call, call.emit("matmul", {"src": src, "weights": weights}, MatMul()), result)
    bias = with_rank(call, bias, ndim)
    *lead, last = call.type(bias).dims
    if set(lead) <= {1} and last == call.type(weights).dims[-1]:
        return reshaped(call, call.emit("matmul", {"src": src, "weights": weights, "bias": bias}, MatMul()), result)
    # oneDNN's fast kernels take only a row as bias; other summands are a post-op
    dst = call.emit("matmul", {"src": src, "weights": weights}, MatMul())
    return reshaped(call, call.emit("binary", {"src_0": dst, "src_1": bias}, Binary("add")), result)


def _product(left: str, right: str) -> Importer:
    def importer(call: Call) -> Value | None:
        return import_product(call, call[left], call[right])

    return importer


def _einsum(call: Call) -> Value | None:
    return import_einsum(call, import_product)


def _baddbmm(call: Call) -> Value | None:
    src, weights, bias = call["batch1"], call["batch2"], call["self"]
    alpha, beta = call["alpha"], call["beta"]
    if not computable(call, src, weights, bias) or beta not in (0, 1) or (beta and alpha != 1):
        return None
    dst = import_product(call, src, weights, bias if beta else None)
    if dst is None or alpha == 1:
        return dst
    return call.emit("eltwise", {"src": dst}, Eltwise("linear", float(alpha)))


def _attention_mask(call: Call, ndim: int) -> Value | bool | None:
    """Return the additive mask of an attention call with `ndim` axes; False without a mask, None to decline."""
    mask, dtype = call["attn_mask"], call.type(call["query"]).dtype.value
    if call["is_causal"]:
        if mask is not None:
            return None
        rows, columns = call.type(call["query"]).dims[-2], call.type(call["key"]).dims[-2]
        allowed = torch.ones(rows, columns, dtype=torch.bool).tril()
        return call.constant(_additive(allowed, ndim).tolist(), dtype)
    if mask is None:
        return False
    if call.type(mask).ndim > ndim:
        return None
    if call.type(mask).dtype is DataType.BOOLEAN:
        known = call.tensor(mask)
        if known is not None and not bool(known.any(-1).all()):
            return None  # a row without visible keys is 0 in PyTorch, but its softmax would be NaN
        if known is not None:
            return call.constant(_additive(known, ndim).tolist(), dtype)
        ones = with_rank(call, call.emit("reorder", {"src": mask}, Reorder(dtype)), ndim)
        return call.emit("eltwise", {"src": ones}, Eltwise("linear", _LARGEST, -_LARGEST))
    return with_rank(call, mask, ndim) if computable(call, mask) else None


def _additive(allowed: torch.Tensor, ndim: int) -> torch.Tensor:
    mask = torch.zeros(allowed.shape).masked_fill(~allowed, -torch.inf)
    return mask.reshape((1,) * (ndim - mask.ndim) + mask.shape)


def _attention(call: Call) -> Value | None:
    """Decompose scaled dot product attention: softmax(query · keyᵀ · scale + mask) · value.

    If several heads of the query read one head of key and value, one product has the rows of all of them, so no head is
    repeated. As in PyTorch, a row with a computed mask of only -inf has the result 0: padded batches have such rows.
    """
    query, key, value = call["query"], call["key"], call["value"]
    ndim = call.type(query).ndim
    if call["dropout_p"] or not computable(call, query, key, value):
        return None
    if ndim < 3 or any(call.type(tensor).ndim != ndim or not call.type(tensor).size for tensor in (key, value)):
        return None
    *lead, heads, rows, width = call.type(query).dims
    key_heads, columns = call.type(key).dims[-3:-1]
    if any(call.type(tensor).dims[:-2] != (*lead, key_heads) for tensor in (key, value)) or heads % key_heads:
        return None
    mask = _attention_mask(call, ndim)
    if mask is None:
        return None
    scale = call["scale"]
    one_product = (*lead, key_heads, heads // key_heads * rows)
    query = reshaped(call, query, (*one_product, width))
    scores = call.emit("matmul", {"src": query, "weights": transposed(call, key)}, MatMul())
    scores = reshaped(call, scores, (*lead, heads, rows, columns))
    factor = width**-0.5 if scale is None else float(scale)
    scores = call.emit("eltwise", {"src": scores}, Eltwise("linear", factor))
    # look at the given mask too: the numbers of a reshaped constant are not known
    known = isinstance(mask, Value) and any(_shows_each_row(call, one) for one in (mask, call["attn_mask"] or mask))
    hiding = mask if isinstance(mask, Value) and not known else None
    if isinstance(mask, Value):
        scores = call.emit("binary", {"src_0": scores, "src_1": mask}, Binary("add"))
    # made of a boolean mask that is computed: rows of a constant one are known
    is_finite = hiding is not None and call.type(call["attn_mask"]).dtype is DataType.BOOLEAN
    if hiding is not None and not is_finite:  # softmax of -inf alone would be NaN
        scores = call.emit("eltwise", {"src": scores}, Eltwise("clip", -_LARGEST, math.inf))
    weights = call.emit("softmax", {"src": scores}, Softmax(ndim - 1))
    weights = reshaped(call, weights, (*one_product, columns))
    dst = call.emit("matmul", {"src": weights, "weights": value}, MatMul())
    dst = reshaped(call, dst, (*lead, heads, rows, call.type(value).dims[-1]))
    if hiding is None:
        return dst
    visible = _visible(call, hiding, is_finite=is_finite)
    return call.emit("binary", {"src_0": dst, "src_1": visible}, Binary("mul"))


def _shows_each_row(call: Call, mask: Value) -> bool:
    """Return whether each row of an additive mask is known to have a finite number."""
    known = call.tensor(mask)
    return known is not None and bool((known > -math.inf).any(-1).all())


def _visible(call: Call, mask: Value, *, is_finite: bool) -> Value:
    """Return 1 for each row of an additive mask that has another number than -inf, or the least one, 0 for others."""
    ndim = call.type(mask).ndim
    value = call.emit("reduction", {"src": mask}, Reduction("max", (ndim - 1,)))
    # the factor 2^-64 separates -inf from the least finite number, which models use to hide padding
    apart = Eltwise("linear", 2.0**-64), Eltwise("clip", -_HIDDEN, 0.0), Eltwise("linear", 1 / _HIDDEN, 1.0)
    exact = Eltwise("clip", -1.0, 0.0), Eltwise("linear", 1.0, 1.0)  # of 0 and the least number
    for step in exact if is_finite else apart:
        value = call.emit("eltwise", {"src": value}, step)
    return value


def _attention_with_statistics(call: Call) -> tuple[Value | None, ...] | None:
    dst = _attention(call)
    return None if dst is None else (dst, None)


# ---------------------------------------------------------------- ONNX


def _write(attrs: MatMul, w: Writing, operands: Mapping[str, str]) -> str:
    dst = w("MatMul", operands["src"], operands["weights"])
    return w("Add", dst, operands["bias"]) if "bias" in operands else dst


# ---------------------------------------------------------------- samples and declaration


def _problem(src: Sequence[int], weights: Sequence[int], bias: Sequence[int] | None = None) -> dict[str, TensorType]:
    types = {"src": TensorType(src), "weights": TensorType(weights)}
    return types if bias is None else {**types, "bias": TensorType(bias)}


def samples() -> Iterable[Sample]:
    """Yield single, batched and broadcast products with tails, and one matrix for a whole batch."""
    yield Sample("2d", MatMul(), _problem((16, 32), (32, 48), (1, 48)))
    yield Sample("2d_odd", MatMul(), _problem((3, 17), (17, 19)))
    yield Sample("column_bias", MatMul(), _problem((5, 16), (16, 8), (5, 1)))
    yield Sample("vector", MatMul(), _problem((1, 40), (40, 7)))
    yield Sample("one_input", MatMul(), _problem((9, 1), (1, 7), (1, 7)))
    yield Sample("batch", MatMul(), _problem((4, 9, 16), (4, 16, 13)))
    yield Sample("batch_bias", MatMul(), _problem((3, 8, 16), (3, 16, 24), (1, 1, 24)))
    yield Sample("heads", MatMul(), _problem((2, 3, 10, 16), (2, 3, 16, 10)))
    yield Sample("broadcast_weights", MatMul(), _problem((3, 6, 8), (1, 8, 5)))
    yield Sample("broadcast_src", MatMul(), _problem((1, 6, 8), (3, 8, 5)))
    yield Sample("one_matrix", MatMul(), _problem((2, 7, 32), (32, 24), (1, 1, 24)))
    yield Sample("one_matrix_4d", MatMul(), _problem((2, 3, 5, 17), (17, 16)))


MATMUL = OpDef(
    name="matmul",
    attrs=MatMul,
    operands=(
        Operand("src", "SRC"),
        Operand("weights", "WEIGHTS"),
        Operand("bias", "BIAS", optional=True, parameter=True),
    ),
    category=Category.COMPUTE,
    infer=infer,
    reference=reference,
    pytorch=ByPyTorch(operator),
    primitive=primitive,
    equivalents=(_as_inner_product, _as_convolution),
    linear=Linear(lambda src, weights, dst: float(prod(dst) * src[-1]), by_columns=True),
    numbers=Numbers(bytes=lambda attrs: Bytes.MULTIPLIED, spreads=True),
    absorbs=Absorbs(frozenset({"eltwise", "binary", "sum"})),
    samples=samples,
    torch={
        "aten.mm.default": _product("self", "mat2"),
        "aten.bmm.default": _product("self", "mat2"),
        "aten.mv.default": _product("self", "vec"),
        "aten.matmul.default": _product("self", "other"),
        "aten.baddbmm.default": _baddbmm,
        "aten.einsum.default": _einsum,
        "aten.scaled_dot_product_attention.default": _attention,
        "aten._scaled_dot_product_flash_attention_for_cpu.default": _attention_with_statistics,
    },
    onnx=Onnx(_write),
)
