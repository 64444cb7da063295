"""Counterfactuals: the cost of the cheapest plan without a certain reorder, which says whether the reorder pays.

Owns the question and its answer. The target gives the ways to run the nodes, :mod:`fmtprop.tuning` their costs, and the
solver is that of policy `optimal`. The question needs only the formatted graph, of any policy: without its format
changes it is a normal graph again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING

from fmtprop.errors import FmtpropError
from fmtprop.ir import Graph, Value
from fmtprop.ir.aliasing import aliases
from fmtprop.ir.footprint import activations_nbytes, weights_nbytes
from fmtprop.layout import MemoryDesc
from fmtprop.passes.assignment.formats import describe
from fmtprop.passes.assignment.without_formats import is_reorder, without_formats
from fmtprop.passes.optimal import price, resolve_pins
from fmtprop.passes.optimal.enumerate import enumerate_ways
from fmtprop.passes.optimal.problem import Problem, Solution, keeping
from fmtprop.passes.optimal.solve import solve
from fmtprop.passes.optimal.ways import Way
from fmtprop.passes.target import Candidate
from fmtprop.targets.executable import Provider
from fmtprop.targets.registry import provider, setting_for
from fmtprop.tuning import TunedCosts, costs_for
from fmtprop.tuning.identity import identity_of

if TYPE_CHECKING:
    from fmtprop.report.model import Compiled

#: verdicts: no plan exists without it; plans without it cost more; a plan without it costs no more; the difference is
#: within the errors of the costs; not asked
FORCED, PAYS, WASTED, UNCERTAIN, UNSOLVED = "forced", "pays", "avoidable", "uncertain", "not solved"

#: errors of modelled and measured figures, as shares of them. The median ratio of measured to modelled figures was
#: 0.71 for MobileNetV2's 312 ways to run a node, and 0.83 for its 118 reorders (one thread of an AMD EPYC)
_MODEL_ERROR, _MEASURE_ERROR = 0.3, 0.05
#: formats that an answer names
_MOST_NAMED = 3
#: time for one answer; without a proof by then, the best plan found counts
_TIME_LIMIT_SECONDS = 3.0


@dataclass(frozen=True)
class Counterfactual:
    """The cost of the cheapest plan without a certain reorder.

    Parameters
    ----------
    verdict : {"forced", "pays", "avoidable", "uncertain", "not solved"}
        No plan exists without it; each plan without it costs more; one costs no more; the difference is smaller than
        its error; not asked. All plans have the nodes of this one: expansions stay expanded.
    plan_seconds : float, optional
        Cost of this plan, by the same costs as the other one's.
    seconds : float, optional
        Cost of the cheapest plan without it; None if there is no such plan.
    extra_seconds : float, optional
        The difference of the two plans, negative for a gain. The cheapest plan without it may differ in other places
        too, so differences of several reorders do not add up.
    error_seconds : float, optional
        Error of the difference: of the costs of all steps that differ.
    why : str
        The reason for not solving it, or the rule or node that forces it, or the nodes that compute in other data types
        in the cheapest plan without it.
    alone_seconds, alone_error_seconds : float, optional
        The difference to the cheapest plan without it in which only the writer and the readers of its tensor differ,
        and the error of the difference; None if there is none. A plan of policy `naive` has many reorders to lose, so
        `extra_seconds` is about the same for each; this figure is its own. If it is a sure gain, the reorder is
        avoidable.
    difference_seconds : float, optional
        The difference that decides the verdict: `alone_seconds`, or `extra_seconds` where only a plan that differs in
        other places, too, is cheaper.
    costs : {"", "modelled", "measured", "modelled and measured"}
        Sources of the costs of all steps that differ.
    """

    verdict: str
    plan_seconds: float | None = None
    seconds: float | None = None
    extra_seconds: float | None = None
    error_seconds: float | None = None
    why: str = ""
    alone_seconds: float | None = None
    alone_error_seconds: float | None = None
    difference_seconds: float | None = None
    costs: str = ""


class Rivals:
    """All plans of a compiled model's graph, and their least cost with one reorder forbidden.

    Raises FmtpropError if the ways to run the graph cannot be enumerated.
    """

    def __init__(self, net: Compiled) -> None:
        self._formatted = net.graph
        self.normal = without_formats(net.graph)
        target = provider(net.options.target)()
        setting = setting_for(target, net.options.boundary)
        self.costs = _costs(net, self.normal, target)
        pins = resolve_pins(
            self.normal, {p: d for p, d in net.options.pin.items() if p.rpartition(".")[0] in self.normal}
        )
        self._runs = _as_it_runs(self.normal, net.graph)
        self._found = enumerate_ways(self.normal, setting, self._runs, pins)
        self._answers: dict[tuple[Value, str], Counterfactual] = {}

    @cached_property
    def problem(self) -> Problem:
        """The choice among all plans of the graph."""
        pairs = [
            step for pairs in self._found.reorders().values() for pair in pairs for step in self._found.steps(*pair)
        ]
        self.costs.prepare(self._found.work(), list(dict.fromkeys(pairs)))
        return self._found.problem(self.costs)

    @cached_property
    def plan_seconds(self) -> float:
        """Cost of the plan, by the same costs as the plans that it is compared with."""
        assert self.problem  # it prepares them
        return price(self._formatted, self.costs)

    def ways_reading(self, reader: str, operand: str, desc: MemoryDesc) -> int:
        """Return the number of ways to run a node that read an operand in a format."""
        ways = self._found.ways.get(reader, ())
        return sum(way.candidate.operands.get(operand) == desc for way in ways if operand in way.inputs)

    def without(self, tensor: Value, in_place: str = "") -> Counterfactual:
        """Return the counterfactual of a tensor: all its readers take it in its first format."""
        known = self._answers.get((tensor, in_place))
        if known is None:
            known = self._answers[tensor, in_place] = self._solved(tensor, in_place)
        return known

    def cheapest(self, tensor: Value, in_place: str = "") -> tuple[list[Value], Problem, Solution] | None:
        """Return the tensors that no reorder changes, and the cheapest plan of that kind; None if there is no plan.

        The tensors are the reorder's and its views. If a view forces a reorder of one, the others may keep theirs.
        """
        same = self.same(tensor)
        others = {value for value in self._reorders_of_plan if value != tensor}
        alone = [value for value in same if value not in others]
        for tensors in (same, alone) if alone != same and not in_place else (same,):
            problem = _out_of_place(self.problem, in_place) if in_place else keeping(self.problem, tensors)
            try:
                return tensors, problem, solve(problem, _TIME_LIMIT_SECONDS)
            except FmtpropError:
                continue
        return None

    def _solved(self, tensor: Value, in_place: str) -> Counterfactual:
        cheapest = self.cheapest(tensor, in_place)
        if cheapest is None:
            return Counterfactual(FORCED, self.plan_seconds, why=self._why_forced(self.same(tensor)))
        same, problem, found = cheapest
        extra = found.objective - self.plan_seconds
        now, then = Counter(self._steps_of_plan()), Counter(self._steps_of(problem, found))
        error = self._error_of_difference(now, then)
        readers = [in_place] if in_place else [name for value in same for name, _ in self.normal.readers(value)]
        alone = self._alone(problem, [] if in_place else same, {tensor.node, *readers})
        is_own_waste = alone is not None and -alone[0] >= alone[1]
        verdict = WASTED if is_own_waste or -extra >= error else PAYS if extra >= error else UNCERTAIN
        decides_alone = is_own_waste or verdict != WASTED
        told = {self.costs.is_measured(identity) for identity, _ in (now - then) + (then - now)}
        costs = " and ".join(word for word, is_so in (("modelled", False), ("measured", True)) if is_so in told)
        own, own_error = alone if alone is not None else (None, None)
        difference = own if own is not None and decides_alone else extra
        why = self._other_types(problem, found)
        return Counterfactual(
            verdict, self.plan_seconds, found.objective, extra, error, why, own, own_error, difference, costs
        )

    def _other_types(self, problem: Problem, solution: Solution) -> str:
        """Return which nodes of another plan read their first source in another data type."""
        told = []
        for index in solution.chosen:
            way: Way = problem.alternatives[index].payload
            now = self._runs.get(way.node.name, [])
            types = [next((desc.dtype for desc in one.operands.values()), None) for one in (*now, way.candidate)]
            if len(set(types)) > 1 and types[-1] is not None:
                told.append(f"{way.node.name} in {types[-1]}")
        return ", ".join([*told[:_MOST_NAMED], *(["…"] if len(told) > _MOST_NAMED else [])])

    def _why_forced(self, same: Collection[Value]) -> str:
        """Return why each plan has the reorder: what the tensor's readers can read."""
        names = {value.node for value in same}
        read: dict[str, None] = {}
        readers: dict[str, None] = {}
        for reader, operand in chain.from_iterable(map(self.normal.readers, same)):
            ways = [way for way in self._found.ways.get(reader, ()) if operand in way.candidate.operands]
            if reader not in names and ways:
                readers[f"{reader}.{operand}"] = None
                read |= dict.fromkeys(describe(way.candidate.operands[operand]) for way in ways)
        if not read:
            return "an output of the model has its format"
        shown = " or ".join([*list(read)[:_MOST_NAMED], *(["another format"] if len(read) > _MOST_NAMED else [])])
        return f"{', '.join(readers)} can read {shown}; no plan of these nodes has the tensor written so"

    def _alone(self, problem: Problem, same: Collection[Value], free: set[str]) -> tuple[float, float] | None:
        """Return the difference to the cheapest plan without a tensor's reorders in which only some nodes differ.

        Result: seconds, and their error; None if the other nodes cannot stay as they are.
        """
        some = self._as_in_plan(problem, free)
        try:
            found = solve(some, _TIME_LIMIT_SECONDS)
        except FmtpropError:
            return None
        # all reorders of other tensors are the best ones, before and after
        before = Counter(self._steps_of(*self._nodes_of_plan, without=same))
        before += Counter(step for tensor in same for step in self._reorders_of_plan.get(tensor, ()))
        after = Counter(self._steps_of(some, found))
        more, less = (sum(count * seconds for (_, seconds), count in steps.items()) for steps in (after, before))
        return more - less, self._error_of_difference(before, after)

    @cached_property
    def _nodes_of_plan(self) -> tuple[Problem, Solution]:
        """The plan's ways to run all nodes, with the best reorders between them."""
        problem = self._as_in_plan(self.problem, set())
        return problem, solve(problem, _TIME_LIMIT_SECONDS)

    def _as_in_plan(self, problem: Problem, free: set[str]) -> Problem:
        """Return the problem in which all nodes except some run as in the plan."""

        def stays(way: Way) -> bool:
            if free.issuperset(way.covers) or way.node.is_boundary:
                return True
            one, (now,) = way.candidate, self._runs[way.node.name]
            return (one.target, one.impl, one.operands, one.results) == (
                now.target,
                now.impl,
                now.operands,
                now.results,
            )

        return replace(problem, alternatives=tuple(one for one in problem.alternatives if stays(one.payload)))

    @cached_property
    def _reorders_of_plan(self) -> dict[Value, list[tuple[Hashable, float]]]:
        """Identity and cost of each reorder of the plan, by its tensor in the graph without format changes."""
        found: dict[Value, list[tuple[Hashable, float]]] = {}
        computed = self._formatted.dependents()  # others ran once, when constants were packed
        for node in self._formatted.nodes():
            if node.name in computed and node.choice is not None and is_reorder(node):
                tensor = Value(node.name)
                while tensor.node not in self.normal:
                    tensor = self._formatted.inputs(tensor.node)["src"]
                found.setdefault(tensor, []).append(self._step_of_reorder(node.choice.operands["src"], node.descs[0]))
        return found

    def _error_of_difference(
        self, plan: Counter[tuple[Hashable, float]], other: Counter[tuple[Hashable, float]]
    ) -> float:
        """Return the error of the difference between the costs of two plans: equal steps have none."""
        steps = (plan - other) + (other - plan)
        return sum(count * seconds * self._error(identity) for (identity, seconds), count in steps.items())

    def _error(self, identity: Hashable) -> float:
        return _MEASURE_ERROR if self.costs.is_measured(identity) else _MODEL_ERROR

    def _steps_of_plan(self) -> Iterator[tuple[Hashable, float]]:
        """Yield the identity and the cost of each step."""
        for name, (candidate,) in self._runs.items():
            node = self.normal.node(name)
            yield identity_of(node, candidate), self.costs.node(node, candidate)
        yield from chain.from_iterable(self._reorders_of_plan.values())

    def _steps_of(
        self, problem: Problem, solution: Solution, without: Collection[Value] = ()
    ) -> Iterator[tuple[Hashable, float]]:
        for index in solution.chosen:
            way: Way = problem.alternatives[index].payload
            yield identity_of(way.node, way.candidate), way.candidate.cost
        kept = (pairs for tensor, pairs in solution.conversions.items() if tensor not in without)
        for src, dst in chain.from_iterable(kept):
            if isinstance(src, MemoryDesc) and isinstance(dst, MemoryDesc):  # for the solver, any hashable objects
                yield from (self._step_of_reorder(*step) for step in self._found.steps(src, dst))

    def _step_of_reorder(self, src: MemoryDesc, dst: MemoryDesc) -> tuple[Hashable, float]:
        return (src, dst), self.costs.reorder(src, dst) or 0.0

    def same(self, tensor: Value) -> list[Value]:
        """Return a tensor and its views of equal size: a reorder of a view would replace one of the tensor."""
        size = self.normal.type_of(tensor).size
        return [alias for alias in aliases(self.normal, tensor) if self.normal.type_of(alias).size == size]


def _as_it_runs(normal: Graph, formatted: Graph) -> Mapping[str, Sequence[Candidate]]:
    """Return each node's candidate in the plan. It is among the node's ways, so the best plan never costs more."""
    known = {}
    for node in normal.nodes():
        choice = formatted.node(node.name).choice
        if choice is not None and not node.is_boundary:
            descs = formatted.node(node.name).descs
            known[node.name] = [
                Candidate(choice.target, choice.impl, choice.operands, descs, choice.cost, False, choice.handle)
            ]
    return known


def _out_of_place(problem: Problem, concat: str) -> Problem:
    def stays(way: Way) -> bool:
        return way.node.name != concat or way.candidate.impl != "in_place"

    return replace(problem, alternatives=tuple(one for one in problem.alternatives if stays(one.payload)))


def _costs(net: Compiled, normal: Graph, target: Provider) -> TunedCosts:
    weights, activations = weights_nbytes(normal), activations_nbytes(normal)
    source = net.options.recorded_costs
    return costs_for(source, weights_nbytes=weights, activations_nbytes=activations, target=target, basis=net.basis)
