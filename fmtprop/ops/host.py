"""Calls that have no oneDNN op: any functional overload, of PyTorch or registered by others, run on plain tensors.

Owns the op ``aten``: how a call is written down as attributes, which calls are refused, and how one is made. It is the
path by which any exportable model runs. A graph file may come from anywhere: it names PyTorch's own functions of
tensors alone, and a call is checked again whenever it is about to be made.
"""

from __future__ import annotations

import cmath
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload, OpOverloadPacket

from fmtprop.errors import FmtpropError, GraphError, UnsupportedOpError
from fmtprop.ir.importing import Call
from fmtprop.ir.json_text import parse_json
from fmtprop.ir.node import Attrs, Value
from fmtprop.ir.op import Category, OpDef, Operand, Sample
from fmtprop.ir.tensors import tensor_type, torch_dtype
from fmtprop.ir.types import TensorType
from fmtprop.layout import DataType

#: where overloads that a file names may come from; each holds functions of tensors, none reads or writes files…
NAMESPACES = ("aten", "prims", "torchvision")
#: …but this one, which maps a file of any name
_REFUSED = frozenset({"aten.from_file"})
#: their strides and offsets count in the storage of the first argument, which is row-major and alone in it
STORAGE_OPS = frozenset({"as_strided", "as_strided_copy", "as_strided_scatter"})
#: they join or part neighbours of the last axis, which must lie side by side and start at a whole element
_RETYPING = frozenset({"aten.view.dtype", "aten.view_copy.dtype"})
#: they have kernels of their own for channels-last tensors, ten times as fast for some, compared with those for
#: row-major ones by `tests/ops/test_host.py`
_ANY_STRIDES = frozenset(
    {
        *(f"aten.{name}.default" for name in ("max_pool2d_with_indices", "avg_pool2d", "adaptive_max_pool2d")),
        *(f"aten.{name}.default" for name in ("adaptive_avg_pool2d", "_adaptive_avg_pool2d")),
        *(
            f"aten.upsample_{name}2d.{form}"
            for name in ("nearest", "bilinear", "bicubic")
            for form in ("vec", "default")
        ),
    }
)
#: the overload that writes to given memory gives it the source's strides instead of its own
_RESTRIDES = "aten.adaptive_avg_pool2d.default"
#: element by element, although PyTorch does not call it so
_CONVERSION = "aten._to_copy.default"
#: names of data types that a graph has the parts of
COMPLEX = {f"complex{bits}": getattr(torch, f"complex{bits}") for bits in (32, 64, 128)}
#: what a graph has of a result that is None: a gradient that nobody asked for
NO_RESULT = TensorType((0,))
_TARGET = re.compile(r"(\w+)\.(\w+)\.(\w+)", re.ASCII)

# ---------------------------------------------------------------- attributes


@dataclass(frozen=True)
class HostCall(Attrs):
    """One call of an overload.

    Parameters
    ----------
    target : str
        Overload name, such as ``"aten.cumsum.default"``.
    arguments : str
        JSON object: arguments by schema name, those at their default left out. A tensor is ``{"tensor": "src_0"}``,
        a complex one, which a graph has as its parts, ``{"parts": "src_0"}``; a float that JSON lacks is
        ``{"float": "inf"}``, a complex number ``{"complex": [0.0, 1.0]}``; data types, devices, layouts and memory
        formats are their names.

    Raises
    ------
    UnsupportedOpError
        The target is no name of an overload, or of one that reads files.
    GraphError
        The arguments are not a JSON object.

    Examples
    --------
    >>> HostCall("aten.cumsum.default", '{"self": {"tensor": "src_0"}, "dim": 1}').target
    'aten.cumsum.default'
    """

    target: str
    arguments: str

    def __post_init__(self) -> None:
        if not _TARGET.fullmatch(self.target) or self.target.rpartition(".")[0] in _REFUSED:
            raise UnsupportedOpError(f"{self.target} cannot be called from a graph: only functions of tensors can")
        try:
            parsed = parse_json(self.arguments)
        except GraphError as error:
            raise GraphError(f"{self.target}: arguments: {error}") from error
        if not isinstance(parsed, dict):
            raise GraphError(f"{self.target}: arguments must be a JSON object, got {self.arguments!r}")

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> HostCall:
        """Build from a dictionary, perhaps from a file: what others have registered is called in memory only.

        Raises
        ------
        UnsupportedOpError
            The target is not in one of the namespaces that hold functions of tensors.
        """
        call = super().from_json(data)
        if call.target.split(".")[0] not in NAMESPACES:
            raise UnsupportedOpError(
                f"{call.target} cannot be called from a file's graph: only functions of tensors in the namespaces "
                f"{', '.join(NAMESPACES)} can; compile the module itself where the op is registered"
            )
        return call


