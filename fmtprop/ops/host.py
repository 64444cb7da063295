"""Calls without a oneDNN op: any functional overload, of PyTorch or of another library, run on plain tensors.

Owns the op ``aten``, which makes a call (:mod:`fmtprop.ops.host_call`). With it, any exportable model can run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch

from fmtprop.errors import FmtpropError, GraphError, UnsupportedOpError
from fmtprop.ir.facets import Cost
from fmtprop.ir.importing import Call
from fmtprop.ir.node import Value
from fmtprop.ir.op import Category, OpDef, Operand, Sample
from fmtprop.ir.tensors import tensor_type, torch_dtype
from fmtprop.ir.types import TensorType
from fmtprop.ops import host_facts
from fmtprop.ops.building import Ready, Tensors, is_native, normalised_axis
from fmtprop.ops.host_call import CallOperand, HostCall, Prepared, arguments_of, host_call, prepare
from fmtprop.ops.view_attrs import permuted
from fmtprop.ops.without_data import result_of
from fmtprop.system.printable import first_line

#: a call with an overload for given memory that replaces the memory's strides by the source's
_RESTRIDES = "aten.adaptive_avg_pool2d.default"
#: a call without an overload for given memory that this module writes out
_TABLE_GRADIENT = "aten.embedding_dense_backward.default"
#: the type of a result that is None: a gradient that was not requested
NO_RESULT = TensorType((0,))

# ---------------------------------------------------------------- meaning

_DATA_DEPENDENT = "the shape of a result depends on the data; shapes must be known before the graph runs"


def infer(attrs: HostCall, types: Mapping[str, TensorType]) -> tuple[TensorType, ...]:
    """Return the types of all results, found by running the call on tensors without data."""
    return _infer(attrs, tuple(types.items()), torch.get_default_dtype())


@lru_cache(maxsize=4096)  # of an LSTM, PyTorch walks through each of its steps: 0.2 s, and each pass is verified
def _infer(attrs: HostCall, operands: tuple[tuple[str, TensorType], ...], _: torch.dtype) -> tuple[TensorType, ...]:
    types = dict(operands)
    results = _on_meta(attrs, types)
    if results is None:
        results = _on_fakes(attrs, types)
    return tuple(_result_type(attrs.target, index, result) for index, result in enumerate(results))


def _on_meta(attrs: HostCall, types: Mapping[str, TensorType]) -> tuple[torch.Tensor, ...] | None:
    """Return the results of the call on the meta device; None if it does not run there as on a CPU.

    Fake tensors run more calls and give reasons, but they load PyTorch's compiler: seconds, and 60 MB.
    """
    prepared = prepare(attrs)
    named = any(isinstance(value, torch.device) for value in (*prepared.args, *prepared.kwargs.values()))
    if named or not types:  # its results would be on a CPU
        return None
    meta = torch.device("meta")
    tensors = {name: torch.empty(t.dims, dtype=torch_dtype(t.dtype), device=meta) for name, t in types.items()}
    try:
        results = _call(attrs, tensors, result_of)
    except (FmtpropError, RuntimeError, TypeError, ValueError, IndexError):
        return None
    if not all(result.device == meta for result in results):
        return None
    # statistics in bf16 have the operands' type in PyTorch's kernels for the CPU, and f32 in those for other devices
    read, made = ({t.dtype for t in of if t.is_floating_point()} for of in (tensors.values(), results))
    return None if len(made) > 1 and len(read) == 1 and torch.float32 not in read else results


def _on_fakes(attrs: HostCall, types: Mapping[str, TensorType]) -> tuple[torch.Tensor, ...]:
    """Return the results of the call on fake tensors, with the dispatcher of torch.export.

    This dispatcher prefers PyTorch's decompositions in Python, which do not read numbers; `istft` in C++ checks the sum
    of its windows.
    """
    from torch._dispatch.python import enable_python_dispatcher
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

    with FakeTensorMode(), enable_python_dispatcher():
        tensors = {name: torch.empty(t.dims, dtype=torch_dtype(t.dtype)) for name, t in types.items()}
        try:
            return _call(attrs, tensors)
        except FmtpropError:
            raise
        except (DynamicOutputShapeException, DataDependentOutputException) as error:
            raise UnsupportedOpError(f"{attrs.target}: {_DATA_DEPENDENT}") from error
        # Whatever a kernel's checks or its shape function may raise about the operands.
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            given = ", ".join(f"{name} {t}" for name, t in types.items())
            raise UnsupportedOpError(f"{attrs.target} does not take {given}: {first_line(error)}") from error


def _result_type(target: str, index: int, result: torch.Tensor) -> TensorType:
    if not all(isinstance(size, int) for size in result.shape):
        raise UnsupportedOpError(f"{target}: {_DATA_DEPENDENT}")
    try:
        return tensor_type(result)
    except GraphError as error:
        raise UnsupportedOpError(f"{target}: result {index}: {error}") from error


def reference(attrs: HostCall, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Make the call; results may be views of the operands."""
    return _call(attrs, tensors)


