"""Element-wise functions of two operands with broadcast: oneDNN's binary primitive."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from fmtprop.errors import ShapeError, UnsupportedOpError
from fmtprop.ir import Attrs, Bytes, Call, Cost, Importer, Onnx, TensorType, Value, Writing, each_image
from fmtprop.ir.facets import Absorbs, ByPyTorch, Numbers
from fmtprop.ir.op import Category, OpDef, Operand, PostOpForm, Sample
from fmtprop.layout import DataType
from fmtprop.ops.building import NATIVE_FLOATS, Ready, Tensors, is_native, primitive_of, promoted
from fmtprop.ops.eltwise import Eltwise
from fmtprop.ops.quantization import decompressed
from fmtprop.ops.sum import Sum
from fmtprop.ops.view_attrs import reshaped

if TYPE_CHECKING:
    from fmtprop.dnnl import NativeDesc, PostOps

# ---------------------------------------------------------------- attributes

#: algorithm -> its meaning in PyTorch
FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "max": torch.maximum,
    "min": torch.minimum,
    "eq": torch.eq,
    "ne": torch.ne,
    "gt": torch.gt,
    "ge": torch.ge,
    "lt": torch.lt,
    "le": torch.le,
}
COMMUTATIVE = frozenset({"add", "mul", "max", "min", "eq", "ne"})

#: algorithms with 1 for true and 0 for false
_COMPARISONS = frozenset({"eq", "ne", "gt", "ge", "lt", "le"})


@dataclass(frozen=True)
class Binary(Attrs):
    """Attributes of an element-wise function of two operands.

    oneDNN developer guide, "Binary".
    """

    #: oneDNN's algorithm name without ``binary_``. Comparisons give 1 and 0 in the operands' own data type.
    alg: str

    def __post_init__(self) -> None:
        if self.alg not in FUNCTIONS:
            raise ShapeError(f"binary has no algorithm {self.alg!r}; it has {', '.join(FUNCTIONS)}")


# ---------------------------------------------------------------- meaning


def infer(attrs: Binary, types: Mapping[str, TensorType]) -> tuple[TensorType, ...]:
    """Return the broadcast of both operands, which have the same rank; data types promote as in PyTorch."""
    a, b = types["src_0"], types["src_1"]
    if a.ndim != b.ndim:
        raise ShapeError(
            f"src_0 has {a.ndim} dimensions but src_1 has {b.ndim}; give the smaller one leading dimensions of size 1"
        )
    for axis, (m, n) in enumerate(zip(a.dims, b.dims, strict=True)):
        if m != n and 1 not in (m, n):
            raise ShapeError(f"src_0 axis {axis} has size {m} but src_1 axis {axis} has {n}; only size 1 broadcasts")
    return (TensorType(_broadcast(a.dims, b.dims), promoted(a, b)),)


def _broadcast(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    # Not the maximum: 1 against 0 gives 0.
    return tuple(n if m == 1 else m for m, n in zip(a, b, strict=True))


def reference(attrs: Binary, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Evaluate in plain PyTorch."""
    a, b = tensors["src_0"], tensors["src_1"]
    return (FUNCTIONS[attrs.alg](a, b).to(torch.promote_types(a.dtype, b.dtype)),)


def operator(attrs: Binary, tensors: Tensors, results: Sequence[torch.Tensor]) -> Ready:
    """Return PyTorch's operator for it, which writes its result to a tensor."""
    return partial(FUNCTIONS[attrs.alg], tensors["src_0"], tensors["src_1"], out=results[0])


def loses(attrs: Binary) -> frozenset[str]:
    """Return the special values that are lost: a maximum of NaN and a number is the number; NaN is greater than it."""
    return frozenset({"nan"}) if attrs.alg in ("max", "min", "gt", "ge") else frozenset()


def _append(attrs: Binary, tail: PostOps, operands: Sequence[NativeDesc], dtype: DataType) -> None:
    if attrs.alg in _COMPARISONS:
        # of channels that do not fill a vector, oneDNN 3.2 generates none for AVX-512, and after one failure no
        # other kernel in this process (Xbyak's error stays)
        raise UnsupportedOpError(f"binary {attrs.alg} is no post-op: oneDNN's code generator fails on some channels")
    tail.append_binary(f"binary_{attrs.alg}", operands[0])


# ---------------------------------------------------------------- importers


