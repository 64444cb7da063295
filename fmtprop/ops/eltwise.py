"""Element-wise functions of one operand: oneDNN's eltwise primitive."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from fmtprop.errors import ShapeError
from fmtprop.ir.importing import Call
from fmtprop.ir.node import Attrs, Value
from fmtprop.ir.op import Category, Lowering, OpDef, Operand, Sample
from fmtprop.ir.types import TensorType
from fmtprop.ops.building import lowering

if TYPE_CHECKING:
    from fmtprop.dnnl import NativeDesc, PrimitiveAttr

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
    "clip": lambda x, alpha, beta: torch.clamp(x, alpha, beta),
    "pow": lambda x, alpha, beta: alpha * torch.pow(x, beta),
    "gelu_erf": lambda x, alpha, beta: F.gelu(x),
    "round": lambda x, alpha, beta: torch.round(x),
    "hardswish": lambda x, alpha, beta: x * torch.clamp(alpha * x + beta, 0.0, 1.0),
}


@dataclass(frozen=True)
class Eltwise(Attrs):
    """Attributes of an element-wise function.

    Parameters
    ----------
    alg : str
        oneDNN's algorithm name without ``eltwise_``.
    alpha, beta : float
        The algorithm's parameters.

    References
    ----------
    oneDNN developer guide, "Eltwise".
    """

    alg: str
    alpha: float = 0.0
    beta: float = 0.0

    def __post_init__(self) -> None:
        if self.alg not in FUNCTIONS:
            raise ShapeError(f"eltwise has no algorithm {self.alg!r}; it has {', '.join(FUNCTIONS)}")


# ---------------------------------------------------------------- meaning


def infer(attrs: Eltwise, types: Mapping[str, TensorType]) -> tuple[TensorType, ...]:
    """Return the type of src: an element-wise function keeps it."""
    return (types["src"],)


def reference(attrs: Eltwise, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Evaluate in plain PyTorch."""
    return (FUNCTIONS[attrs.alg](tensors["src"], attrs.alpha, attrs.beta),)


def primitive(attrs: Eltwise, descs: Mapping[str, NativeDesc], attr: PrimitiveAttr | None, prop_kind: str) -> Lowering:
    """Create the eltwise primitive descriptor."""
    from fmtprop import dnnl

    alg = f"eltwise_{attrs.alg}"
    pd = dnnl.eltwise_forward(prop_kind, alg, descs["src"], descs["dst"], attrs.alpha, attrs.beta, attr=attr)
    return lowering(pd, {"src": "src", "dst": "dst"})


# ---------------------------------------------------------------- importers


def _unary(alg: str, alpha: float = 0.0, beta: float = 0.0) -> Callable[[Call], Value]:
    def importer(call: Call) -> Value:
        return call.emit("eltwise", {"src": call["self"]}, Eltwise(alg, alpha, beta))

    return importer


def _leaky_relu(call: Call) -> Value:
    return call.emit("eltwise", {"src": call["self"]}, Eltwise("relu", call["negative_slope"]))


def _gelu(call: Call) -> Value:
    alg = "gelu_tanh" if call["approximate"] == "tanh" else "gelu_erf"
    return call.emit("eltwise", {"src": call["self"]}, Eltwise(alg))


def _clamp(call: Call) -> Value | None:
    low, high = call["min"], call["max"]
    if isinstance(low, Value) or isinstance(high, Value):
        return None
    bounds = (-torch.inf if low is None else low, torch.inf if high is None else high)
    return call.emit("eltwise", {"src": call["self"]}, Eltwise("clip", *map(float, bounds)))


def _hardtanh(call: Call) -> Value:
    return call.emit("eltwise", {"src": call["self"]}, Eltwise("clip", call["min_val"], call["max_val"]))


def _elu(call: Call) -> Value | None:
    if call["scale"] != 1 or call["input_scale"] != 1:
        return None
    return call.emit("eltwise", {"src": call["self"]}, Eltwise("elu", call["alpha"]))


def _softplus(call: Call) -> Value | None:
    # oneDNN's soft_relu has no linear threshold; PyTorch's is beyond f32's precision from 20 on
    if call["threshold"] < 20:
        return None
    return call.emit("eltwise", {"src": call["self"]}, Eltwise("soft_relu", call["beta"]))


def _pow(call: Call) -> Value | None:
    exponent = call["exponent"]
    if isinstance(exponent, Value):
        return None
    alg = {2: Eltwise("square"), 0.5: Eltwise("sqrt")}.get(exponent, Eltwise("pow", 1.0, float(exponent)))
    return call.emit("eltwise", {"src": call["self"]}, alg)


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
    yield Sample("leaky_relu", Eltwise("relu", 0.1), {"src": TensorType((3, 40))})


ELTWISE = OpDef(
    name="eltwise",
    attrs=Eltwise,
    operands=(Operand("src", "SRC"),),
    category=Category.BANDWIDTH,
    infer=infer,
    reference=reference,
    primitive=primitive,
    post_ops=frozenset({"binary"}),
    as_post_op=True,
    inplace=frozenset({"src"}),
    samples=samples,
    torch={
        "aten.relu.default": _unary("relu"),
        "aten.leaky_relu.default": _leaky_relu,
        "aten.tanh.default": _unary("tanh"),
        "aten.sigmoid.default": _unary("logistic"),
        "aten.silu.default": _unary("swish", 1.0),
        "aten.mish.default": _unary("mish"),
        "aten.gelu.default": _gelu,
        "aten.exp.default": _unary("exp"),
        "aten.log.default": _unary("log"),
        "aten.sqrt.default": _unary("sqrt"),
        "aten.abs.default": _unary("abs"),
        "aten.square.default": _unary("square"),
        "aten.neg.default": _unary("linear", -1.0),
        "aten.round.default": _unary("round"),
        "aten.elu.default": _elu,
        "aten.softplus.default": _softplus,
        "aten.hardsigmoid.default": _unary("hardsigmoid", 1 / 6, 0.5),
        "aten.hardswish.default": _unary("hardswish", 1 / 6, 0.5),
        "aten.relu6.default": _unary("clip", 0.0, 6.0),
        "aten.hardtanh.default": _hardtanh,
        "aten.clamp.default": _clamp,
        "aten.pow.Tensor_Scalar": _pow,
    },
)
