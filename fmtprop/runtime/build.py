"""Build of a plan from a formatted graph: buffers are placed, primitives compiled, then constants packed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from fmtprop.errors import PlanError
from fmtprop.ir import Graph, Into, Node, TensorType, Value, opdef
from fmtprop.ir.aliasing import is_in_place, is_view, parts_of
from fmtprop.layout import MemoryDesc
from fmtprop.passes.target import Target
from fmtprop.runtime.arena import Lifetime, peak_nbytes, place_parts, plan_arena, sum_operand
from fmtprop.runtime.constants import ConstantStore, computed_nodes
from fmtprop.runtime.packing import Once, Packing
from fmtprop.runtime.plan import Access, Buffer, Home, Plan, Step, Turn
from fmtprop.targets.executable import Executable, implementation, threads_here
from fmtprop.targets.memory import check_fits, nbytes_of
from fmtprop.targets.reference import ReferenceTarget

#: gradients get a place in the arena if they are large: in bytes, and as a share of the saved tensors
_MUCH_NBYTES, _MUCH_SHARE = 16 << 20, 1 / 16


def build_plan(graph: Graph, target: Target, *, consume: bool = False, constants: ConstantStore | None = None) -> Plan:
    """Freeze a formatted graph.

    `consume`: whether to remove constants from the graph when they are packed, so that memory never holds all of them
    twice. Raises PlanError if a node has no format or no way to run.
    """
    return Draft(graph, target).pack(constants or ConstantStore(), consume=consume)


def _changes(graph: Graph) -> dict[str, str]:
    """Return, for each node that changes a part of what becomes an input's new content, the operand that it changes."""
    found: dict[str, str] = {}
    for output in graph.output_nodes:
        if not isinstance(output.attrs, Into):
            continue
        node, chain = graph.node(graph.inputs(output.name)["src"].node), dict[str, str]()
        while not node.is_boundary and node.choice is not None and node.choice.handle is not None:
            operand = implementation(node).may_change(node)
            if operand is None:
                break
            chain[node.name] = operand
            node = graph.node(graph.inputs(node.name)[operand].node)
        if node.name == output.attrs.into:
            found |= chain
    return found


class _Root:
    """A buffer under construction: one tensor's memory, shared by its views and in-place successors."""

    def __init__(self, home: Home, nbytes: int, first: int, index: int = 0) -> None:
        self.home, self.nbytes, self.first, self.last, self.index = home, nbytes, first, first, index
        #: reads still to come, by steps and outputs
        self.reads = 0
        #: format of a tensor that a step makes
        self.made: MemoryDesc | None = None


