"""Element-wise functions of one operand: oneDNN's eltwise primitive."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf, isfinite, isinf, log
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from fmtprop.errors import ShapeError
from fmtprop.ir import Attrs, Call, Cost, Importer, Onnx, TensorType, Value, Writing, each_image
from fmtprop.ir.facets import ByPyTorch, Numbers
from fmtprop.ir.op import Category, OpDef, Operand, PostOpForm, Sample
from fmtprop.layout import DataType
from fmtprop.ops.building import Ready, Tensors, is_native, primitive_of
from fmtprop.ops.pytorch import elu, hardsigmoid, hardswish, leaky_relu, mish

if TYPE_CHECKING:
    from fmtprop.dnnl import NativeDesc, PostOps

# ---------------------------------------------------------------- attributes

#: algorithm -> its meaning in PyTorch; alpha and beta as in oneDNN's eltwise page
FUNCTIONS: dict[str, Callable[[torch.Tensor, float, float], torch.Tensor]] = {
    "relu": lambda x, alpha, beta: F.leaky_relu(x, alpha) if alpha else F.relu(x),
    "tanh": lambda x, alpha, beta: torch.tanh(x),
    "elu": lambda x, alpha, beta: F.elu(x, alpha),
    "square": lambda x, alpha, beta: x * x,
    "abs": lambda x, alpha, beta: torch.abs(x),
    "sqrt": lambda x, alpha, beta: torch.sqrt(x),
    "linear": lambda x, alpha, beta: alpha * x + beta,
    "soft_relu": lambda x, alpha, beta: F.softplus(x * alpha) / alpha,
    "hardsigmoid": lambda x, alpha, beta: torch.clamp(alpha * x + beta, 0.0, 1.0),
    "mish": lambda x, alpha, beta: F.mish(x),
    "logistic": lambda x, alpha, beta: torch.sigmoid(x),
    "exp": lambda x, alpha, beta: torch.exp(x),
    "gelu_tanh": lambda x, alpha, beta: F.gelu(x, approximate="tanh"),
    "swish": lambda x, alpha, beta: x * torch.sigmoid(alpha * x),
    "log": lambda x, alpha, beta: torch.log(x),
    "clip": lambda x, alpha, beta: torch.clamp(x, *_bounds(x.dtype, alpha, beta)),
    "pow": lambda x, alpha, beta: alpha * torch.pow(x, beta),
    "gelu_erf": lambda x, alpha, beta: F.gelu(x),
    "round": lambda x, alpha, beta: torch.round(x),
    "hardswish": lambda x, alpha, beta: x * torch.clamp(alpha * x + beta, 0.0, 1.0),
}

#: algorithm -> a function of alpha and beta, which returns PyTorch's operator that writes its result to a tensor, and
#: the operator's arguments after the source; it returns nothing if no single operator exists
_WRITING: dict[str, Callable[[float, float], tuple[Any, ...]]] = {
    "relu": lambda alpha, beta: (leaky_relu, alpha) if alpha else (torch.clamp_min, 0.0),
    "tanh": lambda alpha, beta: (torch.tanh,),
    "elu": lambda alpha, beta: (elu, alpha),
    "square": lambda alpha, beta: (torch.square,),
    "abs": lambda alpha, beta: (torch.abs,),
    "sqrt": lambda alpha, beta: (torch.sqrt,),
    "linear": lambda alpha, beta: (torch.mul, alpha) if not beta else (torch.add, beta) if alpha == 1.0 else (None,),
    "logistic": lambda alpha, beta: (torch.sigmoid,),
    "exp": lambda alpha, beta: (torch.exp,),
    "swish": lambda alpha, beta: (torch.ops.aten.silu.out,) if alpha == 1.0 else (None,),
    "log": lambda alpha, beta: (torch.log,),
    "clip": lambda alpha, beta: (torch.clamp, alpha, beta),
    "pow": lambda alpha, beta: (torch.pow, beta) if alpha == 1.0 else (None,),
    "gelu_erf": lambda alpha, beta: (F.gelu,),
    "round": lambda alpha, beta: (torch.round,),
    "soft_relu": lambda alpha, beta: (F.softplus, alpha, _LINEAR_FROM),
    "mish": lambda alpha, beta: (mish,),
    "gelu_tanh": lambda alpha, beta: (partial(F.gelu, approximate="tanh"),),
    "hardsigmoid": lambda alpha, beta: (hardsigmoid,) if is_usual(alpha, beta) else (None,),
    "hardswish": lambda alpha, beta: (hardswish,) if is_usual(alpha, beta) else (None,),
}

#: where PyTorch's softplus of f32 is its argument
_LINEAR_FROM = 20.0


def is_usual(alpha: float, beta: float) -> bool:
    """Return whether these are PyTorch's constants of a hard sigmoid: it clips x/6 + 1/2."""
    return (alpha, beta) == (1 / 6, 0.5)


