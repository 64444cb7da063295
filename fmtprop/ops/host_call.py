"""One call of an overload, of PyTorch or of another library, as attributes of a node.

Owns the form of a call in a graph, and the calls that are refused. A graph file is untrusted: it may name only
PyTorch's own functions of tensors, and a call is checked again before it is made.
"""

from __future__ import annotations

import cmath
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from fmtprop.errors import GraphError, UnsupportedOpError
from fmtprop.ir.json_text import parse_json
from fmtprop.ir.node import Attrs, Value
from fmtprop.ir.tensors import torch_dtype
from fmtprop.layout import DataType
from fmtprop.ops.pytorch import OpOverload, OpOverloadPacket, has_kernel

#: namespaces of overloads that a file may name: functions of tensors, which do not read or write files
NAMESPACES = ("aten", "prims", "torchvision")
#: an exception in these namespaces, which maps a file of any name
_REFUSED = frozenset({"aten.from_file"})
#: calls with strides and offsets in the storage of the first argument, which is row-major and has its own storage
STORAGE_OPS = frozenset({"as_strided", "as_strided_copy", "as_strided_scatter"})
#: calls that join or split elements along the last axis, which must be contiguous and start at a whole element
_RETYPING = frozenset({"aten.view.dtype", "aten.view_copy.dtype"})
#: calls that return factors of their first argument's transpose if that is row-major; readers of factors rely on it
_FACTORIZING = frozenset(f"aten._linalg_{name}.default" for name in ("det", "slogdet", "solve_ex"))
#: complex data types, which a graph represents by their parts
COMPLEX = {f"complex{bits}": getattr(torch, f"complex{bits}") for bits in (32, 64, 128)}
_TARGET = re.compile(r"(\w+)\.(\w+)\.(\w+)", re.ASCII)

# ---------------------------------------------------------------- attributes


@dataclass(frozen=True)
class HostCall(Attrs):
    """One call of an overload.

    >>> HostCall("aten.cumsum.default", '{"self": {"tensor": "src_0"}, "dim": 1}').target
    'aten.cumsum.default'
    """

    #: overload name, such as ``"aten.cumsum.default"``
    target: str
    #: JSON object: arguments by schema name, without those at their default. A tensor is ``{"tensor": "src_0"}``, a
    #: complex tensor ``{"parts": "src_0"}``, as a graph has its parts; a float that JSON lacks is ``{"float": "inf"}``,
    #: a complex number ``{"complex": [0.0, 1.0]}``; data types, devices, layouts and memory formats are their names.
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
        """Build from a dictionary, perhaps of a file: so overloads of other libraries are refused."""
        call = super().from_json(data)
        if call.target.split(".")[0] not in NAMESPACES:
            raise UnsupportedOpError(
                f"{call.target} cannot be called from a file's graph: only functions of tensors in the namespaces "
                f"{', '.join(NAMESPACES)} can; compile the module itself where the op is registered"
            )
        return call


class Resolved(NamedTuple):
    """A resolved call: the function and its arguments, with names of operands instead of tensors."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    row_major: bool


class CallOperand(NamedTuple):
    """An operand of the node in place of a tensor, or as the parts of a complex tensor."""

    name: str
    is_complex: bool = False


@dataclass(frozen=True)
class Parts:
    """A complex tensor as its parts: a real tensor with one more axis of size 2."""

    #: the real tensor, as of ``torch.view_as_real``
    value: Value


#: calls that convert a tensor to another data type
_CONVERSIONS = frozenset({"aten._to_copy.default", "aten.to.dtype"})


def is_conversion(attrs: Attrs) -> bool:
    """Return whether a node with these attributes gives its operand's numbers in another data type."""
    return isinstance(attrs, HostCall) and attrs.target in _CONVERSIONS


def is_elementwise(attrs: HostCall) -> bool:
    """Return whether a call computes each number of its result from one number of each operand."""
    return is_conversion(attrs) or torch.Tag.pointwise in prepare(attrs).function.tags


# ---------------------------------------------------------------- changes in place


