"""Running a plan: check inputs, find or make a free context, return results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import inf

import torch

from fmtprop import dnnl
from fmtprop.errors import FmtpropError, InputError
from fmtprop.runtime.arenas import Arenas
from fmtprop.runtime.boundary import Boundary
from fmtprop.runtime.context import Context
from fmtprop.runtime.plan import Plan, Step
from fmtprop.runtime.threads import current_threads, running_with
from fmtprop.system.locks import ProcessLock
from fmtprop.targets.bound import OutsideError, Place, of_both


class Executor:
    """Runs one plan, from any number of threads at once.

    `plan_for`: makes the plan for another number of threads; without it, all runs use the first plan's number.
    `arenas`: memory for the activations, which other executors may share. `flushes`: whether denormal numbers are zero
    in native steps (:mod:`fmtprop.jit.denormals`).

    A run uses torch's number of OpenMP threads in the calling thread. The first run with another number makes a plan
    for it, which shares the constants. Contexts are made on demand and kept for later runs: for each number of
    threads, as many as ran at the same time. In a forked child the OpenMP threads did not survive, so runs use a new
    thread.
    """

    def __init__(
        self,
        plan: Plan,
        plan_for: Callable[[int], Plan] | None = None,
        *,
        arenas: Arenas | None = None,
        flushes: bool = True,
    ) -> None:
        self.plan = plan
        self._flushes, self._arenas = flushes, arenas or Arenas()
        self._boundary = Boundary.of(plan)
        self._plan_for = plan_for
        self._runners = {plan.threads: _Runner(plan, self._arenas, flushes)}
        self._planning = ProcessLock()

    def run(
        self,
        inputs: Sequence[object],
        out: torch.Tensor | Sequence[torch.Tensor] | None = None,
        threads: int | None = None,
    ) -> list[torch.Tensor]:
        """Execute the plan.

        `threads`: number of threads. Default: torch's number in the calling thread. Result: the tensors of ``out``, or
        new ones, which a later run never overwrites. Raises InputError if number, shape, data type or device of the
        tensors does not fit, or one of ``out`` overlaps another, or an index does not exist in its tensor.
        """
        tensors = self._boundary.read(inputs)
        targets = self._boundary.check_out(out, inputs) if out is not None else None
        try:
            if dnnl.fork_guard():
                results = dnnl.after_fork(lambda: self._run(tensors, targets, threads))
            else:
                results = self._run(tensors, targets, threads)
        except OutsideError as error:
            raise outside(error, self.plan, self._boundary, tensors) from error
        for target in targets or ():
            torch.autograd.graph.increment_version(target)  # for graphs that saved the tensor
        return results

    def lease(self) -> tuple[Context, Callable[[], None]]:
        """Return a context that no other run has, for the caller's number of threads, and its release function.

        Whoever closes the context instead ends it.
        """
        runner = self._runner(current_threads())
        context = runner.take()
        runner.contexts.remove(context)

        def give_back() -> None:
            context.clear()
            runner.contexts.append(context)
            context.lock.release()

        return context, give_back

    def profile(self, inputs: Sequence[object], limit: float = inf) -> tuple[list[torch.Tensor], list[float]]:
        """Execute the plan once, step by step; return the results and the seconds of each step.

        After the limit, in seconds, no step begins: then there are fewer times than steps, and no results.
        """
        results, spans = self._stepwise(inputs, limit)
        return results, [seconds for _, seconds in spans]

    def timeline(self, inputs: Sequence[object]) -> list[tuple[float, float]]:
        """Execute the plan once, step by step; return when each step began, by ``perf_counter``, and its seconds."""
        return self._stepwise(inputs, inf)[1]

    def watch(self, inputs: Sequence[object], see: Callable[[Step, Place], None]) -> list[torch.Tensor]:
        """Execute the plan once, step by step; call a function after each with the place of its first result."""
        return self._stepwise(inputs, inf, see)[0]

    def prepare(self, threads: int) -> Plan:
        """Return the plan for a number of threads; it is made on the first request.

        Raises PlanError if its primitives keep failing their check.
        """
        return dnnl.after_fork(lambda: self._runner(threads).plan)

    def rest(self) -> None:
        """Give the pages of idle contexts back to the system; their next runs take new ones."""
        for runner in list(self._runners.values()):
            runner.rest()

    def close(self) -> None:
        """Release every idle context, and the plans for other numbers of threads."""
        with self._planning.current:
            runners, self._runners = self._runners, {self.plan.threads: self._runners[self.plan.threads]}
        for runner in runners.values():
            runner.close()

    def _run(
        self, tensors: Sequence[torch.Tensor], out: Sequence[torch.Tensor] | None, threads: int | None
    ) -> list[torch.Tensor]:
        here = current_threads()
        threads = here if threads is None else threads
        runner = self._runners.get(threads) or self._runner(threads)
        context = runner.take()
        try:
            if here == runner.plan.threads:
                return context.run(tensors, out)
            with running_with(runner.plan.threads):
                return context.run(tensors, out)
        except BaseException:
            runner.contexts.remove(context)  # it has tensors of a run that did not end
            raise
        finally:
            context.lock.release()

    def _stepwise(
        self, inputs: Sequence[object], limit: float, see: Callable[[Step, Place], None] | None = None
    ) -> tuple[list[torch.Tensor], list[tuple[float, float]]]:
        tensors = self._boundary.read(inputs)
        return dnnl.after_fork(partial(self._profile, tensors, current_threads(), limit, see))

    def _profile(
        self, tensors: Sequence[torch.Tensor], threads: int, limit: float, see: Callable[[Step, Place], None] | None
    ) -> tuple[list[torch.Tensor], list[tuple[float, float]]]:
        runner = self._runner(threads)
        context = runner.take()
        try:
            with running_with(runner.plan.threads):
                return context.profile(tensors, limit, see)
        except BaseException:
            runner.contexts.remove(context)
            raise
        finally:
            context.lock.release()

    def _runner(self, threads: int) -> _Runner:
        with self._planning.current:
            runner = self._runners.get(threads)
            if runner is None:
                plan = self._plan_for(threads) if self._plan_for is not None else self.plan
                # if there is no plan for this number, use the first plan's contexts
                own = self._runners[self.plan.threads]
                runner = own if plan is self.plan else _Runner(plan, self._arenas, self._flushes)
                self._runners[threads] = runner
            return runner


def outside(error: OutsideError, plan: Plan, boundary: Boundary, tensors: Sequence[torch.Tensor]) -> FmtpropError:
    """Return the error of an index that its tensor does not have, with the inputs that may hold it."""
    operands = [
        f"{access.desc.dtype.value}{list(access.desc.dims)}"
        for step in plan.steps
        if step.node.name == error.node.name
        for access in step.operands.values()
    ]
    held = [
        f"input {given.name} holds {int(tensor.min())} to {int(tensor.max())}"
        for given, tensor in zip(boundary.inputs, tensors, strict=True)
        if tensor.numel() and not (tensor.is_floating_point() or tensor.is_complex())
    ]
    return of_both(
        InputError,
        error.error,
        f"{error}; its operands are {', '.join(operands)}. An index must exist along its axis: "
        f"{', '.join(held) or 'no input holds whole numbers, so the model computes it'}; pass indices that do",
    )


class _Runner:
    """A plan for one number of threads, and its contexts: in each arena one."""

    def __init__(self, plan: Plan, arenas: Arenas, flushes: bool) -> None:
        self.plan, self._arenas, self._flushes = plan, arenas, flushes
        self.contexts: list[Context] = []

    def take(self) -> Context:
        """Return a context with the lock of its arena."""
        for context in self.contexts:
            if context.lock.acquire(False):
                if context.is_open:
                    return context
                context.lock.release()
        arena = self._arenas.take(self.plan.arena_nbytes)
        for context in self.contexts:
            if context.arena is arena and context.is_open:  # it ended its run meanwhile
                return context
        try:
            with torch.inference_mode(mode=False):  # views made in that mode could be written in it alone
                context = Context(self.plan, arena, flushes=self._flushes)
        except BaseException:
            arena.lock.release()
            raise
        self.contexts.append(context)
        return context

    def rest(self) -> None:
        for context in self._idle():
            context.rest()

    def close(self) -> None:
        for context in self._idle():
            self.contexts.remove(context)
            context.close()

    def _idle(self) -> Iterator[Context]:
        """Yield the contexts that no run has, each with its arena's lock."""
        for context in list(self.contexts):
            if context.lock.acquire(False):
                try:
                    if context.is_open:
                        yield context
                finally:
                    context.lock.release()