class _Prepared(NamedTuple):
    """A resolved call: what to call and with what, tensors still being operand names."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    row_major: bool


class _Operand(NamedTuple):
    name: str
    is_complex: bool = False


@dataclass(frozen=True)
class Parts:
    """A complex tensor, of which a graph has the parts: a real tensor with one more axis, of size 2.

    Parameters
    ----------
    value : Value
        As ``torch.view_as_real`` gives it.
    """

    value: Value


# ---------------------------------------------------------------- resolving


@lru_cache(maxsize=4096)
def _prepare(call: HostCall) -> _Prepared:
    function = _resolve(call.target)
    given = json.loads(call.arguments)
    schema = function._schema.arguments
    unknown = sorted(set(given) - {argument.name for argument in schema})
    if unknown:
        raise GraphError(f"{call.target} has no argument {unknown[0]!r}; it has {[a.name for a in schema]}")
    values = {}
    for argument in schema:
        if argument.name in given:
            values[argument.name] = _decode(call.target, given[argument.name], str(argument.real_type))
        elif not argument.has_default_value():
            raise GraphError(f"{call.target}: argument {argument.name!r} is missing")
    _check_deterministic(function, values)
    _check_pure(function, values)
    args = []
    for argument in schema:
        if argument.kwarg_only or argument.name not in values:
            break
        args.append(values[argument.name])
    kwargs = {argument.name: values[argument.name] for argument in schema[len(args) :] if argument.name in values}
    row_major = call.target in _RETYPING or call.target.split(".")[1] in STORAGE_OPS
    return _Prepared(function, tuple(args), kwargs, row_major)


def _resolve(target: str) -> Any:
    namespace, name, overload = target.split(".")
    packet = getattr(getattr(torch.ops, namespace), name, None)
    function = getattr(packet, overload, None) if isinstance(packet, OpOverloadPacket) else None
    if not isinstance(function, OpOverload):  # Python's own attributes have names too
        hint = "" if namespace in ("aten", "prims") else f"; import what registers {namespace} first"
        raise UnsupportedOpError(f"PyTorch {torch.__version__} has no overload {target}{hint}")
    returns = [str(result.real_type) for result in function._schema.returns]
    # What only TorchScript knows (save, print, …) has no kernel with the dispatcher.
    known = torch._C._dispatch_has_kernel(function.name())  # type: ignore[no-untyped-call]
    if not known or not returns or any("Tensor" not in r for r in returns):
        raise UnsupportedOpError(f"{target} cannot be called from a graph: it is not a function that returns tensors")
    if function._schema.is_mutable:
        raise UnsupportedOpError(
            f"{target} changes its arguments in place; export the model with torch.export and run_decompositions, "
            "which leave functional calls only"
        )
    return function


def _check_deterministic(function: Any, values: Mapping[str, Any]) -> None:
    if draws_random_numbers(function, values):
        raise UnsupportedOpError(
            f"{function} draws random numbers; a graph is a function of its inputs. Export the model in eval mode, "
            "or pass the random tensor as an input"
        )


def draws_random_numbers(function: Any, arguments: Mapping[str, Any]) -> bool:
    """Tell whether a call of an overload with these arguments is random.

    Parameters
    ----------
    function : torch._ops.OpOverload
        What is called.
    arguments : mapping
        Arguments by schema name; a missing one has its default.

    Returns
    -------
    bool
        False too for random functions that are switched off: dropout outside of training, attention with a dropout
        probability of 0.

    Examples
    --------
    >>> aten = torch.ops.aten
    >>> draws_random_numbers(aten.dropout.default, {"p": 0.5, "train": False})
    False
    >>> draws_random_numbers(aten.dropout.default, {"p": 0.5, "train": True})
    True
    """
    if torch.Tag.nondeterministic_seeded not in function.tags:
        return False
    values = {a.name: a.default_value for a in function._schema.arguments if a.has_default_value()} | dict(arguments)
    untrained = any(values.get(name) is False for name in ("train", "training"))
    return not untrained and not any(values.get(name, 1) == 0 for name in ("dropout_p", "dropout", "p"))


def _check_pure(function: Any, values: Mapping[str, Any]) -> None:
    # Batch normalization updates its running statistics in training, which its schema does not say.
    if any(kind in function.name() for kind in ("functional", "backward")):
        return  # it returns new ones, or only reads them
    learning = any(values.get(name) is True for name in ("training", "train", "use_input_stats"))
    if learning and isinstance(values.get("running_mean"), _Operand):
        raise UnsupportedOpError(f"{function} updates running statistics; export the model in eval mode")


def _decode(target: str, value: Any, kind: str) -> Any:
    """Turn JSON into what an argument of that schema type takes."""
    if isinstance(value, list):
        return [_decode(target, item, kind) for item in value]
    if isinstance(value, dict):
        ((tag, content),) = value.items() if len(value) == 1 else (("", None),)
        if tag == "tensor" and re.fullmatch(r"src_\d+", str(content)):
            return _Operand(str(content))
        if tag == "parts" and re.fullmatch(r"src_\d+", str(content)):
            return _Operand(str(content), is_complex=True)
        if tag == "float" and content in ("inf", "-inf", "nan"):
            return float(content)
        if tag == "complex" and isinstance(content, list) and [type(part) for part in content] == [float, float]:
            return complex(*content)
        raise GraphError(f"{target}: {value} is neither a tensor nor a number")
    if isinstance(value, str):
        for name, decode in _NAMED.items():
            if name in kind:
                return decode(target, value)
    return value


def _dtype(target: str, name: str) -> torch.dtype:
    return COMPLEX.get(name) or torch_dtype(DataType.from_any(name))


def _device(target: str, name: str) -> torch.device:
    if name != "cpu":
        raise UnsupportedOpError(f"{target} asks for device {name!r}; export the model on the CPU")
    return torch.device(name)


def _member(kind: type) -> Callable[[str, str], Any]:
    def decode(target: str, name: str) -> Any:
        found = getattr(torch, name, None)
        if not isinstance(found, kind):
            raise GraphError(f"{target}: {name!r} is not a {kind.__name__}")
        return found

    return decode


#: schema type -> from its name to the object
_NAMED: dict[str, Callable[[str, str], Any]] = {
    "ScalarType": _dtype,
    "Device": _device,
    "Layout": _member(torch.layout),
    "MemoryFormat": _member(torch.memory_format),
}


# ---------------------------------------------------------------- meaning

_DATA_DEPENDENT = "the shape of a result depends on the data; shapes must be known before the graph runs"


def infer(attrs: HostCall, types: Mapping[str, TensorType]) -> tuple[TensorType, ...]:
    """Return the types of all results, found by running the call on tensors without data."""
    return _infer(attrs, tuple(types.items()))


@lru_cache(maxsize=4096)  # of an LSTM, PyTorch walks through each of its steps: 0.2 s, and each pass is verified
def _infer(attrs: HostCall, operands: tuple[tuple[str, TensorType], ...]) -> tuple[TensorType, ...]:
    types = dict(operands)
    results = _on_meta(attrs, types)
    if results is None:
        results = _on_fakes(attrs, types)
    return tuple(_result_type(attrs.target, index, result) for index, result in enumerate(results))


def _on_meta(attrs: HostCall, types: Mapping[str, TensorType]) -> tuple[torch.Tensor, ...] | None:
    """Return the results of the call on the meta device; None where it does not run there as on a CPU.

    Fake tensors know better, and why, but bring PyTorch's compiler with them: seconds, and 60 MB.
    """
    prepared = _prepare(attrs)
    named = any(isinstance(value, torch.device) for value in (*prepared.args, *prepared.kwargs.values()))
    if named or not types:  # it would make its results on a CPU
        return None
    meta = torch.device("meta")
    tensors = {name: torch.empty(t.dims, dtype=torch_dtype(t.dtype), device=meta) for name, t in types.items()}
    try:
        results = _call(attrs, tensors)
    except (FmtpropError, RuntimeError, TypeError, ValueError, IndexError):
        return None
    return results if all(result.device == meta for result in results) else None


def _on_fakes(attrs: HostCall, types: Mapping[str, TensorType]) -> tuple[torch.Tensor, ...]:
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

    with FakeTensorMode():
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
            raise UnsupportedOpError(f"{attrs.target} does not take {given}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _result_type(target: str, index: int, result: torch.Tensor) -> TensorType:
    if not all(isinstance(size, int) for size in result.shape):
        raise UnsupportedOpError(f"{target}: {_DATA_DEPENDENT}")
    try:
        return tensor_type(result)
    except GraphError as error:
        raise UnsupportedOpError(f"{target}: result {index}: {error}") from error


def any_strides(attrs: HostCall) -> bool:
    """Tell whether the call is right whatever strides its operands have: PyTorch says that it is element-wise.

    It does where PyTorch has kernels for channels-last tensors that are known to be right. Others may take one memory
    format for another: max-unpooling reads channels-last indices as row-major ones.
    """
    function = _prepare(attrs).function
    known = attrs.target == _CONVERSION or attrs.target in _ANY_STRIDES
    return function.namespace in NAMESPACES and (torch.Tag.pointwise in function.tags or known)


def reference(attrs: HostCall, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Make the call; results may be views of the operands."""
    return _call(attrs, tensors)


