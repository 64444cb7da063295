"""The table of primitives: C function and arguments of each kind in each direction, and operands at execution.

Owns the order of C arguments, and the checks before oneDNN gets them. Must not know a primitive descriptor.

References
----------
oneapi/dnnl/dnnl.h, ``dnnl_*_primitive_desc_create``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from ctypes import Array, c_int64
from dataclasses import dataclass, fields
from functools import lru_cache
from operator import attrgetter
from typing import Any, Final, TypeAlias

from fmtprop.dnnl import _abi
from fmtprop.dnnl._abi import Arg
from fmtprop.dnnl.desc import NativeDesc
from fmtprop.dnnl.engine import Engine
from fmtprop.dnnl.enums import algorithm, prop_kind, rnn_direction
from fmtprop.dnnl.kinds import Problem
from fmtprop.dnnl.sizes import float_array, int64_array
from fmtprop.errors import InputError, ShapeError, UnsupportedOpError

#: a function that makes a C argument from a problem
Reader: TypeAlias = Callable[[Any], Any]

# Limit of extents, strides and paddings: far beyond any tensor, but sums of them fit in 64 bits.
_WINDOW_MAX = 2**31 - 1


@dataclass(frozen=True)
class Spec:
    """One kind in one direction."""

    #: name between ``dnnl_`` and ``_primitive_desc_create``
    function: str
    #: propagation kinds that it serves; one empty string for a kind without directions
    props: tuple[str, ...]
    #: names of the C arguments between the result and the attributes; optional operands end in ``?``
    arguments: tuple[str, ...]
    #: operands that are no C arguments, only execution arguments: vectors, statistics, the workspace
    at_execution: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """Name of the primitive in oneDNN."""
        return self.function.partition("_forward")[0].partition("_backward")[0]

    @property
    def takes_hint(self) -> bool:
        """Whether the forward descriptor is an argument."""
        return self.arguments[-1] == "hint"

    @property
    def operands(self) -> dict[str, int]:
        """Operand -> its argument number (`Arg`) at execution, without sources of a list."""
        names = [argument.removesuffix("?") for argument in self.arguments]
        names += ["src", "dst"] if "data" in names else []
        return {name: int(Arg[name.upper()]) for name in (*names, *self.at_execution) if is_operand(name)}

    @property
    def results(self) -> tuple[str, ...]:
        """The operands that it writes; with `NormFlags.USE_GLOBAL_STATS`, it reads mean and variance instead."""
        if self.takes_hint:
            return tuple(n for n in self.operands if n.startswith("diff_") and not n.startswith("diff_dst"))
        written = ("dst", "mean", "variance", "workspace")
        return tuple(name for name in self.operands if name.startswith(written))


def is_operand(name: str) -> bool:
    """Return whether oneDNN has an execution argument of this name."""
    return name.upper() in Arg.__members__


def _spec(function: str, props: str, arguments: str, at_execution: str = "") -> Spec:
    names = tuple(arguments.split())
    # reorder lists its two engines itself
    names = names if "engine" in names else ("engine", *names)
    return Spec(function, tuple(props.split()) or ("",), names, tuple(at_execution.split()))


_FORWARD = "forward_training forward_inference"
_WINDOW = "strides dilates pad_l pad_r"


def _convolution(kind: str) -> Iterator[Spec]:
    yield _spec(f"{kind}_forward", _FORWARD, f"prop alg src weights bias? dst {_WINDOW}")
    yield _spec(f"{kind}_backward_data", "backward_data", f"alg diff_src weights diff_dst {_WINDOW} hint")
    arguments = f"alg src diff_weights diff_bias? diff_dst {_WINDOW} hint"
    yield _spec(f"{kind}_backward_weights", "backward_weights", arguments)


def _normalization(
    name: str, own: str = "", forward: str = "", gradients: str = "", affine: str = ""
) -> Iterator[Spec]:
    function = f"{name}_normalization"
    yield _spec(
        f"{function}_forward", _FORWARD, f"prop src dst {own} epsilon flags", f"mean variance scale shift {forward}"
    )
    arguments = f"prop diff_src diff_dst src {own} epsilon flags hint"
    vectors = f"scale {affine} diff_scale diff_shift"
    yield _spec(f"{function}_backward", "backward", arguments, f"mean variance {vectors} {gradients}")
    yield _spec(f"{function}_backward", "backward_data", arguments, f"mean variance {gradients}")


def _recurrent(kind: str, numbers: str, states: str = "", weights: str = "", more: str = "") -> Iterator[Spec]:
    """Yield a kind's rows: `numbers` come first, then operands with further states and weights, flags and `more`."""
    source = f"src_layer src_iter? {states}"
    learned = f"weights_layer weights_iter {weights} bias?"
    result = f"dst_layer dst_iter? {states.replace('src', 'dst')}"
    forward = f"{source} {learned} {result}"
    gradients = " ".join(f"diff_{name}" for name in forward.split())
    yield _spec(f"{kind}_forward", _FORWARD, f"prop {numbers} {forward} flags {more}", "workspace")
    yield _spec(f"{kind}_backward", "backward", f"prop {numbers} {forward} {gradients} flags {more} hint", "workspace")


