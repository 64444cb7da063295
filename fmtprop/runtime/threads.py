"""One plan for each number of threads.

A primitive is compiled for a number of threads: its share of the work and its scratchpad depend on it. When the
number changes, every primitive is made again, by the same implementation and in the same formats, so that the packed
constants serve both plans; but for those that an implementation wants in another format for this number. Owns that,
and what number the caller's thread runs with; must not choose the formats of what steps hand to each other.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cache

import torch

from fmtprop import dnnl
from fmtprop.errors import LoadError, PlanError
from fmtprop.ir.node import Choice, Node
from fmtprop.ir.op import opdef
from fmtprop.ir.ports import result_names
from fmtprop.ir.types import TensorType
from fmtprop.layout import MemoryDesc
from fmtprop.passes.target import Candidate, Target
from fmtprop.runtime.arena import Lifetime, plan_arena
from fmtprop.runtime.constants import ConstantStore
from fmtprop.runtime.plan import Access, Buffer, Home, Plan, Step
from fmtprop.runtime.selfcheck import check_steps
from fmtprop.runtime.weights import WEIGHTS
from fmtprop.store import Store
from fmtprop.targets.executable import Executable, Targets, implementation, threads_here
from fmtprop.targets.memory import check_fits

#: how often primitives are chosen again when some failed their check
_ATTEMPTS = 5


def current_threads() -> int:
    """Return the number of threads that oneDNN uses in the calling thread, after making it torch's number.

    Returns
    -------
    int
    """
    wanted = torch.get_num_threads()  # a thread that is new to torch takes over the number set for the process
    if _torch_governs():
        return wanted
    library = dnnl.lib()
    library.set_threads(wanted)
    return library.threads


@contextmanager
def running_with(threads: int) -> Iterator[None]:
    """Let the calling thread, and no other, run with a number of threads."""
    before = current_threads()
    try:
        set_threads: Callable[[int], None] = dnnl.lib().set_threads
    except LoadError:  # PyTorch's operators run all of it
        set_threads = torch.set_num_threads
    set_threads(threads)
    try:
        yield
    finally:
        set_threads(before)


def on_cpu() -> AbstractContextManager[object]:
    """Return a context in which new tensors are on the CPU, whatever the caller's default device is."""
    # entered, it slows down every call of torch, by 10 us: only where it changes something
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")


def for_threads(plan: Plan, threads: int, store: Store | None) -> Plan:
    """Return the same plan for another number of threads.

    Parameters
    ----------
    plan : Plan
        Shares its constants with the result.
    threads : int
        At least 1.
    store : Store or None
        Which primitives are known to be right; None to check none.

    Returns
    -------
    Plan
        The very plan, with a warning, where some primitive exists in these formats for its own number only.

    Raises
    ------
    PlanError
        Primitives keep failing their check.
    """
    targets = Targets()
    with running_with(threads), on_cpu(), torch.autocast("cpu", enabled=False):
        for _ in range(_ATTEMPTS):
            try:
                other = _Rebuilder(plan, threads_here(), targets).build()
            except _NoPrimitiveError as error:
                warnings.warn(
                    f"model {plan.name} keeps running with {plan.threads} threads: {error}; compile it again with "
                    f"{threads}",
                    RuntimeWarning,
                    stacklevel=2,
                )
                return plan
            wrong = check_steps(other.steps, store, other.packed[len(plan.packed) :]) if store is not None else []
            if not wrong:
                return other
            for mismatch in wrong:
                warnings.warn(f"{mismatch}; choosing another implementation", RuntimeWarning, stacklevel=2)
                targets.reject(mismatch.node)
    raise PlanError(
        f"model {plan.name}: primitives for {threads} threads keep failing their check; the last: {wrong[0]}"
    )


class _NoPrimitiveError(PlanError):
    """A node has no primitive in its formats for this number of threads."""


@cache
def _torch_governs() -> bool:
    """Whether torch and oneDNN share one OpenMP runtime, so that a number set for one is the other's."""
    before = torch.get_num_threads()
    try:
        library = dnnl.lib()
    except LoadError:
        return True
    if library.threads != before:
        return False
    library.set_threads(before + 1)
    follows = torch.get_num_threads() == before + 1 == library.threads
    library.set_threads(before)
    return follows