def operator(
    attrs: HostCall, tensors: Mapping[str, torch.Tensor], results: Sequence[torch.Tensor]
) -> Callable[[], object] | None:
    """Return the call of the overload that writes its results to given tensors; None where there is none."""
    prepared = _prepare(attrs)
    out = _writing(prepared.function)
    if out is None or prepared.row_major or len(out.names) != len(results) or attrs.target == _RESTRIDES:
        return None
    if _has_complex(attrs, tuple((name, t.dtype, t.shape) for name, t in tensors.items())):
        return None
    args, kwargs = _filled(attrs.target, prepared, tensors)
    return partial(out.function, *args, **kwargs, **dict(zip(out.names, results, strict=True)))


@lru_cache(maxsize=1024)
def _has_complex(attrs: HostCall, operands: tuple[tuple[str, torch.dtype, torch.Size], ...]) -> bool:
    """Whether a call reads or gives complex tensors: where that isn't known, it may."""
    prepared = _prepare(attrs)
    if any(map(_reads_parts, (*prepared.args, *prepared.kwargs.values()))):
        return True
    tensors = {name: torch.empty(shape, dtype=dtype, device="meta") for name, dtype, shape in operands}
    try:
        return any(result.is_complex() for result in _results(attrs, tensors))
    except (FmtpropError, RuntimeError, TypeError, ValueError, IndexError):
        return any(name in attrs.target for name in ("complex", "fft", "eig", "polar"))


