"""Constants while a plan is built: parameters as they were at that moment, packed ones in aligned memory.

Owns what becomes of parameters: each distinct one is kept once, and their originals go when the user says so.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Protocol

import torch

from fmtprop.ir.graph import Graph
from fmtprop.ir.node import Node
from fmtprop.ir.ports import result_names
from fmtprop.ir.tensors import Constant, is_fresh, materialise
from fmtprop.ir.types import TensorType
from fmtprop.layout import MemoryDesc
from fmtprop.runtime.weights import WEIGHTS
from fmtprop.targets.executable import SCRATCHPAD, Executable, Memory, Place, Stream, implementation
from fmtprop.targets.memory import aligned_bytes, nbytes_of, view

#: flat bytes of each operand, and how it lies in them
Operands = Mapping[str, tuple[torch.Tensor, MemoryDesc]]


class ConstantStore:
    """Flat bytes of every constant, by number; equal bytes that are the store's own have one number, and one place."""

    def __init__(self) -> None:
        self._bytes: list[torch.Tensor] = []
        #: how often each is in use
        self._uses: list[int] = []
        #: by the identity of shared bytes
        self._numbers: dict[int, int] = {}

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._bytes[index]

    def nbytes(self, index: int) -> int:
        """Return the size of a constant in bytes."""
        return nbytes_of(self._bytes[index])

    def keep(self, flat: torch.Tensor) -> int:
        """Store flat bytes, or a tensor, that nobody else can change; return their number, an old one where known."""
        shared = WEIGHTS.share(flat)
        known = self._numbers.get(id(shared))
        if known is None:
            known = self._numbers[id(shared)] = self._append(shared)
        else:
            self._uses[known] += 1
        return known

    def drop(self, index: int) -> None:
        """Let go of one use of a constant that no step reads: one whose packed form has taken its place."""
        self._uses[index] -= 1
        if self._uses[index]:
            return  # others were found equal to it
        self._numbers.pop(id(self._bytes[index]), None)
        self._bytes[index] = self._bytes[index].new_empty(0)

    def _append(self, flat: torch.Tensor) -> int:
        self._bytes.append(flat)
        self._uses.append(1)
        return len(self._bytes) - 1

    def add(self, data: Constant, type_: TensorType, desc: MemoryDesc, *, packed: bool, native: bool) -> int:
        """Store a parameter in a dense plain format.

        Parameters
        ----------
        data : torch.Tensor, Initialiser or Deferred
            The parameter. A tensor's memory is someone else's, who may change it after the model was compiled, and a
            deferred one's may be a file's.
        type_ : TensorType
            What it is.
        desc : MemoryDesc
            A dense plain format.
        packed : bool
            Whether only `compute` reads it, now: then the original needs no copy.
        native : bool
            Whether only what takes any numbers reads it, now or in a run.

        Returns
        -------
        int
            The constant's number.
        """
        fresh = is_fresh(data)
        tensor = materialise(data, type_).detach()
        if tensor.numel() == 0:
            return self.keep(torch.zeros(0, dtype=torch.uint8))
        copy = not (packed or fresh) or not _lies_as(tensor, desc)
        if copy:
            tensor = view(aligned_bytes(desc.nbytes), desc).copy_(tensor)
        flat = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
        return self.keep(flat) if copy or fresh else self._append(flat)

    def compute(self, node: Node, operands: Operands, threads: int, unread: Collection[int] = ()) -> list[torch.Tensor]:
        """Execute a node on constants, once, and return its results; `unread` ones may hold anything.

        They are flat bytes, or tensors where the node's implementation makes its results.
        """
        way = implementation(node)
        results = [Memory(None if way.makes_results else aligned_bytes(desc.nbytes)) for desc in node.descs]
        places = {name: Place(Memory(flat), desc) for name, (flat, desc) in operands.items()}
        for index, (name, memory, desc) in enumerate(zip(result_names(node), results, node.descs, strict=True)):
            places[name] = Place(memory, desc, is_read=index not in unread)
        run_once(node, way.build(threads), places)
        return [memory.tensor for memory in results]


class Owner(Protocol):
    """Who holds parameters beside a graph: a module, an exported program."""

    def parameters(self) -> Iterator[torch.Tensor]:
        """Yield the learned tensors."""

    def buffers(self) -> Iterator[torch.Tensor]:
        """Yield the other tensors that are part of the model."""


def release(graph: Graph, owner: Owner | None = None) -> None:
    """Let go of a model's weights once a plan has its own copy of them.

    The graph's constants are dropped, and every parameter and buffer of the owner becomes an empty tensor: neither can
    be run, saved or compiled again, and what shares parameters with the owner cannot either. Tensors that the caller
    holds stay valid, and keep their memory.

    Parameters
    ----------
    graph : Graph
        The imported graph.
    owner : Owner, optional
        The ``torch.nn.Module`` or ``torch.export.ExportedProgram`` that it was imported from.

    Examples
    --------
    >>> layer = torch.nn.Linear(8, 4)
    >>> release(Graph(), layer)
    >>> layer.weight.shape
    torch.Size([0])
    """
    graph.constants.clear()
    if owner is not None:
        for tensor in (*owner.parameters(), *owner.buffers()):
            # not the storage's end: what else points into it would read freed memory
            tensor.data = tensor.data.new_empty(0)


def _lies_as(tensor: torch.Tensor, desc: MemoryDesc) -> bool:
    return all(size == 1 or a == b for size, a, b in zip(desc.dims, tensor.stride(), desc.strides, strict=True))


def run_once(node: Node, executable: Executable, places: dict[str, Place]) -> None:
    """Run what was built for a node, with a scratchpad of its own."""
    nbytes, stream = implementation(node).scratchpad_nbytes, Stream()
    if nbytes:
        places = {**places, SCRATCHPAD: Place(Memory(aligned_bytes(nbytes)), MemoryDesc((nbytes,), "u8"))}
    bound = executable.bind(node, places, stream)
    bound.run()
    stream.wait()
