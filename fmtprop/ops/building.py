"""Helpers of all op families: a node with inferred types, the formats of a primitive, checks of sums."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch

from fmtprop.errors import GraphError, ShapeError, UnsupportedOpError
from fmtprop.ir import Graph, Lowering, NativeAttr, Natives, Operand, Primitive, TensorType, opdef
from fmtprop.ir.node import Attrs, Node, Value, label_of
from fmtprop.layout import DataType

if TYPE_CHECKING:
    from fmtprop.dnnl import NativeDesc, PrimitiveDesc
    from fmtprop.layout import MemoryDesc

T = TypeVar("T")

#: operands of an op by name
Tensors: TypeAlias = Mapping[str, torch.Tensor]
#: PyTorch's operator, ready to be called; None if an op's own meaning must run
Ready: TypeAlias = Callable[[], object] | None


def emit(
    graph: Graph,
    op: str,
    inputs: Mapping[str, Value | None],
    attrs: Attrs,
    *,
    name: str | None = None,
    origin: str = "",
    before: str | None = None,
) -> Value:
    """Add a node, infer its result types and return its first result.

    `inputs`: operands by name; None for an absent optional one. `name`: node name; by default the op's short name and a
    number. `before`: the node that takes its turn after the new one. Default: the new one is last.
    """
    declaration = opdef(op)
    present = {operand: value for operand, value in inputs.items() if value is not None}
    if name is None:
        name = graph.fresh_name(getattr(attrs, "alg", "") if op == "eltwise" else declaration.short)
    if not isinstance(attrs, declaration.attrs):
        raise GraphError(
            f"{label_of(name, op)}: attrs must be {declaration.attrs.__name__}, got {type(attrs).__name__}"
        )
    try:
        declaration.check_operands(present)
        types = {operand: graph.type_of(value) for operand, value in present.items()}
        results = declaration.infer(attrs, types)
    except ShapeError as error:
        raise ShapeError(f"{label_of(name, op)}{f' from {origin}' if origin else ''}: {error}") from error
    node = Node(name, op, attrs, results, origin=origin).agreeing_with(types)
    return (graph.add(node, present) if before is None else graph.insert(node, present, before))[0]


def primitive_of(problem: str, extra: Callable[[Any], Mapping[str, Any]] | None = None) -> Primitive:
    """Return the lowering rule of an op that is one of oneDNN's primitives.

    `problem`: class of :mod:`fmtprop.dnnl`, such as ``"Softmax"``. Its fields have the names of operands, results or
    attributes; the value of ``alg`` begins with the primitive's name. `extra`: ``attrs -> fields`` for fields with
    other names than the attributes.
    """

    def primitive(attrs: Any, descs: Natives, attr: NativeAttr) -> Lowering:
        _, named = _problem(problem)
        tensors = {name: desc for name, desc in descs.items() if name in named}
        further = {} if extra is None else dict(extra(attrs))
        if "srcs" in named:
            further["srcs"] = operand_list("src", descs)
            tensors |= {f"src_{index}": desc for index, desc in enumerate(further["srcs"])}
        return lowering(create(problem, attrs, tensors, attr, **further), tensors)

    return primitive


def create(
    problem: str,
    attrs: object,
    tensors: Natives,
    attr: NativeAttr = None,
    hint: PrimitiveDesc | None = None,
    **further: Any,
) -> PrimitiveDesc:
    """Create the descriptor of a primitive."""
    from fmtprop import dnnl

    make, named = _problem(problem)
    given = {name: getattr(attrs, name) for name in named if hasattr(attrs, name)}
    if "alg" in given:
        given["alg"] = f"{make.kind}_{given['alg']}"
    given |= {name: value for name, value in {**tensors, **further}.items() if name in named}
    return dnnl.create(make(**given), attr, hint)


def native(desc: MemoryDesc) -> NativeDesc:
    """Return oneDNN's descriptor of a format."""
    from fmtprop import dnnl

    return dnnl.NativeDesc.from_desc(desc)


def by_autograd(
    function: Callable[[torch.Tensor], torch.Tensor], operand: torch.Tensor, diff_dst: torch.Tensor
) -> tuple[torch.Tensor]:
    """Return the gradient of a function by its operand, by PyTorch's autograd."""
    with torch.enable_grad(), torch.inference_mode(False):
        leaf = operand.detach().clone().requires_grad_()
        (gradient,) = torch.autograd.grad(function(leaf), leaf, diff_dst.detach().clone())
    return (gradient,)


def check_alike(types: Mapping[str, TensorType], name: str, other: str) -> None:
    """Refuse an operand with other dims than another operand."""
    if types[name].dims != types[other].dims:
        raise ShapeError(f"{name} has dims {types[name].dims} but {other} has {types[other].dims}")


@cache
def _problem(name: str) -> tuple[Any, tuple[str, ...]]:
    from fmtprop import dnnl

    make = getattr(dnnl, name)
    return make, tuple(field.name for field in fields(make))


