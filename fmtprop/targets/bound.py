"""Steps that are bound to memory: the positions of operands and results, and the calls of a run.

Must not know how implementations are chosen or built.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from time import perf_counter
from typing import Any
from weakref import WeakValueDictionary

import torch

from fmtprop import dnnl
from fmtprop.errors import FmtpropError, PlanError
from fmtprop.ir.node import Node
from fmtprop.ir.tensors import torch_dtype
from fmtprop.jit import Call, flushed
from fmtprop.layout import MemoryDesc
from fmtprop.ops.building import several
from fmtprop.ops.pytorch import is_alias, set_grad_enabled
from fmtprop.targets.memory import copied, laid_out, view, view_of_tensor

#: name of the scratchpad's place
SCRATCHPAD = "scratchpad"

#: content between runs of memory with another tensor in each run, so that no tensor is kept
NOTHING = torch.empty(0, device="cpu")

#: exceptions of operators that refuse their arguments
REFUSED = (RuntimeError, ValueError, TypeError, IndexError)

#: classes of such errors that a message makes
_CLASSES = (*REFUSED, NotImplementedError, torch.linalg.LinAlgError)  # type: ignore[attr-defined]

_has_grad = torch.is_grad_enabled


class MovableMemory:
    """Memory of operands and results.

    `tensor`: flat bytes, or a whole tensor; the same in each run. Default: each run puts another tensor here.
    """

    __slots__ = ("_followers", "_views", "desc", "is_fixed", "pointer", "tensor")

    def __init__(self, tensor: torch.Tensor | None = None, desc: MemoryDesc | None = None) -> None:
        self.is_fixed, self.desc = tensor is not None, desc
        self.tensor = NOTHING if tensor is None else tensor
        #: the address that the functions below were called with
        self.pointer = 0
        #: functions that are called with a new address, and their offsets from the start in bytes
        self._followers: list[tuple[Callable[[int], object], int]] = []
        #: tensors that lie in the present memory, by format: each with what it holds between runs, and whether it is
        #: the whole tensor there
        self._views: dict[MemoryDesc, tuple[torch.Tensor, torch.Tensor, bool]] = {}

    @property
    def is_viewed(self) -> bool:
        """Whether a call has a view of it (:meth:`viewed_as`), which must be cleared after a run."""
        return bool(self._views)

    @property
    def is_followed(self) -> bool:
        """Whether a call must know its address (:meth:`follow`)."""
        return bool(self._followers)

    @property
    def whole_view(self) -> torch.Tensor | None:
        """The view that is the whole tensor (:meth:`viewed_as`), if a call has one."""
        return next((seen for seen, _, is_whole in self._views.values() if is_whole), None)

    def put(self, tensor: torch.Tensor) -> None:
        """Hold another tensor from now on: flat bytes, or a whole tensor."""
        self.tensor = tensor
        if self._followers:
            pointer = tensor.data_ptr()
            if pointer != self.pointer:  # allocators often return the same memory again
                self.point(pointer)
        for desc, (seen, _, is_whole) in self._views.items():
            if is_whole and not tensor.is_inference():
                seen.data = tensor  # a sixth of the time
            else:
                seen.set_(tensor.untyped_storage(), tensor.storage_offset() + desc.offset0, desc.dims, desc.strides)

    def point(self, pointer: int) -> None:
        """Call the functions that follow the address with another one."""
        for point, start in self._followers:
            point(pointer + start)
        self.pointer = pointer

    def clear(self) -> None:
        """Hold nothing."""
        self.tensor = NOTHING
        for seen, nothing, _ in self._views.values():
            seen.data = nothing

    def viewed_as(self, desc: MemoryDesc) -> torch.Tensor | None:
        """Return one tensor that lies in the present memory in every run; None where there can be none.

        A call that is bound to it need not be bound anew in each run. No view of it may be kept: it would stay where
        the tensor is now.
        """
        if self.is_fixed or self.desc is None or not desc.is_plain or desc.dtype is not self.desc.dtype:
            return None
        if desc not in self._views:
            nothing = torch.empty(0, dtype=torch_dtype(desc.dtype), device="cpu")
            self._views[desc] = nothing.new_empty_strided(desc.dims, desc.strides), nothing, desc == self.desc
        return self._views[desc][0]

    def follow(self, point: Callable[[int], object], start: int = 0) -> None:
        """Call a function with the address `start` bytes after the beginning: now, if known, and at each change."""
        if self.is_fixed:
            point(self.tensor.data_ptr() + start)
        else:
            self._followers.append((point, start))


class Place:
    """Position of an operand or a result.

    `desc`: its format; ``offset0`` counts from the memory's start. `is_read`: whether a node or the caller reads a
    result that a step writes here.
    """

    __slots__ = ("desc", "is_read", "is_whole", "memory")

    def __init__(self, memory: MovableMemory, desc: MemoryDesc, *, is_read: bool = True) -> None:
        self.memory, self.desc, self.is_read = memory, desc, is_read
        #: whether it is the whole tensor in memory, in its own format
        self.is_whole = memory.desc == desc

    def tensor(self) -> torch.Tensor:
        """Return the present tensor: a view of the memory, unless it is the whole tensor."""
        tensor, desc = self.memory.tensor, self.desc
        if self.is_whole or tensor.layout is not torch.strided:
            return tensor
        if tensor.dtype is torch_dtype(desc.dtype):
            return view_of_tensor(tensor, desc)
        return view(tensor, desc)


class OwnStream:
    """The oneDNN stream of one context's native calls; created on first use."""

    def __init__(self) -> None:
        self._native: dnnl.Stream | None = None
        #: memory, identity of a descriptor, bytes before it -> oneDNN's object for it
        self._memories: WeakValueDictionary[tuple[MovableMemory, int, int], dnnl.Memory] = WeakValueDictionary()

    def memory(self, memory: MovableMemory, md: dnnl.NativeDesc, start: int) -> dnnl.Memory:
        """Return oneDNN's object for the memory from a byte on: calls that read it in one format share it."""
        key = memory, id(md), start  # the object keeps the descriptor alive
        made = self._memories.get(key)
        if made is None:
            pointer = memory.tensor.data_ptr() + start if memory.is_fixed else None
            self._memories[key] = made = dnnl.Memory(dnnl.Engine.cpu(), md, pointer)
            if not memory.is_fixed:
                memory.follow(made.set_data_handle, start)
        return made

    @property
    def native(self) -> dnnl.Stream:
        """The oneDNN stream."""
        if self._native is None:
            self._native = dnnl.Stream(dnnl.Engine.cpu())
        return self._native

    @property
    def is_asynchronous(self) -> bool:
        """Whether a call may return before its work is done."""
        return self._native is not None and dnnl.lib().runtime == "SYCL"

    def wait(self) -> None:
        """Wait until all calls are done."""
        if self._native is not None:
            self._native.wait()

    def close(self) -> None:
        """Release the oneDNN stream, and the objects for memory."""
        for memory in list(self._memories.values()):
            memory.close()
        if self._native is not None:
            self._native.close()


