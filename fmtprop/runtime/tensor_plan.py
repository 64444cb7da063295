"""From a formatted graph to a plan whose steps pass PyTorch tensors: no arena, every result a tensor of its own.

For targets that are PyTorch operators: those allocate what they return, and opaque tensors have no bytes to place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fmtprop.errors import PlanError
from fmtprop.ir.aliasing import is_view
from fmtprop.ir.graph import Graph
from fmtprop.ir.node import Node, Value
from fmtprop.ir.tensors import is_fresh, materialise
from fmtprop.layout import MemoryDesc
from fmtprop.runtime.plan import Access, Buffer, Home, Plan, Step
from fmtprop.runtime.tensor_calls import function_of, viewed
from fmtprop.targets.mkldnn.kernel import Kernel

__all__ = ["build_tensor_plan"]


def build_tensor_plan(graph: Graph) -> Plan:
    """Freeze a formatted graph for :class:`~fmtprop.runtime.tensors.TensorExecutor`.

    Parameters
    ----------
    graph : Graph
        With descs and choices on every node; its constants are read, not kept.

    Returns
    -------
    Plan

    Raises
    ------
    PlanError
        A node has no format or no way to run.
    """
    return _Builder(graph).build()


class _Builder:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.nodes = graph.nodes()
        self.computed = graph.dependents()
        self.buffers: list[Buffer] = []
        self.places: dict[Value, Access] = {}
        self.constants: list[torch.Tensor] = []
        #: buffer -> reads still to come, by steps and outputs
        self.reads: dict[int, int] = {}
        #: buffer of a step's result -> the format in which it is made
        self.made: dict[int, MemoryDesc] = {}
        self.steps: list[Step] = []
        self.packed: list[Node] = []

    def build(self) -> Plan:
        for node in self.nodes:
            self._visit(node)
        outputs = tuple((node.name, self._source(node)) for node in self.graph.output_nodes)
        for _, access in outputs:
            self._extend(access.buffer, len(self.steps))
        inputs = tuple((node.name, node.descs[0], self._read_input(node, outputs)) for node in self.graph.input_nodes)
        used = {access.buffer for step in self.steps for access in step.operands.values()}
        used |= {access.buffer for _, access in outputs}
        buffers, constants = self._freeze(used)
        return Plan(
            self.graph.name, tuple(self.steps), buffers, inputs, outputs, constants, 0, _peak(buffers, len(self.steps)),
            tuple(self.packed), torch.get_num_threads(), True,
        )  # fmt: skip

    # ------------------------------------------------------------------ nodes

    def _visit(self, node: Node) -> None:
        if node.choice is None:
            raise PlanError(f"{node.label} has no choice: assign formats before planning")
        inputs = {name: self.places[value] for name, value in self.graph.inputs(node.name).items()}
        if node.op == "input":
            number = [n.name for n in self.graph.input_nodes].index(node.name)
            self._place(node, 0, self._buffer(Home.INPUT, node.descs[0].nbytes, number))
        elif node.op == "constant":
            self._place(node, 0, self._constant(self._stored(node)))
        elif node.op == "output":
            pass
        elif is_view(self.graph, node.name):
            self._place(node, 0, inputs["src"].buffer)
        elif node.choice.target == "view":
            raise PlanError(f"{node.label} is to be made in place, which tensors of PyTorch's own cannot be")
        elif node.name not in self.computed:
            self._run_once(node, inputs)
        else:
            self._add_step(node, inputs)

    def _stored(self, node: Node) -> torch.Tensor:
        """Return a parameter in its format; a copy, unless nothing but packing reads it."""
        data, desc = self.graph.constants[node.name], node.descs[0]
        tensor = materialise(data, node.results[0]).detach()
        kept = not is_fresh(data) and self._read_later(Value(node.name))
        same = all(n == 1 or a == b for n, a, b in zip(desc.dims, tensor.stride(), desc.strides, strict=True))
        if same and not kept:
            return tensor
        return torch.empty_strided(desc.dims, desc.strides, dtype=tensor.dtype, device="cpu").copy_(tensor)

    def _read_later(self, value: Value) -> bool:
        """Whether a run reads a constant or a view of it, or another constant may be a view of it."""
        readers = [name for name, _ in self.graph.readers(value)]
        return any(name in self.computed or is_view(self.graph, name) for name in readers)

    def _run_once(self, node: Node, inputs: Mapping[str, Access]) -> None:
        """Execute a node of constants now: weights are packed once."""
        tensors = [viewed(self.constants[self.buffers[a.buffer].index], a.desc) for a in inputs.values()]
        with torch.no_grad():
            results = function_of(node)(*tensors)
        for index, tensor in enumerate(results if isinstance(results, tuple) else (results,)):
            self._place(node, index, self._constant(tensor))
        self.packed.append(node)

    def _add_step(self, node: Node, inputs: dict[str, Access]) -> None:
        number = len(self.steps)
        for access in inputs.values():
            self._extend(access.buffer, number)
        overwritten = self._overwritable(node, inputs)
        results = []
        for index, desc in enumerate(node.descs):
            if index == 0 and overwritten is not None:
                buffer = inputs[overwritten].buffer
                self._extend(buffer, number)
            else:
                buffer = self._buffer(Home.TENSOR, desc.nbytes, first=number)
                self.made[buffer] = desc
            self._place(node, index, buffer)
            results.append(self.places[Value(node.name, index)])
        self.steps.append(Step(node, inputs, tuple(results), None))  # type: ignore[arg-type]
        for access in inputs.values():
            self.reads[access.buffer] -= 1
        for index, access in enumerate(results):
            self.reads[access.buffer] = self.reads.get(access.buffer, 0) + self._reads_of(Value(node.name, index))

    def _overwritable(self, node: Node, inputs: Mapping[str, Access]) -> str | None:
        """Return the operand that the node may add into, or None: nobody else reads its tensor, now or later."""
        kernel = node.choice.handle if node.choice is not None else None
        if not isinstance(kernel, Kernel) or kernel.residual is None:
            return None
        access = inputs[kernel.residual]
        buffer = self.buffers[access.buffer]
        once = self.reads.get(access.buffer) == 1 and sum(a.buffer == access.buffer for a in inputs.values()) == 1
        whole = access.desc == node.descs[0] == self.made.get(access.buffer)
        return kernel.residual if buffer.home is Home.TENSOR and once and whole else None

    # ------------------------------------------------------------------ buffers

    def _buffer(self, home: Home, nbytes: int, index: int = 0, first: int = 0) -> int:
        self.buffers.append(Buffer(home, nbytes, first, first, 0, index))
        return len(self.buffers) - 1

    def _constant(self, tensor: torch.Tensor) -> int:
        self.constants.append(tensor)
        nbytes = torch.ops.mkldnn._nbytes(tensor) if tensor.is_mkldnn else tensor.numel() * tensor.element_size()
        return self._buffer(Home.CONSTANT, int(nbytes), len(self.constants) - 1)

    def _place(self, node: Node, index: int, buffer: int) -> None:
        value = Value(node.name, index)
        self.places[value] = Access(buffer, node.descs[index])
        if self.buffers[buffer].home is not Home.TENSOR:
            self.reads[buffer] = self.reads.get(buffer, 0) + self._reads_of(value)

    def _reads_of(self, value: Value) -> int:
        """Return how many operands and outputs read a value or a view of it."""
        total = 0
        for reader, _ in self.graph.readers(value):
            total += self._reads_of(Value(reader)) if is_view(self.graph, reader) else 1
        return total

    def _extend(self, buffer: int, step: int) -> None:
        known = self.buffers[buffer]
        self.buffers[buffer] = Buffer(known.home, known.nbytes, known.first, step, 0, known.index)

    def _source(self, node: Node) -> Access:
        return self.places[self.graph.inputs(node.name)["src"]]

    def _read_input(self, node: Node, outputs: tuple[tuple[str, Access], ...]) -> int:
        buffer = self.places[Value(node.name)].buffer
        read = any(a.buffer == buffer for step in self.steps for a in step.operands.values())
        return buffer if read or any(access.buffer == buffer for _, access in outputs) else -1

    def _freeze(self, used: set[int]) -> tuple[tuple[Buffer, ...], tuple[Any, ...]]:
        """Drop the constants that were only needed to make others."""
        kept = sorted({self.buffers[i].index for i in used if self.buffers[i].home is Home.CONSTANT})
        renumbered = {old: new for new, old in enumerate(kept)}
        buffers = []
        for buffer in self.buffers:
            if buffer.home is Home.CONSTANT:
                index = renumbered.get(buffer.index, -1)
                buffer = Buffer(buffer.home, buffer.nbytes if index >= 0 else 0, buffer.first, buffer.last, 0, index)
            buffers.append(buffer)
        return tuple(buffers), tuple(self.constants[index] for index in kept)


def _peak(buffers: tuple[Buffer, ...], steps: int) -> int:
    """Return the largest sum of bytes alive at one step: a lower bound of what PyTorch allocates."""
    change = [0] * (steps + 2)
    for buffer in buffers:
        if buffer.home is Home.TENSOR:
            change[buffer.first] += buffer.nbytes
            change[buffer.last + 1] -= buffer.nbytes
    alive = peak = 0
    for delta in change:
        alive += delta
        peak = max(peak, alive)
    return peak
