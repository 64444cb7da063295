"""The cheapest reorders from the format that a tensor's producer writes to all formats that are needed.

Owns shortest chains of reorders and the cheapest tree of them (a directed Steiner arborescence, by the dynamic program
of Dreyfus and Wagner). Must not know ops: the caller knows writers and readers.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from functools import lru_cache

from fmtprop.errors import PassError
from fmtprop.passes.optimal.problem import Format, Problem, Reorder, Tensor, check_cover

Tree = tuple[float, tuple[Reorder, ...]]
_IMPOSSIBLE: Tree = (math.inf, ())


class TensorReorders:
    """The reorders of one tensor, with a cache of results.

    S. E. Dreyfus and R. A. Wagner, "The Steiner problem in graphs", Networks 1 (1971).
    """

    def __init__(self, reorders: Mapping[Reorder, float]) -> None:
        self._reorders = reorders
        self._formats = list(dict.fromkeys(fmt for pair in reorders for fmt in pair))
        self._trees: dict[tuple[Format, frozenset[Format]], Tree] = {}
        self._distances, self._next = _shortest_chains(self._formats, reorders)

    def distance(self, src: Format, dst: Format) -> float:
        """Price the cheapest chain of reorders."""
        return 0.0 if src == dst else self._distances.get((src, dst), math.inf)

    def tree(self, root: Format, needs: frozenset[Format]) -> Tree:
        """Find the cheapest reorders that make all of `needs` from `root`.

        Result: seconds, and the reorders in an executable order; infinite seconds and no reorders if it is impossible.
        """
        terminals = needs - {root}
        if not terminals:
            return (0.0, ())
        key = (root, terminals)
        if key not in self._trees:
            self._trees[key] = self._grow(root, terminals)
        return self._trees[key]

    def _grow(self, root: Format, terminals: frozenset[Format]) -> Tree:
        if any(self.distance(root, fmt) == math.inf for fmt in terminals):
            return _IMPOSSIBLE
        if len(terminals) == 1:
            arcs = self._chain(root, next(iter(terminals)))
        else:
            arcs = self._steiner(root, [fmt for fmt in self._formats if fmt in terminals])
        ordered = _in_order(root, arcs, terminals)
        return (math.fsum(self._reorders[pair] for pair in ordered), ordered)

    def _chain(self, src: Format, dst: Format) -> list[Reorder]:
        arcs = []
        while src != dst:
            step = self._next[src, dst]
            arcs.append((src, step))
            src = step
        return arcs

    def _steiner(self, root: Format, terminals: list[Format]) -> list[Reorder]:
        """Combine, for each set of terminals and each format, the best split at a format with the best chain to it."""
        full = (1 << len(terminals)) - 1
        best: list[dict[Format, float]] = [{}]
        split: list[dict[Format, int]] = [{}]
        hop: list[dict[Format, Format]] = [{}]
        for mask in range(1, full + 1):
            joined, parts = _split_costs(mask, self._formats, best, terminals)
            here: dict[Format, float] = {}
            via: dict[Format, Format] = {}
            for fmt in self._formats:
                via[fmt] = min(joined, key=lambda mid, fmt=fmt: self.distance(fmt, mid) + joined[mid])  # type: ignore[misc]
                here[fmt] = self.distance(fmt, via[fmt]) + joined[via[fmt]]
            best.append(here)
            split.append(parts)
            hop.append(via)
        arcs: list[Reorder] = []
        todo = [(full, root)]
        while todo:
            mask, fmt = todo.pop()
            middle = hop[mask][fmt]
            arcs += self._chain(fmt, middle)
            if mask & (mask - 1):
                part = split[mask][middle]
                todo += [(part, middle), (mask ^ part, middle)]
        return arcs


@lru_cache(maxsize=1024)
def tensor_reorders(reorders: tuple[tuple[Reorder, float], ...]) -> TensorReorders:
    """Return `TensorReorders` of (reorder, seconds) pairs, cached because many tensors have equal ones."""
    return TensorReorders(dict(reorders))


class ReorderTable:
    """The reorders of every tensor of a problem, computed on request."""

    def __init__(self, reorders: Mapping[Tensor, Mapping[Reorder, float]]) -> None:
        self._reorders = reorders
        self._tensors: dict[Tensor, TensorReorders] = {}

    def __getitem__(self, tensor: Tensor) -> TensorReorders:
        if tensor not in self._tensors:
            self._tensors[tensor] = tensor_reorders(tuple(self._reorders.get(tensor, {}).items()))
        return self._tensors[tensor]


def cheapest_conversions(
    problem: Problem, chosen: Collection[int], table: ReorderTable | None = None
) -> dict[Tensor, tuple[Reorder, ...]]:
    """Find the cheapest reorders that make a choice of alternatives executable.

    `table`: the table of this problem, to share its cache. Result: in an executable order, none of them useless.
    Tensors that need no reorder are absent.
    """
    check_cover(problem, chosen)
    table = table or ReorderTable(problem.reorders)
    alternatives = [problem.alternatives[index] for index in sorted(chosen)]
    written = {tensor: fmt for alternative in alternatives for tensor, fmt in alternative.writes.items()}
    needs: dict[Tensor, set[Format]] = {}
    for alternative in alternatives:
        for tensor, formats in alternative.reads.items():
            needs.setdefault(tensor, set()).update(formats)
    conversions = {}
    for tensor, wanted in needs.items():
        if not wanted:
            continue
        if tensor not in written:
            raise PassError(f"optimal: {tensor} is read, but none of the chosen alternatives writes it")
        seconds, reorders = table[tensor].tree(written[tensor], frozenset(wanted))
        if seconds == math.inf:
            missing = [fmt for fmt in wanted if table[tensor].distance(written[tensor], fmt) == math.inf]
            names = ", ".join(sorted(map(str, missing)))
            raise PassError(
                f"optimal: {tensor} is written in {written[tensor]} and needed in {names}; no reorders lead there"
            )
        if reorders:
            conversions[tensor] = reorders
    return conversions


def _shortest_chains(
    formats: list[Format], reorders: Mapping[Reorder, float]
) -> tuple[dict[Reorder, float], dict[Reorder, Format]]:
    """Floyd's and Warshall's algorithm: seconds of the cheapest chain, and its first step."""
    seconds = {pair: cost for pair, cost in reorders.items() if pair[0] != pair[1]}
    step = {pair: pair[1] for pair in seconds}
    for mid in formats:
        for src in formats:
            first = seconds.get((src, mid))
            if first is None:
                continue
            for dst in formats:
                second = seconds.get((mid, dst))
                if second is not None and src != dst and first + second < seconds.get((src, dst), math.inf):
                    seconds[src, dst] = first + second
                    step[src, dst] = step[src, mid]
    return seconds, step


def _split_costs(
    mask: int, formats: list[Format], best: list[dict[Format, float]], terminals: list[Format]
) -> tuple[dict[Format, float], dict[Format, int]]:
    """Return the costs of two subtrees from one format that serve `mask`, and the terminals of the first."""
    if not mask & (mask - 1):
        return {terminals[mask.bit_length() - 1]: 0.0}, {}
    lowest = mask & -mask
    joined: dict[Format, float] = {}
    parts: dict[Format, int] = {}
    part = (mask - 1) & mask
    while part:
        if part & lowest:
            for fmt in formats:
                cost = best[part][fmt] + best[mask ^ part][fmt]
                if cost < joined.get(fmt, math.inf):
                    joined[fmt], parts[fmt] = cost, part
        part = (part - 1) & mask
    return joined or {formats[0]: math.inf}, parts


def _in_order(root: Format, arcs: list[Reorder], terminals: frozenset[Format]) -> tuple[Reorder, ...]:
    """Order reorders for execution, without those that make a known or an unneeded format.

    Only reorders without cost can be superfluous here: a cheapest tree has no other superfluous ones.
    """
    outgoing: dict[Format, list[Format]] = {}
    for src, dst in arcs:
        outgoing.setdefault(src, []).append(dst)
    made, order = {root}, []
    todo = [root]
    for src in todo:
        for dst in outgoing.get(src, ()):
            if dst not in made:
                made.add(dst)
                order.append((src, dst))
                todo.append(dst)
    wanted, kept = set(terminals), []
    for src, dst in reversed(order):
        if dst in wanted:
            wanted.add(src)
            kept.append((src, dst))
    return tuple(reversed(kept))