SPECS: tuple[Spec, ...] = (
    *_convolution("convolution"),
    *_convolution("deconvolution"),
    _spec("inner_product_forward", _FORWARD, "prop src weights bias? dst"),
    _spec("inner_product_backward_data", "backward_data", "diff_src weights diff_dst hint"),
    _spec("inner_product_backward_weights", "backward_weights", "src diff_weights diff_bias? diff_dst hint"),
    _spec("matmul", "", "src weights bias? dst"),
    _spec("pooling_forward", _FORWARD, "prop alg src dst strides kernel dilates pad_l pad_r", "workspace"),
    _spec(
        "pooling_backward",
        "backward_data",
        "alg diff_src diff_dst strides kernel dilates pad_l pad_r hint",
        "workspace",
    ),
    _spec("lrn_forward", _FORWARD, "prop alg src dst local_size alpha beta k", "workspace"),
    _spec("lrn_backward", "backward_data", "alg diff_src diff_dst src local_size alpha beta k hint", "workspace"),
    *_normalization("batch", forward="src_1 workspace", gradients="diff_src_1 workspace"),
    # early versions need the shift, although no gradient depends on it
    *_normalization("layer", own="mean?", affine="shift"),
    *_normalization("group", own="groups"),
    _spec("eltwise_forward", _FORWARD, "prop alg src dst alpha beta"),
    _spec("eltwise_backward", "backward_data", "alg diff_src diff_dst data alpha beta hint"),
    _spec("prelu_forward", _FORWARD, "prop src weights dst"),
    _spec("prelu_backward", "backward", "src weights diff_src diff_weights diff_dst hint"),
    _spec("softmax_forward", _FORWARD, "prop alg src dst axis"),
    _spec("softmax_backward", "backward_data", "alg diff_src diff_dst dst axis hint"),
    _spec("shuffle_forward", _FORWARD, "prop src dst axis group_size"),
    _spec("shuffle_backward", "backward_data", "diff_src diff_dst axis group_size hint"),
    _spec("resampling_forward", _FORWARD, "prop alg factors src dst?"),
    _spec("resampling_backward", "backward_data", "alg factors diff_src diff_dst hint"),
    _spec("binary", "", "alg src_0 src_1 dst"),
    _spec("reduction", "", "alg src dst p eps"),
    _spec("reorder", "", "src engine dst engine"),
    _spec("concat", "", "dst? count axis srcs"),
    _spec("sum", "", "dst? count scales srcs"),
    *_recurrent("vanilla_rnn", "activation direction", more="alpha beta"),
    *_recurrent("lstm", "direction", "src_iter_c?", "weights_peephole? weights_projection?"),
    *_recurrent("gru", "direction"),
    *_recurrent("lbr_gru", "direction"),
)

_BY_DIRECTION = {(spec.kind, prop): spec for spec in SPECS for prop in spec.props}


def spec_of(kind: str, prop: str = "") -> Spec:
    """Return the row of a kind in a direction.

    >>> spec_of("inner_product", "backward_data").arguments
    ('engine', 'diff_src', 'weights', 'diff_dst', 'hint')
    >>> spec_of("prelu", "backward").results
    ('diff_src', 'diff_weights')
    """
    if (kind, prop) not in _BY_DIRECTION:
        known = ", ".join(repr(known) for of, known in _BY_DIRECTION if of == kind)
        raise UnsupportedOpError(f"{kind} has no propagation kind {prop!r}; known: {known}")
    return _BY_DIRECTION[kind, prop]


@lru_cache(maxsize=256)
def _call_of(cls: Any, prop: str) -> tuple[str, tuple[Reader, ...], tuple[str, ...]]:
    """Return, for a class and direction: C function, readers of its arguments, operands of other directions."""
    spec = spec_of(cls.kind, prop)
    readers = tuple(_reader(argument, prop) for argument in spec.arguments if argument != "hint")
    others = (field.name for field in fields(cls) if is_operand(field.name) and field.name not in spec.operands)
    return f"{spec.function}_primitive_desc_create", readers, tuple(others)


def c_call(problem: Problem) -> tuple[str, list[Any]]:
    """Return the C function of a problem, without ``dnnl_``, and its arguments before the hint.

    Raises ShapeError if a number does not fit the operands: oneDNN would read beyond an array, or wrap around, and
    UnsupportedOpError if oneDNN has no such propagation kind or algorithm.
    """
    cls: Any = type(problem)
    function, readers, others = _call_of(cls, problem.prop)
    for name in others:
        if getattr(problem, name) is not None:
            taken = ", ".join(spec_of(problem.kind, problem.prop).operands)
            raise InputError(f"{problem.kind} ({problem.prop}) takes no operand {name}; it takes {taken}")
    if problem.kind in _NEEDING_EACH_ELEMENT:
        _check_repeats(problem)
    return function, [read(problem) for read in readers]