class as_planned:
    """Run operators from Python in the planned data types, in any mode of the caller.

    A function with PyTorch's own classes takes five times as long, 3 us.
    """

    __slots__ = ("_autocast", "_has_grad")

    def __enter__(self) -> None:
        """Begin."""
        self._has_grad = _has_grad()
        set_grad_enabled(False)
        self._autocast: Any = None
        if torch.is_autocast_enabled("cpu"):
            self._autocast = torch.autocast("cpu", enabled=False)
            self._autocast.__enter__()

    def __exit__(self, *error: Any) -> None:
        """Return to the caller's mode."""
        if self._autocast is not None:
            self._autocast.__exit__(*error)
        set_grad_enabled(self._has_grad)


class PythonCalls:
    """Consecutive calls of Python functions, as one function of a plan."""

    __slots__ = ("pairs",)

    def __init__(self, pairs: Sequence[tuple[Node, Callable[[], object]]]) -> None:
        self.pairs = pairs

    def __call__(self, *_: None) -> int:
        """Make the calls and return 0; an error of an operator names the node.

        Raises PlanError if an operator refused.
        """
        for node, call in self.pairs:
            try:
                call()
            except FmtpropError:
                raise
            except REFUSED as error:
                raise failed(node, node.choice.target if node.choice is not None else "", error) from error
        return 0


class Making:
    """A call that makes its results in each run: tensors in the planned formats, with memory of their own.

    `call`: returns the result, or a sequence of several, in formats of its own. `memories`: the memory of each result;
    None for one without readers. `operands`: tensors of which a result may be a view.
    """

    __slots__ = ("call", "likes", "memories", "node", "operands")

    def __init__(
        self,
        node: Node,
        call: partial[Any],
        memories: Sequence[MovableMemory | None],
        operands: Sequence[torch.Tensor] = (),
    ) -> None:
        self.node, self.call, self.memories, self.operands = node, call, memories, operands
        #: dimensions, strides and data type of each result
        self.likes = [(desc.dims, desc.strides, torch_dtype(desc.dtype)) for desc in node.descs]

    def __call__(self) -> None:
        """Make the call."""
        for index, value in enumerate(several(self.call())):
            if (memory := self.memories[index]) is not None:
                memory.put(self.own(index, value, *self.operands))

    def own(self, index: int, value: torch.Tensor, *operands: torch.Tensor) -> torch.Tensor:
        """Return a result in its format, with memory of its own: the tensor that was made, or a copy."""
        dims, _, dtype = self.likes[index]
        if value.shape != dims:
            raise PlanError(shape_differs(self.node, index, value, dims))
        is_own = value.dtype is dtype and not value.is_neg() and not any(is_alias(value, one) for one in operands)
        return laid_out(value, self.node.descs[index]) if is_own else copied(value, self.node.descs[index])


