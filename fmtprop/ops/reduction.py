"""Reducing axes to size 1: oneDNN's reduction primitive."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from fmtprop.errors import ShapeError
from fmtprop.ir import Attrs, Call, Cost, Importer, Onnx, TensorType, Value, Writing
from fmtprop.ir.facets import Absorbs, ByPyTorch, Numbers
from fmtprop.ir.op import Category, Lowering, NativeAttr, Natives, OpDef, Operand, Sample
from fmtprop.ops.arguments import first_of
from fmtprop.ops.building import Ready, Tensors, check_summands, is_native, normalised_axis, primitive_of
from fmtprop.ops.reorder import converted
from fmtprop.ops.view_attrs import reshaped

# ---------------------------------------------------------------- attributes

Axes = tuple[int, ...]


def _product(x: torch.Tensor, axes: Axes) -> torch.Tensor:
    for axis in axes:
        x = x.prod(axis, keepdim=True)
    return x


def _power_sum(x: torch.Tensor, axes: Axes, p: float) -> torch.Tensor:
    return x.abs().pow(p).sum(axes, keepdim=True)


#: algorithm -> its meaning in PyTorch; p and eps as in oneDNN's reduction page
FUNCTIONS: dict[str, Callable[[torch.Tensor, Axes, float, float], torch.Tensor]] = {
    "max": lambda x, axes, p, eps: x.amax(axes, keepdim=True),
    "min": lambda x, axes, p, eps: x.amin(axes, keepdim=True),
    "sum": lambda x, axes, p, eps: x.sum(axes, keepdim=True),
    "mul": lambda x, axes, p, eps: _product(x, axes),
    "mean": lambda x, axes, p, eps: x.mean(axes, keepdim=True),
    "norm_lp_max": lambda x, axes, p, eps: _power_sum(x, axes, p).clamp_min(eps).pow(1 / p),
    "norm_lp_sum": lambda x, axes, p, eps: (_power_sum(x, axes, p) + eps).pow(1 / p),
    "norm_lp_power_p_max": lambda x, axes, p, eps: _power_sum(x, axes, p).clamp_min(eps),
    "norm_lp_power_p_sum": lambda x, axes, p, eps: _power_sum(x, axes, p) + eps,
}

#: algorithms that one operator of PyTorch computes
_WRITING: dict[str, Callable[..., torch.Tensor]] = {
    "max": torch.amax,
    "min": torch.amin,
    "sum": torch.sum,
    "mean": torch.mean,
}


@dataclass(frozen=True)
class Reduction(Attrs):
    """Attributes of a reduction.

    oneDNN developer guide, "Reduction".
    """

    #: oneDNN's algorithm name without ``reduction_``
    alg: str
    #: axes that become 1, from 0, ascending; at least one
    axes: tuple[int, ...]
    #: `p`, `eps`: power of the norms, at least 1, and the summand that keeps them from 0
    p: float = 0.0
    eps: float = 0.0

    def __post_init__(self) -> None:
        if self.alg not in FUNCTIONS:
            raise ShapeError(f"reduction has no algorithm {self.alg!r}; it has {', '.join(FUNCTIONS)}")
        if not self.axes or self.axes[0] < 0 or sorted(set(self.axes)) != list(self.axes):
            raise ShapeError(f"reduction: axes {self.axes} must be distinct, ascending, from 0, and at least one")
        if self.alg.startswith("norm") and not 1 <= self.p < math.inf:
            raise ShapeError(f"reduction: p is {self.p}; a norm needs a finite p of at least 1")


# ---------------------------------------------------------------- meaning


def infer(attrs: Reduction, types: Mapping[str, TensorType]) -> tuple[TensorType, ...]:
    """Return the type of src with the reduced axes of size 1."""
    src = types["src"]
    if attrs.axes[-1] >= src.ndim:
        raise ShapeError(f"src has {src.ndim} dimensions, so there is no axis {attrs.axes[-1]} to reduce")
    return (src.with_dims([1 if axis in attrs.axes else size for axis, size in enumerate(src.dims)]),)


def reference(attrs: Reduction, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Evaluate in plain PyTorch; low precisions accumulate in f32 as the primitive does."""
    src = tensors["src"]
    wide = src.float() if src.dtype in (torch.bfloat16, torch.float16) else src
    return (FUNCTIONS[attrs.alg](wide, attrs.axes, attrs.p, attrs.eps).to(src.dtype),)


def operator(attrs: Reduction, tensors: Tensors, results: Sequence[torch.Tensor]) -> Ready:
    """Return PyTorch's operator for it, which writes its result to a tensor."""
    function = _WRITING.get(attrs.alg)
    if function is None:
        return None
    return partial(function, tensors["src"], attrs.axes, keepdim=True, out=results[0])


def loses(attrs: Reduction) -> frozenset[str]:
    """Return the special values that maxima lose: NaN is skipped; of infinities only, the result is finite."""
    if attrs.alg in ("max", "min"):
        return frozenset({"nan", "extremum"})
    return frozenset({"nan"}) if attrs.alg.endswith("_max") else frozenset()


def primitive(attrs: Reduction, descs: Natives, attr: NativeAttr) -> Lowering:
    """Create the reduction primitive descriptor.

    Raises UnsupportedOpError for a sum of too many elements.
    """
    if attrs.alg not in ("max", "min", "mul"):
        check_summands("reduction", math.prod(descs["src"].dims[axis] for axis in attrs.axes))
    return primitive_of("Reduction")(attrs, descs, attr)


