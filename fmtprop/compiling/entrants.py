"""The entrants: graphs that may become the fastest plan of a model. Each has a name and is made on request.

Decides no formats and runs nothing: the planner requests entrants and keeps one.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from time import thread_time

from fmtprop.compiling.attempts import Attempts
from fmtprop.compiling.budget import Budget
from fmtprop.compiling.options import OPTIMAL, Options
from fmtprop.errors import PassError, UnsupportedOpError
from fmtprop.ir.graph import Graph
from fmtprop.ir.verify import Stage, verify
from fmtprop.layout import MemoryDesc
from fmtprop.passes.assignment.assign import AssignFormats
from fmtprop.passes.assignment.identities import Forms
from fmtprop.passes.assignment.same_choices import SameChoices
from fmtprop.passes.assignment.same_expansions import expand_alike
from fmtprop.passes.assignment.same_graph import SameGraph
from fmtprop.passes.base import Pass, Pipeline
from fmtprop.passes.optimal import Certificate, OptimalFormats, expansions, fallen_back, price, resolve_pins
from fmtprop.passes.optimal.assign import MOST_SECONDS
from fmtprop.passes.optimal.variants import EXPANSIONS, FUSIONS, OF_GRAPH, Variant
from fmtprop.passes.precision.mark_grids import MarkGrids
from fmtprop.passes.rewrites.release_sums import ReleaseSums
from fmtprop.passes.target import Candidate, Setting
from fmtprop.planfile.rebuild import rebuild
from fmtprop.targets.executable import Provider, threads_here
from fmtprop.tuning import TunedCosts
from fmtprop.tuning.identity import persistent_text

_LOG = logging.getLogger(__name__)

#: names of entrants, also in the store; with a variant of the graph, the variant's name follows
BEST, DIRECT, GREEDY, PLAIN, PYTORCH = (
    OPTIMAL,
    f"{OPTIMAL}, no node run as several",
    "propagate",
    "plain",
    "PyTorch's operators",
)

#: the best of each variant of the graph, by name
VARIANTS: Mapping[str, Variant[Pass]] = {f"{BEST}, {variant.name}": variant for variant in OF_GRAPH}

#: the graph itself, and the variants with meaningful costs
_PRICED = (BEST, *(name for name, variant in VARIANTS.items() if variant.is_priced))

#: the name of an entrant with the choices of another shape's plan
OTHER_SHAPE = "as for another shape"

#: least seconds for the solver, and those after which it stops where its time must not decide: the built-in networks
#: take less than one
_LEAST_SECONDS, _DETERMINISTIC_SECONDS = 0.5, 120.0

#: the part of an entrant that can be dropped
COMPOSED = "nodes run as several"

#: passes before the choice of formats, for the variants of the graph
_PREPARE = (ReleaseSums(), MarkGrids())


@dataclass(frozen=True)
class Entrant:
    """A formatted graph that may become the plan."""

    #: name of the entrant, or of the policy if there is only one
    name: str
    graph: Graph
    certificate: Certificate | None = None
    #: the rewrite of the normal graph before its formats were chosen
    rewrite: Pass | None = None
    #: whether its primitives passed their check in another process, on a machine like this one
    is_checked: bool = False
    #: the number of threads that its implementations are for; 0 for those of another process
    threads: int = 0
    #: node -> the request by which its implementation was found again for other shapes
    requests: dict[str, int] = field(default_factory=dict, compare=False)

    @cached_property
    def key(self) -> str:
        """A hash of the graph's operations and choices, without names of nodes."""
        digest = hashlib.sha256()
        places: dict[str, int] = {}
        for node in self.graph.nodes():
            choice, places[node.name] = node.choice, len(places)
            if choice is not None:
                tail = tuple((post_op.op, post_op.attrs, post_op.operands) for post_op in node.post_ops)
                inputs = [(key, places[value.node], value.index) for key, value in self.graph.inputs(node.name).items()]
                formats = [persistent_text(desc) for desc in (*choice.operands.values(), *node.descs)]
                how = (node.op, node.attrs, tail, choice.target, choice.impl, tuple(choice.operands), formats, inputs)
                digest.update(repr(how).encode())
        return digest.hexdigest()


