"""The gradient of an element-wise function of one operand: oneDNN's eltwise primitive in backward propagation.

It reads the function's source, or its result if PyTorch saves the result: oneDNN's algorithms
``…_use_dst_for_bwd``. As in PyTorch, NaN in the gradient passes if the function's slope is not 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from fmtprop.errors import ShapeError
from fmtprop.ir import Attrs, Call, Cost, Importer, TensorType, Value
from fmtprop.ir.facets import ByPyTorch, Numbers
from fmtprop.ir.op import Category, Lowering, NativeAttr, Natives, OpDef, Operand, Sample
from fmtprop.ops import eltwise
from fmtprop.ops.building import Ready, Tensors, by_autograd, check_alike, create, is_native, lowering
from fmtprop.ops.eltwise import Eltwise

#: algorithm -> its slope as a function of the result and of alpha
_BY_RESULT: Mapping[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "tanh": lambda y, alpha: 1 - y * y,
    "logistic": lambda y, alpha: y * (1 - y),
    "elu": lambda y, alpha: torch.where(y > 0, 1.0, y + alpha),
}

#: algorithm -> PyTorch's operator that writes the gradient. Autograd takes three times as long for that of GELU: it
#: computes the function once more (200 x 3072 numbers of f32, two threads of an Intel core)
_WRITING: Mapping[str, Callable[..., object]] = {
    "gelu_erf": torch.ops.aten.gelu_backward.grad_input,
    "gelu_tanh": partial(torch.ops.aten.gelu_backward.grad_input, approximate="tanh"),
    "swish": torch.ops.aten.silu_backward.grad_input,
    "tanh": torch.ops.aten.tanh_backward.grad_input,
    "logistic": torch.ops.aten.sigmoid_backward.grad_input,
}

#: special values of the source or result that a function's gradient loses
_LOSES = {"elu": frozenset({"nan"}), "hardswish": frozenset({"nan"}), "mish": frozenset({"inf"})}

# ---------------------------------------------------------------- attributes


@dataclass(frozen=True)
class EltwiseGradient(Attrs):
    """Attributes of the gradient of an element-wise function: those of the function, and the operand that is read.

    oneDNN developer guide, "Eltwise", backward propagation.
    """

    alg: str
    alpha: float = 0.0
    beta: float = 0.0
    #: whether it reads the function's result, ``dst``, instead of ``src``
    by_result: bool = False

    def __post_init__(self) -> None:
        _ = self.function
        if self.by_result and self.alg not in _BY_RESULT:
            raise ShapeError(f"eltwise {self.alg} has no gradient by its result; these have: {', '.join(_BY_RESULT)}")

    @property
    def function(self) -> Eltwise:
        """The attributes of the function itself."""
        return Eltwise(self.alg, self.alpha, self.beta)

    @property
    def reads(self) -> str:
        """The second operand, after the gradient."""
        return "dst" if self.by_result else "src"


# ---------------------------------------------------------------- meaning


def infer(attrs: EltwiseGradient, types: Mapping[str, TensorType]) -> tuple[TensorType, ...]:
    """Return the type of diff_src: that of diff_dst."""
    if {"src", "dst"} & set(types) != {attrs.reads}:
        raise ShapeError(f"this gradient of {attrs.alg} reads diff_dst and {attrs.reads}, and nothing else")
    check_alike(types, attrs.reads, "diff_dst")
    return (types["diff_dst"],)


def reference(attrs: EltwiseGradient, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Evaluate by PyTorch's autograd, or by the slope as a function of the result."""
    if attrs.by_result:
        return (tensors["diff_dst"] * _BY_RESULT[attrs.alg](tensors["dst"], attrs.alpha),)
    if attrs.alg == "clip":  # autograd's slope at the bounds depends on how the bounds are given
        inside = (tensors["src"] > attrs.alpha) & (tensors["src"] < attrs.beta)
        return (torch.where(inside, tensors["diff_dst"], 0.0),)
    if attrs.alg == "hardswish" and eltwise.is_usual(attrs.alpha, attrs.beta):  # autograd rounds x/6 + 1/2 in bf16
        return (torch.ops.aten.hardswish_backward(tensors["diff_dst"], tensors["src"]),)
    function = attrs.function
    return by_autograd(lambda src: eltwise.reference(function, {"src": src})[0], tensors["src"], tensors["diff_dst"])


def operator(attrs: EltwiseGradient, tensors: Tensors, results: Sequence[torch.Tensor]) -> Ready:
    """Return PyTorch's operator for it, which writes its result to a tensor."""
    function = _WRITING.get(attrs.alg)
    if function is None or attrs.by_result != (attrs.alg in _BY_RESULT) or (attrs.alg == "swish" and attrs.alpha != 1):
        return None
    return partial(function, tensors["diff_dst"], tensors[attrs.reads], grad_input=results[0])


def primitive(attrs: EltwiseGradient, descs: Natives, attr: NativeAttr) -> Lowering:
    """Create the descriptor; its hint, the forward descriptor, has src in the same format."""
    # oneDNN has two clips; the slope of this one is 0 at the upper bound, as in PyTorch
    alg = "clip_v2" if attrs.alg == "clip" else attrs.alg
    alg = f"eltwise_{alg}{'_use_dst_for_bwd' if attrs.by_result else ''}"
    images = dict.fromkeys(("src", "dst"), descs[attrs.reads])
    hint = create("Eltwise", attrs, images, attr, prop="forward_training", alg=alg)
    return lowering(create("Eltwise", attrs, descs, attr, hint, prop="backward_data", alg=alg), descs)


