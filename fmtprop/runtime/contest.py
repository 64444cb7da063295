"""Plans of one model run in turns, to see which is faster: the last word on what was chosen by cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import quantiles
from time import perf_counter

import torch

from fmtprop.runtime.executor import Executor
from fmtprop.runtime.plan import Plan
from fmtprop.targets.memory import huge_bytes

__all__ = ["Contest", "contest"]

#: rounds after which another plan may take the place of the choice by cost, and at most
_SURE, _MOST = 9, 30

#: seconds that may go into being sure, beyond the time allowed
_EXTRA = 3.0

#: seconds after which rounds that were asked for are not waited for any longer
_LONGEST = 15.0


@dataclass(frozen=True)
class Contest:
    """How long each of several plans took, in the same minutes or scaled to them.

    Parameters
    ----------
    seconds : tuple of float
        Lower quartile of each plan's runs: other processes only ever add time.
    rounds : int
        Runs of each plan.
    winner : int
        Index of the faster; the first where they are too close to tell.
    names : tuple of str
        What each plan is called, where they have names.
    runs : tuple of tuple of float
        Seconds of each plan's runs, round by round, where they all ran in the same rounds.
    """

    seconds: tuple[float, ...]
    rounds: int
    winner: int
    names: tuple[str, ...] = ()
    runs: tuple[tuple[float, ...], ...] = ()

    def is_beyond(self, index: int, factor: float) -> bool:
        """Say whether the first plan takes more than so many times as long as another: in two rounds of three."""
        runs = self.runs or tuple((seconds,) for seconds in self.seconds)
        longer = sum(a > factor * b for a, b in zip(runs[0], runs[index], strict=True))
        return 3 * longer >= 2 * len(runs[0])


def contest(plans: Sequence[Plan], inputs: Sequence[torch.Tensor], budget: float, fewest: int = 1) -> Contest:
    """Run plans in turns and say which is faster.

    Parameters
    ----------
    plans : sequence of Plan
        Of the same model; the first is preferred where the others are not clearly faster.
    inputs : sequence of torch.Tensor
        What to run them on.
    budget : float
        Seconds to spend; one round is run in any case, and more where the first plan does not win.
    fewest : int
        Rounds to run whatever they cost, but for plans so slow that these would take longer than 15 s.

    Returns
    -------
    Contest
    """
    arena = huge_bytes(max(plan.arena_nbytes for plan in plans))
    executors = [Executor(plan, arena=arena) for plan in plans]
    try:
        for executor in executors:
            executor.run(inputs)
        times: list[list[float]] = [[] for _ in plans]
        start = perf_counter()
        while _goes_on(times, perf_counter() - start, budget, fewest):
            # alternately forwards and backwards: who goes first finds other things in the caches
            order = list(enumerate(executors))
            for index, executor in order if len(times[0]) % 2 else reversed(order):
                before = perf_counter()
                executor.run(inputs)
                times[index].append(perf_counter() - before)
        return Contest(tuple(map(_typical, times)), len(times[0]), _winner(times), runs=tuple(map(tuple, times)))
    finally:
        for executor in executors:
            executor.close()


def _goes_on(times: Sequence[Sequence[float]], elapsed: float, budget: float, fewest: int) -> bool:
    """Say whether there is time for another round; a few rounds are no evidence against costs."""
    rounds = len(times[0])
    if rounds < fewest and elapsed <= _LONGEST:
        return True
    extra = _EXTRA if rounds and rounds < _SURE and _winner(times) != 0 else 0.0
    return not rounds or (rounds < _MOST and elapsed * (rounds + 1) / rounds <= budget + extra)


def _winner(times: Sequence[Sequence[float]]) -> int:
    """Return the fastest plan that beats the first in two rounds of three at least; else the first."""
    first, best = times[0], 0
    for index, other in enumerate(times):
        wins = sum(b < a for a, b in zip(first, other, strict=True))
        if 3 * wins >= 2 * len(first) and _typical(other) < _typical(times[best]):
            best = index
    return best


def _typical(seconds: Sequence[float]) -> float:
    return quantiles(seconds, n=4, method="inclusive")[0] if len(seconds) > 1 else seconds[0]
