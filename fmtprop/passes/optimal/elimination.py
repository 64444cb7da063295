"""The exact assignment of narrow problems, by eliminating one variable after the other.

Owns variables, the tables over them, and their order. The choice for an op affects only its neighbours. So the op can
be eliminated: a table has its best alternative for all choices of the neighbours. Networks are mostly chains with a
few parallel branches and never need a large table. If a table would be too large, :func:`eliminate` gives up, and
:func:`improve` keeps a few variables at the values of a known choice, so that the best choice of all others is found.

References
----------
R. Dechter, "Bucket elimination: a unifying framework for reasoning", Artificial Intelligence 113 (1999).
A. Anderson and D. Gregg, "Optimal DNN primitive selection with partitioned boolean quadratic programming", CGO 2018:
the same reductions, of up to two neighbours.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from fmtprop.passes.optimal.conversions import ReorderTable, TensorReorders
from fmtprop.passes.optimal.problem import Format, Problem, Tensor, find_cycle

#: an op (its values are the alternatives that cover it), or a tensor (its values are the sets of formats that it has)
Variable: TypeAlias = Hashable
Formats: TypeAlias = frozenset[Format]

#: limits of a narrow problem: entries of all tables together, and sets of formats of a tensor (some tenths of a
#: second)
_MANY_ENTRIES, _MANY_SETS = 1 << 24, 128

#: entries of one table while a choice is improved: with a larger one, a variable keeps its value
LARGE_TABLE = 1 << 15


class _TooWideError(Exception):
    """A table would be too large, or tables cannot express the problem."""


@dataclass(frozen=True, eq=False)
class _Table:
    """Seconds for each combination of values: a part of the objective, with one axis per variable."""

    scope: tuple[Variable, ...]
    seconds: np.ndarray


def eliminate(problem: Problem, reorders: ReorderTable) -> tuple[tuple[int, ...], float] | None:
    """Find the cheapest choice of alternatives of a narrow problem.

    Result: the best choice, ascending, and its seconds, which are the lower bound and equal those of :func:`evaluate`
    within rounding. None if the problem is too wide or has no solution, or if alternatives of the choice wait for each
    other.
    """
    return _found(problem, problem.covering(), reorders)


def improve(
    problem: Problem, reorders: ReorderTable, chosen: Collection[int], kept: Counter[Variable]
) -> tuple[int, ...] | None:
    """Find a choice that is at least as cheap as a known one; most ops are chosen anew, together.

    Result: the choice, ascending. None if tables cannot express the problem, or if alternatives of the choice wait for
    each other.
    """
    known = set(chosen)
    # the first value of each variable is that of the known choice
    covering = {op: sorted(indices, key=lambda index: index not in known) for op, indices in problem.covering().items()}
    found = _found(problem, covering, reorders, kept)
    return None if found is None else found[0]


def _found(
    problem: Problem,
    covering: Mapping[str, Sequence[int]],
    reorders: ReorderTable,
    kept: Counter[Variable] | None = None,
) -> tuple[tuple[int, ...], float] | None:
    tables = [*_of_ops(problem, covering)]
    try:
        tables += _of_tensors(problem, covering, reorders, is_exact=kept is None)
        best = _minimum(tables, kept)
    except _TooWideError:
        return None
    if best is None:
        return None
    values, least = best
    chosen = tuple(sorted({indices[values[op]] for op, indices in covering.items()}))
    return None if find_cycle(problem, chosen) else (chosen, least)


def _of_ops(problem: Problem, covering: Mapping[str, Sequence[int]]) -> Iterator[_Table]:
    """Yield the costs of alternatives, and the rule that one for several ops is chosen for all or none of them."""
    covers = [alternative.covers for alternative in problem.alternatives]
    for op, indices in covering.items():
        own = [problem.alternatives[index].cost if covers[index][0] == op else 0.0 for index in indices]
        yield _Table((op,), np.array(own))
        for first in dict.fromkeys(covers[index][0] for index in indices):
            if first != op:
                apart = [
                    [math.inf if one != two and (op in covers[one] or first in covers[two]) else 0.0 for two in indices]
                    for one in covering[first]
                ]
                yield _Table((first, op), np.array(apart))


def _of_tensors(
    problem: Problem, covering: Mapping[str, Sequence[int]], reorders: ReorderTable, *, is_exact: bool
) -> Iterator[_Table]:
    """Yield the costs of each tensor's reorders."""
    writers: dict[Tensor, set[str]] = {}
    readers: dict[Tensor, dict[str, None]] = {}
    for alternative in problem.alternatives:
        for tensor in alternative.writes:
            writers[tensor] = writers.get(tensor, set(alternative.covers)) & set(alternative.covers)
        for tensor, formats in alternative.reads.items():
            if formats:
                readers.setdefault(tensor, {})[alternative.covers[0]] = None
    for tensor, ops in readers.items():
        common = writers.get(tensor, set()) - set(ops)
        if not common:  # written by one of several ops, or read by the op that writes it
            raise _TooWideError
        writer = min(common)
        written = [problem.alternatives[index].writes.get(tensor) for index in covering[writer]]
        needs = {
            op: [
                frozenset(problem.alternatives[index].reads.get(tensor, ()))
                if problem.alternatives[index].covers[0] == op
                else frozenset()
                for index in covering[op]
            ]
            for op in ops
        }
        yield from _of_tensor(tensor, writer, written, needs, reorders[tensor], is_exact=is_exact)


