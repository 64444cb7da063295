"""Executable steps: an implementation builds an executable, which is bound to memory and then run.

All users of steps (a plan's context, the packing of constants, the self-check, timings) know only these classes: they
give the positions of operands and results, and get calls.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from time import perf_counter
from types import MappingProxyType
from typing import Any

import torch

from fmtprop import dnnl
from fmtprop.errors import FmtpropError, LoadError, PlanError, UnsupportedOpError
from fmtprop.ir.node import Choice, Node
from fmtprop.ir.tensors import torch_dtype
from fmtprop.jit import Call
from fmtprop.layout import DataType, MemoryDesc
from fmtprop.passes.target import Candidate, CostModel, Request
from fmtprop.targets.memory import view, view_of_tensor

__all__ = [
    "REFUSED",
    "SCRATCHPAD",
    "Bound",
    "Executable",
    "Implementation",
    "Memory",
    "Place",
    "Provider",
    "PythonCalls",
    "Stream",
    "Targets",
    "as_planned",
    "failed",
    "implementation",
    "threads_here",
]

#: name of the scratchpad's place
SCRATCHPAD = "scratchpad"

#: content between runs of memory with another tensor in each run, so that no tensor is kept
_NOTHING = torch.empty(0, device="cpu")

#: exceptions of operators that refuse their arguments
REFUSED = (RuntimeError, ValueError, TypeError, IndexError)


class Memory:
    """Memory of operands and results.

    Parameters
    ----------
    tensor : torch.Tensor, optional
        Flat bytes, or a whole tensor; the same in each run. Default: each run puts another tensor here.
    desc : MemoryDesc, optional
        Format of all tensors that are put here.
    """

    __slots__ = ("_followers", "_pointer", "desc", "is_fixed", "tensor")

    def __init__(self, tensor: torch.Tensor | None = None, desc: MemoryDesc | None = None) -> None:
        self.is_fixed, self.desc = tensor is not None, desc
        self.tensor = _NOTHING if tensor is None else tensor
        self._pointer = 0
        #: functions that are called with a new address, and their offsets from the start in bytes
        self._followers: list[tuple[Callable[[int], object], int]] = []

    def put(self, tensor: torch.Tensor) -> None:
        """Hold another tensor from now on: flat bytes, or a whole tensor."""
        self.tensor = tensor
        if self._followers:
            pointer = tensor.data_ptr()
            if pointer != self._pointer:  # allocators often return the same memory again
                for point, start in self._followers:
                    point(pointer + start)
                self._pointer = pointer

    def clear(self) -> None:
        """Hold nothing."""
        self.tensor = _NOTHING

    def follow(self, point: Callable[[int], object], start: int = 0) -> None:
        """Call a function with the address `start` bytes after the beginning: now, if known, and at each change."""
        if self.is_fixed:
            point(self.tensor.data_ptr() + start)
        else:
            self._followers.append((point, start))


class Place:
    """Position of an operand or a result.

    Parameters
    ----------
    memory : Memory
        The memory that holds it.
    desc : MemoryDesc
        Its format; ``offset0`` counts from the memory's start.
    is_read : bool
        Whether anybody reads a result that a step writes here.
    """

    __slots__ = ("desc", "is_read", "is_whole", "memory")

    def __init__(self, memory: Memory, desc: MemoryDesc, *, is_read: bool = True) -> None:
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


class Stream:
    """The oneDNN stream of one context's native calls; created on first use."""

    def __init__(self) -> None:
        self._native: dnnl.Stream | None = None

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
        """Release the oneDNN stream."""
        if self._native is not None:
            self._native.close()


@contextmanager
def as_planned() -> Iterator[None]:
    """Run operators from Python in the planned data types, whatever the caller's modes are."""
    with torch.no_grad():
        if not torch.is_autocast_enabled("cpu"):
            yield
            return
        with torch.autocast("cpu", enabled=False):
            yield


