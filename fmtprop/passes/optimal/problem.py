"""The assignment problem as pure data: alternatives of ops, formats of tensors, costs of reorders.

Owns problems and solutions, the rules of a valid problem, and the cost of a solution. Must not know graphs, targets or
torch: an op is a name, tensors and formats are any hashable objects, and a cost is a number of seconds.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from fmtprop.errors import GraphError, PassError

Tensor: TypeAlias = Hashable
Format: TypeAlias = Hashable
Reorder: TypeAlias = tuple[Format, Format]
Conversions: TypeAlias = Mapping[Tensor, tuple[Reorder, ...]]


@dataclass(frozen=True)
class Alternative:
    """One way to execute one op, or several together."""

    #: the ops that it executes: usually one, two for a fused pair
    covers: tuple[str, ...]
    #: formats in which it needs each tensor. A tensor that is read twice may be needed in two formats.
    reads: Mapping[Tensor, tuple[Format, ...]]
    #: formats of the tensors that it produces, without tensors inside a fused region
    writes: Mapping[Tensor, Format]
    cost: float
    #: any object of the enumerator; ignored in comparisons
    payload: Any = field(default=None, compare=False)


@dataclass(frozen=True)
class Problem:
    """Ops to execute, the ways to execute them, and the costs of changing a tensor's format.

    A convolution that is faster in a blocked format, between a plain input and a plain output:

    >>> problem = Problem(
    ...     ops=("x", "conv", "y"),
    ...     alternatives=(
    ...         Alternative(("x",), {}, {"x.dst": "abcd"}, 0.0),
    ...         Alternative(("conv",), {"x.dst": ("abcd",)}, {"conv.dst": "abcd"}, 9e-6),
    ...         Alternative(("conv",), {"x.dst": ("aBcd8b",)}, {"conv.dst": "aBcd8b"}, 4e-6),
    ...         Alternative(("y",), {"conv.dst": ("abcd",)}, {}, 0.0),
    ...     ),
    ...     reorders={
    ...         "x.dst": {("abcd", "aBcd8b"): 1e-6},
    ...         "conv.dst": {("aBcd8b", "abcd"): 1e-6},
    ...     },
    ... )
    >>> problem.check()
    >>> conversions = {"x.dst": (("abcd", "aBcd8b"),), "conv.dst": (("aBcd8b", "abcd"),)}
    >>> round(evaluate(problem, (0, 2, 3), conversions) * 1e6, 3)
    6.0
    """

    #: exactly one chosen alternative must cover each op. Inputs of the graph are ops that only write, outputs ops that
    #: only read. A user's pin removes alternatives.
    ops: tuple[str, ...]
    alternatives: tuple[Alternative, ...]
    #: seconds; a missing pair is impossible
    reorders: Mapping[Tensor, Mapping[Reorder, float]]

    def check(self) -> None:
        """Refuse an invalid problem, before it is solved.

        Raises GraphError if an alternative covers nothing, the same op twice or an unknown op, or reads a tensor that
        it writes itself; a cost is negative or not finite; two alternatives that can be chosen together write one
        tensor; all the ways to execute an op read a tensor that no alternative writes, and PassError if no alternative
        covers an op.
        """
        _check_ops(self)
        _check_costs(self)
        _check_writers(self)
        _check_readers(self)

    def covering(self) -> dict[str, list[int]]:
        """Find the alternatives of each op.

        Result: indices into `alternatives`, in order; the keys are in the order of `ops`.
        """
        found: dict[str, list[int]] = {op: [] for op in self.ops}
        for index, alternative in enumerate(self.alternatives):
            for op in alternative.covers:
                found[op].append(index)
        return found


@dataclass(frozen=True)
class Solution:
    """A choice, its cost, and a bound that proves its quality.

    The proof is made in floating point: if the objective is within a relative 1e-6 of the solver's bound, the choice
    is called optimal, and its objective becomes the bound.
    """

    #: indices into `Problem.alternatives`, ascending; each op is covered exactly once
    chosen: tuple[int, ...]
    #: the reorders to execute, each after the one that makes its source. Tensors without reorders are absent.
    conversions: Conversions
    #: `objective`, `bound`: seconds: the cost of the choice, and a lower bound of the cost of all choices
    objective: float
    bound: float
    #: ``(objective - bound) / objective``, or 0 if the objective is 0
    gap: float
    seconds: float
    #: whether the choice is proved to be the best: the gap is 0
    optimal: bool


def keeping(problem: Problem, tensors: Collection[Tensor]) -> Problem:
    """Return the problem without reorders of some tensors, which are read in the format in which they are written."""
    if not tensors:
        return problem
    return replace(problem, reorders={**problem.reorders, **{tensor: {} for tensor in tensors}})


def evaluate(problem: Problem, chosen: Collection[int], conversions: Conversions) -> float:
    """Return the cost of a choice; refuse one that cannot be executed.

    `conversions`: the reorders to execute, in order.
    """
    check_cover(problem, chosen)
    cycle = find_cycle(problem, chosen)
    if cycle:
        regions = " → ".join("+".join(problem.alternatives[index].covers) for index in cycle)
        raise PassError(f"optimal: {regions} wait for each other's results; one of them must be executed in parts")
    alternatives = [problem.alternatives[index] for index in sorted(chosen)]
    made: dict[Tensor, set[Format]] = {}
    for alternative in alternatives:
        for tensor, fmt in alternative.writes.items():
            made[tensor] = {fmt}
    costs = [alternative.cost for alternative in alternatives]
    for tensor, reorders in conversions.items():
        for src, dst in reorders:
            if (src, dst) not in problem.reorders.get(tensor, {}):
                raise PassError(f"optimal: {tensor} cannot be reordered from {src} to {dst}: there is no such reorder")
            if src not in made.get(tensor, ()):
                raise PassError(f"optimal: {tensor} is reordered from {src} to {dst} before anything makes it in {src}")
            made[tensor].add(dst)
            costs.append(problem.reorders[tensor][src, dst])
    for alternative in alternatives:
        for tensor, formats in alternative.reads.items():
            for fmt in formats:
                if fmt not in made.get(tensor, ()):
                    raise PassError(f"optimal: {_name(alternative)} reads {tensor} in {fmt}, which nothing makes")
    return math.fsum(costs)


def check_cover(problem: Problem, chosen: Collection[int]) -> None:
    """Refuse a choice that does not execute each op exactly once."""
    executed: set[str] = set()
    for index in chosen:
        if not 0 <= index < len(problem.alternatives):
            raise PassError(f"optimal: {index} is no alternative; there are {len(problem.alternatives)}")
        for op in problem.alternatives[index].covers:
            if op in executed:
                raise PassError(f"optimal: {op} is executed twice; choose one of the alternatives that cover it")
            executed.add(op)
    for op in problem.ops:
        if op not in executed:
            raise PassError(f"optimal: {op} is not executed; choose one of the alternatives that cover it")


def find_cycle(problem: Problem, chosen: Collection[int]) -> tuple[int, ...]:
    """Find alternatives that wait for each other's results (two fused regions can do so)."""
    writer = {tensor: index for index in chosen for tensor in problem.alternatives[index].writes}
    needs = {
        index: {writer[tensor] for tensor in problem.alternatives[index].reads if tensor in writer} for index in chosen
    }
    done: set[int] = set()
    for start in sorted(chosen):
        path: list[int] = []
        waiting: set[int] = set()
        branches: list[Iterator[int]] = [iter((start,))]
        while branches:
            index = next(branches[-1], None)
            if index is None:
                branches.pop()
                if path:
                    done.add(path[-1])
                    waiting.remove(path.pop())
            elif index in waiting:
                return tuple(reversed(path[path.index(index) :]))
            elif index not in done:
                path.append(index)
                waiting.add(index)
                branches.append(iter(sorted(needs[index])))
    return ()


