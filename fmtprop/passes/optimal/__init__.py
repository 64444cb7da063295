"""The `optimal` policy: formats and implementations at least total cost, exactly.

:mod:`~fmtprop.passes.optimal.enumerate` finds every way to run every node. :mod:`~fmtprop.passes.optimal.problem`
defines problems and solutions as pure data. :mod:`~fmtprop.passes.optimal.solve` finds the best solution with a proof.
:mod:`~fmtprop.passes.optimal.realise` makes the formatted graph of a solution. :mod:`~fmtprop.passes.optimal.assign`
is the pass that uses all of them.
"""

from fmtprop.passes.optimal.assign import Certificate, OptimalFormats, fallen_back, price, prices
from fmtprop.passes.optimal.conversions import ReorderTable, cheapest_conversions
from fmtprop.passes.optimal.pins import resolve_pins
from fmtprop.passes.optimal.problem import Alternative, Problem, Solution, evaluate
from fmtprop.passes.optimal.solve import solve
from fmtprop.passes.optimal.trial import expansions

__all__ = [
    "Alternative",
    "Certificate",
    "OptimalFormats",
    "Problem",
    "ReorderTable",
    "Solution",
    "cheapest_conversions",
    "evaluate",
    "expansions",
    "fallen_back",
    "price",
    "prices",
    "resolve_pins",
    "solve",
]
