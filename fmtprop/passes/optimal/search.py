"""Good choices without a proof: a greedy start, and improvements by steepest descent.

Owns the start solution of the exact solver, which is also its result when its time ends. Must not know linear
programs.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Collection, Iterable

from fmtprop.passes.optimal.conversions import ReorderTable
from fmtprop.passes.optimal.problem import Format, Problem, Tensor, find_cycle


class PartialSolution:
    """A choice under construction, with its cost.

    Parameters
    ----------
    problem : Problem
        As it was checked.
    table : ReorderTable
        Of this problem.
    chosen : collection of int, optional
        Alternatives to begin with, without two that cover the same op.
    """

    def __init__(self, problem: Problem, table: ReorderTable, chosen: Collection[int] = ()) -> None:
        self._problem = problem
        self._table = table
        self.by_op: dict[str, int] = {}
        self._written: dict[Tensor, Format] = {}
        self._needs: dict[Tensor, Counter[Format]] = {}
        self._seconds: dict[Tensor, float] = {}
        self.apply((), chosen)

    def chosen(self) -> tuple[int, ...]:
        """Return the chosen alternatives, ascending."""
        return tuple(sorted(set(self.by_op.values())))

    def change(self, removed: Iterable[int], added: Iterable[int]) -> float:
        """Return the cost of a change without making it.

        Returns
        -------
        float
            Seconds that it adds (negative if it saves); infinite if a tensor could not be made afterwards.
        """
        seconds, tensors = self._after(removed, added)
        return seconds + sum(after - self._seconds.get(tensor, 0.0) for tensor, after in tensors.items())

    def apply(self, removed: Iterable[int], added: Iterable[int]) -> None:
        """Make a change."""
        removed, added = tuple(removed), tuple(added)
        self._seconds.update(self._after(removed, added)[1])
        for index in removed:
            alternative = self._problem.alternatives[index]
            for op in alternative.covers:
                del self.by_op[op]
            for tensor in alternative.writes:
                del self._written[tensor]
            for tensor, formats in alternative.reads.items():
                self._needs[tensor].subtract(formats)
        for index in added:
            alternative = self._problem.alternatives[index]
            self.by_op.update(dict.fromkeys(alternative.covers, index))
            self._written.update(alternative.writes)
            for tensor, formats in alternative.reads.items():
                self._needs.setdefault(tensor, Counter()).update(formats)

    def _after(self, removed: Iterable[int], added: Iterable[int]) -> tuple[float, dict[Tensor, float]]:
        """Return the additional seconds of the ops, and the seconds of the reorders of each affected tensor."""
        seconds = 0.0
        writes: dict[Tensor, Format | None] = {}
        reads: dict[Tensor, Counter[Format]] = {}
        for sign, indices in ((-1, removed), (1, added)):
            for index in indices:
                alternative = self._problem.alternatives[index]
                seconds += sign * alternative.cost
                for tensor, fmt in alternative.writes.items():
                    writes[tensor] = fmt if sign > 0 else None
                for tensor, formats in alternative.reads.items():
                    if tensor not in reads:
                        reads[tensor] = Counter(self._needs.get(tensor, ()))
                    for fmt in formats:
                        reads[tensor][fmt] += sign
        tensors = {}
        for tensor in {**writes, **reads}:
            needs = reads.get(tensor) or self._needs.get(tensor, Counter())
            root = writes[tensor] if tensor in writes else self._written.get(tensor)
            tensors[tensor] = self._price(tensor, root, frozenset(fmt for fmt, count in needs.items() if count > 0))
        return seconds, tensors

    def _price(self, tensor: Tensor, root: Format | None, needs: frozenset[Format]) -> float:
        if not needs:
            return 0.0
        return math.inf if root is None else self._table[tensor].tree(root, needs)[0]


def greedy(problem: Problem, table: ReorderTable) -> tuple[int, ...] | None:
    """Choose for each op in turn the cheapest alternative, given the choices already made.

    Parameters
    ----------
    problem : Problem
        As it was checked. Ops in topological order give the best results.
    table : ReorderTable
        Of this problem.

    Returns
    -------
    tuple of int or None
        A choice that can be executed; None if this simple rule finds none.
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
    possible = PartialSolution(problem, table).change((), chosen) < math.inf and not find_cycle(problem, chosen)
    return tuple(sorted(chosen)) if possible else None


def descend(problem: Problem, table: ReorderTable, chosen: Collection[int], deadline: float) -> tuple[int, ...]:
    """Exchange alternatives for better ones, one at a time, until no exchange helps or the time ends.

    Parameters
    ----------
    problem : Problem
        As it was checked.
    table : ReorderTable
        Of this problem.
    chosen : collection of int
        A choice that can be executed.
    deadline : float
        End of the time, by `time.monotonic`.

    Returns
    -------
    tuple of int
        A choice that can be executed and is not worse.
    """
    state = PartialSolution(problem, table, chosen)
    singles = {
        op: [index for index in indices if len(problem.alternatives[index].covers) == 1]
        for op, indices in problem.covering().items()
    }
    least = -1e-9 * max((alternative.cost for alternative in problem.alternatives), default=0.0)
    improved = True
    while improved:
        improved = False
        for index in range(len(problem.alternatives)):
            if time.monotonic() > deadline:
                return state.chosen()
            removed, added = _exchange(problem, state, index, singles)
            if index in removed or not added or state.change(removed, added) >= least:
                continue
            state.apply(removed, added)
            if len(added) + len(removed) > 2 and find_cycle(problem, state.chosen()):
                state.apply(added, removed)
            else:
                improved = True
    return state.chosen()


def _exchange(
    problem: Problem, state: PartialSolution, index: int, singles: dict[str, list[int]]
) -> tuple[list[int], list[int]]:
    """Find the alternatives to remove and to add if one alternative is added (with others for uncovered ops).

    Ops become uncovered if a removed region covers more ops than the alternative; nothing is added if that fails.
    """
    covers = problem.alternatives[index].covers
    removed = sorted({state.by_op[op] for op in covers})
    added = [index]
    for other in removed:
        for op in problem.alternatives[other].covers:
            if op in covers:
                continue
            if not singles[op]:
                return removed, []
            added.append(min(singles[op], key=lambda single: state.change(removed, [*added, single])))
    return removed, added
