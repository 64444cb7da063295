"""Running a plan: inputs checked, a free context found or made, results handed over."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from math import inf

import torch

from fmtprop import dnnl
from fmtprop.runtime.boundary import Boundary, Port
from fmtprop.runtime.context import Context
from fmtprop.runtime.plan import Plan
from fmtprop.runtime.threads import current_threads, for_threads, running_with
from fmtprop.store import Store
from fmtprop.system.locks import ProcessLock


class Executor:
    """Runs one plan, from any number of threads at once.

    Parameters
    ----------
    plan : Plan
        What to run.
    checked : bool
        Whether primitives that are made for another number of threads are checked against their reference.
    arena : torch.Tensor, optional
        Memory for the activations of the first run with the plan's threads, and of later ones that do not overlap with
        others. Executors of which one runs at a time can share it.

    Notes
    -----
    A run uses as many OpenMP threads as torch would in the calling thread; the first run with another number makes a
    plan for it, which shares the constants. Contexts are made on demand and kept for later runs: for each number of
    threads as many as ever ran at the same time. In a forked child, whose OpenMP threads did not survive, runs go to a
    thread of its own.
    """

    def __init__(self, plan: Plan, *, checked: bool = True, arena: torch.Tensor | None = None) -> None:
        self.plan = plan
        self._boundary = Boundary(
            plan.name,
            tuple(Port(name, desc) for name, desc, _ in plan.inputs),
            tuple(Port(name, access.desc) for name, access in plan.outputs),
        )
        self._checked = checked
        self._runners = {plan.threads: _Runner(plan)}
        if arena is not None:
            self._runners[plan.threads].free.append(Context(plan, arena))
        self._planning = ProcessLock()

    def run(
        self,
        inputs: Sequence[object],
        out: torch.Tensor | Sequence[torch.Tensor] | None = None,
        threads: int | None = None,
    ) -> list[torch.Tensor]:
        """Execute the plan.

        Parameters
        ----------
        inputs : sequence of torch.Tensor
            One for each graph input, any strides.
        out : torch.Tensor or sequence of torch.Tensor, optional
            One for each graph output, to write the results to; any strides.
        threads : int, optional
            How many to run with, if not as torch does in the calling thread.

        Returns
        -------
        list of torch.Tensor
            The tensors of ``out``, or new ones, which a later run never overwrites.

        Raises
        ------
        InputError
            Number, shape, data type or device of the tensors does not fit, or one of ``out`` overlaps another.
        """
        tensors = self._boundary.read(inputs)
        targets = self._boundary.check_out(out, inputs) if out is not None else None
        if threads is None:
            threads = current_threads()
        if dnnl.fork_guard():
            results = dnnl.after_fork(lambda: self._run(tensors, targets, threads))
        else:
            results = self._run(tensors, targets, threads)
        for target in targets or ():
            torch.autograd.graph.increment_version(target)  # for graphs that saved the tensor
        return results

    def profile(self, inputs: Sequence[object], limit: float = inf) -> tuple[list[torch.Tensor], list[float]]:
        """Execute the plan once, step by step, and return the seconds of each step beside the results.

        No step begins once the limit, in seconds, is over: there are fewer figures then than steps, and no results.
        """
        tensors = self._boundary.read(inputs)
        return dnnl.after_fork(partial(self._profile, tensors, current_threads(), limit))

    def prepare(self, threads: int) -> Plan:
        """Return the plan for a number of threads; it is made when it is first asked for.

        Raises
        ------
        PlanError
            Its primitives keep failing their check.
        """
        return dnnl.after_fork(lambda: self._runner(threads).plan)

    def close(self) -> None:
        """Release every context that is not running, and plans for other numbers of threads than the first."""
        with self._planning.current:
            runners, self._runners = self._runners, {self.plan.threads: self._runners[self.plan.threads]}
        for runner in runners.values():
            runner.close()

    def _run(
        self, tensors: Sequence[torch.Tensor], out: Sequence[torch.Tensor] | None, threads: int
    ) -> list[torch.Tensor]:
        runner = self._runners.get(threads) or self._runner(threads)
        context = runner.take()
        if current_threads() == runner.plan.threads:
            results = context.run(tensors, out)
        else:
            with running_with(runner.plan.threads):
                results = context.run(tensors, out)
        runner.free.append(context)
        return results

    def _profile(
        self, tensors: Sequence[torch.Tensor], threads: int, limit: float
    ) -> tuple[list[torch.Tensor], list[float]]:
        runner = self._runner(threads)
        context = runner.take()
        with running_with(runner.plan.threads):
            outcome = context.profile(tensors, limit)
        runner.free.append(context)
        return outcome

    def _runner(self, threads: int) -> _Runner:
        with self._planning.current:
            runner = self._runners.get(threads)
            if runner is None:
                plan = for_threads(self.plan, threads, Store() if self._checked else None)
                # where there is no such plan, the first one's contexts serve
                runner = _Runner(plan) if plan is not self.plan else self._runners[self.plan.threads]
                self._runners[threads] = runner
            return runner


class _Runner:
    """A plan for one number of threads, and its idle contexts."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.free: deque[Context] = deque()

    def take(self) -> Context:
        try:
            return self.free.pop()
        except IndexError:
            with torch.inference_mode(mode=False):  # views made in that mode could be written in it alone
                return Context(self.plan)

    def close(self) -> None:
        while True:
            try:
                context = self.free.pop()
            except IndexError:  # empty, or a run took the last one
                return
            context.close()
