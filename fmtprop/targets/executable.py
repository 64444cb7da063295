"""Executable steps: an implementation builds an executable, which is bound to memory (:mod:`fmtprop.targets.bound`).

All users of steps (a plan's context, the packing of constants, the self-check, timings) know only these classes: they
give the positions of operands and results, and get calls.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import torch

from fmtprop import dnnl
from fmtprop.errors import LoadError, PlanError, UnsupportedOpError
from fmtprop.ir.node import Choice, Node
from fmtprop.layout import DataType, MemoryDesc
from fmtprop.passes.target import Candidate, CostModel, Request, of_name
from fmtprop.targets.bound import Bound, OwnStream, Place


class Executable(ABC):
    """A built implementation: all slow work is done. Equal steps, and all contexts, can share it."""

    @abstractmethod
    def bind(self, node: Node, places: Mapping[str, Place], stream: OwnStream) -> Bound:
        """Return the calls that compute a node.

        `places`: positions of each operand and each result, by name, and of a scratchpad if one is needed. The
        implementation's :meth:`~Implementation.residual` lies in the first result's memory; the operand of
        :meth:`~Implementation.may_add_to` may lie there.
        """

    def lay_out(self, node: Node, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return numbers in a format that only this executable knows, as a tensor for :class:`Memory`."""
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

    #: whether it computes with bytes that stand for real numbers (:class:`~fmtprop.ir.grid.Grid`)
    has_bytes = False

    #: whether it can run a step of training (``training=True``)
    has_training = False

    @abstractmethod
    def candidates(self, node: Node, request: Request) -> Iterable[Candidate]:
        """Yield every implementation that serves a request (:class:`fmtprop.passes.target.Target`)."""

    def named(self, node: Node, request: Request, choice: Choice) -> Iterable[Candidate]:
        """Yield the candidates with a choice's name (:class:`fmtprop.passes.target.Target`)."""
        return of_name(self.candidates(node, request), choice)

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

    def is_fast_in(self, dtype: DataType) -> bool:
        """Return whether compute-intensive ops are no slower in a data type than in f32, whatever their size."""
        return self.computes_in(dtype)

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

    #: for modelled costs: whether it moves bytes as fast as a copy, for any op; whether PyTorch's operators compute it,
    #: or a kernel of the project's own
    moves_freely, by_operators, by_kernel = False, False, False

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
        """Return the operand that it can add to, instead of allocating a result, if no other node reads it."""
        return None

    def may_change(self, node: Node) -> str | None:
        """Return the operand of which it can change numbers in place, where these are an input's new content."""
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
        """Exclude a formatted node's choice from all further answers."""
        self.of(implementation(node)).reject(node)


def threads_here() -> int:
    """Return the number of threads of executables that are built now."""
    try:
        return dnnl.lib().threads
    except LoadError:
        return torch.get_num_threads()


def implementation(node: Node) -> Implementation:
    """Return the implementation that was chosen for a formatted node."""
    choice: Choice | None = node.choice
    if choice is None or choice.handle is None:
        raise PlanError(f"{node.label} has no choice: assign formats before planning")
    handle: Implementation = choice.handle
    return handle
