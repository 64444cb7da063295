"""One plan for each number of threads.

A primitive is compiled for a number of threads: its share of the work and its scratchpad depend on it. When the
number changes, every primitive is made again, by the same implementation and for exactly the same formats, so that the
packed constants serve both plans. Owns that, and what number the caller's thread runs with; must not choose formats.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache

import torch

from fmtprop import dnnl
from fmtprop.errors import LoadError, PlanError
from fmtprop.ir.node import Node
from fmtprop.ir.op import opdef
from fmtprop.layout import MemoryDesc
from fmtprop.passes.target import Candidate, Target
from fmtprop.runtime.arena import Lifetime, plan_arena
from fmtprop.runtime.plan import Buffer, Home, Plan
from fmtprop.runtime.selfcheck import Memory, check_steps
from fmtprop.targets import OneDnnTarget
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
    library, before = dnnl.lib(), current_threads()
    library.set_threads(threads)
    try:
        yield
    finally:
        library.set_threads(before)


def for_threads(plan: Plan, threads: int, memory: Memory | None) -> Plan:
    """Return the same plan for another number of threads.

    Parameters
    ----------
    plan : Plan
        Shares its constants with the result.
    threads : int
        At least 1.
    memory : Memory or None
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
    target = OneDnnTarget()
    with running_with(threads), torch.device("cpu"), torch.autocast("cpu", enabled=False):
        for _ in range(_ATTEMPTS):
            try:
                other = _rebuilt(plan, dnnl.lib().threads, target)
            except _NoPrimitiveError as error:
                warnings.warn(
                    f"model {plan.name} keeps running with {plan.threads} threads: {error}; compile it again with "
                    f"{threads}",
                    RuntimeWarning,
                    stacklevel=2,
                )
                return plan
            wrong = check_steps(other.steps, memory) if memory is not None else []
            if not wrong:
                return other
            for mismatch in wrong:
                warnings.warn(f"{mismatch}; choosing another implementation", RuntimeWarning, stacklevel=2)
                target.reject(mismatch.node)
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


def _rebuilt(plan: Plan, threads: int, target: Target) -> Plan:
    buffers, compiled = list(plan.buffers), dict[int, dnnl.Primitive]()
    steps = []
    for number, step in enumerate(plan.steps):
        if step.primitive is None or step.target != target.name:
            steps.append(step)  # PyTorch reads the number at each call
            continue
        candidate = _same(step.node, target)
        primitive = compiled.get(id(candidate.handle))
        if primitive is None:
            primitive = compiled[id(candidate.handle)] = dnnl.Primitive(candidate.handle)
        reason = step.node.choice.reason if step.node.choice is not None else ""
        node = step.node.with_(choice=candidate.choice(reason))
        scratchpad = _make_room(buffers, step.scratchpad, primitive.desc.scratchpad_nbytes, number)
        steps.append(replace(step, node=node, primitive=primitive, scratchpad=scratchpad))
    return _laid_out(replace(plan, steps=tuple(steps), threads=threads), buffers)


def _same(node: Node, target: Target) -> Candidate:
    """Return the node's own implementation in its formats, else the first that is not a slow reference."""
    choice = node.choice
    if choice is None:
        raise PlanError(f"{node.label} has no choice: assign formats before planning")
    wanted = {**choice.operands, **dict(zip(opdef(node.op).result_names, node.descs, strict=False))}
    stand_in: Candidate | None = None
    for request in _requests(node, wanted):
        for candidate in target.candidates(node, request):
            given = {**candidate.operands, **dict(zip(opdef(node.op).result_names, candidate.results, strict=False))}
            if any(given.get(name) != desc for name, desc in wanted.items()):
                continue
            if candidate.impl == choice.impl:
                return candidate
            if stand_in is None and not candidate.is_ref:
                stand_in = candidate
    if stand_in is None:
        raise _NoPrimitiveError(f"{node.label} with {choice.impl} has no other primitive in its formats")
    return stand_in


def _requests(node: Node, wanted: Mapping[str, MemoryDesc]) -> Iterator[dict[str, MemoryDesc]]:
    """Yield ways to ask for the formats that are wanted; only what is answered with exactly these is taken.

    Where a dimension is 1, oneDNN tells strides apart that place no element differently, and some implementations take
    those only that they choose themselves.
    """
    yield dict(wanted)
    free = set(opdef(node.op).result_names)
    yield {name: _any(desc) if name in free else desc for name, desc in wanted.items()}
    if "weights" in wanted:
        free |= {"weights"}
        yield {name: _any(desc) if name in free else desc for name, desc in wanted.items()}


def _any(desc: MemoryDesc) -> MemoryDesc:
    return MemoryDesc.any(desc.dims, desc.dtype)


def _make_room(buffers: list[Buffer], scratchpad: int | None, nbytes: int, step: int) -> int | None:
    """Give a step's scratchpad its new size; return its buffer."""
    if scratchpad is not None:
        buffers[scratchpad] = replace(buffers[scratchpad], nbytes=nbytes)
        return scratchpad if nbytes else None
    if not nbytes:
        return None
    buffers.append(Buffer(Home.ARENA, nbytes, first=step, last=step))
    return len(buffers) - 1


def _laid_out(plan: Plan, buffers: list[Buffer]) -> Plan:
    """Return the plan with an arena for buffers of these sizes."""
    arena = [i for i, buffer in enumerate(buffers) if buffer.home is Home.ARENA]
    layout = plan_arena([Lifetime(buffers[i].nbytes, buffers[i].first, buffers[i].last) for i in arena])
    for i, offset in zip(arena, layout.offsets, strict=True):
        buffers[i] = replace(buffers[i], offset=offset)
    check_fits(layout.nbytes, f"a run of {plan.name}")
    return replace(plan, buffers=tuple(buffers), arena_nbytes=layout.nbytes, peak_nbytes=layout.peak_nbytes)