# ---------------------------------------------------------------- importers


def reduced(call: Call, src: Value, attrs: Reduction) -> Value:
    """Return the reduction of a value under the dimensions of the call's result: axes kept or dropped."""
    return reshaped(call, call.emit("reduction", {"src": src}, attrs), call.results[0].dims)


def reduced_axes(axes: int | Sequence[int] | None, ndim: int) -> Axes:
    """Return the axes of an ATen argument, ascending from 0; None and an empty list mean all.

    >>> reduced_axes([-1, 1], 4), reduced_axes(None, 2), reduced_axes(-1, 3)
    ((1, 3), (0, 1), (2,))
    """
    if axes is None or axes == [] or axes == ():
        return tuple(range(ndim))
    listed = (axes,) if isinstance(axes, int) else axes
    return tuple(sorted(normalised_axis(axis, ndim) for axis in listed))


def _reduction(alg: str) -> Importer:
    def importer(call: Call) -> Value | None:
        # With a dtype argument PyTorch converts first.
        src = converted(call, call["self"], call.results[0].dtype)
        # An empty axis has no maximum, and oneDNN does not give 0 or 1 as its sum or product.
        if src is None or not is_native(call.type(src)) or not call.type(src).size:
            return None
        return reduced(call, src, Reduction(alg, reduced_axes(call.args.get("dim"), call.type(src).ndim)))

    return importer


def _norm(power: str) -> Importer:
    def importer(call: Call) -> Value | None:
        p = 2 if call[power] is None else call[power]
        src = converted(call, call["self"], call.results[0].dtype)
        if src is None or not is_native(call.type(src)) or not call.type(src).size or not 1 <= p < math.inf:
            return None
        axes = reduced_axes(call.args.get("dim"), call.type(src).ndim)
        return reduced(call, src, Reduction("norm_lp_sum", axes, float(p)))

    return importer


def _sliced(attrs: Reduction, batch: int, images: int) -> Reduction | None:
    return None if 0 in attrs.axes else attrs


# ---------------------------------------------------------------- ONNX


_OPERATORS = {"max": "ReduceMax", "min": "ReduceMin", "sum": "ReduceSum", "mul": "ReduceProd", "mean": "ReduceMean"}


def _write(attrs: Reduction, w: Writing, operands: Mapping[str, str]) -> str:
    src, axes = operands["src"], w.constant(list(attrs.axes), "s64")
    if attrs.alg in _OPERATORS:
        return w(_OPERATORS[attrs.alg], src, axes, keepdims=1)
    powers = w("ReduceSum", w("Pow", w("Abs", src), w.constant(attrs.p)), axes, keepdims=1)
    total = w("Max" if attrs.alg.endswith("max") else "Add", powers, w.constant(attrs.eps))
    return total if "power" in attrs.alg else w("Pow", total, w.constant(1 / attrs.p))


# ---------------------------------------------------------------- samples and declaration


def samples() -> Iterable[Sample]:
    """Yield every algorithm over space, then other axes."""
    image = {"src": TensorType((2, 17, 5, 7))}
    for alg in FUNCTIONS:
        norm = {"p": 2.0, "eps": 0.001} if alg.startswith("norm") else {}
        yield Sample(alg, Reduction(alg, (2, 3), **norm), image, 0.5, 1.5)
    yield Sample("channels", Reduction("mean", (1,)), image)
    yield Sample("batch", Reduction("sum", (0,)), image)
    yield Sample("all", Reduction("max", (0, 1, 2, 3)), image)
    yield Sample("rows", Reduction("sum", (1,)), {"src": TensorType((3, 40))})
    yield Sample("p3", Reduction("norm_lp_sum", (1,), 3.0), {"src": TensorType((3, 40))})
    yield Sample("volume", Reduction("mean", (2, 3, 4)), {"src": TensorType((1, 8, 3, 4, 5))})


REDUCTION = OpDef(
    name="reduction",
    attrs=Reduction,
    operands=(Operand("src", "SRC"),),
    category=Category.BANDWIDTH,
    infer=infer,
    reference=reference,
    pytorch=ByPyTorch(operator),
    primitive=primitive,
    sliced=_sliced,
    cost=Cost(lambda attrs, gathered: max(gathered, 1.0), pace=0.15, pytorch=0.5),
    numbers=Numbers(loses=loses),
    absorbs=Absorbs(
        # oneDNN takes binary ones too, but then only its slow reference code is left.
        kinds=frozenset({"eltwise", "sum"}),
        wanted=False,
    ),
    samples=samples,
    torch={
        "aten.sum.default": _reduction("sum"),
        "aten.sum.dim_IntList": _reduction("sum"),
        "aten.mean.default": _reduction("mean"),
        "aten.prod.default": _reduction("mul"),
        "aten.prod.dim_int": _reduction("mul"),
        "aten.amax.default": _reduction("max"),
        "aten.amin.default": _reduction("min"),
        "aten.max.default": _reduction("max"),
        "aten.min.default": _reduction("min"),
        "aten.max.dim": first_of(_reduction("max")),
        "aten.min.dim": first_of(_reduction("min")),
        "aten.linalg_vector_norm.default": _norm("ord"),
        "aten.norm.Scalar": _norm("p"),
        "aten.norm.ScalarOpt_dim": _norm("p"),
    },
    onnx=Onnx(_write),
)
