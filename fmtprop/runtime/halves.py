"""A plan with two entry points: the forward half now, the backward half of the same run later, or never.

Owns the memory of each forward run, as long as its backward run may come. Must not know the caller, or autograd.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any, TypeVar

import numpy as np
import torch

from fmtprop import dnnl
from fmtprop.errors import InputError, PlanError
from fmtprop.ops.pytorch import without_modes
from fmtprop.runtime.boundary import Boundary
from fmtprop.runtime.context import Context
from fmtprop.runtime.executor import Executor, outside
from fmtprop.runtime.plan import Plan
from fmtprop.runtime.threads import current_threads, running_with
from fmtprop.targets.bound import OutsideError

T = TypeVar("T")

_TICKET, _GRADIENTS = "ticket", "gradients"


class Halves:
    """Runs the halves of a plan, each forward run in memory of its own.

    Tensors that the backward half reads stay in the arena, in their planned formats. Their memory belongs to a ticket,
    a small tensor. No other call gets the memory as long as the ticket exists, for instance saved by autograd.
    """

    def __init__(self, plan: Plan, plan_for: Callable[[int], Plan] | None = None, *, flushes: bool = True) -> None:
        if plan.turn is None:
            raise PlanError(f"model {plan.name} has no backward half: compile it with training=True")
        self.plan, turn = plan, plan.turn
        self._executor = Executor(plan, plan_for, flushes=flushes)
        inputs = Boundary.of(plan).inputs
        self._forward = Boundary(plan.name, inputs[: turn.input], ())
        self._backward = Boundary(plan.name, inputs[turn.input :], ())
        self._leased: dict[int, _Lease] = {}
        #: whether gradients take the place of saved tensors
        self._is_shared = bool(plan.inside)
        self._numbers = count()

    def forward(self, inputs: Sequence[object]) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Run the forward half.

        Raises InputError if an input does not fit, or an index does not exist in its tensor.
        """
        tensors = self._forward.read(inputs)
        try:
            return self._guarded(lambda: self._run_forward(tensors))
        except OutsideError as error:
            raise outside(error, self.plan, self._forward, tensors) from error

    def backward(self, ticket: torch.Tensor, tangents: Sequence[object], *, again: bool = False) -> list[torch.Tensor]:
        """Run the backward half of a forward run."""
        tensors = self._backward.read(tangents)
        number = int(ticket)
        lease = self._leased.get(number)
        if lease is None:
            raise InputError(
                f"model {self.plan.name}: the tensors that the forward pass saved for this backward pass are gone: "
                "hooks for saved tensors (torch.autograd.graph.save_on_cpu, saved_tensors_hooks) cannot move them; "
                "call the model outside of them"
            )
        context = lease.context
        arena = self._arena_for_gradients(number, lease) if self._is_shared and not again else None
        run = partial(context.backward, tensors, again=again, arena=arena)
        return self._guarded(lambda: self._in_threads(context, run))

    def rest(self) -> None:
        """Give the pages that no forward run holds back to the system; the next run takes new ones."""
        self._executor.rest()

    def close(self) -> None:
        """Release memory that no forward run holds."""
        self._executor.close()

    def _run_forward(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], torch.Tensor]:
        for lease in list(self._leased.values()):
            if _TICKET not in lease.holders:
                self._is_shared = False
                lease.end()
        context, give_back = self._executor.lease()
        results = self._in_threads(context, lambda: context.forward(tensors))
        number = next(self._numbers)
        self._leased[number] = _Lease(context, give_back)
        # a tensor's storage holds the array that it was made from, as long as any tensor on that storage exists
        owner = _Owner((), np.int64)
        owner[()] = number
        weakref.finalize(owner, self._give_back, number, _TICKET).atexit = False
        return results, torch.from_numpy(owner)

    def _arena_for_gradients(self, number: int, lease: _Lease) -> torch.Tensor:
        """Return the memory of a forward run, which no other call gets as long as a tensor in it exists."""
        owner = lease.context.arena.memory.numpy().view(_Owner)
        lease.holders.add(_GRADIENTS)
        weakref.finalize(owner, self._give_back, number, _GRADIENTS).atexit = False
        return torch.from_numpy(owner)

    def _give_back(self, number: int, holder: str) -> None:
        lease = self._leased[number]
        lease.holders.discard(holder)
        if not lease.holders and self._leased.pop(number, None) is not None:
            with without_modes():  # the collector may call this while PyTorch traces another program
                lease.give_back()

    @staticmethod
    def _guarded(run: Callable[[], T]) -> T:
        return dnnl.after_fork(run) if dnnl.fork_guard() else run()

    @staticmethod
    def _in_threads(context: Context, run: Callable[[], T]) -> T:
        if current_threads() == context.plan.threads:
            return run()
        with running_with(context.plan.threads):
            return run()


class _Lease:
    """The memory of a forward run, and what holds it: a ticket, gradients, or both."""

    def __init__(self, context: Context, give_back: Callable[[], None]) -> None:
        self.context, self.give_back = context, give_back
        self.holders = {_TICKET}

    def end(self) -> None:
        """Leave no memory but the gradients', and none after these."""
        if self.give_back != self.context.close:
            self.give_back = self.context.close
            self.context.shrink()


class _Owner(np.ndarray[Any, Any]):
    """An array that can be told of its end."""