def lowering(pd: PrimitiveDesc, names: Iterable[str]) -> Lowering:
    """Return a lowering that queries the formats from the primitive descriptor, by oneDNN's names of operands."""
    wanted = tuple(names)

    def resolve(candidate: PrimitiveDesc) -> Mapping[str, MemoryDesc]:
        found = {}
        for name in wanted:
            native = candidate.query_md(name)
            if native is not None:
                found[name] = native.desc
        return found

    return Lowering(pd, resolve)


def several(made: torch.Tensor | Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return the results of a call of PyTorch's, which returns a single one as it is."""
    return (made,) if isinstance(made, torch.Tensor) else made


class Copying:
    """A call of a function that cannot write to given memory, and copies of its results to their places.

    A step may also make the call alone and keep the results.

    `places`: the place of each result; None for one without readers. `may_share`: whether a result may share memory
    with an argument. `overload`: PyTorch's function that is called, if it is one.
    """

    __slots__ = ("call", "may_share", "overload", "places")

    def __init__(
        self,
        call: partial[Any],
        places: Sequence[torch.Tensor | None],
        *,
        may_share: bool = False,
        overload: Any = None,
    ) -> None:
        self.call, self.places, self.may_share, self.overload = call, places, may_share, overload

    def __call__(self) -> None:
        """Make the call and the copies."""
        for place, value in zip(self.places, several(self.call()), strict=True):
            if place is None:
                continue
            if value.shape != place.shape:
                shapes = f"{tuple(value.shape)}, not {tuple(place.shape)}"
                raise UnsupportedOpError(f"{self.call.func}: its result has shape {shapes}")
            place.copy_(value)


def only(types: Mapping[str, TensorType], *names: str) -> tuple[TensorType, ...]:
    """Return the types of these operands, in this order."""
    return tuple(types[name] for name in names)


def operand_list(name: str, operands: Mapping[str, T]) -> list[T]:
    """Return the inputs of a variadic operand in order: ``name_0``, ``name_1``, ….

    >>> operand_list("src", {"src_1": "b", "src_0": "a", "dst": "c"})
    ['a', 'b']
    """
    numbers = sorted(int(key.removeprefix(f"{name}_")) for key in operands if key.startswith(f"{name}_"))
    if numbers != list(range(len(numbers))):
        raise ShapeError(f"operands {name}_{numbers} must be numbered from 0 without gaps")
    return [operands[f"{name}_{number}"] for number in numbers]


#: most numbers that a primitive may add one after the other in f32: the sum of 16 384 equal ones is off by 1e-4
MOST_SUMMANDS = 1 << 14

#: the same limit for code with an alternative: the sum of 1 024 equal numbers is off by 1e-5, in a tree by 1e-7
FEW_SUMMANDS = 512


def check_summands(op: str, count: int) -> None:
    """Refuse a sum of too many numbers: oneDNN and our kernels add one after the other, PyTorch adds in a tree."""
    if count > MOST_SUMMANDS:
        raise UnsupportedOpError(
            f"{op}: oneDNN adds {count} numbers one after the other in f32, of which at most {MOST_SUMMANDS} leave "
            "enough digits: the reference target adds them in a tree"
        )


#: operands of ops with learned weights
WEIGHTED = (
    Operand("src", "SRC"),
    Operand("weights", "WEIGHTS", parameter=True),
    Operand("bias", "BIAS", optional=True, parameter=True),
)

#: element types of oneDNN's floating-point primitives
NATIVE_FLOATS = frozenset({DataType.F32, DataType.BF16, DataType.F16})

#: ranks that every primitive family takes
MAX_RANK = 6


def is_native(*types: TensorType) -> bool:
    """Return whether tensors of these types can be operands of a floating-point primitive.

    Importers decline others, so that integers, booleans, f64, scalars and very high ranks run on the reference target.

    >>> is_native(TensorType((2, 3), "f32")), is_native(TensorType((2, 3), "s64")), is_native(TensorType(()))
    (True, False, False)
    """
    return all(t.dtype in NATIVE_FLOATS and 1 <= t.ndim <= MAX_RANK for t in types)


def promoted(*types: TensorType) -> DataType:
    """Return the floating-point type that PyTorch's promotion gives operands of these types, none of them a scalar.

    >>> promoted(TensorType((2,), "bf16"), TensorType((2,), "f32")).value
    'f32'
    """
    dtypes = {t.dtype for t in types}
    return dtypes.pop() if len(dtypes) == 1 else DataType.F32


def normalised_axis(axis: int, ndim: int) -> int:
    """Return the axis counted from the front; a negative one counts from the end.

    >>> normalised_axis(-1, 4)
    3
    """
    if not -max(ndim, 1) <= axis < max(ndim, 1):
        raise ShapeError(f"axis {axis} does not exist in a tensor of {ndim} dimensions")
    return axis % ndim if ndim else 0