def _check_ops(problem: Problem) -> None:
    if len(set(problem.ops)) != len(problem.ops):
        twice = next(op for op in problem.ops if problem.ops.count(op) > 1)
        raise GraphError(f"optimal: {twice} is listed twice among the ops; name each op once")
    known = set(problem.ops)
    covered: set[str] = set()
    for number, alternative in enumerate(problem.alternatives):
        if not alternative.covers:
            raise GraphError(f"optimal: alternative {number} covers no op; leave it out")
        for op in alternative.covers:
            if op not in known:
                raise GraphError(f"optimal: alternative {number} covers {op}, which is not an op of the problem")
        if len(set(alternative.covers)) != len(alternative.covers):
            raise GraphError(f"optimal: alternative {number} covers an op twice: {', '.join(alternative.covers)}")
        covered.update(alternative.covers)
    for op in problem.ops:
        if op not in covered:
            raise PassError(
                f"optimal: {op} can be executed in no way: no alternative covers it; a pin of its operands or results "
                "may ask for a format that no implementation has (remove it), or no target supports the op"
            )


def _check_costs(problem: Problem) -> None:
    for alternative in problem.alternatives:
        if not 0.0 <= alternative.cost < math.inf:
            raise GraphError(
                f"optimal: {_name(alternative)} costs {alternative.cost} s; a cost is finite and not negative"
            )
    for tensor, pairs in problem.reorders.items():
        for (src, dst), cost in pairs.items():
            if not 0.0 <= cost < math.inf:
                raise GraphError(
                    f"optimal: the reorder of {tensor} from {src} to {dst} costs {cost} s; a cost is finite and not "
                    "negative, and an impossible reorder is left out"
                )


def _check_writers(problem: Problem) -> None:
    writers: dict[Tensor, list[Alternative]] = {}
    for alternative in problem.alternatives:
        for tensor in alternative.writes:
            if tensor in alternative.reads:
                raise GraphError(
                    f"optimal: {_name(alternative)} reads {tensor}, which it writes itself; an "
                    "alternative's internal tensors must not be among its reads"
                )
            writers.setdefault(tensor, []).append(alternative)
    for tensor, group in writers.items():
        if set.intersection(*(set(alternative.covers) for alternative in group)):
            continue
        for position, first in enumerate(group):
            for second in group[:position]:
                if not set(first.covers) & set(second.covers):
                    raise GraphError(
                        f"optimal: {tensor} has two writers that can be chosen together, {_name(second)} and "
                        f"{_name(first)}; a tensor is written by one op"
                    )


def _check_readers(problem: Problem) -> None:
    written = {tensor for alternative in problem.alternatives for tensor in alternative.writes}
    for op, indices in problem.covering().items():
        missing = [_unwritten(problem.alternatives[index], written) for index in indices]
        if all(missing):
            raise GraphError(
                f"optimal: every way to execute {op} reads a tensor that no alternative writes: "
                f"{missing[0][0]}; add the op that produces it"
            )


def _unwritten(alternative: Alternative, written: set[Tensor]) -> Sequence[Tensor]:
    return [tensor for tensor, formats in alternative.reads.items() if formats and tensor not in written]


def _name(alternative: Alternative) -> str:
    return "+".join(alternative.covers)
