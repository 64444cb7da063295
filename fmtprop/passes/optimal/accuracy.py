"""Growth of a plan's rounding errors over those of direct computation.

Each sum of products in a network adds an error, independent of the others and of about the same size relative to its
result. So the growth of the network's error is the root mean square of the growths of its sums of products.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import sqrt

from fmtprop.ir.op import Category, opdef
from fmtprop.passes.optimal.composition import Composition
from fmtprop.passes.optimal.problem import Alternative
from fmtprop.passes.optimal.ways import Way


def growth(alternatives: Iterable[Alternative]) -> float:
    """Return the expected rounding error of chosen alternatives, relative to direct computation."""
    squares = [square for alternative in alternatives for square in _squares(alternative)]
    return sqrt(sum(squares) / len(squares)) if squares else 1.0


def _squares(alternative: Alternative) -> list[float]:
    """Return the square of the growth of each sum of products that an alternative computes."""
    way: Way = alternative.payload
    is_product = not way.node.is_boundary and opdef(way.node.op).category is Category.COMPUTE
    return [_square(alternative)] * len(alternative.covers) if is_product else []


def _square(alternative: Alternative) -> float:
    handle = alternative.payload.candidate.handle
    return handle.growth**2 if isinstance(handle, Composition) else 1.0
