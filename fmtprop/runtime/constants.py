"""Constants while a plan is built: parameters with their values at that time, and the results of nodes on them.

Originals are released only if the user says so. Also tells which nodes are constant, and which numbers they accept.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Protocol

import torch

from fmtprop.ir import Graph, Node, TensorType, Value, opdef, result_names
from fmtprop.ir.aliasing import is_in_place, is_view
from fmtprop.ir.deferred import Deferred
from fmtprop.ir.tensors import Constant, is_fresh, materialise
from fmtprop.layout import MemoryDesc
from fmtprop.ops.host_call import HostCall
from fmtprop.runtime.weights import WEIGHTS, PackedForms
from fmtprop.targets.bound import SCRATCHPAD, MovableMemory, OwnStream, Place
from fmtprop.targets.executable import Executable, Implementation, implementation
from fmtprop.targets.memory import ALIGNMENT_NBYTES, aligned_bytes, view

#: flat bytes of each operand, and its layout in them
Operands = Mapping[str, tuple[torch.Tensor, MemoryDesc]]


class ConstantStore:
    """Source of the bytes of a plan's constants."""

    def __init__(self, forms: PackedForms | None = None) -> None:
        self.forms = forms or PackedForms()
        #: implementation -> itself and its executable: equal weights are packed by the same one
        self._executables: dict[int, tuple[Implementation, Executable]] = {}

    def keep(self, flat: torch.Tensor) -> torch.Tensor:
        """Return bytes that a plan keeps, and no other code can change: equal ones, if another plan has them."""
        return WEIGHTS.share(flat)

    def lends(self, data: Constant) -> bool:
        """Return whether a plan may keep the memory of a parameter itself, which its owner may change."""
        return isinstance(data, Deferred) and data.lent

    def add(self, data: Constant, type_: TensorType, desc: MemoryDesc, *, packed: bool, native: bool) -> torch.Tensor:
        """Return the flat bytes of a parameter in a dense plain format."""
        fresh = is_fresh(data)
        tensor = materialise(data, type_).detach()
        if tensor.numel() == 0:
            return torch.zeros(0, dtype=torch.uint8)
        kept = fresh or (self.lends(data) and tensor.data_ptr() % ALIGNMENT_NBYTES == 0)
        if not (packed or kept) or not _lies_as(tensor, desc):
            tensor = view(aligned_bytes(desc.nbytes), desc).copy_(tensor)
        return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)

    def compute(self, node: Node, operands: Operands, threads: int, unread: Collection[int] = ()) -> list[torch.Tensor]:
        """Execute a node on constants once and return its results; `unread` ones may hold any numbers.

        Results are flat bytes, or tensors if the node's implementation makes its results.
        """
        way = implementation(node)
        results = [MovableMemory(None if way.makes_results else aligned_bytes(desc.nbytes)) for desc in node.descs]
        places = {name: Place(MovableMemory(flat), desc) for name, (flat, desc) in operands.items()}
        for index, (name, memory, desc) in enumerate(zip(result_names(node), results, node.descs, strict=True)):
            places[name] = Place(memory, desc, is_read=index not in unread)
        if id(way) not in self._executables:
            self._executables[id(way)] = way, way.build(threads)
        run_once(node, self._executables[id(way)][1], places)
        return [memory.tensor for memory in results]


def computed_nodes(graph: Graph) -> set[str]:
    """Return the nodes that take part in each run; all others are constant.

    They depend on an input, on a concat in place, or on an op that runs in each run whatever it reads.
    """
    in_place = {node.name for node in graph.nodes() if is_in_place(node)}
    return graph.dependents() | graph.dependents(in_place)


def packed_nbytes(graph: Graph) -> int:
    """Return the bytes that packing writes: constants, and the results of the nodes that run once on them."""
    computed = computed_nodes(graph)
    once = [node for node in graph.nodes() if node.name not in computed and not is_view(graph, node.name)]
    return sum(desc.nbytes for node in once for desc in node.descs)


def is_indifferent(node: Node) -> bool:
    """Return whether a formatted node takes equally long for any numbers, and its results may be any bytes."""
    choice = node.choice
    if choice is None or choice.handle is None or not all(desc.takes_any_bytes for desc in node.descs):
        return False
    # PyTorch's operator of a declared op, too; but a whole number may be an index, and other calls may do anything
    floating = all(desc.dtype.is_floating for desc in (*choice.operands.values(), *node.descs))
    declared = opdef(node.op).elementwise or not isinstance(node.attrs, HostCall)
    return implementation(node).takes_any_numbers or (declared and floating)


def any_numbers_do(graph: Graph, constant: str) -> bool:
    """Return whether a constant may be any bytes, and all nodes that read it or a view of it accept any numbers."""
    readers = readers_behind_views(graph, Value(constant))
    return graph.node(constant).descs[0].takes_any_bytes and all(is_indifferent(graph.node(one)) for one in readers)


def readers_behind_views(graph: Graph, value: Value) -> set[str]:
    """Return the nodes that read a value or a view of it."""
    found: set[str] = set()
    for name, _ in graph.reading(value):
        found |= readers_behind_views(graph, Value(name)) if is_view(graph, name) else {name}
    return found


class Owner(Protocol):
    """Another owner of a graph's parameters: a module, an exported program."""

    def parameters(self) -> Iterator[torch.Tensor]:
        """Yield the learned tensors."""

    def buffers(self) -> Iterator[torch.Tensor]:
        """Yield the other tensors that are part of the model."""


def release(graph: Graph, owner: Owner | None = None) -> None:
    """Release a model's weights after a plan has its own copy of them.

    The graph's constants are dropped, and every parameter and buffer of the owner becomes an empty tensor. Neither can
    be run, saved or compiled again, nor can another module that shares parameters with the owner. Tensors that the
    caller holds stay valid and keep their memory.

    `owner`: the ``torch.nn.Module`` or ``torch.export.ExportedProgram`` that it was imported from.

    >>> layer = torch.nn.Linear(8, 4)
    >>> release(Graph(), layer)
    >>> layer.weight.shape
    torch.Size([0])
    """
    graph.constants.clear()
    if owner is not None:
        for tensor in (*owner.parameters(), *owner.buffers()):
            # the storage is not freed: other tensors may point into it
            tensor.data = tensor.data.new_empty(0)


def _lies_as(tensor: torch.Tensor, desc: MemoryDesc) -> bool:
    return all(size == 1 or a == b for size, a, b in zip(desc.dims, tensor.stride(), desc.strides, strict=True))


def run_once(node: Node, executable: Executable, places: dict[str, Place]) -> None:
    """Run a node's executable once, with its own scratchpad."""
    nbytes, stream = implementation(node).scratchpad_nbytes, OwnStream()
    if nbytes:
        places = {**places, SCRATCHPAD: Place(MovableMemory(aligned_bytes(nbytes)), MemoryDesc((nbytes,), "u8"))}
    bound = executable.bind(node, places, stream)
    bound.run()
    stream.wait()
