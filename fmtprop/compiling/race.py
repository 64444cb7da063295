"""The race: plans of one model run in turns, and the fastest replaces the choice by cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from time import perf_counter

import torch

from fmtprop.compiling.attempts import Attempts
from fmtprop.runtime.benchmark import quartiles
from fmtprop.runtime.executor import Executor
from fmtprop.runtime.plan import Plan
from fmtprop.targets.memory import huge_bytes

#: least rounds before another plan may replace the choice by cost, and most rounds
_SURE_ROUNDS, _MOST_ROUNDS = 5, 30

#: rounds against the choice by cost, if it lost only the first runs, which find colder caches and untouched memory
_WARM_ROUNDS = 3

#: additional seconds to become sure, beyond the budget
_EXTRA_SECONDS = 3.0

#: after so many seconds, no further requested rounds are run
_LONGEST_SECONDS = 15.0

#: limits of a plan's first run: factor of the fastest plan's time, and factor of its expected time before others go
#: first
_HOPELESS_RATIO, _PATIENCE_RATIO = 2.0, 4.0

#: seconds that a first run may always take, since its caches are colder than in later runs
_GRACE_SECONDS = 0.1


@dataclass(frozen=True)
class Race:
    """Times of several plans.

    Parameters
    ----------
    seconds : tuple of float
        Lower quartile of each plan's runs, since other processes can only lengthen them.
    rounds : int
        Runs of each plan.
    winner : int
        Index of the fastest plan; the first if the difference is too small.
    names : tuple of str
        Names of the plans.
    runs : tuple of tuple of float
        Seconds of each plan's runs, round by round.
    """

    seconds: tuple[float, ...]
    rounds: int
    winner: int
    names: tuple[str, ...] = ()
    runs: tuple[tuple[float, ...], ...] = ()

    def is_beyond(self, index: int, factor: float) -> bool:
        """Return whether the first plan takes more than `factor` times as long as another, in two rounds of three."""
        runs = self.runs or tuple((seconds,) for seconds in self.seconds)
        longer = sum(a > factor * b for a, b in zip(runs[0], runs[index], strict=True))
        return 3 * longer >= 2 * len(runs[0])


def race(
    plans: Mapping[str, Plan],
    inputs: Sequence[torch.Tensor],
    budget: float,
    fewest: int = 1,
    expected: float = inf,
    attempts: Attempts | None = None,
    most: float = inf,
) -> Race | None:
    """Run plans in turns and return their times.

    Parameters
    ----------
    plans : mapping of str to Plan
        Plans of the same model, by name; the first is preferred unless another is clearly faster.
    inputs : sequence of torch.Tensor
        Inputs of the runs.
    budget : float
        Seconds to spend; there is at least one round, and there are more if the first plan does not win.
    fewest : int
        Least rounds, unless they would take longer than 15 s.
    expected : float
        Expected seconds of the first plan. If it takes much longer, it is interrupted, and only run to its end if all
        others are as slow.
    attempts : Attempts, optional
        Records plans that cannot run.
    most : float, optional
        Seconds for all runs, whatever `budget` and `fewest` ask for: further rounds must fit.

    Returns
    -------
    Race or None
        Times of the plans that could win after their first run; None if no plan can run.
    """
    attempts, until = attempts or Attempts(), perf_counter() + most
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
        return _rounds({name: executors[name] for name in firsts}, inputs, budget, fewest, firsts, until)
    finally:
        for executor in executors.values():
            executor.close()


def _first_runs(
    executors: Mapping[str, Executor], inputs: Sequence[torch.Tensor], expected: float, attempts: Attempts
) -> dict[str, float]:
    """Run each plan once, as long as it can win; return the seconds of the plans that still can."""
    limit, seconds = _GRACE_SECONDS + _PATIENCE_RATIO * expected, dict.fromkeys(executors, inf)
    while seconds and min(seconds.values()) == inf:
        for name in list(seconds):
            most = min(limit, _GRACE_SECONDS + _HOPELESS_RATIO * min(seconds.values()))
            needed = attempts.of(name, partial(_seconds_of, executors[name], inputs, most))
            if needed is None:
                del seconds[name]
            else:
                seconds[name] = needed
        limit *= _PATIENCE_RATIO
    most = _GRACE_SECONDS + _HOPELESS_RATIO * min(seconds.values(), default=0.0)
    slow = [name for name, needed in list(seconds.items())[:1] if needed > most]
    for name in slow:  # the first run of all pays for what libraries set up: 0.03 s, 0.3 on a busy machine
        again = attempts.of(name, partial(_seconds_of, executors[name], inputs, most))
        seconds[name] = inf if again is None else again
    return {name: needed for name, needed in seconds.items() if needed <= most}


def _seconds_of(executor: Executor, inputs: Sequence[torch.Tensor], limit: float) -> float:
    """Return the seconds of a run; infinity if it is interrupted."""
    results, seconds = executor.profile(inputs, limit)
    return sum(seconds) if results else inf


def _rounds(
    executors: Mapping[str, Executor],
    inputs: Sequence[torch.Tensor],
    budget: float,
    fewest: int,
    firsts: Mapping[str, float],
    until: float,
) -> Race:
    """Run all plans in rounds; first runs that took longer than the whole budget are a round if the first plan won."""
    is_long = min(firsts.values()) > budget
    times: list[list[float]] = [[firsts[name]] if is_long else [] for name in executors]
    start = perf_counter() - (sum(firsts.values()) if is_long else 0.0)
    if is_long and _winner(times) != 0:
        times, fewest = [[] for _ in times], max(fewest, _WARM_ROUNDS)
    while len(times) > 1 and _goes_on(times, perf_counter() - start, budget, fewest):
        if times[0] and perf_counter() + sum(some[-1] for some in times) > until:
            break
        # alternately forwards and backwards, since the first plan of a round finds other data in the caches
        order = list(enumerate(executors.values()))
        for index, executor in order if len(times[0]) % 2 else reversed(order):
            before = perf_counter()
            # a long run goes step by step, so that Ctrl-C works between two native calls
            (executor.profile if is_long else executor.run)(inputs)
            times[index].append(perf_counter() - before)
    runs = tuple(map(tuple, times if times[0] else [[seconds] for seconds in firsts.values()]))
    return Race(tuple(quartiles(seconds)[0] for seconds in runs), len(runs[0]), _winner(runs), tuple(executors), runs)


def _goes_on(times: Sequence[Sequence[float]], elapsed: float, budget: float, fewest: int) -> bool:
    """Return whether to run another round; a few rounds are not enough evidence against costs."""
    rounds = len(times[0])
    if rounds < fewest and elapsed <= _LONGEST_SECONDS:
        return True
    extra = _EXTRA_SECONDS if rounds and rounds < _SURE_ROUNDS and _winner(times) != 0 else 0.0
    return not rounds or (rounds < _MOST_ROUNDS and elapsed * (rounds + 1) / rounds <= budget + extra)


def _winner(times: Sequence[Sequence[float]]) -> int:
    """Return the fastest plan that beats the first in at least two rounds of three; otherwise the first."""
    first, best = times[0], 0
    for index, other in enumerate(times):
        wins = sum(b < a for a, b in zip(first, other, strict=True))
        if 3 * wins >= 2 * len(first) and quartiles(other)[0] < quartiles(times[best])[0]:
            best = index
    return best
