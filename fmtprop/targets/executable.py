"""What a target makes of a choice: an implementation builds an executable, which is bound to memory and then run.

Whoever runs steps (a plan's context, the packing of constants, the self-check, timings) knows these classes alone: it
says where operands and results lie, and gets calls.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from time import perf_counter
from types import MappingProxyType
from typing import Any, Protocol

import torch

from fmtprop import dnnl
from fmtprop.errors import FmtpropError, LoadError, PlanError, UnsupportedOpError
from fmtprop.ir.node import Choice, Node
from fmtprop.ir.tensors import torch_dtype
from fmtprop.jit import Call
from fmtprop.layout import MemoryDesc
from fmtprop.passes.target import Target
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

#: name of the place that an implementation with a scratchpad works in
SCRATCHPAD = "scratchpad"

#: what memory holds between runs that is another one in each, so that nobody's tensors are kept
_NOTHING = torch.empty(0, device="cpu")

#: what operators called from Python raise about what they are given
REFUSED = (RuntimeError, ValueError, TypeError, IndexError)


class Memory:
    """Memory that operands and results lie in.

    Parameters
    ----------
    tensor : torch.Tensor, optional
        Flat bytes, or a tensor of its own; the same in each run. Without it, each run puts another one here.
    desc : MemoryDesc, optional
        The format of all tensors that are put here.
    """

    __slots__ = ("_followers", "_pointer", "desc", "is_fixed", "tensor")

    def __init__(self, tensor: torch.Tensor | None = None, desc: MemoryDesc | None = None) -> None:
        self.is_fixed, self.desc = tensor is not None, desc
        self.tensor = _NOTHING if tensor is None else tensor
        self._pointer = 0
        #: what is to be told its address, and bytes from the start to where that begins
        self._followers: list[tuple[Callable[[int], object], int]] = []

    def put(self, tensor: torch.Tensor) -> None:
        """Let it be another tensor, flat or of its own, from now on."""
        self.tensor = tensor
        if self._followers:
            pointer = tensor.data_ptr()
            if pointer != self._pointer:  # allocators tend to give the same memory again
                for point, start in self._followers:
                    point(pointer + start)
                self._pointer = pointer

    def clear(self) -> None:
        """Hold nothing."""
        self.tensor = _NOTHING

    def follow(self, point: Callable[[int], object], start: int = 0) -> None:
        """Tell a function the address so many bytes behind the start: now if it is known, and whenever it changes."""
        if self.is_fixed:
            point(self.tensor.data_ptr() + start)
        else:
            self._followers.append((point, start))


class Place:
    """Where an operand or a result lies.

    Parameters
    ----------
    memory : Memory
        In what.
    desc : MemoryDesc
        How; ``offset0`` counts from the memory's start.
    is_read : bool
        Whether anybody reads what a step writes here.
    """

    __slots__ = ("desc", "is_read", "is_whole", "memory")

    def __init__(self, memory: Memory, desc: MemoryDesc, *, is_read: bool = True) -> None:
        self.memory, self.desc, self.is_read = memory, desc, is_read
        #: whether it is what was put there, as that was made
        self.is_whole = memory.desc == desc

    def tensor(self) -> torch.Tensor:
        """Return the tensor that lies here now: a view of the memory, unless it is all of a tensor."""
        tensor, desc = self.memory.tensor, self.desc
        if self.is_whole or tensor.layout is not torch.strided:
            return tensor
        if tensor.dtype is torch_dtype(desc.dtype):
            return view_of_tensor(tensor, desc)
        return view(tensor, desc)


class Stream:
    """Where the native calls of one context are executed; made when it is first needed."""

    def __init__(self) -> None:
        self._native: dnnl.Stream | None = None

    @property
    def native(self) -> dnnl.Stream:
        """OneDNN's."""
        if self._native is None:
            self._native = dnnl.Stream(dnnl.Engine.cpu())
        return self._native

    @property
    def is_asynchronous(self) -> bool:
        """Whether a call may return before its work is done."""
        return self._native is not None and dnnl.lib().runtime == "SYCL"

    def wait(self) -> None:
        """Wait until all that was called has been done."""
        if self._native is not None:
            self._native.wait()

    def close(self) -> None:
        """Release it."""
        if self._native is not None:
            self._native.close()


@contextmanager
def as_planned() -> Iterator[None]:
    """Let operators called from Python run in the types that were decided, whatever the caller's modes are."""
    with torch.no_grad():
        if not torch.is_autocast_enabled("cpu"):
            yield
            return
        with torch.autocast("cpu", enabled=False):
            yield


class PythonCalls:
    """Calls of Python functions in a row, as one function of a plan.

    Parameters
    ----------
    pairs : sequence of (Node, callable)
        What each computes, and the call.
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
    """Return the error that says which node's operator failed, and on which target."""
    where = f" from {node.origin}" if node.origin else ""
    return PlanError(f"{node.label}{where} failed on the {target} target: {error}")