@dataclass(frozen=True)
class Eltwise(Attrs):
    """Attributes of an element-wise function.

    oneDNN developer guide, "Eltwise".
    """

    #: oneDNN's algorithm name without ``eltwise_``
    alg: str
    alpha: float = 0.0
    beta: float = 0.0

    def __post_init__(self) -> None:
        if self.alg not in FUNCTIONS:
            raise ShapeError(f"eltwise has no algorithm {self.alg!r}; it has {', '.join(FUNCTIONS)}")


def _bounds(dtype: torch.dtype, lowest: float, highest: float) -> tuple[float, float]:
    """Return bounds that a data type has: PyTorch refuses the largest number of f32 as a bound of bf16."""
    if not dtype.is_floating_point:
        return lowest, highest
    limits = torch.finfo(dtype)
    low, high = (bound if isinf(bound) else min(max(bound, limits.min), limits.max) for bound in (lowest, highest))
    return low, high


# ---------------------------------------------------------------- meaning


def infer(attrs: Eltwise, types: Mapping[str, TensorType]) -> tuple[TensorType, ...]:
    """Return the type of src: an element-wise function keeps it."""
    return (types["src"],)


def reference(attrs: Eltwise, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Evaluate in plain PyTorch."""
    return (FUNCTIONS[attrs.alg](tensors["src"], attrs.alpha, attrs.beta),)


def operator(attrs: Eltwise, tensors: Tensors, results: Sequence[torch.Tensor]) -> Ready:
    """Return PyTorch's operator for it, which writes its result to a tensor."""
    make, numbers = _WRITING.get(attrs.alg), (attrs.alpha, attrs.beta)
    if attrs.alg == "clip":
        numbers = _bounds(tensors["src"].dtype, *numbers)
    function, *arguments = make(*numbers) if make is not None else (None,)
    return None if function is None else partial(function, tensors["src"], *arguments, out=results[0])


#: algorithm -> special values for which oneDNN 3.2's kernels differ from PyTorch
_LOSES = {
    "relu": frozenset({"nan"}),
    "clip": frozenset({"nan"}),
    "exp": frozenset({"nan"}),
    "hardsigmoid": frozenset({"nan"}),
    "gelu_erf": frozenset({"inf"}),
    "pow": frozenset({"inf"}),
}


#: algorithms that are defined on positive numbers only
_POSITIVE = frozenset({"log", "sqrt", "pow"})

#: algorithms of more than a comparison or a product
_COSTLY = frozenset(
    {"exp", "gelu_erf", "gelu_tanh", "tanh", "logistic", "swish", "mish", "elu", "log", "pow", "soft_relu", "hardswish"}
)


def operations(attrs: Eltwise, gathered: float) -> float:
    """Return the operations per element."""
    return 24.0 if attrs.alg in _COSTLY else 1.0


#: operations per element of PyTorch's functions that take 1.8 to 3.9 times as long as oneDNN's kernels (Zen 4, AVX-512)
_PYTORCH_OPERATIONS = {"exp": 48.0, "tanh": 94.0, "mish": 43.0}


def loses(attrs: Eltwise) -> frozenset[str]:
    """Return the special values that the function loses: some instructions return the operand that is not NaN."""
    if attrs.alg == "relu" and attrs.alpha:  # a leaky one multiplies
        return frozenset()
    return _LOSES.get(attrs.alg, frozenset())


def _append(attrs: Eltwise, tail: PostOps, operands: Sequence[NativeDesc], dtype: DataType) -> None:
    tail.append_eltwise(f"eltwise_{attrs.alg}", attrs.alpha, attrs.beta)


# ---------------------------------------------------------------- importers


def _eltwise(call: Call, *chain: Eltwise) -> Value | None:
    """Apply functions one after the other to the call's argument."""
    value: Value = call["self"]
    if not is_native(call.type(value)):
        return None
    for function in chain:
        value = call.emit("eltwise", {"src": value}, function)
    return value


def _unary(alg: str, alpha: float = 0.0, beta: float = 0.0) -> Importer:
    return lambda call: _eltwise(call, Eltwise(alg, alpha, beta))


def _leaky_relu(call: Call) -> Value | None:
    return _eltwise(call, Eltwise("relu", float(call["negative_slope"])))


def _gelu(call: Call) -> Value | None:
    return _eltwise(call, Eltwise("gelu_tanh" if call["approximate"] == "tanh" else "gelu_erf"))


def _clip(lowest: str, highest: str) -> Importer:
    def importer(call: Call) -> Value | None:
        bounds = call.args.get(lowest), call.args.get(highest)
        if any(isinstance(bound, Value) for bound in bounds):
            return None
        low, high = (default if b is None else float(b) for b, default in zip(bounds, (-inf, inf), strict=True))
        if not low <= high:
            # PyTorch gives the upper bound, or NaN where a bound is NaN; oneDNN refuses.
            return None
        return _eltwise(call, Eltwise("relu") if (low, high) == (0.0, inf) else Eltwise("clip", low, high))

    return importer


def _threshold(call: Call) -> Value | None:
    return _eltwise(call, Eltwise("relu")) if call["threshold"] == call["value"] == 0 else None


def _elu(call: Call) -> Value | None:
    alpha, scale = float(call.args.get("alpha", 1)), float(call.args.get("scale", 1))
    if call.args.get("input_scale", 1) != 1:
        return None
    return _eltwise(call, Eltwise("elu", alpha), *([] if scale == 1 else [Eltwise("linear", scale)]))


def _celu(call: Call) -> Value | None:
    alpha = float(call["alpha"])
    if alpha == 1:
        return _eltwise(call, Eltwise("elu", 1.0))
    if not 1 < alpha < inf:
        return None  # a larger factor makes infinities of numbers
    return _eltwise(call, Eltwise("linear", 1 / alpha), Eltwise("elu", 1.0), Eltwise("linear", alpha))


def _logarithm(base: float) -> Importer:
    return lambda call: _eltwise(call, Eltwise("log"), Eltwise("linear", 1 / log(base)))


def _softplus(call: Call) -> Value | None:
    # oneDNN's soft_relu has no linear threshold; PyTorch's is beyond f32's precision from 20 on
    if call["threshold"] < _LINEAR_FROM or not call["beta"]:
        return None
    return _eltwise(call, Eltwise("soft_relu", float(call["beta"])))


def _pow(call: Call) -> Value | None:
    exponent = call["exponent"]
    if isinstance(exponent, Value):
        return None
    return _eltwise(
        call, {2: Eltwise("square"), 0.5: Eltwise("sqrt")}.get(exponent, Eltwise("pow", 1.0, float(exponent)))
    )


# ---------------------------------------------------------------- ONNX

#: functions that are one ONNX operator without attributes
_OPERATORS = {
    "tanh": "Tanh",
    "abs": "Abs",
    "sqrt": "Sqrt",
    "mish": "Mish",
    "logistic": "Sigmoid",
    "exp": "Exp",
    "log": "Log",
    "gelu_erf": "Gelu",
    "round": "Round",
}

#: the other functions
_WRITTEN: dict[str, Callable[[Writing, str, float, float], str]] = {
    "relu": lambda w, x, alpha, beta: w("LeakyRelu", x, alpha=alpha) if alpha else w("Relu", x),
    "elu": lambda w, x, alpha, beta: w("Elu", x, alpha=alpha),
    "square": lambda w, x, alpha, beta: w("Mul", x, x),
    "linear": lambda w, x, alpha, beta: _plus(w, _times(w, x, alpha), beta),
    "soft_relu": lambda w, x, alpha, beta: _times(w, w("Softplus", _times(w, x, alpha)), 1 / alpha),
    "hardsigmoid": lambda w, x, alpha, beta: w("HardSigmoid", x, alpha=alpha, beta=beta),
    "gelu_tanh": lambda w, x, alpha, beta: w("Gelu", x, approximate="tanh"),
    "swish": lambda w, x, alpha, beta: w("Mul", x, w("Sigmoid", _times(w, x, alpha))),
    "clip": lambda w, x, alpha, beta: w("Clip", x, _bound(w, alpha), _bound(w, beta)),
    "pow": lambda w, x, alpha, beta: _times(w, _power(w, x, beta), alpha),
    "hardswish": lambda w, x, alpha, beta: w("Mul", x, w("HardSigmoid", x, alpha=alpha, beta=beta)),
}


def _times(w: Writing, x: str, factor: float) -> str:
    if factor == 1:
        return x
    return w("Neg", x) if factor == -1 else w("Mul", x, w.constant(factor))


def _plus(w: Writing, x: str, summand: float) -> str:
    return w("Add", x, w.constant(summand)) if summand else x


def _bound(w: Writing, bound: float) -> str | None:
    return w.constant(bound) if isfinite(bound) else None


def _power(w: Writing, x: str, exponent: float) -> str:
    return w("Reciprocal", x) if exponent == -1 else w("Pow", x, w.constant(exponent))


def _write(attrs: Eltwise, w: Writing, operands: Mapping[str, str]) -> str:
    operator = _OPERATORS.get(attrs.alg)
    if operator is not None:
        return w(operator, operands["src"])
    return _WRITTEN[attrs.alg](w, operands["src"], attrs.alpha, attrs.beta)


# ---------------------------------------------------------------- samples and declaration


def samples() -> Iterable[Sample]:
    """Yield every algorithm on a tensor with a channel tail."""
    parameters = {
        "elu": (1.0, 0.0), "linear": (2.0, 0.5), "soft_relu": (1.0, 0.0), "hardsigmoid": (1 / 6, 0.5),
        "swish": (1.0, 0.0), "clip": (-0.5, 0.5), "pow": (1.0, 3.0), "hardswish": (1 / 6, 0.5),
    }  # fmt: skip
    for alg in FUNCTIONS:
        low = 0.1 if alg in ("log", "sqrt") else -2.0
        attrs = Eltwise(alg, *parameters.get(alg, (0.0, 0.0)))
        yield Sample(alg, attrs, {"src": TensorType((2, 17, 5, 7))}, low, 2.0)
    rows = {"src": TensorType((3, 40))}
    yield Sample("leaky_relu", Eltwise("relu", 0.1), rows)
    yield Sample("log_sigmoid", Eltwise("soft_relu", -1.0), rows, -8.0, 8.0)
    yield Sample("reciprocal", Eltwise("pow", 1.0, -1.0), rows, -2.0, -0.5)
    yield Sample("rsqrt", Eltwise("pow", 1.0, -0.5), rows, 0.5, 2.0)
    yield Sample("clip_below", Eltwise("clip", -0.5, inf), rows)


ELTWISE = OpDef(
    name="eltwise",
    attrs=Eltwise,
    operands=(Operand("src", "SRC"),),
    category=Category.BANDWIDTH,
    infer=infer,
    reference=reference,
    pytorch=ByPyTorch(operator),
    primitive=primitive_of("Eltwise"),
    elementwise=True,
    numbers=Numbers(positive=lambda attrs: frozenset({"src"}) if attrs.alg in _POSITIVE else frozenset(), loses=loses),
    sliced=each_image,
    cost=Cost(operations, pytorch=0.7, by_pytorch=lambda attrs: _PYTORCH_OPERATIONS.get(attrs.alg, 0.0)),
    # no post_ops: oneDNN takes some, but then only its slow reference code is left
    as_post_op=PostOpForm("eltwise", _append),
    inplace=frozenset({"src"}),
    samples=samples,
    torch={
        "aten.relu.default": _unary("relu"),
        "aten.leaky_relu.default": _leaky_relu,
        "aten.threshold.default": _threshold,
        "aten.tanh.default": _unary("tanh"),
        "aten.sigmoid.default": _unary("logistic"),
        "aten.special_expit.default": _unary("logistic"),
        "aten.log_sigmoid.default": _unary("soft_relu", -1.0),
        "aten.silu.default": _unary("swish", 1.0),
        "aten.mish.default": _unary("mish"),
        "aten.gelu.default": _gelu,
        "aten.exp.default": _unary("exp"),
        "aten.log.default": _unary("log"),
        "aten.log2.default": _logarithm(2.0),
        "aten.log10.default": _logarithm(10.0),
        "aten.sqrt.default": _unary("sqrt"),
        "aten.rsqrt.default": _unary("pow", 1.0, -0.5),
        "aten.reciprocal.default": _unary("pow", 1.0, -1.0),
        "aten.abs.default": _unary("abs"),
        "aten.square.default": _unary("square"),
        "aten.neg.default": _unary("linear", -1.0),
        "aten.round.default": _unary("round"),
        "aten.elu.default": _elu,
        "aten.celu.default": _celu,
        "aten.softplus.default": _softplus,
        "aten.hardsigmoid.default": _unary("hardsigmoid", 1 / 6, 0.5),
        "aten.hardswish.default": _unary("hardswish", 1 / 6, 0.5),
        "aten.relu6.default": _unary("clip", 0.0, 6.0),
        "aten.hardtanh.default": _clip("min_val", "max_val"),
        "aten.clamp.default": _clip("min", "max"),
        "aten.clip.default": _clip("min", "max"),
        "aten.clamp_min.default": _clip("min", ""),
        "aten.clamp_max.default": _clip("", "max"),
        "aten.pow.Tensor_Scalar": _pow,
    },
    onnx=Onnx(_write),
)
