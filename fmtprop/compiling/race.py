"""The race: plans of one model run in turns, and the fastest replaces the choice by cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from statistics import median
from typing import Any, Protocol

import torch

from fmtprop.compiling.attempts import Attempts
from fmtprop.runtime.arenas import Arenas
from fmtprop.runtime.executor import Executor
from fmtprop.runtime.plan import Plan
from fmtprop.system.timing import Stopwatch, quartiles

#: least rounds before another plan may replace the choice by cost, and most rounds
_SURE_ROUNDS, _MOST_ROUNDS = 5, 30

#: rounds and seconds after which a race ends if the first plan's slowest run is faster than all runs of the others:
#: costs and all runs agree
_CLEAR_ROUNDS, _CLEAR_SECONDS = 2, 0.03

#: rounds against the choice by cost, if it lost only the first runs, which find colder caches and untouched memory
_WARM_ROUNDS = 3

#: additional seconds to become sure, beyond the budget
_EXTRA_SECONDS = 3.0

#: share of all time that threads may wait for processors in a race that teaches something
_DISTURBED_SHARE = 0.02

#: least and most runs step by step of a disturbed race, as far as its seconds allow. No whole run is undisturbed beside
#: other programs, but each step is in one of a few: a plan's time is then the sum of its steps' least ones (two busy
#: loops on two processors: 4.2 ms, quiet 4.3, whole runs 214)
_LEAST_STEPWISE_RUNS, _STEPWISE_RUNS = 3, 8

#: seconds from which all runs are step by step, which then takes no time of its own
_STEPWISE_SECONDS = 0.02

#: runs step by step after the others, by which costs are judged
_PROFILED_RUNS = 2

#: seconds after which a race ends, even if more rounds were asked for
_LONGEST_SECONDS = 15.0

#: limits of a plan's first run. One that takes more than twice the fastest plan's time cannot win; one that takes four
#: times its expected time is interrupted, and the others run first
_HOPELESS_RATIO, _PATIENCE_RATIO = 2.0, 4.0

#: seconds for the runs of a plan without a rival
_ALONE_SECONDS = 0.1

#: seconds that a first run may always take, since its caches are colder than in later runs
_GRACE_SECONDS = 0.1


class Runner(Protocol):
    """What runs a plan: an executor."""

    def run(self, inputs: Sequence[torch.Tensor]) -> Any:
        """Run the plan."""

    def profile(self, inputs: Sequence[torch.Tensor], limit: float = ...) -> tuple[list[Any], list[float]]:
        """Run it step by step, as long as the limit in seconds allows; return results and the seconds of each step."""


@dataclass(frozen=True)
class Race:
    """Times of several plans.

    The seconds of a run are those in which its threads could run (:mod:`fmtprop.system.waiting`).
    """

    #: lower quartile of each plan's runs, since other processes can only lengthen them
    seconds: tuple[float, ...]
    rounds: int
    #: index of the fastest plan; the first if the difference is too small
    winner: int
    names: tuple[str, ...] = ()
    #: seconds of each plan's runs, round by round
    runs: tuple[tuple[float, ...], ...] = ()
    #: seconds of each step of each plan; in all, those of the plan's median run
    steps: tuple[tuple[float, ...], ...] = ()
    #: whether threads waited for processors that other programs used. Then there is one round, the least seconds of
    #: each step in all: they tell who is faster, but nothing about costs.
    is_disturbed: bool = False

    def median(self, name: str) -> float | None:
        """Return the median seconds of a plan's runs, and None of a plan that did not take part."""
        return median(self.runs[self.names.index(name)]) if self.runs and name in self.names else None

    def is_beaten(self, name: str) -> bool:
        """Return whether each run of a plan was slower than all of the winner's, or its first one hopeless."""
        if self.is_disturbed or not self.runs:
            return False
        return name not in self.names or min(self.runs[self.names.index(name)]) > max(self.runs[self.winner])

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

    `plans`: plans of the same model, by name; the first is preferred unless another is clearly faster. `budget`:
    seconds to spend; there is at least one round, and there are more if the first plan does not win. `fewest`: least
    rounds, unless they would take longer than 15 s. `expected`: expected seconds of the first plan. If it takes much
    longer, it is interrupted, and only run to its end if all others are as slow. Result: times of the plans that could
    win after their first run; None if no plan can run.
    """
    arenas = Arenas(max(plan.arena_nbytes for plan in plans.values()))
    executors = {name: Executor(plan, arenas=arenas) for name, plan in plans.items()}
    try:
        return run_in_turns(executors, inputs, budget, fewest, expected, attempts, most)
    finally:
        for executor in executors.values():
            executor.close()


def run_in_turns(
    executors: Mapping[str, Runner],
    inputs: Sequence[torch.Tensor],
    budget: float,
    fewest: int = 1,
    expected: float = inf,
    attempts: Attempts | None = None,
    most: float = inf,
    watch: Stopwatch | None = None,
) -> Race | None:
    """Run executors of plans in turns; see :func:`race`."""
    with watch or Stopwatch() as watch:
        field = _Field(executors, inputs, attempts or Attempts(), watch, watch.now() + most)
        firsts = field.first_runs(expected)
        return field.rounds(firsts, budget, fewest) if firsts else None


def alone(name: str, plan: Plan, inputs: Sequence[torch.Tensor], attempts: Attempts, most: float) -> Race | None:
    """Return the times of one plan, against which its costs are held; None if it cannot run."""
    return race({name: plan}, inputs, _ALONE_SECONDS, attempts=attempts, most=most)


class _Field:
    """The executors of a race, and what their runs took."""

    def __init__(
        self,
        executors: Mapping[str, Runner],
        inputs: Sequence[torch.Tensor],
        attempts: Attempts,
        watch: Stopwatch,
        until: float,
    ) -> None:
        self._executors, self._inputs, self._attempts, self._watch = executors, inputs, attempts, watch
        #: when the race ends, on the watch's clock
        self._until = until
        #: seconds of each step of a plan's last first run
        self._profiles: dict[str, list[float]] = {}

    def first_runs(self, expected: float) -> dict[str, float]:
        """Run each plan once, as long as it can win; return the seconds of the plans that still can."""
        limit, seconds = _GRACE_SECONDS + _PATIENCE_RATIO * expected, dict.fromkeys(self._executors, inf)
        while seconds and min(seconds.values()) == inf:
            for name in list(seconds):
                most = min(limit, _GRACE_SECONDS + _HOPELESS_RATIO * min(seconds.values()))
                needed = self._attempts.of(name, partial(self._first_run, name, most))
                if needed is None:
                    del seconds[name]
                else:
                    seconds[name] = needed
            limit *= _PATIENCE_RATIO
        most = _GRACE_SECONDS + _HOPELESS_RATIO * min(seconds.values(), default=0.0)
        slow = [name for name, needed in list(seconds.items())[:1] if needed > most]
        for name in slow:  # the first run of all pays for what libraries set up: 0.03 s, 0.3 on a busy machine
            again = self._attempts.of(name, partial(self._first_run, name, most))
            seconds[name] = inf if again is None else again
        return {name: needed for name, needed in seconds.items() if needed <= most}

    def _first_run(self, name: str, limit: float) -> float:
        self._watch.start()
        results, self._profiles[name] = self._executors[name].profile(self._inputs, limit)
        self._watch.stop()
        return max(0.0, sum(self._profiles[name]) - self._watch.waited) if results else inf

    def rounds(self, firsts: Mapping[str, float], budget: float, fewest: int) -> Race:
        """Run all plans in rounds; first runs that took longer than the whole budget are a round if the first won."""
        executors, watch = [self._executors[name] for name in firsts], self._watch
        is_long = min(firsts.values()) > budget
        is_stepwise = min(firsts.values()) > min(budget, _STEPWISE_SECONDS)
        times: list[list[float]] = [[seconds] if is_long else [] for seconds in firsts.values()]
        warm: list[list[list[float]]] = [[] for _ in executors]
        start = watch.now() - (sum(firsts.values()) if is_long else 0.0)
        if is_long and _winner(times) != 0:
            times, fewest = [[] for _ in times], max(fewest, _WARM_ROUNDS)
        while _goes_on(times, watch.now() - start, budget, fewest):
            if times[0] and not self._has_time([some[-1] for some in times]):
                break
            # alternately forwards and backwards, since the first plan of a round finds other data in the caches
            order = list(enumerate(executors))
            for index, executor in order if len(times[0]) % 2 else reversed(order):
                watch.start()
                if is_stepwise:  # Ctrl-C works between two native calls
                    warm[index].append(executor.profile(self._inputs)[1])
                else:
                    executor.run(self._inputs)
                times[index].append(watch.stop())
        runs = tuple(map(tuple, times if times[0] else [[seconds] for seconds in firsts.values()]))
        is_disturbed = watch.is_disturbed(_DISTURBED_SHARE)
        least = _LEAST_STEPWISE_RUNS if is_disturbed else 0 if is_stepwise else _PROFILED_RUNS
        most, start = _STEPWISE_RUNS if is_disturbed else least, watch.now()
        while (done := len(warm[0])) < least or (done < most and watch.now() - start < budget):
            if not self._has_time([min(some) for some in runs]):
                break
            for executor, known in zip(executors, warm, strict=True):
                known.append(executor.profile(self._inputs)[1])
        measured = [some or [self._profiles[name]] for name, some in zip(firsts, warm, strict=True)]
        if is_disturbed:
            runs = tuple((sum(_least(some)),) for some in measured)
        steps = tuple(_scaled(_least(some), median(times)) for some, times in zip(measured, runs, strict=True))
        lowest = tuple(quartiles(seconds)[0] for seconds in runs)
        return Race(lowest, len(runs[0]), _winner(runs), tuple(firsts), runs, steps, is_disturbed)

    def _has_time(self, seconds: Sequence[float]) -> bool:
        """Return whether a round, by the seconds of each plan, ends in time."""
        return self._watch.now() + sum(seconds) <= self._until


def _least(profiles: Sequence[Sequence[float]]) -> list[float]:
    """Return the least seconds of each step of some runs."""
    return [min(times) for times in zip(*profiles, strict=True)]


def _scaled(steps: Sequence[float], seconds: float) -> tuple[float, ...]:
    """Return the seconds of each step, in all as many as a run takes: timing takes time, too."""
    return tuple(step * seconds / max(sum(steps), 1e-9) for step in steps)


def _goes_on(times: Sequence[Sequence[float]], elapsed: float, budget: float, fewest: int) -> bool:
    """Return whether to run another round; a few rounds are not enough evidence against costs."""
    rounds = len(times[0])
    if len(times) > 1 and rounds >= max(fewest, _CLEAR_ROUNDS) and elapsed >= _CLEAR_SECONDS:
        winner = _winner(times)
        if (winner == 0 or rounds >= _SURE_ROUNDS) and _is_clear(times, winner):
            return False
    if rounds < fewest and elapsed <= _LONGEST_SECONDS:
        return True
    extra = _EXTRA_SECONDS if rounds and rounds < _SURE_ROUNDS and _winner(times) != 0 else 0.0
    return not rounds or (rounds < _MOST_ROUNDS and elapsed * (rounds + 1) / rounds <= budget + extra)


def _is_clear(times: Sequence[Sequence[float]], winner: int) -> bool:
    """Return whether the winner's slowest run was faster than the fastest of each other plan."""
    return all(max(times[winner]) < min(other) for index, other in enumerate(times) if index != winner)


def _winner(times: Sequence[Sequence[float]]) -> int:
    """Return the fastest plan that beats the first in at least two rounds of three; otherwise the first."""
    first, best = times[0], 0
    for index, other in enumerate(times):
        wins = sum(b < a for a, b in zip(first, other, strict=True))
        if 3 * wins >= 2 * len(first) and quartiles(other)[0] < quartiles(times[best])[0]:
            best = index
    return best