class Draft:
    """A plan with all but its constants: its primitives can be checked, and its constants be packed more than once.

    `graph`: the graph, with descs and choices on every node; its constants are read only when they are packed.
    """

    def __init__(self, graph: Graph, target: Target) -> None:
        torch.get_num_threads()  # the first call in a thread adopts the process's number of threads
        self.graph = graph
        self.target = target
        self.forward = graph.forward_names()
        #: in topological order, those of the forward half first: nothing there depends on the other half
        self.nodes = sorted(graph.nodes(), key=lambda node: node.name not in self.forward)
        #: input -> its place among the inputs
        self.arguments = {node.name: place for place, node in enumerate(graph.input_nodes)}
        self.turn: int | None = None
        self.roots: list[_Root] = []
        self.places: dict[Value, Access] = {}
        self.steps: list[Step] = []
        #: constants and nodes without an input behind them, without views: sources come before their readers
        self.once: list[Once] = []
        #: buffer of a constant -> the node that fills it
        self.fillers: dict[int, Node] = {}
        self.threads = threads_here()
        #: implementation -> its executable
        self.executables: dict[int, Executable] = {}
        #: views, and nodes in place: asked for again and again
        self.views = frozenset(node.name for node in self.nodes if is_view(graph, node.name))
        self.joins = frozenset(node.name for node in self.nodes if is_in_place(node))
        self.computed = computed_nodes(graph)
        #: node -> operand, in the caller's tensor, of which it may change a part there
        self.changes = _changes(graph)
        self.placement = place_parts(graph, self.computed)
        #: a value with a slot, or with slots inside -> its buffer, and the elements before it there
        self.spots: dict[Value, tuple[int, int]] = {}
        self.pending = self._count_reads()
        #: the plan without constants; it cannot run
        self.plan = self._place_all()

    def pack(self, constants: ConstantStore, *, consume: bool = False) -> Plan:
        """Return the plan with constants; see :func:`build_plan`."""
        packing = Packing(self.graph, self.once, self.used & self.fillers.keys(), self.threads, constants, consume)
        flats = packing.run()
        distinct = {id(flat): flat for flat in flats.values()}
        places = {key: place for place, key in enumerate(distinct)}
        buffers = list(self.plan.buffers)
        for i, flat in flats.items():
            buffers[i] = replace(buffers[i], nbytes=nbytes_of(flat), index=places[id(flat)])
        return replace(
            self.plan, buffers=tuple(buffers), constants=tuple(distinct.values()), packed=tuple(packing.packed)
        )

    def _place_all(self) -> Plan:
        for node in self.nodes:
            if self.turn is None and node.name not in self.forward:
                self.turn = len(self.steps)
            self._visit(node)
        outputs = self._outputs()
        used = {a.buffer for s in self.steps for a in (*s.operands.values(), *s.results)}
        self.used = used | {access.buffer for _, access in outputs}
        turn = self._turn()
        inside = self._inside(turn) if turn is not None else []
        buffers, arena, peak = self._freeze(inside)
        results = sum(buffer.nbytes for buffer in buffers if buffer.home is Home.OUTPUT)
        check_fits(arena + results, f"a run of {self.graph.name}")
        inputs = tuple(
            (node.name, node.descs[0], i if (i := self.places[Value(node.name)].buffer) in self.used else -1)
            for node in self.graph.input_nodes
        )
        packed = tuple(one.node for one in self.once if one.node.op != "constant")
        return Plan(
            self.graph.name, tuple(self.steps), buffers, inputs, outputs, (), arena, peak,
            packed, self.threads, turn, {i: buffers[i].offset for i in inside}, self._changed(outputs),
        )  # fmt: skip

    def _turn(self) -> Turn | None:
        """Return where the backward half begins."""
        phases = [[node.phase for node in nodes] for nodes in (self.graph.input_nodes, self.graph.output_nodes)]
        if self.turn is None or not any(map(any, phases)):
            return None
        if any(sorted(of) != of for of in phases):
            raise PlanError(f"model {self.graph.name}: inputs and outputs of the forward half must come first")
        inputs, outputs = (sum(not phase for phase in of) for of in phases)
        return Turn(self.turn, inputs, outputs)

    # ------------------------------------------------------------------ nodes

    def _visit(self, node: Node) -> None:
        if node.choice is None:
            raise PlanError(f"{node.label} has no choice: assign formats before planning")
        if node.op == "constant" or (node.name not in self.computed and not node.is_boundary):
            return  # packed at its first read: weights are packed one by one
        inputs = {name: self._place_of(value) for name, value in self.graph.inputs(node.name).items()}
        if node.op == "input":
            root = self._root(Home.INPUT, node.descs[0].nbytes, self.arguments[node.name])
            self.roots[root].reads = self.pending[Value(node.name)]
            self._place(node, 0, root)
        elif node.op == "output":
            pass
        elif node.name in self.joins:
            self._join(node, inputs)
        elif node.name in self.views:
            self._view(node)
        else:
            self._add_step(node, inputs)

    def _view(self, node: Node) -> None:
        value = self.graph.inputs(node.name)["src"]
        place = self._place_of(value)
        self._place(node, 0, place.buffer, place.desc.offset0 - self.graph.desc_of(value).offset0)

    def _supply(self, value: Value) -> None:
        """Place a constant, or a value computed from constants, without its bytes."""
        node = self.graph.node(value.node)
        if node.name in self.views:
            self._view(node)
            return
        operands = {name: self._place_of(source) for name, source in self.graph.inputs(node.name).items()}
        roots = tuple(self._root(Home.CONSTANT, 0, index=-1) for _ in node.results)
        for index, root in enumerate(roots):
            self._place(node, index, root)
            self.fillers[root] = node
        unread = frozenset(index for index in range(len(roots)) if not self.pending[Value(node.name, index)])
        self.once.append(Once(node, operands, roots, unread))

    def _place_of(self, value: Value) -> Access:
        """Return the position of a value."""
        if value not in self.places:
            self._supply(value)
        return self.places[value]

    def _join(self, node: Node, inputs: Mapping[str, Access]) -> None:
        """Place a concat with its sources inside; copy the sources that were not written there."""
        root, start = self._spot(Value(node.name))
        self._place(node, 0, root, start)
        for operand, part in (parts_of(self.graph, node) or {}).items():
            if (node.name, operand) not in self.placement.written:
                reason = f"{operand} of {node.name} is made elsewhere and must be inside the result"
                self._copy(node, operand, inputs[operand], Access(root, part.moved(start)), reason)

    def _add_step(self, node: Node, inputs: dict[str, Access]) -> None:
        overwritten = self._overwritable(node, inputs)
        for index, desc in enumerate(node.descs):
            if index == 0 and overwritten is not None:
                self._place(node, 0, inputs[overwritten].buffer, inputs[overwritten].desc.offset0)
            elif implementation(node).makes_results:
                root = self._root(Home.TENSOR, desc.nbytes, first=len(self.steps))
                self.roots[root].made = desc
                self._place(node, index, root)
            else:
                self._place(node, index, *self._spot(Value(node.name, index)))
        results = tuple(self.places[Value(node.name, index)] for index in range(len(node.descs)))
        if all(0 in desc.dims for desc in node.descs) and not implementation(node).makes_results:
            return  # there is nothing to write
        residual = sum_operand(node)
        if residual is not None and overwritten is None:
            reason = f"{node.name} adds into {residual} in place, but others still read it"
            inputs[residual] = self._copy(node, residual, inputs[residual], results[0], reason)
        self._execute(node, inputs, results)

    def _execute(self, node: Node, operands: Mapping[str, Access], results: tuple[Access, ...]) -> None:
        """Add a step, with its executable, scratchpad and packing reorders."""
        way, scratchpad = implementation(node), None
        if id(way) not in self.executables:
            self.executables[id(way)] = way.build(self.threads)
        if way.scratchpad_nbytes:
            scratchpad = self._root(Home.ARENA, way.scratchpad_nbytes, first=len(self.steps))
        packers = {name: self.fillers[a.buffer] for name, a in operands.items() if a.buffer in self.fillers}
        packing = {k: one for k, one in packers.items() if one.op == "reorder" and one.descs[0] == operands[k].desc}
        self._append(Step(node, operands, results, self.executables[id(way)], scratchpad, packing))

    def _append(self, step: Step) -> None:
        for access in (*step.operands.values(), *step.results):
            self.roots[access.buffer].last = len(self.steps)
        for access in step.operands.values():
            self.roots[access.buffer].reads -= 1
        for index, access in enumerate(step.results):
            self.roots[access.buffer].reads += self.pending.get(Value(step.node.name, index), 0)
        self.steps.append(step)

    def _overwritable(self, node: Node, inputs: Mapping[str, Access]) -> str | None:
        """Return the operand of which the first result may take over the buffer, or None."""
        allowed, way = opdef(node.op).inplace, implementation(node)
        if (changed := self.changes.get(node.name)) is not None:
            access = inputs[changed]
            readers = sum(other.buffer == access.buffer for other in inputs.values())
            is_last = self.roots[access.buffer].reads == 1 and readers == 1
            return changed if is_last and access.desc == node.descs[0] else None
        if way.makes_results:
            return self._addable(node, way.may_add_to(node), inputs)
        if not way.overwrites:
            return None
        residual = sum_operand(node)
        if Value(node.name) in self.placement.slots:
            return residual if node.name in self.placement.added_to else None
        for name, access in inputs.items():
            if name != residual and (residual is not None or name not in allowed):
                continue
            root = self.roots[access.buffer]
            # a residual may be a part of its buffer; another operand would keep a large buffer for a small result
            fits = root.nbytes == access.desc.nbytes or name == residual
            same = access.desc == node.descs[0] and access.desc.offset0 == 0 and fits
            readers = sum(other.buffer == access.buffer for other in inputs.values())
            is_own = root.home is Home.ARENA or (root.home is Home.TENSOR and access.desc == root.made)
            if is_own and same and root.reads == 1 and readers == 1:
                return name
        return None

    def _addable(self, node: Node, name: str | None, inputs: Mapping[str, Access]) -> str | None:
        """Return the operand if a step made it and no other node reads it, now or later."""
        if name is None:
            return None
        access = inputs[name]
        root = self.roots[access.buffer]
        readers = sum(other.buffer == access.buffer for other in inputs.values())
        same = access.desc == root.made == node.descs[0]
        return name if root.home is Home.TENSOR and same and root.reads == 1 and readers == 1 else None

    def _copy(self, node: Node, operand: str, source: Access, place: Access, reason: str) -> Access:
        """Add a step that copies an operand to the position that the node needs."""
        attrs, type_ = opdef("reorder").attrs(), TensorType(place.desc.dims, place.desc.dtype)
        stand_in = Node(f"{node.name}.{operand}_copy", "reorder", attrs, (type_,), origin=node.origin)
        for target in (self.target, ReferenceTarget()):
            for candidate in target.candidates(stand_in, {"src": source.desc, "dst": place.desc}):
                copy = stand_in.with_(descs=(place.desc.at_start(),), choice=candidate.choice(reason))
                self.pending[Value(copy.name)] = int(sum_operand(node) == operand)
                self._execute(copy, {"src": source}, (place,))
                return place
        raise PlanError(f"{node.label}: operand {operand} ({source.desc!r}) cannot be copied")

    # ------------------------------------------------------------------ buffers

    def _root(self, home: Home, nbytes: int, index: int = 0, first: int = 0) -> int:
        self.roots.append(_Root(home, nbytes, first, index))
        return len(self.roots) - 1

    def _place(self, node: Node, index: int, root: int, start: int = 0) -> None:
        self.places[Value(node.name, index)] = Access(root, node.descs[index].moved(start))

    def _spot(self, value: Value) -> tuple[int, int]:
        """Return buffer and first element of a result: its slot, or a new buffer."""
        inwards = [value]
        while inwards[-1] not in self.spots and (slot := self.placement.slots.get(inwards[-1])) is not None:
            inwards.append(slot.outer)
        for inner in reversed(inwards):
            if inner in self.spots:
                continue
            slot = self.placement.slots.get(inner)
            if slot is None:
                root, start = self._root(Home.ARENA, self.graph.desc_of(inner).nbytes, first=len(self.steps)), 0
            else:
                root, start = self.spots[slot.outer]
                start += slot.start
            if inner.node in self.joins:  # no step writes it, but it is read
                self.roots[root].reads += self.pending[inner]
            self.spots[inner] = root, start
        return self.spots[value]

    def _count_reads(self) -> dict[Value, int]:
        """Return, for each value that a step writes, how many operands and outputs read it or a view of it."""
        reads = {Value(node.name, index): 0 for node in self.nodes for index in range(len(node.results))}
        for node in reversed(self.nodes):  # all readers of a view come before it
            for operand, value in self.graph.inputs(node.name).items():
                if node.name in self.joins:
                    reads[value] += (node.name, operand) not in self.placement.written
                else:
                    reads[value] += reads[Value(node.name)] if node.name in self.views else 1
        return reads

    def _outputs(self) -> tuple[tuple[str, Access], ...]:
        """Make an output's buffer the caller's tensor if the buffer has no other use.

        The backward half has the caller's tensors for its own results only: a gradient that takes the place of a saved
        tensor stays in the arena.
        """
        accesses = [self._place_of(self.graph.inputs(node.name)["src"]) for node in self.graph.output_nodes]
        end = len(self.steps)
        outputs = []
        for index, (node, access) in enumerate(zip(self.graph.output_nodes, accesses, strict=True)):
            root = self.roots[access.buffer]
            alone = sum(other.buffer == access.buffer for other in accesses) == 1
            whole = access.desc.is_packed and access.desc.offset0 == 0 and access.desc.nbytes == root.nbytes
            is_saved = node.phase == "backward" and root.first < (self.turn or 0)
            if root.home is Home.ARENA and alone and whole and not is_saved:
                root.home, root.index = Home.OUTPUT, index
            root.last = end
            outputs.append((node.name, access))
        return tuple(outputs)

    def _changed(self, outputs: Sequence[tuple[str, Access]]) -> frozenset[int]:
        """Return which outputs are an input's new content, in the input's tensor."""
        found = set()
        for number, (node, (_, access)) in enumerate(zip(self.graph.output_nodes, outputs, strict=True)):
            root = self.roots[access.buffer]
            into = self.arguments.get(node.attrs.into) if isinstance(node.attrs, Into) else None
            if root.home is Home.INPUT and root.index == into:
                found.add(number)
        return frozenset(found)

    def _inside(self, turn: Turn) -> list[int]:
        """Return the buffers of gradients that have a place in the arena, if they are much of a step's memory."""
        found = [i for i, root in enumerate(self.roots) if root.home is Home.OUTPUT and root.index >= turn.output]
        arena = (root for root in self.roots if root.home is Home.ARENA)
        saved = sum(root.nbytes for root in arena if root.first < turn.step <= root.last)
        nbytes = sum(self.roots[i].nbytes for i in found)
        return found if nbytes >= max(_MUCH_NBYTES, saved * _MUCH_SHARE) else []

    def _freeze(self, inside: Sequence[int]) -> tuple[tuple[Buffer, ...], int, int]:
        arena = [i for i, root in enumerate(self.roots) if root.home is Home.ARENA]
        lifetimes = {
            i: Lifetime(root.nbytes, root.first, root.last)
            for i, root in enumerate(self.roots)
            if root.home in (Home.ARENA, Home.TENSOR) or i in inside
        }
        arena += inside
        layout = plan_arena([lifetimes[i] for i in arena])
        offsets = dict(zip(arena, layout.offsets, strict=True))
        buffers = tuple(
            Buffer(root.home, root.nbytes, root.first, root.last, offsets.get(i, 0), root.index)
            for i, root in enumerate(self.roots)
        )
        return buffers, layout.nbytes, peak_nbytes(list(lifetimes.values()))