def operator(attrs: HostCall, tensors: Tensors, results: Sequence[torch.Tensor | None]) -> Ready:
    """Return the call, or the overload that writes its results to given tensors; None if operands must be copied.

    Arguments are put together once. Complex operands and results are views of their parts. A result that is None has
    no readers.
    """
    prepared = prepare(attrs)
    if attrs.target == _TABLE_GRADIENT and results[0] is not None:
        return _gradient_of_table(attrs, tensors, results[0])
    if prepared.row_major or attrs.target == _RESTRIDES:
        return None
    operands = tuple((name, t.dtype, t.shape) for name, t in tensors.items())
    complex_results = _complex_results(attrs, operands, len(results))
    if complex_results is None or len(complex_results) != len(results):
        return None
    joined = {name for value in (*prepared.args, *prepared.kwargs.values()) for name in _complex_operands(value)}
    parts = [r for r, is_complex in zip(results, complex_results, strict=True) if is_complex and r is not None]
    if not all(map(_can_be_joined, (*(tensors[name] for name in joined), *parts))):
        return None
    args, kwargs = _filled(attrs.target, prepared, tensors)
    places = [
        torch.view_as_complex(r) if c and r is not None else r for r, c in zip(results, complex_results, strict=True)
    ]
    out = _writing(prepared.function)
    # running averages of a bf16 batch are f32 by PyTorch's rules for shapes, bf16 by its kernels
    is_sure = len({result.dtype for result in results if result is not None and result.is_floating_point()}) < 2
    if out is not None and is_sure and len(out.names) == len(results) and None not in results:
        return partial(out.function, *args, **kwargs, **dict(zip(out.names, places, strict=True)))
    if any(str(result.real_type) != "Tensor" for result in prepared.function._schema.returns):
        return None
    return partial(_copied, prepared.function, tuple(args), kwargs, places)


def _copied(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], places: Sequence[torch.Tensor | None]
) -> None:
    values = function(*args, **kwargs)
    for place, value in zip(places, values if len(places) > 1 else (values,), strict=True):
        if place is None:
            continue
        if value.shape != place.shape:
            raise UnsupportedOpError(f"{function}: its result has shape {tuple(value.shape)}, not {tuple(place.shape)}")
        place.copy_(value)


def _gradient_of_table(
    attrs: HostCall, tensors: Mapping[str, torch.Tensor], dst: torch.Tensor
) -> Callable[[], object] | None:
    """Return a call that adds the gradients of rows to a table. PyTorch's makes another table, which may be large."""
    given = arguments_of(attrs)
    diff, indices = tensors[given["grad_output"].name], tensors[given["indices"].name]
    if given["scale_grad_by_freq"]:
        return None
    padding = given["padding_idx"]

    def add() -> None:
        dst.zero_().index_add_(0, indices.flatten(), diff.reshape(-1, dst.shape[1]))
        if padding >= 0:
            dst[padding].zero_()

    return add


@lru_cache(maxsize=1024)
def _complex_results(
    attrs: HostCall, operands: tuple[tuple[str, torch.dtype, torch.Size], ...], count: int
) -> tuple[bool, ...] | None:
    """Return which of a call's results are complex tensors, None if this is not known."""
    tensors = {name: torch.empty(shape, dtype=dtype, device="meta") for name, dtype, shape in operands}
    try:
        return tuple(result.is_complex() for result in _results(attrs, tensors, result_of))
    except (FmtpropError, RuntimeError, TypeError, ValueError, IndexError):
        may_be = any(name in attrs.target for name in ("complex", "fft", "eig", "polar"))
        return None if may_be else (False,) * count


def _complex_operands(value: Any) -> Iterable[str]:
    if isinstance(value, list):
        return [name for item in value for name in _complex_operands(item)]
    return [value.name] if isinstance(value, CallOperand) and value.is_complex else []


def _can_be_joined(parts: torch.Tensor) -> bool:
    """Return whether the parts of complex numbers lie in pairs, so that they are complex numbers without a copy."""
    steps = (parts.storage_offset(), *parts.stride()[:-1])
    return parts.stride(-1) == 1 and all(step % 2 == 0 for step in steps)


#: PyTorch's generated bindings, without those of `torch.nn.functional`
_BINDINGS = tuple(getattr(torch._C, module) for module in ("_VariableFunctions", "_fft", "_linalg", "_special"))


