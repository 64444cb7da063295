"""Record of PyTorch's calls on tensors without data.

``make_fx`` of PyTorch gives the same calls, but evaluates each twice and generates Python source. A model has hundreds
of nodes, and most of the time of loading it would go there. PyTorch's dispatcher takes longer for a call than all of
its record, so it is asked only once which overload a call of a function with such arguments reaches.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from operator import attrgetter
from types import BuiltinFunctionType, MethodDescriptorType
from typing import Any, Final

import torch
from torch._ops import OpOverload

from fmtprop.capture.torch_call import by_schema
from fmtprop.errors import ImportModelError
from fmtprop.ir.tensors import map_tensors, tensors_in
from fmtprop.onnx.model import limits
from fmtprop.onnx.model.modes import CallMode
from fmtprop.ops.without_data import result_of


@dataclass(slots=True, eq=False)
class Recorded:
    """A call."""

    target: OpOverload
    #: `args`, `kwargs`: its arguments; tensors are :class:`Traced`, or have data
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    origin: str


class RecordedTensor(torch.Tensor):
    """A tensor without data, or a constant; PyTorch's functions on it are recorded."""

    # PyTorch's own attributes would be calls, too
    is_meta: Any = property(attrgetter("_is_meta"))
    shape: Any = property(attrgetter("_shape"))
    dtype: Any = property(attrgetter("_dtype"))
    ndim: Any = property(attrgetter("_ndim"))
    nbytes: Any = property(lambda self: self.numel() * self.dtype.itemsize)
    device = torch.device("cpu")  # other tensors that a function makes have data

    def numel(self) -> int:
        """Return the number of elements."""
        return int(self.shape.numel())

    def is_floating_point(self) -> bool:
        """Return whether its elements are floats."""
        return bool(self.dtype.is_floating_point)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Pass a call on to the present record."""
        with torch._C.DisableTorchFunctionSubclass():
            return _present.recording.call(func, args, kwargs or {})


class Recording:
    """Calls on tensors without data and on constants, in order."""

    def __init__(self) -> None:
        self.calls: list[Recorded] = []
        self.origin = ""
        #: by identity of a constant with recorded calls: the constant; by that of a plain constant: the other form
        self._plain: dict[int, torch.Tensor] = {}
        self._traced: dict[int, tuple[RecordedTensor, torch.Tensor]] = {}

    def input(self, dims: Sequence[int], dtype: torch.dtype) -> RecordedTensor:
        """Return a dense tensor without data; its calls are recorded."""
        return self.made(torch.empty(dims, dtype=dtype, device="meta"))

    def traced(self, value: Any) -> Any:
        """Return an operand; its calls are recorded."""
        return map_tensors(value, self._as_traced)

    def _as_traced(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, RecordedTensor):
            return tensor
        found = self._traced.get(id(tensor))
        return self.made(tensor) if found is None else found[0]

    def plain(self, value: Any) -> Any:
        """Return a constant; its calls are not recorded."""
        return map_tensors(value, lambda tensor: self._plain.get(id(tensor), tensor))

    def made(self, value: torch.Tensor) -> RecordedTensor:
        """Return a tensor as a new one; its calls are recorded."""
        found: Any = value.as_subclass(RecordedTensor)
        found._shape, found._dtype, found._ndim, found._is_meta = value.shape, value.dtype, value.ndim, value.is_meta
        if not found._is_meta:
            self._plain[id(found)] = value
            self._traced[id(value)] = found, value  # both live as long as this table; its keys are their identities
        return found  # type: ignore[no-any-return]

    @contextmanager
    def on(self) -> Iterator[None]:
        """Record this thread's calls here."""
        before = _present.recording
        _present.recording = self
        try:
            yield
        finally:
            _present.recording = before

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Make a call of one of PyTorch's functions."""
        # a function in C++ reaches an overload by the kinds of its arguments
        kinds = (func, *map(_kind, args), *((name, _kind(value)) for name, value in kwargs.items()))
        overload = _OVERLOADS.get(kinds)
        if overload is not None:
            return self.add(overload, args, kwargs)
        # one in Python may compute with their values and shapes
        tensors = [tensor for value in (args, kwargs) for tensor in tensors_in(value)]
        key = (func, *map(_described, args), *((name, _described(value)) for name, value in kwargs.items()))
        known = _CALLS.get(key)
        if known is not None:
            target, *arguments = known
            return self.add(target, *(_replaced(value, tensors) for value in arguments))
        first = len(self.calls)
        with _Dispatched():
            result = func(*args, **kwargs)
        if len(self.calls) == first + 1 and self.calls[first].result is result:
            call = self.calls[first]
            by_kinds = isinstance(func, BuiltinFunctionType | MethodDescriptorType) and func.__name__ not in _BY_STRIDES
            if by_kinds and _same_arguments(call, args, kwargs):
                _keep(_OVERLOADS, kinds, call.target)
            # all given tensors, no others: it has neither read the numbers of one nor made one
            elif (places := {id(at): place for place, at in enumerate(tensors)}).keys() == set(
                map(id, tensors_in((call.args, call.kwargs)))
            ):
                arguments = map_tensors((call.args, call.kwargs), lambda tensor: _RecordedPlace(places[id(tensor)]))
                _keep(_CALLS, key, (call.target, *arguments))
        return result

    def add(self, target: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Make a call of an overload, and record it."""
        kwargs = dict(kwargs)
        result = result_of(target, args, kwargs)
        if not isinstance(result, torch.Tensor | list | tuple):  # numbers of a constant
            return result
        found = self.traced(result)
        self.calls.append(Recorded(target, args, kwargs, found, self.origin))
        if len(self.calls) > limits.CALLS:
            raise ImportModelError(f"node {self.origin}: the model would become more than {limits.CALLS} calls")
        return found


class _Present(threading.local):
    """The record of this thread's calls."""

    recording: Any = None


_present = _Present()

#: functions in C++ that make no call where their operand has the wanted strides
_BY_STRIDES: Final = frozenset({"contiguous"})
#: overload by function and kinds of arguments, for calls that pass their arguments on as they are
_OVERLOADS: dict[Any, OpOverload] = {}
#: overload and arguments by function, values, and types and shapes of tensors, for all other functions of one call
_CALLS: dict[Any, tuple[OpOverload, Any, Any]] = {}
_MOST_KEPT: Final = 4096


def _keep(table: dict[Any, Any], key: Any, value: Any) -> None:
    """Keep a value in a table of bounded size."""
    if len(table) >= _MOST_KEPT:
        table.clear()
    table[key] = value


def _described(value: Any) -> Any:
    """Return the properties of an argument on which a function may depend."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.stride()
    if isinstance(value, list | tuple):
        return (type(value), *map(_described, value))
    return type(value), repr(value)  # 1 equals True, and 0 equals -0


@dataclass(frozen=True, slots=True)
class _RecordedPlace:
    """The place of a tensor among the arguments of a call."""

    index: int


def _replaced(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, _RecordedPlace):
        return tensors[value.index]
    if isinstance(value, dict):
        return {name: _replaced(item, tensors) for name, item in value.items()}
    return type(value)(_replaced(item, tensors) for item in value) if isinstance(value, list | tuple) else value


def _kind(value: Any) -> Any:
    kind = type(value)
    if kind is list or kind is tuple:
        return (kind, *map(_kind, value))
    return torch.Tensor if kind is RecordedTensor else kind


def _same_arguments(call: Recorded, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call of an overload has the arguments of the call of a function."""
    given = by_schema(call.target, args, kwargs)
    if given is None:
        return False
    reached = by_schema(call.target, call.args, call.kwargs) or {}
    return all(_same(given[name], value) for name, value in reached.items())


def _same(given: Any, reached: Any) -> bool:
    if isinstance(given, list | tuple) and isinstance(reached, list | tuple):
        return len(given) == len(reached) and all(map(_same, given, reached))
    if isinstance(given, torch.Tensor) or isinstance(reached, torch.Tensor):
        return given is reached
    return type(given) is type(reached) and bool(given == reached)


class _Dispatched(CallMode):  # type: ignore[no-untyped-call]
    """A mode that records the calls of overloads, before PyTorch decomposes them.

    Decomposition is a part of autograd's dispatch, which the mode leaves out.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._below_autograd = ExitStack()

    def __enter__(self) -> _Dispatched:
        self._below_autograd.enter_context(torch._C._AutoDispatchBelowAutograd())
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._below_autograd.close()

    def result(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call, and record it."""
        if kwargs.get("device") == _META:  # a tensor that is made where another one lies
            kwargs = kwargs | {"device": torch.device("cpu")}
        return _present.recording.add(func, args, kwargs)


_META: Final = torch.device("meta")