def scalar_operand(call: Call, operand: Any) -> float | None:
    """Return the finite number of an argument: a Python number or a one-element constant."""
    if isinstance(operand, bool):
        return None
    number = call.scalar(operand) if isinstance(operand, Value) else operand
    # Beyond f32 the attribute would become infinite, and 0 * inf is NaN, but PyTorch's result is 0.
    if not isinstance(number, (int, float)) or not abs(number) <= torch.finfo(torch.float32).max:
        return None
    return float(number)


def _with_scalar(alg: str, c: float, alpha: float) -> Eltwise | None:
    """Return ``x alg c`` as a function of x."""
    if alg in ("max", "min"):
        if alg == "max":
            return Eltwise("clip", c, math.inf) if c else Eltwise("relu")
        return Eltwise("clip", -math.inf, c)
    if alg == "div":
        return Eltwise("linear", 1 / c) if c and math.isfinite(1 / c) else None
    return {"add": Eltwise("linear", 1.0, alpha * c), "sub": Eltwise("linear", 1.0, -alpha * c)}.get(
        alg, Eltwise("linear", c)
    )


def _scalar_first(alg: str, c: float, alpha: float) -> Eltwise | None:
    """Return ``c alg x`` as a function of x."""
    if alg == "add":
        return Eltwise("linear", alpha, c)
    if alg == "sub":
        return Eltwise("linear", -alpha, c)
    if alg == "div":
        return Eltwise("pow", c, -1.0)
    return _with_scalar(alg, c, alpha)


def _eltwise(call: Call, value: Value, function: Eltwise | None) -> Value | None:
    result, type_ = call.results[0], call.type(value)
    dims = type_.dims or (1,)
    if function is None or type_.dtype is not result.dtype or not is_native(type_.with_dims(dims)):
        return None
    return reshaped(call, call.emit("eltwise", {"src": reshaped(call, value, dims)}, function), result.dims)


def _aligned(call: Call, value: Value, ndim: int) -> Value:
    dims = call.type(value).dims
    return reshaped(call, value, (1,) * (ndim - len(dims)) + dims)


def _tensors(call: Call, alg: str, a: Value, b: Value, alpha: float) -> Value | None:
    """Import ``a alg alpha * b`` for two tensors; oneDNN's fast code broadcasts only the second one."""
    result = call.results[0]
    dims = result.dims or (1,)  # of two scalars, a vector of one number
    types = call.type(a), call.type(b)
    if not is_native(result.with_dims(dims)):
        return None
    if any(t.dtype not in NATIVE_FLOATS for t in types):
        return decompressed(call, alg, a, b)
    if promoted(*types) != result.dtype:
        return None
    if alpha != 1 and types[0] == types[1] and result.dims:
        return call.emit("sum", {"src_0": a, "src_1": b}, Sum((1.0, alpha if alg == "add" else -alpha)))
    a, b = _aligned(call, a, len(dims)), _aligned(call, b, len(dims))
    whole = [call.type(value).dims == dims for value in (a, b)]
    if not any(whole):
        # An outer product: oneDNN has only its slow reference for it, PyTorch has fast code.
        return None
    if alpha != 1:
        b = call.emit("eltwise", {"src": b}, Eltwise("linear", alpha))
    if not whole[0]:
        # Only the first operand broadcasts: exchange the operands, inverting the second if necessary.
        if alg not in COMMUTATIVE:
            b = call.emit("eltwise", {"src": b}, Eltwise("linear", -1.0) if alg == "sub" else Eltwise("pow", 1.0, -1.0))
            alg = {"sub": "add", "div": "mul"}[alg]
        a, b = b, a
    return reshaped(call, call.emit("binary", {"src_0": a, "src_1": b}, Binary(alg)), result.dims)


def _binary(alg: str, first: str = "self", second: str = "other") -> Importer:
    def importer(call: Call) -> Value | None:
        a, b, alpha = call[first], call[second], float(call.args.get("alpha", 1))
        if call.args.get("rounding_mode") is not None or not math.isfinite(alpha):
            return None
        return _operation(call, alg, a, b, alpha)

    return importer


def _operation(call: Call, alg: str, a: Any, b: Any, alpha: float = 1.0) -> Value | None:
    """Import ``a alg alpha * b`` for tensors and numbers."""
    if isinstance(a, Value) and (c := scalar_operand(call, b)) is not None:
        return _eltwise(call, a, _with_scalar(alg, c, alpha))
    if isinstance(b, Value) and (c := scalar_operand(call, a)) is not None:
        return _eltwise(call, b, _scalar_first(alg, c, alpha))
    if not (isinstance(a, Value) and isinstance(b, Value)):
        return None
    return _tensors(call, alg, a, b, alpha)


