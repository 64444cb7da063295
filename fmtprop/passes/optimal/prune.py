"""Removal of dominated alternatives, formats and reorders from a problem.

Owns the three rules of dominance below; each keeps at least one optimal choice. Removed are:

* A reorder that is not cheaper than a chain of others.
* A format that no alternative reads or writes, if chains through it are not cheaper than chains around it.
* An alternative, if another one executes the same ops and is not dearer together with reorders between their formats.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

from fmtprop.passes.optimal.conversions import ReorderTable, TensorReorders, tensor_reorders
from fmtprop.passes.optimal.problem import Alternative, Format, Problem, Reorder, Tensor


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