def name_of_rewrite(entrant: Entrant) -> str:
    """Return the name of the rewrite before an entrant's formats were chosen; empty without one."""
    return next((one.name for one in OF_GRAPH if one.rewrite == entrant.rewrite), "")


def entrant_of(graph: Graph, rewrite: str, *, is_checked: bool = False) -> Entrant:
    """Return the entrant of a formatted graph; the name of a rewrite is not trusted."""
    before = next((one.rewrite for one in OF_GRAPH if one.name == rewrite), None)
    return Entrant(OTHER_SHAPE, graph, rewrite=before, is_checked=is_checked)


class Entrants:
    """The entrants for one model.

    `attempts`: records the entrants that are dropped after a failure. `budget`: the time of the compilation; no limit
    by default. `has_expansions`: whether nodes could run as several.
    """

    def __init__(
        self,
        normal: Graph,
        setting: Setting,
        costs: TunedCosts | None,
        options: Options,
        attempts: Attempts | None = None,
        budget: Budget | None = None,
    ) -> None:
        self._normal, self._setting, self._options = normal, setting, options
        self._costs, self._attempts = costs, attempts or Attempts()
        self._budget = budget or Budget(is_limited=False)
        self.seconds, self.has_expansions = 0.0, False
        self._made: dict[str, Entrant | None] = {}
        #: further solutions of each problem, by the first solution's name
        self._behind: dict[str, Iterator[Entrant]] = {}

    @property
    def ladder(self) -> tuple[str, ...]:
        """Names of entrants in order of preference before any run; the first that can be made is used."""
        if self._options.policy != OPTIMAL:
            return tuple(dict.fromkeys((self._options.policy, PLAIN, PYTORCH)))
        # only these obey pins
        return (BEST, DIRECT) if self._options.pin else (BEST, DIRECT, GREEDY, PLAIN, PYTORCH)

    @property
    def best(self) -> Entrant:
        """The choice before any run: the entrant of the least cost, if costs are known.

        Raises FmtpropError if no entrant can be made; this is the error of the first one.
        """
        for name in self.ladder:
            found = [one for one in map(self.get, _PRICED if name == BEST else (name,)) if one is not None]
            if found:
                return min(found, key=self.expected)
        raise self._attempts.failed[self.ladder[0]]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the entrants that may be the fastest."""
        return (*_PRICED, DIRECT, *(name for name in VARIANTS if name not in _PRICED), GREEDY)

    def field(self, *, whole: bool) -> list[Entrant]:
        """Return entrants that may win, the best first; if not `whole`, only those with unclear costs."""
        told = () if whole else (*_PRICED, DIRECT)
        distinct: dict[str, Entrant] = {}
        for one in (self.best, *(self.get(name) for name in self.names if name not in told)):
            if one is not None:
                distinct.setdefault(one.key, one)
        return list(distinct.values())

    def get(self, name: str) -> Entrant | None:
        """Return the entrant with a name; None if the model has none or it was dropped."""
        if name not in self._made:
            self._made[name] = self._attempts.of(name, lambda: self._make(name))
        return None if name in self._attempts.failed else self._made[name]

    def expected(self, entrant: Entrant) -> float:
        """Return the expected seconds of a run, by the costs of the best entrant; infinity if unknown."""
        if entrant.certificate is not None:
            return entrant.certificate.objective
        return self._propagate if entrant.name == GREEDY and self._propagate else inf

    def price(self, entrant: Entrant) -> float:
        """Return the cost of a run of any entrant, by the present costs; infinity without costs."""
        return inf if self._costs is None else price(entrant.graph, self._costs)

    def is_usual(self, entrant: Entrant) -> bool:
        """Return whether an entrant is the plan of policy `propagate`."""
        usual = self.get(GREEDY)
        return usual is not None and usual.key == entrant.key

    def certified(self, entrant: Entrant) -> Certificate | None:
        """Return the certificate of any entrant: its own, or its cost beside the bound of the best one's."""
        if entrant.certificate is not None:
            return replace(entrant.certificate, plan=entrant.name, is_usual=self.is_usual(entrant))
        known = self.best.certificate
        if known is None or self._costs is None:
            return known
        cost = self.price(entrant)
        gap = max(0.0, 1 - known.bound / cost) if cost else 0.0
        fallback = fallen_back(entrant.graph, self._costs, self._setting)
        return replace(
            known, objective=cost, gap=gap, growth=1.0, fallback=fallback, plan=entrant.name,
            is_usual=self.is_usual(entrant),
        )  # fmt: skip

    def _make(self, name: str) -> Entrant | None:
        if name == BEST:
            return self._first(name, self._normal)
        if name in VARIANTS:
            return self._variant(name, VARIANTS[name])
        if name == DIRECT:
            solved = [one for name in _PRICED if name in self._behind and (one := self._made.get(name)) is not None]
            if not solved:
                return next(self._solved(self._normal, DIRECT, composed=False))
            return next(self._behind[min(solved, key=self.expected).name], None)
        if name == PYTORCH:
            pytorch = replace(self._setting, target=self._setting.fallback)
            return replace(greedy(PLAIN, self._normal, pytorch), name=name)
        return greedy(name, self._normal, self._setting)

    def _variant(self, name: str, variant: Variant[Pass]) -> Entrant | None:
        """Return the best entrant of a variant of the graph; None if it changes nothing or no target can run it."""
        if self._options.policy != OPTIMAL or self._options.pin:  # pins name nodes of the original graph
            return None
        rewritten = variant.rewrite.run(self._normal)
        if rewritten is self._normal:  # it was verified
            return None
        derived = self._derived(name, variant)
        if not self._budget.allows(name, self.seconds):
            return derived
        verify(rewritten, Stage.IMPORTED)
        try:
            solved = self._first(name, rewritten, variant.pins(self._normal), variant.rewrite)
        except UnsupportedOpError:  # no kernel supports the rewritten graph: this is not a failure
            return derived
        # a solution may be worse where the solver had too little time
        return solved if derived is None else min(solved, derived, key=self.expected)

    def _derived(self, name: str, variant: Variant[Pass]) -> Entrant | None:
        """Return the best entrant of the graph itself, rewritten in its formats; nothing is proved about its costs."""
        best = self.get(BEST)
        if best is None or best.certificate is None or variant.formatted is None or self._costs is None:
            return None
        graph = variant.formatted(best.graph, self._setting, self._costs)
        if graph is best.graph:
            return None
        verify(graph, Stage.FORMATTED)
        cost = price(graph, self._costs)
        return Entrant(name, graph, replace(best.certificate, objective=cost, bound=0.0, gap=1.0), variant.rewrite)

    def _first(
        self,
        name: str,
        normal: Graph,
        pins: Mapping[str, MemoryDesc] | None = None,
        rewrite: Pass | None = None,
    ) -> Entrant:
        start, solutions = thread_time(), self._solved(normal, name, DIRECT, pins=pins, rewrite=rewrite)
        best, self._behind[name] = next(solutions), solutions
        self.seconds = self.seconds or thread_time() - start
        return best

    def _solved(
        self,
        normal: Graph,
        *names: str,
        pins: Mapping[str, MemoryDesc] | None = None,
        composed: bool = True,
        rewrite: Pass | None = None,
    ) -> Iterator[Entrant]:
        """Yield the best entrant by cost, then the best one without expansions, if it differs."""
        if self._costs is None:
            raise PassError("pass optimal: there are no costs to be optimal by")
        prepared, options = Pipeline(_PREPARE, Stage.NORMAL).run(normal), self._options
        obeyed = {**resolve_pins(prepared, options.pin), **(pins or {})}
        solver = OptimalFormats(self._setting, self._costs, obeyed, self._solver_seconds)
        ways: dict[str, list[Candidate]] = {}
        if composed and self._setting.expanding:
            how = {
                "winograd": options.winograd,
                "spreads": options.special_values != "exact",
                "with_originals": options.tuning.measures,
            }
            found = self._attempts.of(COMPOSED, lambda: expansions(prepared, solver, **how))
            ways = found or {}
            self.has_expansions |= bool(ways)
        usual = self.get(GREEDY)
        # if `propagate` has no plan, there is no comparison
        baseline = Graph(prepared.name) if usual is None else usual.graph if prepared is self._normal else None
        for name, (formatted, certificate) in zip(names, solver.solutions(prepared, ways, baseline), strict=False):
            verify(formatted, Stage.FORMATTED)
            yield Entrant(name, formatted, replace(certificate, propagate=self._propagate), rewrite)

    def _solver_seconds(self, run: float) -> float:
        """Return the time for the solver, which needs it only for wide problems."""
        self._budget.run = max(self._budget.run, run)
        if self._options.deterministic:
            return _DETERMINISTIC_SECONDS
        return min(MOST_SECONDS, max(_LEAST_SECONDS, self._budget.left / 2))

    @cached_property
    def _propagate(self) -> float:
        """Return the cost of `propagate`'s plan, by the first solution's costs; 0 without such a plan."""
        usual = self.get(GREEDY)
        return 0.0 if usual is None or self._costs is None else price(usual.graph, self._costs)