# ---------------------------------------------------------------- importers


def _emit(call: Call, gradient: str, src: str, attrs: EltwiseGradient) -> Value | None:
    inputs = {attrs.reads: call[src], "diff_dst": call[gradient]}
    types = [call.type(value) for value in inputs.values()]
    if not is_native(*types) or types[0] != types[1]:
        return None
    return call.emit("eltwise_backward", inputs, attrs)


def _unary(alg: str, alpha: float = 0.0, beta: float = 0.0) -> Importer:
    return lambda call: _emit(call, "grad_output", "self", EltwiseGradient(alg, alpha, beta))


def _threshold(call: Call) -> Value | None:
    # a rectified result has the sign of its source
    return _emit(call, "grad_output", "self", EltwiseGradient("relu")) if call["threshold"] == 0 else None


def _gelu(call: Call) -> Value | None:
    return _emit(
        call, "grad_output", "self", EltwiseGradient("gelu_tanh" if call["approximate"] == "tanh" else "gelu_erf")
    )


def _leaky_relu(call: Call) -> Value | None:
    slope = float(call["negative_slope"])
    if call["self_is_result"] and slope <= 0:
        return None
    return _emit(call, "grad_output", "self", EltwiseGradient("relu", slope))


def _by_result(alg: str) -> Importer:
    return lambda call: _emit(call, "grad_output", "output", EltwiseGradient(alg, by_result=True))


def _elu(call: Call) -> Value | None:
    if (call["scale"], call["input_scale"]) != (1, 1) or call["alpha"] <= 0:
        return None
    attrs = EltwiseGradient("elu", float(call["alpha"]), by_result=bool(call["is_result"]))
    return _emit(call, "grad_output", "self_or_result", attrs)


def _hardtanh(call: Call) -> Value | None:
    low, high = float(call["min_val"]), float(call["max_val"])
    return _emit(call, "grad_output", "self", EltwiseGradient("clip", low, high)) if low < high else None


def _softplus(call: Call) -> Value | None:
    if call["threshold"] < 20 or not call["beta"]:
        return None
    return _emit(call, "grad_output", "self", EltwiseGradient("soft_relu", float(call["beta"])))


# ---------------------------------------------------------------- samples and declaration

#: algorithms with a declared gradient: those of the importers
_ALGORITHMS: Mapping[str, tuple[float, float]] = {
    "relu": (0.0, 0.0), "gelu_erf": (0.0, 0.0), "gelu_tanh": (0.0, 0.0), "swish": (1.0, 0.0), "mish": (0.0, 0.0),
    "hardsigmoid": (1 / 6, 0.5), "hardswish": (1 / 6, 0.5), "elu": (1.5, 0.0), "clip": (-1.5, 1.75),
    "soft_relu": (1.5, 0.0),
}  # fmt: skip


def samples() -> Iterable[Sample]:
    """Yield every algorithm that is imported, on a tensor with a channel tail and on rows."""
    for dims in ((2, 17, 5, 7), (3, 40)):
        types = {"src": TensorType(dims), "diff_dst": TensorType(dims)}
        for alg, (alpha, beta) in _ALGORITHMS.items():
            yield Sample(f"{alg}_{len(dims)}d", EltwiseGradient(alg, alpha, beta), types, -2.0, 2.0)
        for alg in _BY_RESULT:
            by_result = {"dst": types["src"], "diff_dst": types["diff_dst"]}
            yield Sample(f"{alg}_by_result_{len(dims)}d", EltwiseGradient(alg, 1.0, 0.0, True), by_result, -0.9, 0.9)
        yield Sample(f"leaky_relu_{len(dims)}d", EltwiseGradient("relu", 0.1), types, -2.0, 2.0)


ELTWISE_BACKWARD = OpDef(
    name="eltwise_backward",
    attrs=EltwiseGradient,
    operands=(
        Operand("src", "SRC", optional=True),
        Operand("dst", "DST", optional=True),
        Operand("diff_dst", "DIFF_DST"),
    ),
    results=(Operand("diff_src", "DIFF_SRC"),),
    category=Category.BANDWIDTH,
    infer=infer,
    reference=reference,
    pytorch=ByPyTorch(operator),
    primitive=primitive,
    cost=Cost(operations=lambda attrs, gathered: eltwise.ELTWISE.cost.operations(attrs.function, gathered)),
    numbers=Numbers(loses=lambda attrs: _LOSES.get(attrs.alg, frozenset())),
    inplace=frozenset({"diff_dst"}),
    short="eltwise_back",
    samples=samples,
    torch={
        "aten.threshold_backward.default": _threshold,
        "aten.tanh_backward.default": _by_result("tanh"),
        "aten.sigmoid_backward.default": _by_result("logistic"),
        "aten.elu_backward.default": _elu,
        "aten.hardtanh_backward.default": _hardtanh,
        "aten.softplus_backward.default": _softplus,
        "aten.leaky_relu_backward.default": _leaky_relu,
        "aten.gelu_backward.default": _gelu,
        "aten.silu_backward.default": _unary("swish", 1.0),
        "aten.mish_backward.default": _unary("mish"),
        "aten.hardsigmoid_backward.default": _unary("hardsigmoid", 1 / 6, 0.5),
        "aten.hardswish_backward.default": _unary("hardswish", 1 / 6, 0.5),
    },
)
