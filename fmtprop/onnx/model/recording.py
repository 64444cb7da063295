"""Record of PyTorch's calls on tensors without data.

``make_fx`` of PyTorch gives the same calls, but evaluates each twice and generates Python source. A model has hundreds
of nodes, and most of the time of loading it would go there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final

import torch

from fmtprop.errors import ImportModelError
from fmtprop.ir.tensors import map_tensors
from fmtprop.onnx.model import limits
from fmtprop.onnx.model.modes import CallMode
from fmtprop.ops.pytorch import OpOverload, below_autograd
from fmtprop.ops.without_data import result_of, row_major

#: a dequantised constant of at least so many numbers is taken for weights: its numbers are not computed while a file is
#: traced, which happens for each shape. Those that decide what is traced (sizes, indices, scales) are fewer
_LARGE_SIZE = 1 << 12


@dataclass(slots=True, eq=False)
class Recorded:
    """A call."""

    target: OpOverload
    #: `args`, `kwargs`: its arguments; tensors are :class:`RecordedTensor`, or have data
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
        """Make a call of one of PyTorch's functions; the present record gets the calls of overloads in it."""
        with torch.DisableTorchFunctionSubclass(), _Dispatched():
            return func(*args, **(kwargs or {}))


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

    def add(self, target: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Make a call of an overload, and record it."""
        kwargs, known = dict(kwargs), args
        if target is torch.ops.fmtprop.dequantize.default and args[0].numel() >= _LARGE_SIZE:
            known = torch.empty(args[0].shape, dtype=args[0].dtype, device="meta"), *args[1:]
        result = result_of(target, row_major(target, known), row_major(target, kwargs))
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


class _Dispatched(CallMode):  # type: ignore[no-untyped-call]
    """A mode that records the calls of overloads, before PyTorch decomposes them.

    Decomposition is a part of autograd's dispatch, which the mode leaves out.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._below_autograd = ExitStack()

    def __enter__(self) -> _Dispatched:
        self._below_autograd.enter_context(below_autograd())
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
