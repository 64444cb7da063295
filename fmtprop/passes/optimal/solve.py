"""The exact solver: the best choice of alternatives and reorders, and the proof.

Owns the order of events: leave out what cannot matter, eliminate op by op where the problem is narrow; where it is not,
find a good choice quickly, let the linear program improve on it and prove it, and report what is known when the time
ends. Knows nothing of graphs, targets and formats.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence

from fmtprop.passes.optimal.conversions import ReorderTable, cheapest_conversions
from fmtprop.passes.optimal.elimination import eliminate
from fmtprop.passes.optimal.problem import Problem, Solution, evaluate, find_cycle
from fmtprop.passes.optimal.prune import prune
from fmtprop.passes.optimal.search import descend, greedy

#: what the arithmetic of HiGHS can tell apart, relative to the objective
_TOLERANCE = 1e-6
#: share of the time for the search that precedes the program
_START = 0.1


def solve(problem: Problem, time_limit: float = 10.0, baseline: Sequence[int] | None = None) -> Solution:
    """Find the choice of alternatives that is cheapest together with the reorders it needs.

    Parameters
    ----------
    problem : Problem
        What can be chosen.
    time_limit : float, optional
        Seconds, or infinity. When they end, the best choice so far is returned with what is proven of it. Only where
        no choice at all has been found by then does it take longer.
    baseline : sequence of int, optional
        A choice to start from; the solution is never worse.

    Returns
    -------
    Solution
        Objective, bound and gap are exact up to rounding and the tolerance that :class:`Solution` states.

    Raises
    ------
    GraphError
        The problem makes no sense; see :meth:`Problem.check`.
    PassError
        There is no solution, or `baseline` is none. The message names the op or the tensor in the way.

    Examples
    --------
    >>> from fmtprop.passes.optimal.problem import Alternative
    >>> problem = Problem(
    ...     ops=("x", "conv"),
    ...     alternatives=(
    ...         Alternative(("x",), {}, {"x.dst": "abcd"}, 0.0),
    ...         Alternative(("conv",), {"x.dst": ("abcd",)}, {}, 9e-6),
    ...         Alternative(("conv",), {"x.dst": ("aBcd8b",)}, {}, 4e-6),
    ...     ),
    ...     reorders={"x.dst": {("abcd", "aBcd8b"): 1e-6}},
    ... )
    >>> solution = solve(problem)
    >>> solution.chosen, dict(solution.conversions), solution.optimal
    ((0, 2), {'x.dst': (('abcd', 'aBcd8b'),)}, True)
    """
    start = time.monotonic()
    problem.check()
    search = _Search(problem, start + time_limit)
    if baseline is not None:
        search.offer(baseline)
    if not search.eliminate():
        search.start()
        search.prove()
    return search.solution(time.monotonic() - start)


class _Search:
    """What is known of a problem so far: the best choice and the best bound."""

    def __init__(self, problem: Problem, deadline: float) -> None:
        self._problem = problem
        self._deadline = deadline
        self._table = ReorderTable(problem.reorders)
        self._reduced, self._kept = prune(problem)
        self._chosen: tuple[int, ...] = ()
        self._objective = math.inf
        self._bound = _share_bound(self._reduced)

    def offer(self, chosen: Collection[int]) -> None:
        """Keep a choice if it is better than the best one."""
        objective = evaluate(self._problem, chosen, cheapest_conversions(self._problem, chosen, self._table))
        if objective < self._objective:
            self._chosen, self._objective = tuple(sorted(chosen)), objective

    def eliminate(self) -> bool:
        """Find the best choice of a narrow problem; say whether that could be done."""
        found = eliminate(self._reduced, self._table) if self._remaining() > 0.0 else None
        if found is None:
            return False
        chosen, self._bound = found
        self.offer(self._original(chosen))
        return True

    def start(self) -> None:
        """Find a first choice: the answer where the program finds none in time, and a limit for its objective."""
        chosen = greedy(self._reduced, self._table)
        if chosen is None:
            from fmtprop.passes.optimal.feasible import find_feasible  # SciPy is imported where it is needed

            chosen = find_feasible(self._reduced, self._table)
        until = time.monotonic() + _START * self._remaining()
        self.offer(self._original(descend(self._reduced, self._table, chosen, until)))

    def prove(self) -> None:
        """Let the program find the best choice and a bound."""
        from fmtprop.passes.optimal.program import AssignmentProgram  # SciPy takes as long as a small compilation

        program = AssignmentProgram(self._reduced)
        while self._remaining() > 0.0 and self._bound < self._objective:
            outcome = program.minimise(self._objective, self._remaining())
            self._bound = max(self._bound, outcome.bound)
            if outcome.values is None:
                return
            chosen = tuple(index for index in range(len(self._reduced.alternatives)) if outcome.values[index] > 0.5)
            cycle = find_cycle(self._reduced, chosen)
            if not cycle:
                self.offer(self._original(chosen))
                return
            program.forbid(cycle)

    def solution(self, seconds: float) -> Solution:
        """Report the best choice with what is proven of it."""
        optimal = self._objective - self._bound <= _TOLERANCE * self._objective
        bound = self._objective if optimal else self._bound
        return Solution(
            chosen=self._chosen,
            conversions=cheapest_conversions(self._problem, self._chosen, self._table),
            objective=self._objective,
            bound=bound,
            gap=0.0 if optimal else (self._objective - bound) / self._objective,
            seconds=seconds,
            optimal=optimal,
        )

    def _original(self, chosen: Collection[int]) -> tuple[int, ...]:
        return tuple(self._kept[index] for index in chosen)

    def _remaining(self) -> float:
        return self._deadline - time.monotonic()


def _share_bound(problem: Problem) -> float:
    """Bound a choice by what the ops cost at least, an alternative's cost shared evenly by the ops that it covers."""
    return math.fsum(
        min(problem.alternatives[index].cost / len(problem.alternatives[index].covers) for index in indices)
        for indices in problem.covering().values()
    )