def _of_tensor(
    tensor: Tensor,
    writer: str,
    written: Sequence[Format | None],
    needs: Mapping[str, Sequence[Formats]],
    reorders: TensorReorders,
    *,
    is_exact: bool,
) -> Iterator[_Table]:
    """Yield the costs of reorders from the written format to the needed ones; None means that no op writes it.

    If there are several readers, a variable for the set of all formats of the tensor connects them with the writer.
    Its first value is the union of the readers' first ones.
    """

    def seconds(sets: Sequence[Formats]) -> np.ndarray:
        rows = {fmt: [_seconds(reorders, fmt, wanted) for wanted in sets] for fmt in dict.fromkeys(written)}
        return np.array([rows[fmt] for fmt in written])

    if len(needs) == 1:
        ((reader, wanted),) = needs.items()
        yield _Table((writer, reader), seconds(wanted))
        return
    sets = _unions(needs.values(), is_exact=is_exact)
    made = ("made", tensor)
    yield _Table((writer, made), seconds(sets))
    for reader, wanted in needs.items():
        serves = [[0.0 if one <= some else math.inf for one in wanted] for some in sets]
        yield _Table((made, reader), np.array(serves))


def _seconds(reorders: TensorReorders, written: Format | None, wanted: Formats) -> float:
    if not wanted:
        return 0.0
    return math.inf if written is None else reorders.tree(written, wanted)[0]


def _unions(needs: Collection[Sequence[Formats]], *, is_exact: bool) -> list[Formats]:
    """Return the possible sets of formats that all readers together need; if not `is_exact`, only some of many."""
    sets: dict[Formats, None] = {frozenset(): None}
    for wanted in needs:
        sets = dict.fromkeys(some | one for some in sets for one in dict.fromkeys(wanted))
        if len(sets) > _MANY_SETS:
            if is_exact:
                raise _TooWideError
            sets = dict.fromkeys(sorted(sets, key=len)[:_MANY_SETS])
    first = frozenset[Format]().union(*(wanted[0] for wanted in needs))
    return list(dict.fromkeys((first, *sets)))


def _minimum(tables: Iterable[_Table], kept: Counter[Variable] | None) -> tuple[dict[Variable, int], float] | None:
    """Return the values of all variables that minimise the tables' sum, and the minimum; None if it is infinite.

    With `kept`, a variable keeps its first value if a table would be too large otherwise.
    """
    around: dict[Variable, list[_Table]] = {}
    values: dict[Variable, int] = {}
    least, work = 0.0, 0
    for whole in tables:
        values.update(dict.fromkeys(whole.scope, 0))
        # variables without a choice would only use up NumPy's limit of axes
        table = _Table(tuple(v for v, size in _sizes([whole]).items() if size > 1), whole.seconds.squeeze())
        least += 0.0 if table.scope else float(table.seconds)
        for variable in table.scope:
            around.setdefault(variable, []).append(table)
    number = {variable: position for position, variable in enumerate(around)}  # decides between equal sizes
    queue = [(_entries(found), number[variable], variable) for variable, found in around.items()]
    heapq.heapify(queue)
    best = []

    def exchange(old: Sequence[_Table], new: Iterable[_Table]) -> None:
        """Put tables over the other variables into the place of some."""
        nonlocal least
        for left in new:
            if not left.scope:
                least += float(left.seconds)
            for other in left.scope:
                around[other].append(left)
        for other in dict.fromkeys(v for table in old for v in table.scope if v in around):
            around[other] = [table for table in around[other] if table not in old]
            heapq.heappush(queue, (_entries(around[other]), number[other], other))

    while queue:
        entries, _, variable = heapq.heappop(queue)
        if variable not in around or entries != _entries(around[variable]):
            continue  # eliminated, or queued again since
        if kept is not None and entries > LARGE_TABLE:
            scope = dict.fromkeys(v for table in around[variable] for v in table.scope)
            hub = min(scope, key=lambda v: (kept[v], -_entries(around[v]), number[v]))
            kept[hub] += 1
            found = around.pop(hub)
            exchange(found, [_at_first(table, hub) for table in found])
            if variable in around:
                heapq.heappush(queue, (_entries(around[variable]), number[variable], variable))
            continue
        work += entries
        if work > _MANY_ENTRIES and kept is None:
            raise _TooWideError
        found = around.pop(variable)
        scope_left, seconds = _sum(found, variable)
        best.append((variable, scope_left, seconds.argmin(axis=-1)))
        exchange(found, [_Table(scope_left, seconds.min(axis=-1))])
    if least == math.inf:
        return None
    for variable, scope_left, choice in reversed(best):
        values[variable] = int(choice[tuple(values[other] for other in scope_left)])
    return values, least


def _at_first(table: _Table, variable: Variable) -> _Table:
    """Return the part of a table in which a variable has its first value."""
    axis = table.scope.index(variable)
    return _Table(table.scope[:axis] + table.scope[axis + 1 :], table.seconds.take(0, axis))


def _sizes(tables: Iterable[_Table]) -> dict[Variable, int]:
    return {variable: size for table in tables for variable, size in zip(table.scope, table.seconds.shape, strict=True)}


def _entries(tables: Iterable[_Table]) -> int:
    """Return the number of entries of the sum of tables."""
    return math.prod(_sizes(tables).values())


def _sum(tables: Sequence[_Table], last: Variable) -> tuple[tuple[Variable, ...], np.ndarray]:
    """Add tables; return the variables but `last`, and the sum with an axis for each and the last for `last`."""
    sizes = _sizes(tables)
    scope = tuple(variable for variable in sizes if variable != last)
    axes = {variable: axis for axis, variable in enumerate((*scope, last))}
    total = np.zeros([sizes[variable] for variable in axes])
    for table in tables:
        order = sorted(range(len(table.scope)), key=lambda axis: axes[table.scope[axis]])
        shape = [sizes[variable] if variable in table.scope else 1 for variable in axes]
        total += table.seconds.transpose(order).reshape(shape)
    return scope, total
