"""Growth of a plan's rounding errors over those of direct computation, and its bound.

Each sum of products in a network adds an error, independent of the others and of about the same size relative to its
result. So the growth of the network's error is the root mean square of the growths of its sums of products.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import sqrt

from fmtprop.ir.op import Category, opdef
from fmtprop.passes.optimal.composition import Composition
from fmtprop.passes.optimal.problem import Alternative, Problem
from fmtprop.passes.optimal.ways import Way

#: limit of a plan's expected rounding error, relative to direct convolutions: that of filtering all of them, four rows
#: at a time. With 1.8, Inception v3 had 3.6 times the error of PyTorch's eager mode, with this limit 2.0, and 1.2 with
#: direct convolutions; PyTorch's own runner of backends takes more than twice for wrong
MOST_GROWTH = 1.52


def growth(alternatives: Iterable[Alternative]) -> float:
    """Return the expected rounding error of chosen alternatives, relative to direct computation."""
    squares = [square for alternative in alternatives for square in _squares(alternative)]
    return sqrt(sum(squares) / len(squares)) if squares else 1.0


def too_rough(problem: Problem, chosen: Sequence[int]) -> set[int]:
    """Return the alternatives to leave out to keep the bound: those that save the least for their error."""
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
