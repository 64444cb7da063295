"""The race: plans of one model run in turns, and the fastest replaces the choice by cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from statistics import median
from time import perf_counter

import torch

from fmtprop.compiling.attempts import Attempts
from fmtprop.runtime.benchmark import quartiles
from fmtprop.runtime.executor import Executor
from fmtprop.runtime.plan import Plan
from fmtprop.system.waiting import Waiting
from fmtprop.targets.memory import huge_bytes

#: least rounds before another plan may replace the choice by cost, and most rounds
_SURE_ROUNDS, _MOST_ROUNDS = 5, 30

#: rounds against the choice by cost, if it lost only the first runs, which find colder caches and untouched memory
_WARM_ROUNDS = 3

#: additional seconds to become sure, beyond the budget
_EXTRA_SECONDS = 3.0

#: share of all time that threads may wait for processors in a race that teaches something
_DISTURBED_SHARE = 0.02

#: runs step by step of a disturbed race. No whole run is undisturbed beside other programs, but each step is in one of
#: a few: a plan's time is then the sum of its steps' least ones (two busy loops on two processors: 4.2 ms, quiet 4.3,
#: whole runs 214)
_STEPWISE_RUNS = 8

#: runs step by step after the others, by which costs are judged
_PROFILED_RUNS = 2

#: after so many seconds, no further requested rounds are run
_LONGEST_SECONDS = 15.0

#: limits of a plan's first run: factor of the fastest plan's time, and factor of its expected time before others go
#: first
_HOPELESS_RATIO, _PATIENCE_RATIO = 2.0, 4.0

#: seconds for the runs of a plan without a rival
_ALONE_SECONDS = 0.1

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
    steps : tuple of tuple of float
        Seconds of each step of each plan; in all, those of the plan's median run.
    is_disturbed : bool
        Whether threads waited for processors that other programs used. Then there is one round, the least seconds of
        each step in all: they tell who is faster, but nothing about costs.

    Notes
    -----
    The seconds of a run are those in which its threads could run (:mod:`fmtprop.system.waiting`).
    """

    seconds: tuple[float, ...]
    rounds: int
    winner: int
    names: tuple[str, ...] = ()
    runs: tuple[tuple[float, ...], ...] = ()
    steps: tuple[tuple[float, ...], ...] = ()
    is_disturbed: bool = False

    def median(self, name: str) -> float | None:
        """Return the median seconds of a plan's runs, and None of a plan that did not take part."""
        return median(self.runs[self.names.index(name)]) if self.runs and name in self.names else None

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
    budget : float
        Seconds to spend; there is at least one round, and there are more if the first plan does not win.
    fewest : int
        Least rounds, unless they would take longer than 15 s.
    expected : float
        Expected seconds of the first plan. If it takes much longer, it is interrupted, and only run to its end if all
        others are as slow.

    Returns
    -------
    Race or None
        Times of the plans that could win after their first run; None if no plan can run.
    """
    attempts, until = attempts or Attempts(), perf_counter() + most
    arena = huge_bytes(max(plan.arena_nbytes for plan in plans.values()))
    executors: dict[str, Executor] = {}
    clock = _Clock()
    try:
        for name, plan in plans.items():
            executor = attempts.of(name, partial(Executor, plan, arena=arena))
            if executor is not None:
                executors[name] = executor
        profiles: dict[str, list[float]] = {}
        firsts = _first_runs(executors, inputs, expected, attempts, profiles, clock)
        if not firsts:
            return None
        executors_in_race = {name: executors[name] for name in firsts}
        return _rounds(executors_in_race, inputs, budget, fewest, firsts, profiles, until, clock)
    finally:
        clock.close()
        for executor in executors.values():
            executor.close()


def alone(name: str, plan: Plan, inputs: Sequence[torch.Tensor], attempts: Attempts, most: float) -> Race | None:
    """Return the times of one plan, against which its costs are held; None if it cannot run."""
    return race({name: plan}, inputs, _ALONE_SECONDS, attempts=attempts, most=most)


def _first_runs(
    executors: Mapping[str, Executor],
    inputs: Sequence[torch.Tensor],
    expected: float,
    attempts: Attempts,
    profiles: dict[str, list[float]],
    clock: _Clock,
) -> dict[str, float]:
    """Run each plan once, as long as it can win; return the seconds of the plans that still can.

    The seconds of the steps are added to `profiles`.
    """

    def seconds_of(name: str, limit: float) -> float:
        clock.start()
        results, profiles[name] = executors[name].profile(inputs, limit)
        waited = clock.waited()
        return max(0.0, sum(profiles[name]) - waited) if results else inf

    limit, seconds = _GRACE_SECONDS + _PATIENCE_RATIO * expected, dict.fromkeys(executors, inf)
    while seconds and min(seconds.values()) == inf:
        for name in list(seconds):
            most = min(limit, _GRACE_SECONDS + _HOPELESS_RATIO * min(seconds.values()))
            needed = attempts.of(name, partial(seconds_of, name, most))
            if needed is None:
                del seconds[name]
            else:
                seconds[name] = needed
        limit *= _PATIENCE_RATIO
    most = _GRACE_SECONDS + _HOPELESS_RATIO * min(seconds.values(), default=0.0)
    slow = [name for name, needed in list(seconds.items())[:1] if needed > most]
    for name in slow:  # the first run of all pays for what libraries set up: 0.03 s, 0.3 on a busy machine
        again = attempts.of(name, partial(seconds_of, name, most))
        seconds[name] = inf if again is None else again
    return {name: needed for name, needed in seconds.items() if needed <= most}


def _rounds(
    executors: Mapping[str, Executor],
    inputs: Sequence[torch.Tensor],
    budget: float,
    fewest: int,
    firsts: Mapping[str, float],
    profiles: Mapping[str, list[float]],
    until: float,
    clock: _Clock,
) -> Race:
    """Run all plans in rounds; first runs that took longer than the whole budget are a round if the first plan won."""
    is_long = min(firsts.values()) > budget
    times: list[list[float]] = [[firsts[name]] if is_long else [] for name in executors]
    warm: list[list[list[float]]] = [[] for _ in executors]
    start = perf_counter() - (sum(firsts.values()) if is_long else 0.0)
    if is_long and _winner(times) != 0:
        times, fewest = [[] for _ in times], max(fewest, _WARM_ROUNDS)
    while _goes_on(times, perf_counter() - start, budget, fewest):
        if times[0] and perf_counter() + sum(some[-1] for some in times) > until:
            break
        # alternately forwards and backwards, since the first plan of a round finds other data in the caches
        order = list(enumerate(executors.values()))
        for index, executor in order if len(times[0]) % 2 else reversed(order):
            clock.start()
            if is_long:  # step by step, so that Ctrl-C works between two native calls
                warm[index].append(executor.profile(inputs)[1])
            else:
                executor.run(inputs)
            times[index].append(clock.seconds())
    runs = tuple(map(tuple, times if times[0] else [[seconds] for seconds in firsts.values()]))
    profiled = _STEPWISE_RUNS if clock.is_disturbed else 0 if is_long else _PROFILED_RUNS
    for _ in range(profiled):
        if perf_counter() + sum(map(min, runs)) > until:
            break
        for executor, known in zip(executors.values(), warm, strict=True):
            known.append(executor.profile(inputs)[1])
    cold = ([profiles[name]] for name in executors)
    measured = [some or first for some, first in zip(warm, cold, strict=True)]
    if clock.is_disturbed:
        runs = tuple((sum(_least(some)),) for some in measured)
    steps = tuple(_scaled(_least(some), median(times)) for some, times in zip(measured, runs, strict=True))
    lowest = tuple(quartiles(seconds)[0] for seconds in runs)
    return Race(lowest, len(runs[0]), _winner(runs), tuple(executors), runs, steps, clock.is_disturbed)


def _least(profiles: Sequence[Sequence[float]]) -> list[float]:
    """Return the least seconds of each step of some runs."""
    return [min(times) for times in zip(*profiles, strict=True)]


def _scaled(steps: Sequence[float], seconds: float) -> tuple[float, ...]:
    """Return the seconds of each step, in all as many as a run takes: timing takes time, too."""
    return tuple(step * seconds / max(sum(steps), 1e-9) for step in steps)


class _Clock:
    """Seconds without those in which a thread waited for a processor, and the share of waiting in all."""

    def __init__(self) -> None:
        self._waiting = Waiting()
        self._before = self._total = self._waited = 0.0

    @property
    def is_disturbed(self) -> bool:
        return self._waited > _DISTURBED_SHARE * self._total

    def start(self) -> None:
        self._waiting.lap()
        self._before = perf_counter()

    def waited(self) -> float:
        """Return the seconds of waiting since the start."""
        waited = self._waiting.lap()
        self._total += perf_counter() - self._before
        self._waited += waited
        return waited

    def seconds(self) -> float:
        """Return the seconds since the start without waiting."""
        taken = perf_counter() - self._before
        return max(0.0, taken - self.waited())

    def close(self) -> None:
        self._waiting.close()


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
