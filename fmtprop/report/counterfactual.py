"""Whether a reorder pays: forbid it, solve again, compare what the rest would cost.

Owns the question and its answer. The ways to run the nodes are the target's, the costs are :mod:`fmtprop.tuning`'s, and
the exact solver is the policy's own. The question is asked of the formatted graph alone: without its changes of
format it is a normal graph again, whichever policy made it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from fmtprop.errors import FmtpropError
from fmtprop.ir.aliasing import aliases
from fmtprop.ir.footprint import activations_nbytes, weights_nbytes
from fmtprop.ir.graph import Graph
from fmtprop.ir.node import Node, Value
from fmtprop.layout import MemoryDesc
from fmtprop.passes.optimal import price, resolve_pins
from fmtprop.passes.optimal.enumerate import enumerate_ways
from fmtprop.passes.optimal.problem import Problem, keeping
from fmtprop.passes.optimal.solve import solve
from fmtprop.passes.optimal.ways import Way
from fmtprop.passes.target import Candidate, Costs
from fmtprop.targets.executable import Provider
from fmtprop.targets.registry import provider, setting_for
from fmtprop.tuning import costs_for

if TYPE_CHECKING:
    from fmtprop.report.model import Compiled

__all__ = ["FORCED", "PAYS", "UNSOLVED", "WASTED", "Counterfactual", "Rivals", "is_format_change"]

#: verdicts: no plan does without it; plans without it cost more; a plan without it costs no more; nobody has asked
FORCED, PAYS, WASTED, UNSOLVED = "forced", "pays", "avoidable", "not solved"

#: costs closer than this, relative to the plan's, are the same
_SAME = 1e-6
#: seconds for one answer; where no proof is found by then, the best plan found counts
_TIME_LIMIT = 3.0


@dataclass(frozen=True)
class Counterfactual:
    """What the cheapest plan without a reorder would cost.

    Parameters
    ----------
    verdict : {"forced", "pays", "avoidable", "not solved"}
        No plan does without it; each plan without it costs more; one costs no more; not asked. Plans of the nodes as
        they are: what runs as several nodes stays so.
    plan_seconds : float, optional
        What this plan costs, by the costs that the other was chosen by.
    seconds : float, optional
        What the cheapest plan without it costs; None where there is no such plan.
    extra_seconds : float, optional
        The difference: what doing without it would cost, below 0 where it would save.
    why : str
        Why it was not solved, or who forces it.
    """

    verdict: str
    plan_seconds: float | None = None
    seconds: float | None = None
    extra_seconds: float | None = None
    why: str = ""


class Rivals:
    """All plans of a compiled model's graph: what they cost, with one reorder forbidden.

    Parameters
    ----------
    net : Compiled
        Its formatted graph is read, nothing is run.

    Raises
    ------
    FmtpropError
        The ways to run the graph cannot be enumerated.
    """

    def __init__(self, net: Compiled) -> None:
        self._formatted = net.graph
        self.normal = _without_format_changes(net.graph)
        target = provider(net.options.target)()
        setting, self._costs = setting_for(target, net.options.boundary), _costs(net, self.normal, target)
        pins = resolve_pins(
            self.normal, {p: d for p, d in net.options.pin.items() if p.rpartition(".")[0] in self.normal}
        )
        self._found = enumerate_ways(self.normal, setting, _as_it_runs(self.normal, net.graph), pins)
        self._answers: dict[tuple[Value, str], Counterfactual] = {}

    @cached_property
    def _problem(self) -> Problem:
        pairs = [
            step for pairs in self._found.reorders().values() for pair in pairs for step in self._found.steps(*pair)
        ]
        self._costs.prepare(self._found.work(), list(dict.fromkeys(pairs)))
        return self._found.problem(self._costs)

    @cached_property
    def plan_seconds(self) -> float:
        """What the plan costs by the costs that others are compared with."""
        return price(self._formatted, self._costs)

    def ways_reading(self, reader: str, operand: str, desc: MemoryDesc) -> int:
        """Return how many ways there are to run a node that read an operand in a format."""
        ways = self._found.ways.get(reader, ())
        return sum(way.candidate.operands.get(operand) == desc for way in ways if operand in way.inputs)

    def without(self, tensor: Value, in_place: str = "") -> Counterfactual:
        """Return what the cheapest plan costs in which a tensor is read as it is written.

        Parameters
        ----------
        tensor : Value
            Of the graph without its changes of format: none of its reorders is allowed, and none of a view of it.
        in_place : str
            Instead of that, a concat that may not be in place.
        """
        known = self._answers.get((tensor, in_place))
        if known is None:
            known = self._answers[tensor, in_place] = self._solved(tensor, in_place)
        return known

    def _solved(self, tensor: Value, in_place: str) -> Counterfactual:
        problem = _out_of_place(self._problem, in_place) if in_place else keeping(self._problem, self._same(tensor))
        try:
            seconds = solve(problem, _TIME_LIMIT).objective
        except FmtpropError as error:
            return Counterfactual(FORCED, self.plan_seconds, why=str(error))
        extra = seconds - self.plan_seconds
        verdict = PAYS if extra > _SAME * self.plan_seconds else WASTED
        return Counterfactual(verdict, self.plan_seconds, seconds, extra)

    def _same(self, tensor: Value) -> list[Value]:
        """Return a tensor and the views of all of it: a reorder of one would stand for a reorder of the other."""
        size = self.normal.type_of(tensor).size
        return [alias for alias in aliases(self.normal, tensor) if self.normal.type_of(alias).size == size]


def is_format_change(node: Node) -> bool:
    """Say whether a formatted node changes the format alone: a reorder that no model asked for."""
    choice = node.choice
    return node.op == "reorder" and choice is not None and node.descs[0].dtype is choice.operands["src"].dtype


def _without_format_changes(graph: Graph) -> Graph:
    normal = graph.copy()
    for node in graph.nodes():
        if is_format_change(node):
            normal.replace_uses(Value(node.name), normal.inputs(node.name)["src"])
            normal.remove(node.name)
    return normal.map_nodes(lambda node: node.with_(descs=(), choice=None))


def _as_it_runs(normal: Graph, formatted: Graph) -> Mapping[str, Sequence[Candidate]]:
    """Return how each node runs in the plan: it is among the ways to run it, so no best plan costs more."""
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


def _costs(net: Compiled, normal: Graph, target: Provider) -> Costs:
    tune = "model" if net.options.tuning.costs == "model" else "auto"  # what was measured; nothing is timed here
    weights, activations = weights_nbytes(normal), activations_nbytes(normal)
    return costs_for(tune, weights_nbytes=weights, activations_nbytes=activations, target=target)
