"""Format assignment by exact minimisation over the whole graph: the `optimal` policy.

Owns the order of the steps: the greedy policy's choices, every way to run every node, their costs, the solver, the
graph, and the certificate of the choice.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import ClassVar

from fmtprop.errors import PassError
from fmtprop.ir import Graph, Node, Value
from fmtprop.passes.assignment.assign import AssignFormats
from fmtprop.passes.assignment.without_formats import is_reorder
from fmtprop.passes.optimal.accuracy import growth
from fmtprop.passes.optimal.conversions import cheapest_conversions
from fmtprop.passes.optimal.enumerate import Pins, enumerate_ways
from fmtprop.passes.optimal.problem import Problem, Solution, keeping
from fmtprop.passes.optimal.realise import realise
from fmtprop.passes.optimal.solve import solve
from fmtprop.passes.optimal.ways import Enumeration, Way
from fmtprop.passes.target import Candidate, Costs, Setting, candidate_of, is_loop

#: most seconds for the solver
MOST_SECONDS = 10.0


@dataclass(frozen=True)
class Certificate:
    """Quality of an assignment, in seconds of the costs that were used for the choice.

    Parameters
    ----------
    objective : float
        Cost of primitives and reorders of the chosen plan.
    bound : float
        Lower bound of the cost of all assignments of the candidates.
    gap : float
        ``(objective - bound) / objective``; 0 is a proof of optimality.
    propagate : float
        Cost of the `propagate` policy's choices.
    alternatives, tensors : int
        Size of the problem.
    seconds : float
        Time of the solver.
    growth : float
        Expected rounding error relative to direct convolutions; no tile of a filtered one has more than 1.6 times it.
    fallback : float
        Part of the objective in steps that the fallback runs (PyTorch's operators), or in reference loops. A proof
        holds for the candidates that exist: the larger this part, the more a new kernel could gain.
    plan : str
        Name of the plan whose cost this is: the one that is kept.
    is_usual : bool
        Whether that is the plan of policy `propagate`: there was nothing to gain.
    run : float
        Median seconds of a run of the plan while it was compiled, or earlier; 0 if it has not run.
    corrected : bool
        Whether a run disagreed with the first costs, so that the plan was found again with corrected ones.
    """

    objective: float
    bound: float
    gap: float
    propagate: float
    alternatives: int
    tensors: int
    seconds: float
    growth: float = 1.0
    fallback: float = 0.0
    plan: str = ""
    is_usual: bool = False
    run: float = 0.0
    corrected: bool = False

    @property
    def optimal(self) -> bool:
        """Whether the choice is proved to be the cheapest."""
        return self.gap <= 1e-9

    @property
    def proof(self) -> str:
        """The proof in words: no choice is cheaper, or a choice could be cheaper by so much."""
        return "proved optimal" if self.optimal else f"gap {self.gap:.2%}"

    def __str__(self) -> str:
        saved = 1 - self.objective / self.propagate if self.propagate else 0.0
        saved = round(saved, 3) + 0.0  # they may differ only by rounding; the sum removes -0.0
        fallback = f", {self.fallback / self.objective:.1%} of it in PyTorch's operators" if self.fallback else ""
        return (
            f"{self.objective * 1e3:.3f} ms by cost{fallback}, lower bound {self.bound * 1e3:.3f} ms ({self.proof}), "
            f"propagate {self.propagate * 1e3:.3f} ms ({saved:.1%} saved); {self.alternatives} alternatives, "
            f"{self.seconds:.2f} s"
        )


@dataclass(frozen=True)
class OptimalFormats:
    """Assign formats and implementations at least total cost.

    Requires a normal graph, returns a formatted one. The choices of `propagate` are among the alternatives, so the
    result never costs more (except with an empty baseline, which leaves them out).
    """

    name: ClassVar[str] = "assign-formats-optimal"

    setting: Setting
    #: seconds of every candidate and reorder
    costs: Costs
    #: required formats, by ``"node.operand"`` or ``"node.dst"``
    pins: Pins = field(default_factory=dict)
    #: from the cost of a run of `propagate`'s plan to the seconds for the solver; then it returns the best solution so
    #: far, with its gap
    time_limit: Callable[[float], float] = lambda run: MOST_SECONDS
    #: tensors that must be read in the format in which they are written: reorders of them are not allowed
    kept: tuple[Value, ...] = ()

    def run(self, graph: Graph) -> Graph:
        """Return the formatted graph."""
        return self.solve(graph)[0]

    def solve(self, graph: Graph) -> tuple[Graph, Certificate]:
        """Return the formatted graph and its certificate."""
        return next(self.solutions(graph, {}))

    def solutions(
        self, graph: Graph, composed: Mapping[str, Sequence[Candidate]], baseline: Graph | None = None
    ) -> Iterator[tuple[Graph, Certificate]]:
        """Yield the best formatted graph, then the best one without compositions if it differs.

        The second certificate has the gap to the first's bound.
        """
        greedy = AssignFormats("propagate", self.setting)
        if baseline is None:
            baseline = greedy.run(graph)
        known = _choices(graph, baseline)
        found = enumerate_ways(graph, self.setting, known, self.pins)
        pinned = {pin.rpartition(".")[0] for pin in self.pins}
        for name, candidates in composed.items():
            for candidate in candidates if name not in pinned else ():
                found.offer(name, candidate)
        self._prepare(found)
        problem, bound, propagate = keeping(found.problem(self.costs), self.kept), inf, price(baseline, self.costs)
        while True:
            solution = solve(problem, self.time_limit(propagate), _indices(problem, known))
            formatted = _with_reorder_costs(realise(graph, problem, solution, greedy, baseline), graph, self.costs)
            bound = min(bound, solution.bound)  # alternatives that are left out later could be chosen, too
            yield (
                formatted,
                replace(
                    _certify(problem, solution, bound, propagate),
                    fallback=fallen_back(formatted, self.costs, self.setting),
                ),
            )
            if not any(problem.alternatives[index].payload.is_composed for index in solution.chosen):
                return
            problem = _without(problem, {i for i, a in enumerate(problem.alternatives) if a.payload.is_composed})

    def _prepare(self, found: Enumeration) -> None:
        pairs = dict.fromkeys(
            step for pairs in found.reorders().values() for pair in pairs for step in found.steps(*pair)
        )
        self.costs.prepare(found.work(), list(pairs))


def _certify(problem: Problem, solution: Solution, bound: float, propagate: float) -> Certificate:
    gap = (solution.objective - bound) / solution.objective if bound < solution.bound else solution.gap
    size = len(problem.alternatives), len(problem.reorders)
    rounding = growth(problem.alternatives[index] for index in solution.chosen)
    return Certificate(solution.objective, bound, gap, propagate, *size, solution.seconds, rounding)


def _without(problem: Problem, indices: Collection[int]) -> Problem:
    return replace(problem, alternatives=tuple(a for i, a in enumerate(problem.alternatives) if i not in indices))


def fallen_back(formatted: Graph, costs: Costs, setting: Setting) -> float:
    """Return the cost of a formatted graph's steps without optimized code, in seconds; see :func:`price`."""
    computed = formatted.dependents()
    return sum(
        _price(node, costs)
        for node in formatted.nodes()
        if node.name in computed
        and node.choice is not None
        and (node.choice.target == setting.fallback.name or is_loop(node.choice.impl))
    )


def price(formatted: Graph, costs: Costs) -> float:
    """Return the cost of one run of a formatted graph in seconds: its nodes and its reorders."""
    return sum(prices(formatted, costs).values())


def prices(formatted: Graph, costs: Costs) -> dict[str, float]:
    """Return the cost of each node that a run executes, in seconds; see :func:`price`."""
    computed = formatted.dependents()
    executed = (node for node in formatted.nodes() if node.name in computed and not node.is_boundary)
    return {node.name: _price(node, costs) for node in executed}


def _price(node: Node, costs: Costs) -> float:
    choice = node.choice
    if choice is None:
        return 0.0
    if choice.target == "view":
        return choice.cost  # for a concat in place, copies of the sources that cannot be made there
    if is_reorder(node):
        return costs.reorder(choice.operands["src"], node.descs[0]) or 0.0
    return costs.node(node, candidate_of(node))


def _choices(graph: Graph, formatted: Graph) -> dict[str, list[Candidate]]:
    """Return the candidates of each node of the normal graph that a formatted graph uses."""
    known = {}
    for node in graph.nodes():
        if node.name in formatted and not node.is_boundary:
            chosen = formatted.node(node.name)
            if chosen.op == node.op:
                known[node.name] = [candidate_of(chosen)]
    return known


def _indices(problem: Problem, known: Mapping[str, list[Candidate]]) -> tuple[int, ...] | None:
    """Return a greedy policy's choices as alternatives; the solver's choice must not be worse.

    None if pins forbid one of them, or if the greedy graph lacks a node (a conversion of data type that it combined
    with a reader's reorder).
    """
    chosen = []
    for op, indices in problem.covering().items():
        wanted = known.get(op)
        matches = [i for i in indices if wanted is None or _alike(problem.alternatives[i].payload, wanted[0])]
        if not matches or (wanted is None and len(indices) > 1):
            return None
        chosen.append(matches[0])
    try:
        cheapest_conversions(problem, tuple(sorted(chosen)))
    except PassError:
        return None  # a format of ways that pins exclude
    return tuple(sorted(chosen))


def _alike(way: Way, candidate: Candidate) -> bool:
    other = way.candidate
    return len(way.covers) == 1 and (other.impl, dict(other.operands), other.results) == (
        candidate.impl,
        dict(candidate.operands),
        candidate.results,
    )


def _with_reorder_costs(formatted: Graph, normal: Graph, costs: Costs) -> Graph:
    """Return the graph with the price of each change of format in its choice."""

    def priced(node: Node) -> Node:
        if node.op != "reorder" or node.choice is None or node.name in normal:
            return node
        return node.with_(choice=replace(node.choice, cost=_price(node, costs)))

    return formatted.map_nodes(priced)