@lru_cache(maxsize=1024)
def in_place_form(function: Any) -> Callable[..., torch.Tensor] | None:
    """Return a function that writes the result of an overload to its first argument, and returns it; None if none does.

    >>> x = torch.zeros(3)
    >>> in_place_form(torch.ops.aten.select_scatter.default)(x, torch.tensor(1.0), 0, 2) is x
    True
    """
    if not isinstance(function, OpOverload) or function.namespace != "aten" or function.is_view:
        return None
    name, aten = function._opname, torch.ops.aten
    writing: OpOverload | None = getattr(getattr(aten, f"{name}_", None), function._overloadname, None)
    if writing is not None or not name.endswith("_scatter"):
        return writing
    view = getattr(aten, name.removesuffix("_scatter"), None)
    wanted = [argument.name for argument in function._schema.arguments if argument.name != "src"]
    for overload in view.overloads() if view is not None else ():
        found = getattr(view, overload)
        if [argument.name for argument in found._schema.arguments] == wanted:
            return WritingPart(found)
    return None


class WritingPart:
    """Writes to a part of a tensor, and returns the tensor."""

    __name__ = "write_to_part"

    def __init__(self, view: OpOverload) -> None:
        self._view = view

    def __call__(self, tensor: torch.Tensor, src: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Write to the part."""
        self._view(tensor, *args, **kwargs).copy_(src)
        return tensor


# ---------------------------------------------------------------- resolving


@lru_cache(maxsize=4096)
def prepare(call: HostCall) -> Resolved:
    """Resolve a call.

    Raises UnsupportedOpError if this PyTorch has no such function of tensors, or the call changes its arguments or is
    random.
    """
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
    row_major = call.target in _RETYPING | _FACTORIZING or call.target.split(".")[1] in STORAGE_OPS
    return Resolved(function, tuple(args), kwargs, row_major)


def arguments_of(call: HostCall) -> dict[str, Any]:
    """Return every argument of a call by its schema name, those at their default too; tensors as `CallOperand`."""
    prepared = prepare(call)
    schema = prepared.function._schema.arguments
    given = dict(zip((argument.name for argument in schema), prepared.args, strict=False))
    defaults = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    return {**defaults, **given, **prepared.kwargs}


def _resolve(target: str) -> Any:
    namespace, name, overload = target.split(".")
    packet = getattr(getattr(torch.ops, namespace), name, None)
    function = getattr(packet, overload, None) if isinstance(packet, OpOverloadPacket) else None
    if not isinstance(function, OpOverload):  # Python's own attributes have names too
        hint = "" if namespace in ("aten", "prims") else f"; import the library that registers {namespace} first"
        raise UnsupportedOpError(f"PyTorch {torch.__version__} has no overload {target}{hint}")
    returns = [str(result.real_type) for result in function._schema.returns]
    # Operators that only TorchScript knows (save, print, …) have no kernel in the dispatcher.
    known = has_kernel(function.name())  # type: ignore[no-untyped-call]
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
    """Return whether a call of an overload with these arguments is random.

    `arguments`: arguments by schema name; a missing one has its default.

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
    if learning and isinstance(values.get("running_mean"), CallOperand):
        raise UnsupportedOpError(f"{function} updates running statistics; export the model in eval mode")


def _decode(target: str, value: Any, kind: str) -> Any:
    """Convert JSON to an argument of this schema type."""
    if isinstance(value, list):
        return [_decode(target, item, kind) for item in value]
    if isinstance(value, dict):
        ((tag, content),) = value.items() if len(value) == 1 else (("", None),)
        if tag == "tensor" and re.fullmatch(r"src_\d+", str(content)):
            return CallOperand(str(content))
        if tag == "parts" and re.fullmatch(r"src_\d+", str(content)):
            return CallOperand(str(content), is_complex=True)
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


#: schema type -> the function from a name to the object
_NAMED: dict[str, Callable[[str, str], Any]] = {
    "ScalarType": _dtype,
    "Device": _device,
    "Layout": _member(torch.layout),
    "MemoryFormat": _member(torch.memory_format),
}


# ---------------------------------------------------------------- writing a call down


def host_call(target: str, arguments: Mapping[str, Any]) -> tuple[HostCall, dict[str, Value]]:
    """Return the attributes and the operands of a call.

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


def _encode(label: str, value: Any, operands: dict[Value, str]) -> Any:
    # Value is a tuple and DataType a str, so they are checked first.
    if isinstance(value, Value):
        return {"tensor": operands.setdefault(value, f"src_{len(operands)}")}
    if isinstance(value, Parts):
        return {"parts": operands.setdefault(value.value, f"src_{len(operands)}")}
    if isinstance(value, complex) and cmath.isfinite(value):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, DataType):
        return value.value
    if isinstance(value, (list, tuple)):
        return [_encode(label, item, operands) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise UnsupportedOpError(f"{label} is {value!r} ({type(value).__name__}), which a graph cannot hold")
