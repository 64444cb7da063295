"""The mixed-integer linear programs of the exact assignment, and their solution by HiGHS.

Owns variables, rows and units. Flows connect the reorders: for each op that reads a tensor, one unit flows from the
format that the chosen writer produces to the format that the chosen reader needs, only through executed reorders. So a
reorder serves all readers but is paid once, chains are allowed, and a cycle of reorders carries nothing. The flows
also make the linear relaxation tight: for graphs of real networks, its solution is usually the answer.

Must not know time budgets, start solutions and proofs; see :mod:`fmtprop.passes.optimal.solve`.

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

#: format of a tensor -> the alternatives that need (or write) it
Demand = dict[Format, list[int]]


@dataclass(frozen=True)
class MilpResult:
    """Result of HiGHS."""

    #: values of the variables; None if there is no solution, or none was found in time
    values: np.ndarray | None
    #: lower bound of all solutions, in the unit of the costs; minus infinity if nothing is known
    bound: float


class LinearProgram:
    """Variables between 0 and 1, and rows over them."""

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
        """Constrain a sum of variables, each group with its factor, to two limits."""
        for factor, variables in terms:
            for variable in variables:
                self._rows.append(len(self._limits))
                self._columns.append(variable)
                self._factors.append(factor)
        self._limits.append((lower, upper))

    def minimise(self, typical: float, time_limit: float = math.inf) -> MilpResult:
        """Solve the program.

        `typical`: approximate cost of a good solution, more than 0. The tolerances of HiGHS are absolute, so costs are
        scaled by this unit.

        Ctrl-C takes effect at once, but HiGHS does not notice it and continues in its thread until its time ends.
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
        return MilpResult(result.x, -math.inf if bound is None or not math.isfinite(bound) else bound / scale)


class AssignmentProgram(LinearProgram):
    """The program of an assignment problem; variable `i` is 1 if alternative `i` is chosen."""

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
        """Forbid that all of these alternatives are chosen."""
        self.row(-math.inf, len(together) - 1.0, (1.0, together))

    def _tensor(self, reorders: Mapping[Reorder, float], supplied: Demand, demands: Sequence[Demand]) -> None:
        """Connect the writers of a tensor with its readers; a single reader's flow needs no separate variables."""
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
    """Find the alternatives that read each tensor in each format, separately for each op and each of its formats.

    One of an op's alternatives is chosen, so its total demand is one unit of flow. A tensor that an alternative needs
    in two formats is demanded twice.
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
    """Leave out demands that another demand contains: its reorders serve them, too."""
    kept: list[Demand] = []
    for demanded in sorted(demands, key=lambda demanded: -sum(map(len, demanded.values()))):
        if not any(all(set(indices) <= set(other.get(fmt, ())) for fmt, indices in demanded.items()) for other in kept):
            kept.append(demanded)
    return kept
