"""The exact solver: the best choice of alternatives and reorders, with a proof.

Owns the order of the steps: prune the problem; if it is narrow, eliminate op by op (almost all networks are narrow);
otherwise make a first choice, improve it by choosing most ops anew, and find and prove the best one by the linear
program; report the best choice when the time ends. Must not know graphs, targets and formats.

Pruning keeps at least one optimal choice. It removes:

* A reorder that is not cheaper than a chain of others.
* A format that no alternative reads or writes, if chains through it are not cheaper than chains around it.
* An alternative, if another one executes the same ops and is not dearer together with reorders between their formats.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache

from fmtprop.errors import PassError
from fmtprop.passes.optimal.conversions import ReorderTable, TensorReorders, cheapest_conversions, tensor_reorders
from fmtprop.passes.optimal.elimination import Variable, eliminate, improve
from fmtprop.passes.optimal.problem import Alternative, Format, Problem, Reorder, Solution, Tensor, evaluate, find_cycle


def prune(problem: Problem) -> tuple[Problem, tuple[int, ...]]:
    """Leave out dominated alternatives and reorders.

    Result: a problem with the same optimum, and the former index of each of its alternatives.

    >>> slow = Alternative(("x",), {}, {"x.dst": "abcd"}, 3e-6)
    >>> fast = Alternative(("x",), {}, {"x.dst": "acdb"}, 1e-6)
    >>> problem = Problem(("x",), (slow, fast), {"x.dst": {("acdb", "abcd"): 2e-6}})
    >>> prune(problem)[1]
    (1,)
    """
    table = ReorderTable(problem.reorders)
    groups: dict[frozenset[str], list[int]] = {}
    for index, alternative in enumerate(problem.alternatives):
        groups.setdefault(frozenset(alternative.covers), []).append(index)
    kept = sorted(index for group in groups.values() for index in _undominated(problem, group, table))
    alternatives = tuple(problem.alternatives[index] for index in kept)
    return Problem(problem.ops, alternatives, _needed_reorders(problem, alternatives)), tuple(kept)


def _undominated(problem: Problem, group: Sequence[int], table: ReorderTable) -> list[int]:
    """Return the alternatives that no cheaper one can replace."""
    kept: list[int] = []
    for index in sorted(group, key=lambda index: problem.alternatives[index].cost):
        alternative = problem.alternatives[index]
        if not any(replaces(problem.alternatives[other], alternative, table) for other in kept):
            kept.append(index)
    return kept


def replaces(better: Alternative, worse: Alternative, table: ReorderTable) -> bool:
    """Return whether `better`, with reorders between its formats and those of `worse`, is never dearer than `worse`."""
    budget = worse.cost - better.cost
    for tensor, fmt in worse.writes.items():
        if tensor not in better.writes:
            return False
        budget -= table[tensor].distance(better.writes[tensor], fmt)
        if budget < 0.0:
            return False
    for tensor, formats in better.reads.items():
        available = worse.reads.get(tensor, ())
        for fmt in dict.fromkeys(fmt for fmt in formats if fmt not in available):
            budget -= min((table[tensor].distance(src, fmt) for src in available), default=math.inf)
            if budget < 0.0:
                return False
    return True


def _needed_reorders(problem: Problem, alternatives: Sequence[Alternative]) -> dict[Tensor, dict[Reorder, float]]:
    written: dict[Tensor, set[Format]] = {}
    read: dict[Tensor, set[Format]] = {}
    for alternative in alternatives:
        for tensor, fmt in alternative.writes.items():
            written.setdefault(tensor, set()).add(fmt)
        for tensor, formats in alternative.reads.items():
            read.setdefault(tensor, set()).update(formats)
    needed = {}
    for tensor, reorders in problem.reorders.items():
        ends = frozenset(written.get(tensor, ())), frozenset(read.get(tensor, ()))
        pairs = _between(tuple(reorders.items()), *ends)
        if pairs:
            needed[tensor] = dict(pairs)
    return needed


@lru_cache(maxsize=1024)
def _between(
    reorders: tuple[tuple[Reorder, float], ...], written: frozenset[Format], read: frozenset[Format]
) -> Mapping[Reorder, float]:
    if not written or not read or (len(written) == 1 and written == read):
        return {}
    pairs = {pair: cost for pair, cost in reorders if pair[0] != pair[1]}
    formats = list(dict.fromkeys(fmt for pair in pairs for fmt in pair))
    for middle in formats:
        if middle not in written and middle not in read:
            around = {pair: cost for pair, cost in pairs.items() if middle not in pair}
            if _goes_around(middle, pairs, tensor_reorders(tuple(around.items()))):
                pairs = around
    chains = tensor_reorders(tuple(pairs.items()))
    return {pair: cost for pair, cost in pairs.items() if not _has_detour(pair, cost, formats, chains)}


def _has_detour(pair: Reorder, cost: float, formats: list[Format], chains: TensorReorders) -> bool:
    """Whether a chain of two or more reorders costs no more than a single one.

    Both halves must cost something: then each reorder of the chain is cheaper than the single one, so the chains
    remain when all single reorders with a chain are removed.
    """
    for middle in formats:
        first, second = chains.distance(pair[0], middle), chains.distance(middle, pair[1])
        if first > 0.0 and second > 0.0 and first + second <= cost:
            return True
    return False


def _goes_around(middle: Format, pairs: dict[Reorder, float], around: TensorReorders) -> bool:
    """Whether each tree through `middle` can be replaced by chains around it that cost no more."""
    onward = [(dst, cost) for (src, dst), cost in pairs.items() if src == middle]
    for (src, dst), entry in pairs.items():
        if dst == middle:
            extra = (max(0.0, around.distance(src, leaf) - cost) for leaf, cost in onward if leaf != src)
            if sum(extra) > entry:
                return False
    return True


#: relative precision of HiGHS's objective
_TOLERANCE = 1e-6

#: a choice is improved until this many rounds in a row gain less than this share of its cost. A round takes half a
#: second for 8 000 alternatives
_VAIN_ROUNDS, _LITTLE_SHARE = 3, 1e-4

#: seconds that an alternative takes in the program before it begins (Zen 4: i-RevNet-301, 6 000 alternatives, 0.6 s)
_PROGRAM_SECONDS = 1e-4


def solve(problem: Problem, time_limit: float = 10.0, baseline: Sequence[int] | None = None) -> Solution:
    """Find the choice of alternatives that is cheapest together with its reorders.

    `time_limit`: seconds, or infinity. At their end, the best choice so far is returned with its proved bound. It takes
    longer only if no choice has been found by then. Raises GraphError if the problem is invalid; see
    :meth:`Problem.check`, and PassError if there is no solution, or `baseline` is not a solution. The message names the
    conflicting op or tensor.

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
        search.improve()
        search.prove()
    return search.solution(time.monotonic() - start)