class _Writing(NamedTuple):
    """An overload that writes its results to tensors given under these names."""

    function: Any
    names: tuple[str, ...]


@lru_cache(maxsize=1024)
def _writing(function: Any) -> _Writing | None:
    """Return the overload with the same arguments that writes to tensors, if its kernels write directly."""
    given = [(argument.name, str(argument.real_type)) for argument in function._schema.arguments]
    if ("reduction", "int") in given:
        return None  # some losses resize the given tensor
    for name in function.overloadpacket.overloads():
        other = getattr(function.overloadpacket, name)
        read = [(a.name, str(a.real_type)) for a in other._schema.arguments if not a.is_out]
        # an overload that PyTorch generated from the function computes and then copies
        if read == given and torch.Tag.generated not in other.tags and len(read) < len(other._schema.arguments):
            names = tuple(a.name for a in other._schema.arguments if a.is_out)
            binding = _binding(function)
            return _Writing(binding if binding is not None and names == ("out",) else other, names)
    return None


def _binding(function: Any) -> Any:
    """Return PyTorch's generated binding of an overload, which takes half of its time per call; None if it has none."""
    name = function.name().partition("::")[2].partition(".")[0]
    return next(filter(None, (getattr(bindings, name, None) for bindings in _BINDINGS)), None)