#: kinds that take the strides of their operands for sizes: a stride of 0 would end the process
_NEEDING_EACH_ELEMENT: Final = frozenset({"inner_product", "vanilla_rnn", "lstm", "gru", "lbr_gru"})


def _check_repeats(problem: Problem) -> None:
    """Refuse operands with one element in several places."""
    operands = ((name, getattr(problem, name, None)) for name in spec_of(problem.kind, problem.prop).operands)
    for name, native in operands:
        desc = None if native is None else native.desc
        if (
            desc is not None
            and desc.kind == "blocked"
            and any(size > 1 and stride == 0 for size, stride in zip(desc.dims, desc.strides, strict=True))
        ):
            raise UnsupportedOpError(
                f"{problem.kind} ({problem.prop}): {name} is {desc}, which repeats elements by a stride of 0; oneDNN "
                "needs each of them in memory: copy it"
            )


# ---------------------------------------------------------------- readers: C arguments from a problem


def _reader(argument: str, prop: str) -> Reader:
    if argument == "prop":
        number = prop_kind(prop)
        return lambda _: number
    if argument in _READERS:
        return _READERS[argument]
    return _operand(argument) if is_operand(argument.removesuffix("?")) else attrgetter(argument)


def _operand(argument: str) -> Reader:
    name, get = argument.removesuffix("?"), attrgetter(argument.removesuffix("?"))

    def read(problem: Any) -> Any:
        desc = get(problem)
        if desc is not None:
            return desc.handle
        if name == argument:
            raise InputError(f"{problem.kind} ({problem.prop}) needs operand {name}; given: {problem}")
        return None

    return read


def _eltwise_data(problem: Any) -> Any:
    return _operand("dst" if problem.alg.endswith("_use_dst_for_bwd") else "src")(problem)


def _data(problem: Any) -> NativeDesc:
    """Return the tensor to which windows and axes apply."""
    if problem.kind == "concat":
        return problem.srcs[0]  # type: ignore[no-any-return]
    return problem.src if problem.src is not None else problem.diff_src  # type: ignore[no-any-return]


def _window(name: str) -> Reader:
    get = attrgetter(name)

    def read(problem: Any) -> Any:
        values: Sequence[int] = get(problem)
        data = _data(problem)
        spatial = len(data.dims) - 2
        if len(values) != spatial:
            raise ShapeError(
                f"{name} {list(values)}: {data} has {spatial} spatial axes, so {spatial} entries are needed"
            )
        return _window_array(name, tuple(values))

    return read


@lru_cache(maxsize=1024)
def _window_array(name: str, values: tuple[int, ...]) -> Array[c_int64]:
    """Return a C array, cached because networks repeat few windows often; oneDNN only reads it."""
    for value in values:
        if not -_WINDOW_MAX <= value <= _WINDOW_MAX:
            raise ShapeError(f"{name} {list(values)}: {value} is out of range (at most {_WINDOW_MAX})")
    return int64_array(values, name)


def _size(name: str) -> Reader:
    get = attrgetter(name)

    def read(problem: Any) -> Any:
        value: int = get(problem)
        if not 0 <= value <= _WINDOW_MAX:
            raise ShapeError(f"{problem.kind} {name} {value} is out of range (0 to {_WINDOW_MAX})")
        return value

    return read


def _axis(problem: Any) -> int:
    data = _data(problem)
    if not 0 <= problem.axis < len(data.dims):
        raise ShapeError(f"{problem.kind}: axis {problem.axis} is not one of {data} (0 to {len(data.dims) - 1})")
    return int(problem.axis)


def _count(problem: Any) -> int:
    if not problem.srcs:
        raise ShapeError(f"{problem.kind}: at least one source is needed")
    return len(problem.srcs)


def _scales(problem: Any) -> Any:
    if len(problem.scales) != len(problem.srcs):
        raise ShapeError(f"sum: {len(problem.srcs)} sources need {len(problem.srcs)} scales, not {len(problem.scales)}")
    return float_array(problem.scales)


def _factors(problem: Any) -> Any:
    if problem.factors is None:
        return None
    data, count = _data(problem), len(problem.factors)
    spatial = len(data.dims) - 2
    if count != spatial:
        raise ShapeError(f"resampling factors {list(problem.factors)}: {data} needs {spatial}, one per spatial axis")
    return float_array(problem.factors)


_READERS: dict[str, Reader] = {
    "engine": lambda _: Engine.cpu().handle,
    "alg": lambda problem: algorithm(problem.alg),
    "activation": lambda problem: algorithm(problem.activation),
    "direction": lambda problem: rnn_direction(problem.direction),
    "flags": lambda problem: int(problem.flags),
    "data": _eltwise_data,
    "axis": _axis,
    "count": _count,
    "scales": _scales,
    "factors": _factors,
    "srcs": lambda problem: (_abi.dnnl_memory_desc_t * len(problem.srcs))(*(desc.handle for desc in problem.srcs)),
    **{name: _window(name) for name in ("strides", "dilates", "kernel", "pad_l", "pad_r")},
    **{name: _size(name) for name in ("local_size", "group_size", "groups")},
}