def shape_differs(node: Node, index: int, value: torch.Tensor, dims: Sequence[int]) -> str:
    """Return the message for a result that has another shape than its place."""
    return (
        f"{node.label}: result {index} has shape {tuple(value.shape)} on the reference target, but the model was "
        f"exported with {tuple(dims)}; report it with the model"
    )


class OutsideError(PlanError):
    """An operator read an index that its tensor does not have."""

    def __init__(self, node: Node, message: str, error: Exception) -> None:
        super().__init__(message)
        self.node, self.error = node, error


def failed(node: Node, target: str, error: Exception) -> FmtpropError:
    """Return the error of a failed operator, with its node and target."""
    where = f" from {node.origin}" if node.origin else ""
    text = str(error)
    if "out of range" in text or "out of bounds" in text:  # PyTorch has no class of its own for these
        return OutsideError(node, f"{node.label}{where}: {text}", error)
    return of_both(PlanError, error, f"{node.label}{where} failed on the {target} target: {text}")


def of_both(kind: type[FmtpropError], error: Exception, message: str) -> FmtpropError:
    """Return an error that is also of the class of an operator's own error, so that callers find it by either.

    >>> isinstance(of_both(PlanError, torch.linalg.LinAlgError("singular"), "node inv: singular"), RuntimeError)
    True
    """
    other = next(one for one in type(error).__mro__ if one in _CLASSES)
    return _class_of_both(kind, other)(message)  # type: ignore[arg-type]


@cache
def _class_of_both(kind: type[FmtpropError], other: type[Exception]) -> type[FmtpropError]:
    if issubclass(kind, other):
        return kind
    # another process may not have made this class
    own = {"__module__": kind.__module__, "__doc__": kind.__doc__, "__reduce__": lambda self: (kind, self.args)}
    return type(kind.__name__, (kind, other), own)


class Bound:
    """An executable with the positions of its operands and results, for one run at a time.

    `native`: the calls, if they are native. `python`: the node and its calls, if they are Python calls, which are made
    under :func:`as_planned`. `keep`: objects that live as long as the calls; those with a ``close`` are closed with
    them.
    """

    __slots__ = ("_failure", "_keep", "calls", "pairs")

    def __init__(
        self,
        native: Sequence[Call] = (),
        *,
        python: tuple[Node, Sequence[Callable[[], object]]] | None = None,
        keep: Sequence[Any] = (),
        failure: Callable[[int], FmtpropError] | None = None,
    ) -> None:
        self._keep, self._failure = keep, failure
        #: node and function of each Python call
        self.pairs = () if python is None else tuple((python[0], call) for call in python[1])
        self.calls: tuple[Call, ...] = tuple(native)
        if self.pairs:
            self.calls = ((PythonCalls(self.pairs), None, None, None, None),)

    @property
    def is_native(self) -> bool:
        """Whether its calls are functions of a shared library with pointers and integers."""
        return not self.pairs

    def run(self) -> None:
        """Make the calls.

        Raises FmtpropError if a call failed.
        """
        if self.is_native:
            self._run()
        else:
            with as_planned():
                self._run()

    def seconds(self, stream: OwnStream) -> float:
        """Make the calls and return their seconds.

        Raises FmtpropError if a call failed.
        """
        failed = 0
        with flushed() if self.is_native else as_planned():  # as in a run
            start = perf_counter()
            for function, a, b, c, d in self.calls:
                failed = function(a, b, c, d) or failed
            stream.wait()
            taken = perf_counter() - start
        if failed:
            raise self.failure(failed)
        return taken

    def _run(self) -> None:
        for function, a, b, c, d in self.calls:
            status = function(a, b, c, d)
            if status:
                raise self.failure(status)

    def failure(self, status: int) -> FmtpropError:
        """Return the error of a call with this status."""
        return PlanError(f"a call returned {status}") if self._failure is None else self._failure(status)

    def close(self) -> None:
        """Release the native objects."""
        self.calls = ()
        for item in self._keep:
            close = getattr(item, "close", None)
            if close is not None:
                close()
        self._keep = ()