class Bound:
    """An executable and where its operands and results lie, for one run at a time.

    Parameters
    ----------
    native : sequence of Call
        The calls, if they are native.
    python : tuple of (Node, callable), optional
        What it computes and the one call, if that is of Python. It is made under :func:`as_planned`.
    keep : sequence of object
        What lives as long as the calls; what has a ``close`` is closed with them.
    failure : callable, optional
        From a native call's status to the error.
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
        #: of a call of Python: what it computes, and the function
        self.pairs = () if python is None else (python,)
        self.calls: tuple[Call, ...] = tuple(native)
        if self.pairs:
            self.calls = ((PythonCalls(self.pairs), None, None, None, None),)

    @property
    def is_native(self) -> bool:
        """Whether its calls are functions of a shared library, with pointers and integers."""
        return not self.pairs

    def run(self) -> None:
        """Make the calls.

        Raises
        ------
        FmtpropError
            One failed.
        """
        if self.is_native:
            self._run()
        else:
            with as_planned():
                self._run()

    def seconds(self, stream: Stream) -> float:
        """Make the calls and return how long they took.

        Raises
        ------
        FmtpropError
            One failed.
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
        """Return the error of a call that gave this status."""
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
    """An implementation that was built: whatever takes long is done. Equal steps, and all contexts, can share it."""

    @abstractmethod
    def bind(self, node: Node, places: Mapping[str, Place], stream: Stream) -> Bound:
        """Return the calls that compute a node.

        Parameters
        ----------
        node : Node
            Formatted, with the implementation that this was built of, or its like, as its choice.
        places : mapping of str to Place
            For each operand, and each result, by name; and the scratchpad's where one is needed. The implementation's
            :meth:`~Implementation.residual` lies in the first result's memory, what it may add to can.
        stream : Stream
            What native calls are executed on.
        """

    def lay_out(self, node: Node, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return numbers in a format that nobody else knows, as :class:`Memory` holds them.

        Parameters
        ----------
        node : Node
            Formatted.
        name : str
            The operand that has such a format.
        tensor : torch.Tensor
            Its numbers, dense.

        Raises
        ------
        UnsupportedOpError
            It knows no such format.
        """
        raise UnsupportedOpError(f"{node.label}: nobody can lay out numbers as operand {name} is read")

    def close(self) -> None:  # noqa: B027 - most have nothing to release
        """Release the native objects; what is bound stays usable."""


class Provider(Target, Protocol):
    """A target that executes, and is told of what came out wrong."""

    def reject(self, node: Node) -> None:
        """Never offer again what a formatted node chose, if that is this target's: it gave a wrong answer."""


class Implementation(ABC):
    """One way to compute nodes, known before it is built: the handle of a candidate, and of a choice."""

    #: what of it decides results and speed beside its name: part of the keys under which these are remembered
    identity: Mapping[str, str] = MappingProxyType({})

    #: whether it takes any numbers, and as long for all: it can be timed on other ones than it will see
    takes_any_numbers = False

    #: whether it was offered for a number of threads, and has to be asked for anew for another one
    is_for_threads = False

    #: whether a result may lie where an operand does that the op's declaration says can be overwritten
    overwrites = False

    #: what costs are modelled by: whether it moves bytes as fast as a copy does, whatever the op; whether operators of
    #: PyTorch compute it
    moves_freely, by_operators = False, False

    #: whether its results are tensors that it makes in each run; otherwise they are written to places
    makes_results = False

    @property
    def scratchpad_nbytes(self) -> int:
        """Bytes that it works in and that nobody else may use meanwhile."""
        return 0

    @property
    @abstractmethod
    def repro(self) -> str:
        """How to see again what it computes: a command line, or words."""

    @abstractmethod
    def target(self) -> Provider:
        """Return a new target of the kind that offered it."""

    @abstractmethod
    def build(self, threads: int) -> Executable:
        """Return what runs with a number of threads."""

    def residual(self, node: Node) -> str | None:
        """Return the operand that it adds to, and so overwrites with the first result; None if it reads all."""
        return None

    def may_add_to(self, node: Node) -> str | None:
        """Return the operand that it can add to where nobody else reads that, instead of making a result."""
        return None

    def needs_check(self, node: Node) -> bool:
        """Say whether a formatted node may come out otherwise than its reference: not where it is the reference."""
        return True


class Targets:
    """Targets that are asked again about implementations of theirs, one of each kind; made when they are needed."""

    def __init__(self) -> None:
        self._made: dict[type[Implementation], Provider] = {}

    def of(self, way: Implementation) -> Provider:
        """Return the target of the kind that offers an implementation."""
        if type(way) not in self._made:
            self._made[type(way)] = way.target()
        return self._made[type(way)]

    def reject(self, node: Node) -> None:
        """Let none of them offer again what a formatted node chose."""
        self.of(implementation(node)).reject(node)


def threads_here() -> int:
    """Return the number of threads that executables built now are for."""
    try:
        return dnnl.lib().threads
    except LoadError:
        return torch.get_num_threads()


def implementation(node: Node) -> Implementation:
    """Return the implementation that was chosen for a formatted node.

    Raises
    ------
    PlanError
        None was.
    """
    choice: Choice | None = node.choice
    if choice is None or choice.handle is None:
        raise PlanError(f"{node.label} has no choice: assign formats before planning")
    handle: Implementation = choice.handle
    return handle
