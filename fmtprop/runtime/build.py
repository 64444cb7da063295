"""From a formatted graph to a plan: constants packed, buffers placed, primitives compiled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fmtprop import dnnl
from fmtprop.errors import PlanError
from fmtprop.ir.graph import Graph
from fmtprop.ir.node import Node, Value
from fmtprop.ir.op import opdef
from fmtprop.ir.tensors import materialise
from fmtprop.passes.target import Target
from fmtprop.runtime.arena import Lifetime, plan_arena
from fmtprop.runtime.constants import ConstantStore
from fmtprop.runtime.plan import Access, Buffer, Home, Plan, Step
from fmtprop.targets.memory import check_fits


def build_plan(graph: Graph, target: Target) -> Plan:
    """Freeze a formatted graph.

    Parameters
    ----------
    graph : Graph
        With descs and choices on every node; its constants are read, not kept.
    target : Target
        Asked only for the copies that in-place post-ops need.

    Returns
    -------
    Plan

    Raises
    ------
    PlanError
        A node has no format or no way to run.
    """
    torch.get_num_threads()  # a thread that is new to torch takes over the number that was set for the process
    return _Builder(graph, target).build()


class _Root:
    """A buffer in the making: one tensor's memory, shared by its views and in-place successors."""

    def __init__(self, home: Home, nbytes: int, first: int, index: int = 0) -> None:
        self.home, self.nbytes, self.first, self.last, self.index = home, nbytes, first, first, index
        #: reads still to come, by steps and outputs
        self.reads = 0