def greedy(policy: str, normal: Graph, setting: Setting) -> Entrant:
    """Return a greedy policy's plan."""
    graph = AssignFormats(policy, setting).run(normal)
    verify(graph, Stage.FORMATTED)
    return Entrant(policy, graph)


def as_before(
    normal: Graph, other: Entrant, boundary: Mapping[str, MemoryDesc], target: Provider, fallback: Provider
) -> Entrant:
    """Return the entrant that another process made of this graph, by the same implementations.

    Raises PassError or NotOfferedError if it is of another graph, or a target has no such implementation.
    """
    prepared = _prepared(normal, other)
    before = SameGraph(other.graph, boundary, tuple(fusion.rewrite for fusion in FUSIONS))
    try:
        graph = before.run(prepared)
    except PassError:
        if other.rewrite is not None or prepared is normal:
            raise
        graph = before.run(normal)  # a greedy policy's plan
    graph = rebuild(graph, target, fallback, {node.name for node in graph.nodes()})
    verify(graph, Stage.FORMATTED)
    return Entrant(OTHER_SHAPE, graph, rewrite=other.rewrite)


def like_another_shape(
    normal: Graph, other: Entrant, setting: Setting, costs: TunedCosts, forms: Forms | None = None
) -> Entrant | None:
    """Return the entrant with the choices of another shape's plan; None where they are impossible.

    `other`: the plan of another shape of the model. `costs`: costs of nodes that cannot run as for the other shape, and
    for reports. `forms`: the packed constants of the model's plans.
    """
    fusions, renews = tuple(fusion.rewrite for fusion in FUSIONS), other.threads != threads_here()
    try:
        same = SameChoices(other.graph, setting, costs, fusions, forms, renews, other.requests)
        graph = same.run(_prepared(normal, other))
    except PassError as error:
        _LOG.info("model %s is planned anew: %s", normal.name, error)
        return None
    verify(graph, Stage.FORMATTED)
    return Entrant(OTHER_SHAPE, graph, rewrite=other.rewrite)


def _prepared(normal: Graph, other: Entrant) -> Graph:
    """Return the graph before its formats are chosen, with the rewrites that another entrant has."""
    prepared = normal if other.rewrite is None else other.rewrite.run(normal)
    for step in _PREPARE:
        prepared = step.run(prepared)
    return expand_alike(prepared, other.graph, [variant.rewrite for variant in EXPANSIONS])
