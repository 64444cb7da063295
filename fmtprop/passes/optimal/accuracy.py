"""How much larger a plan's rounding errors are than a direct computation's, and the bound that they keep.

Each sum of products in a network adds an error of its own, independent of the others', and by and large of the same
size in relation to its result. So the network's error grows as the root mean square of what that of its sums of
products does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import sqrt

from fmtprop.ir.op import Category, opdef
from fmtprop.passes.optimal.composition import Composition
from fmtprop.passes.optimal.problem import Alternative, Problem
from fmtprop.passes.optimal.ways import Way

__all__ = ["MOST_GROWTH", "growth", "too_rough"]

#: how many times the rounding error of direct convolutions a plan may have, as far as is to be expected
MOST_GROWTH = 1.8


def growth(alternatives: Iterable[Alternative]) -> float:
    """Return how many times a direct computation's rounding error is to be expected of chosen alternatives."""
    squares = [square for alternative in alternatives for square in _squares(alternative)]
    return sqrt(sum(squares) / len(squares)) if squares else 1.0


def too_rough(problem: Problem, chosen: Sequence[int]) -> set[int]:
    """Return the alternatives to be left out so that the rest keeps the bound: those that save least for their error.

    Parameters
    ----------
    problem : Problem
        What was solved.
    chosen : sequence of int
        The alternatives that were chosen.
    """
    alternatives = [problem.alternatives[index] for index in chosen]
    excess = sum(square - MOST_GROWTH**2 for one in alternatives for square in _squares(one))
    worth: list[tuple[float, float, int]] = []
    covering = problem.covering()
    for index in chosen:
        own = problem.alternatives[index]
        finer = [other for i in covering[own.covers[-1]] if _square(other := problem.alternatives[i]) < _square(own)]
        if _square(own) > 1.0 and finer:
            instead = min(finer, key=lambda other: other.cost)
            saved = _square(own) - _square(instead)
            worth.append(((instead.cost - own.cost) / saved, saved, index))
    rough = set()
    for _, saved, index in sorted(worth):
        if excess <= 0:
            break
        excess -= saved
        rough.add(index)
    return rough


def _squares(alternative: Alternative) -> list[float]:
    """Return the square of the growth of each sum of products that an alternative computes."""
    way: Way = alternative.payload
    is_product = not way.node.is_boundary and opdef(way.node.op).category is Category.COMPUTE
    return [_square(alternative)] * len(alternative.covers) if is_product else []


def _square(alternative: Alternative) -> float:
    handle = alternative.payload.candidate.handle
    return handle.growth**2 if isinstance(handle, Composition) else 1.0