class PythonCalls:
    """Consecutive calls of Python functions, as one function of a plan.

    Parameters
    ----------
    pairs : sequence of (Node, callable)
        The node of each call, and the call.
    """

    __slots__ = ("pairs",)

    def __init__(self, pairs: Sequence[tuple[Node, Callable[[], object]]]) -> None:
        self.pairs = pairs

    def __call__(self, *_: None) -> int:
        """Make the calls and return 0; an error of an operator names the node.

        Raises
        ------
        PlanError
            An operator refused.
        """
        for node, call in self.pairs:
            try:
                call()
            except FmtpropError:
                raise
            except REFUSED as error:
                raise failed(node, node.choice.target if node.choice is not None else "", error) from error
        return 0


def failed(node: Node, target: str, error: Exception) -> PlanError:
    """Return the error of a failed operator, with its node and target."""
    where = f" from {node.origin}" if node.origin else ""
    return PlanError(f"{node.label}{where} failed on the {target} target: {error}")


class Bound:
    """An executable with the positions of its operands and results, for one run at a time.

    Parameters
    ----------
    native : sequence of Call
        The calls, if they are native.
    python : tuple of (Node, callable), optional
        The node and its call, if it is a Python call, which is made under :func:`as_planned`.
    keep : sequence of object
        Objects that live as long as the calls; those with a ``close`` are closed with them.
    failure : callable, optional
        Makes the error of a native call's status.
    """

    __slots__ = ("_failure", "_keep", "calls", "pairs")

    def __init__(
        self,
        native: Sequence[Call] = (),
        *,
        python: tuple[Node, Callable[[], object]] | None = None,
        keep: Sequence[Any] = (),
        failure: Callable[[int], FmtpropError] | None = None,
    ) -> None:
        self._keep, self._failure = keep, failure
        #: node and function of a Python call
        self.pairs = () if python is None else (python,)
        self.calls: tuple[Call, ...] = tuple(native)
        if self.pairs:
            self.calls = ((PythonCalls(self.pairs), None, None, None, None),)

    @property
    def is_native(self) -> bool:
        """Whether its calls are functions of a shared library with pointers and integers."""
        return not self.pairs

    def run(self) -> None:
        """Make the calls.

        Raises
        ------
        FmtpropError
            A call failed.
        """
        if self.is_native:
            self._run()
        else:
            with as_planned():
                self._run()

    def seconds(self, stream: Stream) -> float:
        """Make the calls and return their seconds.

        Raises
        ------
        FmtpropError
            A call failed.
        """
        failed = 0
        with nullcontext() if self.is_native else as_planned():
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


