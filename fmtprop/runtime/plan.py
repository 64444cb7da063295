"""The frozen plan: steps, buffers and where each operand lies. Data only; nothing here runs or decides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from fmtprop.ir.node import Node
from fmtprop.layout import MemoryDesc
from fmtprop.targets.executable import Executable


class Home(str, Enum):
    """Where the bytes of a buffer come from."""

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
    """A contiguous range of bytes.

    Parameters
    ----------
    home : Home
        Where it comes from.
    nbytes : int
        Size.
    first, last : int
        The steps between which it holds data (arena and tensors).
    offset : int
        Bytes from the start of the arena (arena only).
    index : int
        Number of the input, output or constant.
    """

    home: Home
    nbytes: int
    first: int = 0
    last: int = 0
    offset: int = 0
    index: int = 0


@dataclass(frozen=True)
class Access:
    """A tensor in a buffer.

    Parameters
    ----------
    buffer : int
        Index into :attr:`Plan.buffers`.
    desc : MemoryDesc
        How it lies there; ``offset0`` counts from the buffer's start.
    """

    buffer: int
    desc: MemoryDesc


@dataclass(frozen=True)
class Step:
    """One thing to execute.

    Parameters
    ----------
    node : Node
        The node it executes, with the choice that its executable was built from.
    operands : mapping of str to Access
        What it reads.
    results : tuple of Access
        What it writes.
    executable : Executable
        What runs it, shared by equal steps.
    scratchpad : int, optional
        Buffer index of its scratchpad.
    packing : mapping of str to Node
        The reorder that ran once, while the plan was built, for each operand that one packed for this step.
    """

    node: Node
    operands: Mapping[str, Access]
    results: tuple[Access, ...]
    executable: Executable
    scratchpad: int | None = None
    packing: Mapping[str, Node] = field(default_factory=dict)

    @property
    def target(self) -> str:
        """Who executes the step."""
        return self.node.choice.target if self.node.choice is not None else ""


@dataclass(frozen=True)
class Plan:
    """Everything that a run needs, decided.

    Parameters
    ----------
    name : str
        Name of the model.
    steps : tuple of Step
        In the order of execution.
    buffers : tuple of Buffer
        All buffers.
    inputs : tuple of (str, MemoryDesc, int)
        Name, format and buffer of each input; buffer -1 where nothing reads it.
    outputs : tuple of (str, Access)
        Name and place of each output.
    constants : tuple of torch.Tensor
        Owners of the constant buffers: flat bytes, 64-byte aligned, or the caller's own tensors.
    arena_nbytes : int
        Size of the arena; 0 where steps make all tensors.
    peak_nbytes : int
        The largest sum of bytes alive at one step, in the arena and in tensors that steps make: the lower bound of
        both.
    packed : tuple of Node
        Nodes that ran once, while the plan was built: most of them reorders that packed weights.
    threads : int
        Threads that the primitives were made for.
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

    @property
    def constant_nbytes(self) -> int:
        """Bytes of the parameters that the plan keeps."""
        # An opaque tensor does not tell its size; equal constants are one, in several buffers.
        sizes = {buffer.index: buffer.nbytes for buffer in self.buffers if buffer.home is Home.CONSTANT}
        return sum(sizes.values())

    @property
    def reorders(self) -> tuple[Step, ...]:
        """The reorders that every run executes."""
        return tuple(step for step in self.steps if step.node.op == "reorder")