class _Rebuilder:
    """A plan in the making: the same steps with other primitives."""

    def __init__(self, plan: Plan, threads: int, targets: Targets) -> None:
        self.plan, self.threads, self.targets = plan, threads, targets
        self.buffers = list(plan.buffers)
        self.added: list[torch.Tensor] = []
        self.packed: list[Node] = []
        #: implementation -> what was built of it
        self.executables: dict[int, Executable] = {}
        #: (buffer, format) -> the same constant in that format
        self.copies: dict[tuple[int, MemoryDesc], Access] = {}
        #: buffer -> the reorder that packed it
        self.packers: dict[int, Node] = {}

    def build(self) -> Plan:
        steps = tuple(self._rebuilt(number, step) for number, step in enumerate(self.plan.steps))
        arena = [i for i, buffer in enumerate(self.buffers) if buffer.home is Home.ARENA]
        sizes = [Lifetime(b.nbytes, b.first, b.last) for b in (self.buffers[i] for i in arena)]
        layout = plan_arena(sizes)
        check_fits(layout.nbytes, f"a run of {self.plan.name}")
        for i, offset in zip(arena, layout.offsets, strict=True):
            self.buffers[i] = replace(self.buffers[i], offset=offset)
        return replace(
            self.plan, steps=steps, buffers=tuple(self.buffers), constants=(*self.plan.constants, *self.added),
            arena_nbytes=layout.nbytes, peak_nbytes=layout.peak_nbytes, packed=(*self.plan.packed, *self.packed),
            threads=self.threads,
        )  # fmt: skip

    def _rebuilt(self, number: int, step: Step) -> Step:
        choice, way = step.node.choice, implementation(step.node)
        if choice is None or not way.is_for_threads:
            return replace(step, executable=self._built(step.node))
        constants = {n for n, a in step.operands.items() if self.plan.buffers[a.buffer].home is Home.CONSTANT}
        candidate = _closest(step.node, choice, constants, self.targets.of(way))
        operands, packing = dict(step.operands), dict(step.packing)
        for name in constants:
            if candidate.operands[name] != choice.operands[name]:
                operands[name] = self._repacked(step, name, candidate.operands[name])
                packing[name] = self.packers[operands[name].buffer]
        formats = {n: candidate.operands[n] if n in constants else desc for n, desc in choice.operands.items()}
        node = step.node.with_(choice=replace(choice, impl=candidate.impl, operands=formats, handle=candidate.handle))
        scratchpad = self._make_room(step.scratchpad, implementation(node).scratchpad_nbytes, number)
        return Step(node, operands, step.results, self._built(node), scratchpad, packing)

    def _built(self, node: Node) -> Executable:
        way = implementation(node)
        if id(way) not in self.executables:
            self.executables[id(way)] = way.build(self.threads)
        return self.executables[id(way)]

    def _repacked(self, step: Step, name: str, desc: MemoryDesc) -> Access:
        """Return a constant in the format that this number of threads wants."""
        access = step.operands[name]
        known = self.copies.get((access.buffer, desc))
        if known is not None:
            return known
        type_ = TensorType(desc.dims, desc.dtype)
        node = Node(f"{step.node.name}.{name}_for_{self.threads}", "reorder", opdef("reorder").attrs(), (type_,))
        target = self.targets.of(implementation(step.node))
        for candidate in target.candidates(node, {"src": access.desc, "dst": desc}):
            reason = f"{step.node.name}.{name} wants {desc} with {self.threads} threads"
            reorder = node.with_(descs=(desc,), choice=candidate.choice(reason))
            flat = self.plan.constants[self.plan.buffers[access.buffer].index]
            (packed,) = ConstantStore().compute(reorder, {"src": (flat, access.desc)}, self.threads)
            packed = WEIGHTS.share(packed)
            index = len(self.plan.constants) + len(self.added)
            self.added.append(packed)
            self.packed.append(reorder)
            self.buffers.append(Buffer(Home.CONSTANT, packed.numel(), index=index))
            self.packers[len(self.buffers) - 1] = reorder
            place = self.copies[access.buffer, desc] = Access(len(self.buffers) - 1, desc)
            return place
        raise _NoPrimitiveError(f"{step.node.label}: operand {name} cannot be packed again, as {desc}")

    def _make_room(self, scratchpad: int | None, nbytes: int, step: int) -> int | None:
        """Give a step's scratchpad its new size; return its buffer."""
        if scratchpad is not None:
            self.buffers[scratchpad] = replace(self.buffers[scratchpad], nbytes=nbytes)
            return scratchpad if nbytes else None
        if not nbytes:
            return None
        self.buffers.append(Buffer(Home.ARENA, nbytes, first=step, last=step))
        return len(self.buffers) - 1


def _closest(node: Node, choice: Choice, constants: Set[str], target: Target) -> Candidate:
    """Return the node's own implementation, or else another that is not a slow reference.

    What other steps read and write keeps its format. Constants may need another: how wide some implementations block
    weights depends on the number of threads.
    """
    names = result_names(node)
    wanted = {**choice.operands, **dict(zip(names, node.descs, strict=False))}
    found: dict[tuple[bool, bool], Candidate] = {}
    for free in (set(), set(names), set(names) | constants, set(wanted)):
        # Where a dimension is 1, oneDNN tells strides apart that place no element differently, and some implementations
        # take only those that they choose themselves: so they may choose, and only what is the same is taken.
        request = {n: MemoryDesc.any(d.dims, d.dtype) if n in free else d for n, d in wanted.items()}
        for candidate in target.candidates(node, request):
            given = {**candidate.operands, **dict(zip(names, candidate.results, strict=False))}
            differing = {name for name, desc in wanted.items() if given[name].at_start() != desc.at_start()}
            if differing <= constants and not (candidate.is_ref and candidate.impl != choice.impl):
                found.setdefault((candidate.impl != choice.impl, bool(differing)), candidate)
        if (False, False) in found:
            break
    if not found:
        raise _NoPrimitiveError(f"{node.label} with {choice.impl} has no other primitive in its formats")
    return found[min(found)]