class Executable(ABC):
    """A built implementation: all slow work is done. Equal steps, and all contexts, can share it."""

    @abstractmethod
    def bind(self, node: Node, places: Mapping[str, Place], stream: Stream) -> Bound:
        """Return the calls that compute a node.

        Parameters
        ----------
        node : Node
            A formatted node; its choice has this executable's implementation, or an equal one.
        places : mapping of str to Place
            Positions of each operand and each result, by name, and of a scratchpad if one is needed. The
            implementation's :meth:`~Implementation.residual` lies in the first result's memory; the operand of
            :meth:`~Implementation.may_add_to` may lie there.
        stream : Stream
            Stream of the native calls.
        """

    def lay_out(self, node: Node, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return numbers in a format that only this executable knows, as a tensor for :class:`Memory`.

        Parameters
        ----------
        node : Node
            Formatted.
        name : str
            The operand with this format.
        tensor : torch.Tensor
            Its numbers, dense.

        Raises
        ------
        UnsupportedOpError
            The executable does not know the format.
        """
        raise UnsupportedOpError(f"{node.label}: numbers cannot be packed in the format of operand {name}")

    def close(self) -> None:  # noqa: B027 - most executables have nothing to release
        """Release the native objects; bound calls stay usable."""


class Provider(ABC):
    """A target that executes. The attributes with a default are the questions of a compilation to its target."""

    #: name in choices, reports and the registry
    name: str

    #: whether sources of a concat can be written inside its result
    in_place = True

    #: whether the fallback's operators are other code, which may be faster
    competing = True

    #: whether several of its nodes may be faster than one (Winograd's filtering, merged groups)
    expanding = True

    #: whether it obeys a node's demand for PyTorch's NaN and infinities (``special_values="exact"``)
    has_exact = False

    #: whether it can run a step of training (``training=True``)
    has_training = False

    @abstractmethod
    def candidates(self, node: Node, request: Request) -> Iterable[Candidate]:
        """Yield every implementation that serves a request (:class:`fmtprop.passes.target.Target`)."""

    @abstractmethod
    def reorder_cost(self, src: MemoryDesc, dst: MemoryDesc) -> float | None:
        """Return the estimated seconds of a reorder, 0 for equal formats, None if no reorder exists."""

    @abstractmethod
    def formats(self, dims: tuple[int, ...], dtype: DataType) -> Sequence[MemoryDesc]:
        """Return the formats to try for a tensor, the most likely first, always including row-major."""

    @abstractmethod
    def reject(self, node: Node) -> None:
        """Never offer a formatted node's choice again, if it is this target's: it gave a wrong result."""

    def forget(self) -> None:  # noqa: B027 - most targets keep nothing
        """Drop the answers so far: formats are chosen, and most answers are not needed again."""

    def computes_in(self, dtype: DataType) -> bool:
        """Return whether compute-intensive ops can run in a data type on this CPU."""
        return dtype is DataType.F32

    def at_boundary(self, desc: MemoryDesc) -> MemoryDesc:
        """Return the format in which it reads and writes a caller's tensor that has this format."""
        return desc

    def model(self) -> CostModel | None:
        """Return its own model of costs; None for the roofline of a oneDNN library (:mod:`fmtprop.tuning`)."""
        return None

    def describe(self) -> dict[str, str]:
        """Return its instruction set (``isa``) and the version of its oneDNN (``onednn``), for reports."""
        return {"isa": torch.backends.cpu.get_cpu_capability().lower(), "onednn": "none"}


class Implementation(ABC):
    """One way to compute nodes, before it is built: the handle of a candidate, and of a choice."""

    #: properties other than the name that decide results and speed: part of the keys of their records
    identity: Mapping[str, str] = MappingProxyType({})

    #: whether it accepts any numbers and takes equally long for all: it can be timed on arbitrary numbers
    takes_any_numbers = False

    #: whether it was offered for one number of threads, and must be requested again for another
    is_for_threads = False

    #: whether a result may overwrite an operand, if the op's declaration permits it
    overwrites = False

    #: for modelled costs: whether it moves bytes as fast as a copy, whatever the op; whether PyTorch's operators
    #: compute it
    moves_freely, by_operators = False, False

    #: whether it allocates its results in each run, from operands as tensors; otherwise they are written to places
    makes_results = False

    @property
    def scratchpad_nbytes(self) -> int:
        """Bytes of temporary memory that nothing else may use during the run."""
        return 0

    @property
    @abstractmethod
    def repro(self) -> str:
        """Instructions to repeat the computation: a command line, or words."""

    @abstractmethod
    def target(self) -> Provider:
        """Return a new target of the kind that offered it."""

    @abstractmethod
    def build(self, threads: int) -> Executable:
        """Return the executable for a number of threads."""

    def residual(self, node: Node) -> str | None:
        """Return the operand that it adds to, and thus overwrites with the first result; None if there is none."""
        return None

    def may_add_to(self, node: Node) -> str | None:
        """Return the operand that it can add to, instead of allocating a result, if nobody else reads it."""
        return None

    def needs_check(self, node: Node) -> bool:
        """Return whether a formatted node's result may differ from its reference (False for the reference itself)."""
        return True


class Targets:
    """The targets of given implementations, one of each kind; made on demand."""

    def __init__(self) -> None:
        self._made: dict[type[Implementation], Provider] = {}

    def of(self, way: Implementation) -> Provider:
        """Return the target of the kind that offers an implementation."""
        if type(way) not in self._made:
            self._made[type(way)] = way.target()
        return self._made[type(way)]

    def reject(self, node: Node) -> None:
        """Tell all of them never to offer a formatted node's choice again."""
        self.of(implementation(node)).reject(node)


def threads_here() -> int:
    """Return the number of threads of executables that are built now."""
    try:
        return dnnl.lib().threads
    except LoadError:
        return torch.get_num_threads()


def implementation(node: Node) -> Implementation:
    """Return the implementation that was chosen for a formatted node.

    Raises
    ------
    PlanError
        The node has no choice.
    """
    choice: Choice | None = node.choice
    if choice is None or choice.handle is None:
        raise PlanError(f"{node.label} has no choice: assign formats before planning")
    handle: Implementation = choice.handle
    return handle