def _reads_parts(value: Any) -> bool:
    return (
        any(map(_reads_parts, value)) if isinstance(value, list) else isinstance(value, _Operand) and value.is_complex
    )


class _Writing(NamedTuple):
    """An overload that writes its results to tensors given under these names."""

    function: Any
    names: tuple[str, ...]


@lru_cache(maxsize=1024)
def _writing(function: Any) -> _Writing | None:
    """Return the overload of the same arguments that writes to tensors, where PyTorch's kernels really do so."""
    given = [(argument.name, str(argument.real_type)) for argument in function._schema.arguments]
    if ("reduction", "int") in given:
        return None  # some losses resize what they are given, for their terms
    for name in function.overloadpacket.overloads():
        other = getattr(function.overloadpacket, name)
        read = [(a.name, str(a.real_type)) for a in other._schema.arguments if not a.is_out]
        # what was generated from the function itself computes and then copies
        if read == given and torch.Tag.generated not in other.tags and len(read) < len(other._schema.arguments):
            names = tuple(a.name for a in other._schema.arguments if a.is_out)
            # the same by PyTorch's generated binding: a call takes half the time
            binding = getattr(torch._C._VariableFunctions, function.name().partition("::")[2].partition(".")[0], None)
            return _Writing(binding if binding is not None and names == ("out",) else other, names)
    return None