class _Builder:
    def __init__(self, graph: Graph, target: Target) -> None:
        self.graph = graph
        self.target = target
        self.nodes = graph.nodes()
        self.roots: list[_Root] = []
        self.places: dict[Value, Access] = {}
        self.constants = ConstantStore()
        self.steps: list[Step] = []
        self.packed: list[Node] = []
        self.primitives: dict[int, dnnl.Primitive] = {}
        self.computed = _computed(graph)
        self.pending = self._count_reads()

    def build(self) -> Plan:
        for node in self.nodes:
            self._visit(node)
        outputs = self._outputs()
        used = {a.buffer for s in self.steps for a in (*s.operands.values(), *s.results)}
        used |= {access.buffer for _, access in outputs}
        buffers, arena, peak, constants = self._freeze(used)
        results = sum(buffer.nbytes for buffer in buffers if buffer.home is Home.OUTPUT)
        check_fits(arena + results, f"a run of {self.graph.name}")
        inputs = tuple(
            (node.name, node.descs[0], i if (i := self.places[Value(node.name)].buffer) in used else -1)
            for node in self.graph.input_nodes
        )
        return Plan(
            self.graph.name, tuple(self.steps), buffers, inputs, outputs, constants, arena, peak, tuple(self.packed),
            dnnl.lib().threads,
        )  # fmt: skip

    # ------------------------------------------------------------------ nodes

    def _visit(self, node: Node) -> None:
        if node.choice is None:
            raise PlanError(f"{node.label} has no choice: assign formats before planning")
        inputs = {name: self.places[value] for name, value in self.graph.inputs(node.name).items()}
        if node.op == "input":
            index = [n.name for n in self.graph.input_nodes].index(node.name)
            self._place(node, 0, self._root(Home.INPUT, node.descs[0].nbytes, index))
        elif node.op == "constant":
            self._place(node, 0, self._add_constant(node))
        elif node.op == "output":
            pass
        elif node.choice.target == "view":
            self._place(node, 0, inputs["src"].buffer)
        elif node.name not in self.computed:
            self._run_once(node, inputs)
        else:
            self._add_step(node, inputs)

    def _add_constant(self, node: Node) -> int:
        data = self.graph.constants[node.name]
        packed_only = all(
            reader not in self.computed and self._target_of(reader) == "onednn"
            for reader, _ in self.graph.readers(Value(node.name))
        )
        # weights that are packed now are not read later: their original needs no copy
        copy = isinstance(data, torch.Tensor) and not packed_only
        return self._constant(self.constants.add(materialise(data, node.results[0]), node.descs[0], copy=copy))

    def _target_of(self, name: str) -> str:
        choice = self.graph.node(name).choice
        return choice.target if choice is not None else ""

    def _run_once(self, node: Node, inputs: Mapping[str, Access]) -> None:
        """Execute a node of constants now: weights are packed once."""
        operands = {name: (self.constants[self.roots[a.buffer].index], a.desc) for name, a in inputs.items()}
        for index, tensor in enumerate(self.constants.compute(node, operands)):
            self._place(node, index, self._constant(self.constants.keep(tensor)))
        self.packed.append(node)

    def _add_step(self, node: Node, inputs: dict[str, Access]) -> None:
        number = len(self.steps)
        overwritten = self._overwritable(node, inputs)
        if overwritten is None and (residual := _sum_operand(node)) is not None:
            inputs[residual] = self._copy(node, residual, inputs[residual])
            overwritten, number = residual, len(self.steps)
        results = []
        for index, desc in enumerate(node.descs):
            if index == 0 and overwritten is not None:
                root = inputs[overwritten].buffer
            else:
                root = self._root(Home.ARENA, desc.nbytes, first=number)
            self.roots[root].last = number
            self._place(node, index, root)
            results.append(self.places[Value(node.name, index)])
        scratchpad = None
        primitive = None
        if node.choice is not None and node.choice.target == "onednn":
            primitive = self._primitive(node.choice.handle)
            if primitive.desc.scratchpad_nbytes:
                scratchpad = self._root(Home.ARENA, primitive.desc.scratchpad_nbytes, first=number)
        self._append(Step(node, inputs, tuple(results), scratchpad, primitive))

    def _append(self, step: Step) -> None:
        number = len(self.steps)
        for access in step.operands.values():
            root = self.roots[access.buffer]
            root.last = max(root.last, number)
            root.reads -= 1
        for index, access in enumerate(step.results):
            self.roots[access.buffer].reads += self.pending.get(Value(step.node.name, index), 0)
        self.steps.append(step)

    def _overwritable(self, node: Node, inputs: Mapping[str, Access]) -> str | None:
        """Return the operand whose buffer the first result may take over, or None."""
        allowed = opdef(node.op).inplace
        if node.choice is None or node.choice.target != "onednn":
            return None
        residual = _sum_operand(node)
        for name, access in inputs.items():
            if name != residual and (
                residual is not None or (opdef_operand(name) not in allowed and name not in allowed)
            ):
                continue
            root = self.roots[access.buffer]
            same = access.desc == node.descs[0] and access.desc.offset0 == 0 and root.nbytes == access.desc.nbytes
            readers = sum(other.buffer == access.buffer for other in inputs.values())
            if root.home is Home.ARENA and same and root.reads == 1 and readers == 1:
                return name
        return None

    def _copy(self, node: Node, operand: str, access: Access) -> Access:
        """Add a step that copies an operand which must not be overwritten."""
        stand_in = Node(f"{node.name}.{operand}_copy", "reorder", opdef("reorder").attrs(), (node.results[0],))
        for candidate in self.target.candidates(stand_in, {"src": access.desc, "dst": access.desc}):
            reason = f"{node.name} adds into {operand} in place, which others still read"
            copy = stand_in.with_(descs=(access.desc,), choice=candidate.choice(reason))
            self.pending[Value(copy.name)] = 1
            self._add_step(copy, {"src": access})
            return self.places[Value(copy.name)]
        raise PlanError(f"{node.label}: operand {operand} ({access.desc!r}) cannot be copied")

    def _primitive(self, pd: dnnl.PrimitiveDesc) -> dnnl.Primitive:
        known = self.primitives.get(id(pd))
        if known is None:
            known = self.primitives[id(pd)] = dnnl.Primitive(pd)
        return known

    # ------------------------------------------------------------------ buffers

    def _root(self, home: Home, nbytes: int, index: int = 0, first: int = 0) -> int:
        self.roots.append(_Root(home, nbytes, first, index))
        return len(self.roots) - 1

    def _constant(self, index: int) -> int:
        return self._root(Home.CONSTANT, self.constants.nbytes(index), index)

    def _place(self, node: Node, index: int, root: int) -> None:
        self.places[Value(node.name, index)] = Access(root, node.descs[index])

    def _count_reads(self) -> dict[Value, int]:
        """Return, for each value that a step writes, how many operands and outputs read it or a view of it."""
        reads: dict[Value, int] = {}
        for node in reversed(self.nodes):
            for index in range(len(node.results)):
                value = Value(node.name, index)
                total = 0
                for reader, _ in self.graph.readers(value):
                    choice = self.graph.node(reader).choice
                    is_view = choice is not None and choice.target == "view"
                    total += reads[Value(reader)] if is_view else 1
                reads[value] = total
        return reads

    def _outputs(self) -> tuple[tuple[str, Access], ...]:
        """Let results be written straight into the caller's tensors where the buffer is theirs alone."""
        accesses = [self.places[self.graph.inputs(node.name)["src"]] for node in self.graph.output_nodes]
        end = len(self.steps)
        outputs = []
        for index, (node, access) in enumerate(zip(self.graph.output_nodes, accesses, strict=True)):
            root = self.roots[access.buffer]
            alone = sum(other.buffer == access.buffer for other in accesses) == 1
            whole = access.desc.is_packed and access.desc.offset0 == 0 and access.desc.nbytes == root.nbytes
            if root.home is Home.ARENA and alone and whole:
                root.home, root.index = Home.OUTPUT, index
            root.last = end
            outputs.append((node.name, access))
        return tuple(outputs)

    def _freeze(self, used: set[int]) -> tuple[tuple[Buffer, ...], int, int, tuple[Any, ...]]:
        arena = [i for i, root in enumerate(self.roots) if root.home is Home.ARENA]
        layout = plan_arena([Lifetime(self.roots[i].nbytes, self.roots[i].first, self.roots[i].last) for i in arena])
        offsets = dict(zip(arena, layout.offsets, strict=True))
        kept = sorted({self.roots[i].index for i in used if self.roots[i].home is Home.CONSTANT})
        renumbered = {old: new for new, old in enumerate(kept)}
        buffers = []
        for i, root in enumerate(self.roots):
            index = renumbered.get(root.index, -1) if root.home is Home.CONSTANT else root.index
            nbytes = root.nbytes if root.home is not Home.CONSTANT or index >= 0 else 0
            buffers.append(Buffer(root.home, nbytes, root.first, root.last, offsets.get(i, 0), index))
        constants = tuple(self.constants[index] for index in kept)
        return tuple(buffers), layout.nbytes, layout.peak_nbytes, constants


def _computed(graph: Graph) -> set[str]:
    """Return the nodes that depend on an input; all else is constant."""
    found: set[str] = set()
    for node in graph.nodes():
        if node.op == "input" or any(value.node in found for value in graph.inputs(node.name).values()):
            found.add(node.name)
    return found


def _sum_operand(node: Node) -> str | None:
    return next((post_op.operand for post_op in node.post_ops if post_op.op == "sum"), None)


def opdef_operand(name: str) -> str:
    """Return the declared operand that a variadic operand belongs to: ``src_2`` -> ``src``."""
    stem, _, index = name.rpartition("_")
    return stem if index.isdigit() else name
