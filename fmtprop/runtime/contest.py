"""Plans of one model run in turns, to see which is faster: the last word on what was chosen by cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import quantiles
from time import perf_counter

import torch

from fmtprop.runtime.executor import Executor
from fmtprop.runtime.plan import Plan

__all__ = ["Contest", "contest"]

#: rounds after which the choice by cost may stand, after which another plan may take its place, and at most
_FEWEST, _SURE, _MOST = 3, 9, 30

#: seconds that may go into being sure, beyond the time allowed
_EXTRA = 3.0


@dataclass(frozen=True)
class Contest:
    """How long each of several plans took, in the same minutes.

    Parameters
    ----------
    seconds : tuple of float
        Lower quartile of each plan's runs: other processes only ever add time.
    rounds : int
        Runs of each plan.
    winner : int
        Index of the faster; the first where they are too close to tell.
    """

    seconds: tuple[float, ...]
    rounds: int
    winner: int


def contest(plans: Sequence[Plan], inputs: Sequence[torch.Tensor], budget: float = 0.4) -> Contest:
    """Run plans in turns and say which is faster.

    Parameters
    ----------
    plans : sequence of Plan
        Of the same model; the first is preferred where the others are not clearly faster.
    inputs : sequence of torch.Tensor
        What to run them on.
    budget : float
        Seconds to spend; at least three rounds are run, and more where the first plan does not win.

    Returns
    -------
    Contest
    """
    executors = [Executor(plan) for plan in plans]
    try:
        for executor in executors:
            executor.run(inputs)
        times: list[list[float]] = [[] for _ in plans]
        end = perf_counter() + budget
        rounds = 0
        while (
            rounds < _FEWEST
            or (rounds < _MOST and perf_counter() < end)
            # a few rounds are no evidence against costs
            or (rounds < _SURE and _winner(times) != 0 and perf_counter() < end + _EXTRA)
        ):
            # alternately forwards and backwards: who goes first finds other things in the caches
            order = list(enumerate(executors))
            for index, executor in order if rounds % 2 else reversed(order):
                start = perf_counter()
                executor.run(inputs)
                times[index].append(perf_counter() - start)
            rounds += 1
        return Contest(tuple(map(_typical, times)), rounds, _winner(times))
    finally:
        for executor in executors:
            executor.close()


def _winner(times: Sequence[Sequence[float]]) -> int:
    """Return the fastest plan that beats the first in two rounds of three at least; else the first."""
    first, best = times[0], 0
    for index, other in enumerate(times):
        wins = sum(b < a for a, b in zip(first, other, strict=True))
        if 3 * wins >= 2 * len(first) and _typical(other) < _typical(times[best]):
            best = index
    return best


def _typical(seconds: Sequence[float]) -> float:
    return quantiles(seconds, n=4, method="inclusive")[0]
