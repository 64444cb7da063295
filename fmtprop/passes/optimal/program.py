"""The mixed-integer linear programs behind the exact assignment, and the answers of HiGHS.

Owns variables, rows and units. What makes the reorders hang together is a flow: each op that reads a tensor draws one
unit of it, from the format that the chosen writer produces to the format that the chosen reader needs, through executed
reorders only. So a reorder serves all readers but is paid once, chains are allowed, and reorders that merely feed each
other carry nothing. The flows also make the linear relaxation tight: for the graphs of real networks its solution
usually is the answer.

Knows nothing of time budgets, starts and proofs; see :mod:`fmtprop.passes.optimal.solve`.

References
----------
R. T. Wong, "A dual ascent approach for Steiner tree problems on a directed graph", Mathematical Programming 28 (1984):
the multi-commodity flow formulation of the directed Steiner tree.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from fmtprop.passes.optimal.problem import Format, Problem, Reorder, Tensor

#: the alternatives that need a tensor in each format
Demand = dict[Format, list[int]]


@dataclass(frozen=True)
class Outcome:
    """What HiGHS found.

    Parameters
    ----------
    values : ndarray or None
        Of the variables; None where there is no solution, or none was found in time.
    bound : float
        What no solution can fall below, in the unit of the costs; minus infinity where nothing is known.
    """

    values: np.ndarray | None
    bound: float


class LinearProgram:
    """Variables between 0 and 1 and rows over them, as they are written down."""

    def __init__(self) -> None:
        self._costs: list[float] = []
        self._integral: list[bool] = []
        self._limits: list[tuple[float, float]] = []
        self._rows: list[int] = []
        self._columns: list[int] = []
        self._factors: list[float] = []

    def variable(self, cost: float, integral: bool) -> int:
        """Add a variable and return its number."""
        self._costs.append(cost)
        self._integral.append(integral)
        return len(self._costs) - 1

    def row(self, lower: float, upper: float, *terms: tuple[float, Iterable[int]]) -> None:
        """Keep a sum of variables, each group with its factor, between two limits."""
        for factor, variables in terms:
            for variable in variables:
                self._rows.append(len(self._limits))
                self._columns.append(variable)
                self._factors.append(factor)
        self._limits.append((lower, upper))

    def minimise(self, typical: float, time_limit: float = math.inf) -> Outcome:
        """Solve it.

        Parameters
        ----------
        typical : float
            About what a good solution costs, more than 0. The tolerances of HiGHS are absolute, so it gets to see
            costs in a unit in which they fit.
        time_limit : float, optional
            Seconds.

        Returns
        -------
        Outcome
            The best solution, or what was known when the time ended.

        Notes
        -----
        Ctrl-C is answered at once; HiGHS, which hears of nothing, then goes on in its thread until its time ends.
        """
        scale = 1e5 / typical
        shape = (len(self._limits), len(self._costs))
        matrix = csr_array((self._factors, (self._rows, self._columns)), shape=shape)
        lower, upper = np.array(self._limits).T
        options = {"mip_rel_gap": 0.0}
        if time_limit < math.inf:
            options["time_limit"] = time_limit
        pool = ThreadPoolExecutor(1, "HiGHS")
        try:
            result = pool.submit(
                milp,
                np.array(self._costs) * scale,
                integrality=np.array(self._integral, dtype=int),
                bounds=Bounds(0.0, 1.0),
                constraints=LinearConstraint(matrix, lower, upper),
                options=options,
            ).result()
        finally:
            pool.shutdown(wait=False)
        bound = result.mip_dual_bound
        return Outcome(result.x, -math.inf if bound is None or not math.isfinite(bound) else bound / scale)


class AssignmentProgram(LinearProgram):
    """The program of an assignment problem; variable number `i` says whether alternative `i` is chosen.

    Parameters
    ----------
    problem : Problem
        As it was checked.
    """

    def __init__(self, problem: Problem) -> None:
        super().__init__()
        for alternative in problem.alternatives:
            self.variable(alternative.cost, integral=True)
        for indices in problem.covering().values():
            self.row(1.0, 1.0, (1.0, indices))
        supplies = supply(problem)
        for tensor, demands in demand(problem).items():
            self._tensor(problem.reorders.get(tensor, {}), supplies.get(tensor, {}), _largest(demands))

    def forbid(self, together: Sequence[int]) -> None:
        """Keep these alternatives from being chosen all at once."""
        self.row(-math.inf, len(together) - 1.0, (1.0, together))

    def _tensor(self, reorders: Mapping[Reorder, float], supplied: Demand, demands: Sequence[Demand]) -> None:
        """Connect the writers of a tensor with its readers; one reader's flow needs no variables of its own."""
        several = len(demands) > 1
        executed = {pair: self.variable(cost, integral=several) for pair, cost in reorders.items()}
        for demanded in demands:
            flow = executed
            if several:
                flow = {pair: self.variable(0.0, integral=False) for pair in executed}
                for pair, carried in flow.items():
                    self.row(0.0, 1.0, (1.0, [executed[pair]]), (-1.0, [carried]))
            for fmt in dict.fromkeys([*supplied, *demanded, *(fmt for pair in flow for fmt in pair)]):
                self.row(
                    0.0,
                    math.inf,
                    (1.0, supplied.get(fmt, ())),
                    (1.0, [variable for (_, dst), variable in flow.items() if dst == fmt]),
                    (-1.0, [variable for (src, _), variable in flow.items() if src == fmt]),
                    (-1.0, demanded.get(fmt, ())),
                )


def supply(problem: Problem) -> dict[Tensor, Demand]:
    """Find the alternatives that write each tensor in each format."""
    found: dict[Tensor, Demand] = {}
    for index, alternative in enumerate(problem.alternatives):
        for tensor, fmt in alternative.writes.items():
            found.setdefault(tensor, {}).setdefault(fmt, []).append(index)
    return found


def demand(problem: Problem) -> dict[Tensor, list[Demand]]:
    """Find the alternatives that read each tensor in each format, apart for each op and each of its formats.

    Of one op's alternatives one is chosen, so its demand is one unit in all: that is what makes it a flow. A tensor
    that an alternative needs in two formats is demanded twice.
    """
    found: dict[Tensor, dict[tuple[str, int], Demand]] = {}
    for index, alternative in enumerate(problem.alternatives):
        for tensor, formats in alternative.reads.items():
            for number, fmt in enumerate(dict.fromkeys(formats)):
                for op in alternative.covers:
                    demands = found.setdefault(tensor, {}).setdefault((op, number), {})
                    demands.setdefault(fmt, []).append(index)
    return {tensor: list(demands.values()) for tensor, demands in found.items()}


def _largest(demands: Sequence[Demand]) -> list[Demand]:
    """Leave out demands that another one contains: what serves that one serves them."""
    kept: list[Demand] = []
    for demanded in sorted(demands, key=lambda demanded: -sum(map(len, demanded.values()))):
        if not any(all(set(indices) <= set(other.get(fmt, ())) for fmt, indices in demanded.items()) for other in kept):
            kept.append(demanded)
    return kept