class _Search:
    """State of a search: the best choice and the best bound so far."""

    def __init__(self, problem: Problem, deadline: float) -> None:
        self._problem = problem
        self._deadline = deadline
        self._table = ReorderTable(problem.reorders)
        self._reduced, self._kept = prune(problem)
        self._chosen: tuple[int, ...] = ()
        self._objective = math.inf
        self._bound = _share_bound(self._reduced)

    def offer(self, chosen: Collection[int]) -> None:
        """Keep a choice if it is better than the best one so far."""
        objective = evaluate(self._problem, chosen, cheapest_conversions(self._problem, chosen, self._table))
        if objective < self._objective:
            self._chosen, self._objective = tuple(sorted(chosen)), objective

    def eliminate(self) -> bool:
        """Find the best choice of a narrow problem; return whether the problem is narrow."""
        found = eliminate(self._reduced, self._table) if self._remaining() > 0.0 else None
        if found is None:
            return False
        chosen, self._bound = found
        self.offer(self._original(chosen))
        return True

    def start(self) -> None:
        """Make a first choice: the unit of the program's costs, and the result if the program finds none."""
        chosen = _greedy(self._reduced, self._table)
        if chosen is None:
            from fmtprop.passes.optimal.feasible import find_feasible  # imports SciPy, which is rarely needed

            chosen = find_feasible(self._reduced, self._table)
        self.offer(self._original(chosen))

    def improve(self) -> None:
        """Choose most ops anew, again and again; in each round, other ops keep their alternatives."""
        kept: Counter[Variable] = Counter()
        vain = 0
        while vain < _VAIN_ROUNDS and self._remaining() > 0.0:
            before = self._objective
            found = improve(self._reduced, self._table, self._undominated(self._chosen), kept)
            if found is not None:
                self.offer(self._original(found))
            vain = 0 if self._objective < (1 - _LITTLE_SHARE) * before else vain + 1

    def prove(self) -> None:
        """Find the best choice and a bound by the program, if there is time to set it up."""
        if self._remaining() < _PROGRAM_SECONDS * len(self._reduced.alternatives):
            return
        from fmtprop.passes.optimal.program import AssignmentProgram  # imports SciPy

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
        """Return the best choice with its proved bound."""
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

    def _undominated(self, chosen: Collection[int]) -> list[int]:
        """Return the same choice in the pruned problem, with alternatives that replace the pruned ones."""
        place_of = {index: place for place, index in enumerate(self._kept)}
        others: dict[frozenset[str], list[int]] = {}
        for place, alternative in enumerate(self._reduced.alternatives):
            others.setdefault(frozenset(alternative.covers), []).append(place)

        def replacement(worse: Alternative) -> int:
            alternatives = self._reduced.alternatives
            places = others[frozenset(worse.covers)]
            return next(place for place in places if replaces(alternatives[place], worse, self._table))

        return [
            place_of[index] if index in place_of else replacement(self._problem.alternatives[index]) for index in chosen
        ]

    def _remaining(self) -> float:
        return self._deadline - time.monotonic()


def _share_bound(problem: Problem) -> float:
    """Return a lower bound: the sum of the ops' least costs; covered ops share an alternative's cost equally."""
    return math.fsum(
        min(problem.alternatives[index].cost / len(problem.alternatives[index].covers) for index in indices)
        for indices in problem.covering().values()
    )


def _greedy(problem: Problem, table: ReorderTable) -> tuple[int, ...] | None:
    """Choose for each op in turn the cheapest alternative, given the choices before; None if that cannot be executed.

    The best results come from ops in topological order. On i-RevNet-301, a wide network, it is within 0.3 %.
    """
    covering = problem.covering()
    executed: set[str] = set()
    written: dict[Tensor, Format] = {}
    chosen = []
    for op in problem.ops:
        if op in executed:
            continue
        price, best = math.inf, None
        for index in covering[op]:
            alternative = problem.alternatives[index]
            if executed.isdisjoint(alternative.covers):
                seconds = alternative.cost + sum(
                    table[tensor].distance(written[tensor], fmt)
                    for tensor, formats in alternative.reads.items()
                    if tensor in written
                    for fmt in formats
                )
                if seconds / len(alternative.covers) < price:
                    price, best = seconds / len(alternative.covers), index
        if best is None:
            return None
        chosen.append(best)
        executed.update(problem.alternatives[best].covers)
        written.update(problem.alternatives[best].writes)
    try:
        evaluate(problem, chosen, cheapest_conversions(problem, chosen, table))
    except PassError:
        return None
    return tuple(sorted(chosen))