def _clamp(call: Call) -> Value | None:
    """Import bounds that are tensors: the maximum with one, then the minimum with the other."""
    value: Value | None = call["self"]
    for alg, bound in (("max", call.args.get("min")), ("min", call.args.get("max"))):
        if bound is not None and value is not None:
            same = call.type(value).dims == call.results[0].dims
            value = _operation(call, alg, value, bound) if same else None
    return value


# ---------------------------------------------------------------- ONNX

_OPERATORS = {
    "add": "Add",
    "sub": "Sub",
    "mul": "Mul",
    "div": "Div",
    "max": "Max",
    "min": "Min",
    "eq": "Equal",
    "ne": "Equal",
    "gt": "Greater",
    "ge": "GreaterOrEqual",
    "lt": "Less",
    "le": "LessOrEqual",
}


def _write(attrs: Binary, w: Writing, operands: Mapping[str, str]) -> str:
    dst = w(_OPERATORS[attrs.alg], operands["src_0"], operands["src_1"])
    if attrs.alg not in _COMPARISONS:
        return dst
    dtype = w.type(operands["src_0"]).dtype.value
    return w.cast(w("Not", dst) if attrs.alg == "ne" else dst, dtype)


# ---------------------------------------------------------------- samples and declaration


def samples() -> Iterable[Sample]:
    """Yield every algorithm, then every pattern of broadcast."""

    def pair(a: tuple[int, ...], b: tuple[int, ...]) -> dict[str, TensorType]:
        return {"src_0": TensorType(a), "src_1": TensorType(b)}

    image = (2, 17, 5, 7)
    for alg in FUNCTIONS:
        # Random numbers are never equal: for `eq` all are the same.
        yield Sample(alg, Binary(alg), pair(image, image), 0.5, 0.5 if alg == "eq" else 2.0)
    yield Sample("channel", Binary("mul"), pair(image, (1, 17, 1, 1)))
    yield Sample("channel_of_each", Binary("mul"), pair(image, (2, 17, 1, 1)))
    yield Sample("scalar", Binary("sub"), pair(image, (1, 1, 1, 1)))
    yield Sample("row", Binary("add"), pair((3, 40), (1, 40)))
    yield Sample("first_broadcasts", Binary("sub"), pair((1, 17, 1, 1), image))
    yield Sample("outer", Binary("mul"), pair((3, 1), (1, 40)))


BINARY = OpDef(
    name="binary",
    attrs=Binary,
    operands=(Operand("src_0", "SRC_0"), Operand("src_1", "SRC_1")),
    category=Category.MULTI_SRC,
    infer=infer,
    reference=reference,
    pytorch=ByPyTorch(operator),
    primitive=primitive_of("Binary"),
    elementwise=True,
    numbers=Numbers(
        bytes=lambda attrs: Bytes.COMBINED if attrs.alg in ("add", "sub", "mul") else Bytes.NEVER,
        positive=lambda attrs: frozenset({"src_0", "src_1"}) if attrs.alg == "div" else frozenset(),
        loses=loses,
    ),
    sliced=each_image,
    cost=Cost(pace=0.75, pytorch=0.7),
    absorbs=Absorbs(frozenset({"eltwise", "binary", "sum"})),
    as_post_op=PostOpForm("binary", _append),
    inplace=frozenset({"src_0"}),
    samples=samples,
    torch={
        "aten.add.Tensor": _binary("add"),
        "aten.add.Scalar": _binary("add"),
        "aten.sub.Tensor": _binary("sub"),
        "aten.sub.Scalar": _binary("sub"),
        "aten.subtract.Tensor": _binary("sub"),
        "aten.rsub.Tensor": _binary("sub", "other", "self"),
        "aten.rsub.Scalar": _binary("sub", "other", "self"),
        "aten.mul.Tensor": _binary("mul"),
        "aten.mul.Scalar": _binary("mul"),
        "aten.multiply.Tensor": _binary("mul"),
        "aten.div.Tensor": _binary("div"),
        "aten.div.Scalar": _binary("div"),
        "aten.div.Tensor_mode": _binary("div"),
        "aten.divide.Tensor": _binary("div"),
        "aten.true_divide.Tensor": _binary("div"),
        "aten.maximum.default": _binary("max"),
        "aten.minimum.default": _binary("min"),
        "aten.max.other": _binary("max"),
        "aten.min.other": _binary("min"),
        "aten.clamp.Tensor": _clamp,
        "aten.clip.Tensor": _clamp,
        "aten.clamp_min.Tensor": _clamp,
        "aten.clamp_max.Tensor": _clamp,
    },
    onnx=Onnx(_write),
)