def _call(attrs: HostCall, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Make a call, of complex results the parts."""
    results = _results(attrs, tensors)
    return tuple(torch.view_as_real(r.resolve_conj().resolve_neg()) if r.is_complex() else r for r in results)


def _results(attrs: HostCall, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    prepared = _prepare(attrs)
    if prepared.row_major:
        tensors = {name: t.clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}
    args, kwargs = _filled(attrs.target, prepared, tensors)
    found = prepared.function(*args, **kwargs)
    every = tuple(found) if isinstance(found, (tuple, list)) else (found,)
    results = tuple(_without_elements() if result is None else result for result in every)
    for index, result in enumerate(results):
        if not isinstance(result, torch.Tensor):
            raise UnsupportedOpError(f"{attrs.target}: result {index} is {result!r}, not a tensor")
    return results


def _without_elements() -> torch.Tensor:
    return torch.empty(NO_RESULT.dims, dtype=torch_dtype(NO_RESULT.dtype), device="cpu")


def _filled(target: str, prepared: _Prepared, tensors: Mapping[str, torch.Tensor]) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of a call with tensors in their places."""

    def filled(value: Any) -> Any:
        if isinstance(value, _Operand):
            if value.name not in tensors:
                raise GraphError(f"{target} reads operand {value.name}, which is not connected")
            return _joined(tensors[value.name]) if value.is_complex else tensors[value.name]
        return [filled(item) for item in value] if isinstance(value, list) else value

    return [filled(value) for value in prepared.args], {name: filled(v) for name, v in prepared.kwargs.items()}


def _joined(parts: torch.Tensor) -> torch.Tensor:
    """Return the complex tensor that has these parts."""
    dense = parts.contiguous()
    # a pair has to begin where pairs do
    return torch.view_as_complex(dense.clone() if dense.storage_offset() % 2 else dense)


# ---------------------------------------------------------------- writing a call down


def make_host_call(call: Call) -> tuple[Value, ...]:
    """Add the node that makes a call as it stands.

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


def host_call(target: str, arguments: Mapping[str, Any]) -> tuple[HostCall, dict[str, Value]]:
    """Return the attributes and the operands of a call.

    Parameters
    ----------
    target : str
        Overload name.
    arguments : mapping
        Every argument by its schema name, as :class:`~fmtprop.ir.importing.Call` has them.

    Examples
    --------
    >>> attrs, inputs = host_call("aten.cat.default", {"tensors": [Value("x"), Value("y"), Value("x")], "dim": 1})
    >>> attrs.arguments
    '{"tensors": [{"tensor": "src_0"}, {"tensor": "src_1"}, {"tensor": "src_0"}], "dim": 1}'
    >>> inputs["src_1"]
    Value(node='y', index=0)
    """
    # The name is checked before anything is looked up.
    function = _resolve(HostCall(target, "{}").target)
    defaults = {a.name: a.default_value for a in function._schema.arguments if a.has_default_value()}
    operands: dict[Value, str] = {}
    written = {
        name: _encode(f"{target}: argument {name}", value, operands)
        for name, value in arguments.items()
        if isinstance(value, (Value, Parts)) or name not in defaults or not _same(value, defaults[name])
    }
    attrs = HostCall(target, json.dumps(written, allow_nan=False))
    return attrs, {name: value for value, name in operands.items()}


def _same(value: Any, default: Any) -> bool:
    return type(value) is type(default) and bool(value == default)


def _encode(what: str, value: Any, operands: dict[Value, str]) -> Any:
    # Value is a tuple and DataType a str: they come first.
    if isinstance(value, Value):
        return {"tensor": operands.setdefault(value, f"src_{len(operands)}")}
    if isinstance(value, Parts):
        return {"parts": operands.setdefault(value.value, f"src_{len(operands)}")}
    if isinstance(value, complex) and cmath.isfinite(value):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, DataType):
        return value.value
    if isinstance(value, (list, tuple)):
        return [_encode(what, item, operands) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise UnsupportedOpError(f"{what} is {value!r} ({type(value).__name__}), which a graph cannot hold")


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
    any_strides=any_strides,
    operator=operator,
    samples=samples,
)
