"""The frozen plan: steps, buffers and the position of each operand. Data only; nothing here runs or decides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from fmtprop.ir.node import Node
from fmtprop.layout import MemoryDesc
from fmtprop.targets.executable import Executable


class Home(str, Enum):
    """The owner of a buffer's bytes."""

    #: the plan's own memory, reused by lifetime
    ARENA = "arena"
    #: packed or original parameters, alive as long as the plan
    CONSTANT = "constant"
    #: the caller's input tensor of this run
    INPUT = "input"
    #: a tensor made for this run and handed to the caller
    OUTPUT = "output"
    #: a tensor that a PyTorch operator makes during the run, dropped after its last reader or handed to the caller
    TENSOR = "tensor"


@dataclass(frozen=True)
class Buffer:
    """A contiguous range of bytes."""

    #: owner of its bytes
    home: Home
    nbytes: int
    #: `first`, `last`: the first and last step that use it (arena and tensors)
    first: int = 0
    last: int = 0
    #: bytes from the start of the arena (arena only)
    offset: int = 0
    #: number of the input, output or constant
    index: int = 0


@dataclass(frozen=True)
class Access:
    """A tensor in a buffer."""

    buffer: int
    #: its format; ``offset0`` counts from the buffer's start
    desc: MemoryDesc


@dataclass(frozen=True)
class Step:
    """One step of a run."""

    #: the node it executes, with the choice that its executable was built from
    node: Node
    operands: Mapping[str, Access]
    results: tuple[Access, ...]
    #: the executable of the node; equal steps share it
    executable: Executable
    scratchpad: int | None = None
    #: for each operand that was packed while the plan was built: the reorder that packed it
    packing: Mapping[str, Node] = field(default_factory=dict)

    @property
    def target(self) -> str:
        """Target that executes the step."""
        return self.node.choice.target if self.node.choice is not None else ""


@dataclass(frozen=True)
class Turn:
    """Where the backward half of a plan with two entry points begins."""

    #: `step`, `input`, `output`: the number of steps, inputs and outputs of the forward half
    step: int
    input: int
    output: int


@dataclass(frozen=True)
class Plan:
    """Everything that a run needs; a run decides nothing.

    Parameters
    ----------
    name : str
        Name of the model.
    steps : tuple of Step
        In the order of execution.
    buffers : tuple of Buffer
        All buffers.
    inputs : tuple of (str, MemoryDesc, int)
        Name, format and buffer of each input; buffer -1 if no step reads it.
    outputs : tuple of (str, Access)
        Name and position of each output.
    constants : tuple of torch.Tensor
        Owners of the constant buffers: flat bytes, 64-byte aligned, or the caller's tensors.
    arena_nbytes : int
        Size of the arena; 0 if steps make all tensors.
    peak_nbytes : int
        The largest sum of bytes alive at one step, in the arena and in tensors that steps make: the lower bound of
        their memory.
    packed : tuple of Node
        Nodes that ran once, while the plan was built: most of them reorders that packed weights.
    threads : int
        Number of threads that the primitives were made for.
    turn : Turn, optional
        Where the second half begins; None where the plan has one entry point.
    inside : mapping of int to int
        Buffers of results of the second half that may take the place of saved tensors, and their offsets in the arena.
    changed : frozenset of int
        Numbers of the outputs that are an input's own tensor, of which steps have changed a part.
    """

    name: str
    steps: tuple[Step, ...]
    buffers: tuple[Buffer, ...]
    inputs: tuple[tuple[str, MemoryDesc, int], ...]
    outputs: tuple[tuple[str, Access], ...]
    constants: tuple[Any, ...]
    arena_nbytes: int
    peak_nbytes: int
    packed: tuple[Node, ...]
    threads: int
    turn: Turn | None = None
    inside: Mapping[int, int] = field(default_factory=dict)
    changed: frozenset[int] = frozenset()

    @property
    def constant_nbytes(self) -> int:
        """Bytes of the parameters that the plan keeps."""
        # An opaque tensor has no size; equal constants are one constant in several buffers.
        sizes = {buffer.index: buffer.nbytes for buffer in self.buffers if buffer.home is Home.CONSTANT}
        return sum(sizes.values())

    @property
    def reorders(self) -> tuple[Step, ...]:
        """The reorders that every run executes."""
        return tuple(step for step in self.steps if step.node.op == "reorder")