#: makes a call of a function on its arguments
_Run = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def _made(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return function(*args, **kwargs)


def _call(attrs: HostCall, tensors: Mapping[str, torch.Tensor], run: _Run = _made) -> tuple[torch.Tensor, ...]:
    """Make a call; return complex results as their parts."""
    results = _results(attrs, tensors, run)
    return tuple(torch.view_as_real(r.resolve_conj().resolve_neg()) if r.is_complex() else r for r in results)


def _results(attrs: HostCall, tensors: Mapping[str, torch.Tensor], run: _Run = _made) -> tuple[torch.Tensor, ...]:
    prepared = prepare(attrs)
    if prepared.row_major:
        tensors = {name: t.clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}
    args, kwargs = _filled(attrs.target, prepared, tensors)
    found = run(prepared.function, tuple(args), kwargs)
    every = tuple(found) if isinstance(found, (tuple, list)) else (found,)
    results = tuple(_without_elements() if result is None else result for result in every)
    for index, result in enumerate(results):
        if not isinstance(result, torch.Tensor):
            raise UnsupportedOpError(f"{attrs.target}: result {index} is {result!r}, not a tensor")
    return results


def _without_elements() -> torch.Tensor:
    return torch.empty(NO_RESULT.dims, dtype=torch_dtype(NO_RESULT.dtype), device="cpu")


def _filled(target: str, prepared: Prepared, tensors: Mapping[str, torch.Tensor]) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of a call with tensors in their places."""

    def filled(value: Any) -> Any:
        if isinstance(value, CallOperand):
            if value.name not in tensors:
                raise GraphError(f"{target} reads operand {value.name}, which is not connected")
            return _joined(tensors[value.name]) if value.is_complex else tensors[value.name]
        return [filled(item) for item in value] if isinstance(value, list) else value

    return [filled(value) for value in prepared.args], {name: filled(v) for name, v in prepared.kwargs.items()}


def _joined(parts: torch.Tensor) -> torch.Tensor:
    """Return the complex tensor that has these parts: a view of them, unless they do not lie in pairs."""
    if not _can_be_joined(parts):
        parts = parts.clone(memory_format=torch.contiguous_format)
    return torch.view_as_complex(parts)


# ---------------------------------------------------------------- importer


def make_host_call(call: Call) -> tuple[Value, ...]:
    """Add the node of an unchanged call.

    Parameters
    ----------
    call : Call
        A call of the source program, normalised.

    Returns
    -------
    tuple of Value
        One per result of the call.

    Raises
    ------
    UnsupportedOpError
        The call changes its arguments, is random, or has an argument or a result that a graph cannot hold.
    """
    attrs, inputs = host_call(call.target, call.args)
    first = call.emit("aten", inputs, attrs)
    return tuple(Value(first.node, index) for index in range(len(call.results)))


def _scan(call: Call) -> Value | None:
    """Emit a scan along the last axis: along another one, PyTorch takes up to 30 times as long."""
    src, type_ = call["self"], call.type(call["self"])
    if type_.ndim < 2 or not is_native(type_):
        return None
    axis = normalised_axis(call["dim"], type_.ndim)
    order = [other for other in range(type_.ndim) if other != axis] + [axis]
    attrs, inputs = host_call(call.target, {**call.args, "self": permuted(call, src, order), "dim": type_.ndim - 1})
    scanned = call.emit("aten", inputs, attrs)
    return permuted(call, scanned, [order.index(other) for other in range(type_.ndim)])


def _places(call: Call) -> Value | None:
    """Emit the places of a maximum: for these alone, PyTorch takes up to 25 times as long along an axis of planes.

    On [1, 2, 64, 64], it takes 0.38 ms for argmax and 0.015 ms for both results of max; on [1, 21, 161, 193], 4.7 ms
    and 1.3 ms; on rows 0.9 to 1.1 times max's time in f32, 2 to 4 times in bf16 (Zen 4, one thread). On integers
    in rows it takes less than max. Both give the first of equal places, and NaN's.
    """
    if call["dim"] is None or not call.type(call["self"]).dtype.is_floating:
        return None
    name = call.target.split(".")[1].removeprefix("arg")
    attrs, inputs = host_call(f"aten.{name}.dim", call.args)
    return Value(call.emit("aten", inputs, attrs).node, 1)


def _filled_places(call: Call) -> Value | None:
    """Emit a choice between a number and the tensor: to fill the marked places, PyTorch copies the tensor first.

    On [2, 6, 128, 128] and a mask of [2, 1, 1, 128], it takes 0.19 ms to fill and 0.11 ms to choose, on a transposed
    tensor 0.32 ms and 0.16 ms (Zen 4, one thread).
    """
    src, value = call["self"], call["value"]
    type_ = call.type(src)
    if isinstance(value, Value) or not (type_.dtype.is_floating or isinstance(value, int)):
        return None
    number = call.constant(value, type_.dtype.value)
    attrs, inputs = host_call("aten.where.self", {"condition": call["mask"], "self": number, "other": src})
    return call.emit("aten", inputs, attrs)


#: Python's operators -> the same functions under names with an overload for given memory
_BITWISE = {
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
    "lshift": "bitwise_left_shift",
    "rshift": "bitwise_right_shift",
}


def _bitwise(call: Call) -> Value | None:
    """Emit a function of bits by its own name: by the operator's, a step makes one more tensor, which takes 3 us."""
    _, name, overload = call.target.split(".")
    name, other = name.strip("_"), call["other"]
    types = [call.type(value).dtype for value in (call["self"], other) if isinstance(value, Value)]
    if isinstance(other, float) or any(dtype.is_floating for dtype in types):
        return None  # older PyTorch takes a shift of those for a product
    kind = "Tensor_Scalar" if name.endswith("shift") and overload == "Scalar" else overload
    attrs, inputs = host_call(f"aten.{_BITWISE[name]}.{kind}", call.args)
    return call.emit("aten", inputs, attrs)


# ---------------------------------------------------------------- samples and declaration


def samples() -> Iterable[Sample]:
    """Yield calls with one operand, a list of operands, several results and an infinite argument."""

    def sample(target: str, arguments: Mapping[str, Any], types: Mapping[str, TensorType]) -> Sample:
        attrs, _ = host_call(target, arguments)
        return Sample(target.split(".")[1], attrs, types)

    x, y = Value("x"), Value("y")
    image = TensorType((2, 17, 5, 7))
    yield sample("aten.cumsum.default", {"self": x, "dim": 1}, {"src_0": image})
    yield sample("aten.roll.default", {"self": x, "shifts": [1, 2], "dims": [2, 3]}, {"src_0": image})
    yield sample("aten.where.self", {"condition": x, "self": y, "other": y}, {
        "src_0": TensorType((3, 40), "boolean"), "src_1": TensorType((3, 40)),
    })  # fmt: skip
    yield sample("aten.topk.default", {"self": x, "k": 3}, {"src_0": TensorType((3, 40))})
    yield sample("aten.nan_to_num.default", {"self": x, "posinf": math.inf}, {"src_0": TensorType((3, 40))})


ATEN = OpDef(
    name="aten",
    attrs=HostCall,
    operands=(Operand("src", "MULTIPLE_SRC", optional=True, variadic=True),),
    category=Category.HOST,
    infer=infer,
    reference=reference,
    checkable=host_facts.checkable,
    cost=Cost(window=host_facts.window),
    any_strides=host_facts.any_strides,
    narrows=host_facts.narrows,
    positions=host_facts.positions,
    repeated=host_facts.repeated,
    operator=operator,
    torch={
        **{f"aten.{name}.default": _scan for name in ("cumsum", "cumprod", "logcumsumexp")},
        **{f"aten.{name}.default": _places for name in ("argmax", "argmin")},
        "aten.masked_fill.Scalar": _filled_places,
        **{f"aten.__{name}__.{kind}": _bitwise for name in _BITWISE for kind in ("Tensor", "Scalar")},
    },
    samples=samples,
)
