"""Plans of one model run in turns, to see which is faster: the last word on what was chosen by cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from statistics import quantiles
from time import perf_counter

import torch

from fmtprop.compiling.attempts import Attempts
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

#: how many times as long as the fastest a plan's first run may take, and as expected before others are tried first
_HOPELESS, _PATIENCE = 2.0, 4.0

#: seconds that a first run may take in any case: it finds other things in the caches than later ones
_GRACE = 0.1


@dataclass(frozen=True)
class Contest:
    """How long each of several plans took.

    Parameters
    ----------
    seconds : tuple of float
        Lower quartile of each plan's runs: other processes only ever add time.
    rounds : int
        Runs of each plan.
    winner : int
        Index of the faster; the first where they are too close to tell.
    names : tuple of str
        What each plan is called.
    runs : tuple of tuple of float
        Seconds of each plan's runs, round by round.
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


def contest(
    plans: Mapping[str, Plan],
    inputs: Sequence[torch.Tensor],
    budget: float,
    fewest: int = 1,
    expected: float = inf,
    attempts: Attempts | None = None,
) -> Contest | None:
    """Run plans in turns and say which is faster.

    Parameters
    ----------
    plans : mapping of str to Plan
        Of the same model, by name; the first is preferred where the others are not clearly faster.
    inputs : sequence of torch.Tensor
        What to run them on.
    budget : float
        Seconds to spend; one round is run in any case, and more where the first plan does not win.
    fewest : int
        Rounds to run whatever they cost, but for plans so slow that these would take longer than 15 s.
    expected : float
        Seconds that the first plan should take. One that takes much longer is interrupted, and only run to its end if
        all others do as well.
    attempts : Attempts, optional
        Told of plans that cannot be run.

    Returns
    -------
    Contest or None
        Of those plans alone that could win after their first run; None where none can be run.
    """
    attempts = attempts or Attempts()
    arena = huge_bytes(max(plan.arena_nbytes for plan in plans.values()))
    executors: dict[str, Executor] = {}
    try:
        for name, plan in plans.items():
            executor = attempts.of(name, partial(Executor, plan, arena=arena))
            if executor is not None:
                executors[name] = executor
        firsts = _first_runs(executors, inputs, expected, attempts)
        if not firsts:
            return None
        return _rounds({name: executors[name] for name in firsts}, inputs, budget, fewest, firsts)
    finally:
        for executor in executors.values():
            executor.close()


def _first_runs(
    executors: Mapping[str, Executor], inputs: Sequence[torch.Tensor], expected: float, attempts: Attempts
) -> dict[str, float]:
    """Run each plan once, for as long as it can win; return the seconds of those that still can."""
    limit, seconds = _GRACE + _PATIENCE * expected, dict.fromkeys(executors, inf)
    while seconds and min(seconds.values()) == inf:
        for name in list(seconds):
            most = min(limit, _GRACE + _HOPELESS * min(seconds.values()))
            needed = attempts.of(name, partial(_seconds_of, executors[name], inputs, most))
            if needed is None:
                del seconds[name]
            else:
                seconds[name] = needed
        limit *= _PATIENCE
    most = _GRACE + _HOPELESS * min(seconds.values(), default=0.0)
    return {name: needed for name, needed in seconds.items() if needed <= most}


def _seconds_of(executor: Executor, inputs: Sequence[torch.Tensor], limit: float) -> float:
    """Return how long a run takes, infinity where it is interrupted."""
    results, seconds = executor.profile(inputs, limit)
    return sum(seconds) if results else inf


def _rounds(
    executors: Mapping[str, Executor],
    inputs: Sequence[torch.Tensor],
    budget: float,
    fewest: int,
    firsts: Mapping[str, float],
) -> Contest:
    """Run all plans round after round; what took longer than the whole budget before tells as much as a round."""
    is_long = min(firsts.values()) > budget
    times: list[list[float]] = [[firsts[name]] if is_long else [] for name in executors]
    start = perf_counter() - (sum(firsts.values()) if is_long else 0.0)
    while len(times) > 1 and _goes_on(times, perf_counter() - start, budget, fewest):
        # alternately forwards and backwards: who goes first finds other things in the caches
        order = list(enumerate(executors.values()))
        for index, executor in order if len(times[0]) % 2 else reversed(order):
            before = perf_counter()
            # a long run step by step: Ctrl-C is answered between two calls of native code
            (executor.profile if is_long else executor.run)(inputs)
            times[index].append(perf_counter() - before)
    runs = tuple(map(tuple, times if times[0] else [[seconds] for seconds in firsts.values()]))
    return Contest(tuple(map(_typical, runs)), len(runs[0]), _winner(runs), tuple(executors), runs)


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
