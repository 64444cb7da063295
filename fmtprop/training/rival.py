"""A captured step beside PyTorch's own: the first call runs both in turns, and the faster runs all calls.

PyTorch's own step is the graph as it was captured, recorded by autograd. Owns the choice, and the trial's arguments.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fmtprop import dnnl
from fmtprop.compiling.options import OPTIMAL, Options
from fmtprop.compiling.turns import Compare, compare
from fmtprop.errors import FmtpropError, PlanError
from fmtprop.system.collector import collect_young
from fmtprop.system.locks import ProcessLock
from fmtprop.targets.memory import check_fits
from fmtprop.training.hooks import no_hooks_for_saved_tensors
from fmtprop.training.step import TrainingStep

_LOG = logging.getLogger(__name__)


class Rival:
    """A step that PyTorch runs if its plan is not faster, or if there is no plan.

    `run`: AOTAutograd's function of the captured graph, which calls the step. `compare`: see
    :func:`fmtprop.compiling.turns.compare`. Without it, the plan runs all calls. `required`: whether a step that cannot
    be planned is an error.
    """

    def __init__(
        self,
        run: Callable[..., Any],
        captured: fx.GraphModule,
        step: TrainingStep,
        compare: Compare | None,
        *,
        required: bool,
    ) -> None:
        self._run, self._captured, self._step = run, captured.forward, step
        self._compare, self._required = compare, required
        #: types of the plan's results
        self._dtypes: list[torch.dtype | None] = []
        self._call: Callable[..., Any] | None = None
        self._settling = ProcessLock()

    def __call__(self, *args: Any) -> Any:
        """Run a step."""
        if self._call is None:
            with self._settling.current:
                if self._call is None:
                    self._call = self._settled(args)
        return self._call(*args)

    def _settled(self, args: Sequence[Any]) -> Callable[..., Any]:
        step = self._step
        try:
            step.prepare()
        except FmtpropError as error:
            if self._required:
                raise
            step.leave(str(error))
            return self._unchanged
        if step.net is None:
            return self._unchanged
        if self._compare is None or not _has_room(step.net.plan.arena_nbytes):
            return self._run
        # under the caller's autocast, both sides compute in its types
        lowered = step.net.precision != "f32" and not torch.is_autocast_enabled("cpu")
        theirs = self._lowered if lowered else self._captured
        leaves, given = self._trial(args)

        def trial(call: Callable[..., Any]) -> None:
            results = call(*given())
            self._dtypes = self._dtypes or [getattr(result, "dtype", None) for result in results]
            reached = [one for one in results if isinstance(one, torch.Tensor) and one.requires_grad]
            torch.autograd.grad(reached, leaves, [torch.ones_like(one) for one in reached], allow_unused=True)

        with torch.random.fork_rng(devices=[]), torch.enable_grad(), no_hooks_for_saved_tensors():
            try:
                faster, seconds = self._compare(lambda: trial(self._run), lambda: trial(theirs), step.rest)
            except Exception as error:  # the call itself raises it again, where the caller expects it
                _LOG.info("a training step is not compared with PyTorch: %s", error)
                return self._run
        collect_young()  # cycles of capture and trial, which may hold memory of the plan's
        if not faster:
            step.leave(f"PyTorch is as fast: {seconds[1] * 1e6:.0f} us, the plan {seconds[0] * 1e6:.0f} us")
        dnnl.trim_heap()  # PyTorch's saved tensors and gradients
        if faster:
            return self._run
        return theirs if lowered else self._unchanged

    def _unchanged(self, *args: Any) -> Any:
        results = self._captured(*args)
        self._step.told()
        return results

    def _lowered(self, *args: Any) -> list[Any]:
        """Run PyTorch's step under autocast, with results of the plan's types."""
        with torch.autocast("cpu", torch.bfloat16):
            results = self._captured(*args)
        return [
            result.to(dtype) if dtype is not None and result.is_floating_point() else result
            for result, dtype in zip(results, self._dtypes, strict=True)
        ]

    def _trial(self, args: Sequence[Any]) -> tuple[list[torch.Tensor], Callable[[], list[Any]]]:
        """Return leaves on the memory of arguments, and a function that makes arguments of them.

        No hook of the caller's knows the leaves. A step may write to arguments: these are copies.
        """
        own = [one.detach().requires_grad_(one.requires_grad) if isinstance(one, torch.Tensor) else one for one in args]
        step = self._step
        is_alike = step.arity == len(args)  # AOTAutograd passes a tensor once
        changed = step.changed if is_alike else frozenset(range(len(args)))

        def given() -> list[Any]:
            return [
                one.clone() if place in changed and isinstance(one, torch.Tensor) else one
                for place, one in enumerate(own)
            ]

        return [one for one in own if isinstance(one, torch.Tensor) and one.requires_grad], given


def _has_room(arena_nbytes: int) -> bool:
    """Return whether PyTorch's saved tensors and their gradients fit beside a plan's arena, by the arena's size."""
    try:
        check_fits(3 * arena_nbytes, "a comparison with PyTorch")
    except PlanError:
        return False
    return True


def rival_of(options: Options) -> Compare | None:
    """Return the comparison of steps with PyTorch's, if the options ask for one.

    PyTorch has no other policy, and saves what ``memory="recompute"`` does not.
    """
    tuning = options.tuning
    asked = options.races and (tuning.costs != "model" or tuning.is_patient)
    return compare if asked and options.policy == OPTIMAL and options.memory == "save" else None
