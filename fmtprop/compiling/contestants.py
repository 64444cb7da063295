"""The plans that may turn out to be the fastest for a model: each has a name, and is made when it is wanted.

Decides no format itself, and runs nothing: who is asked for which of them, and which one is kept, is the planner's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

from fmtprop.compiling.attempts import Attempts
from fmtprop.compiling.options import OPTIMAL, Options
from fmtprop.errors import PassError, UnsupportedOpError
from fmtprop.ir.graph import Graph
from fmtprop.ir.verify import Stage, verify
from fmtprop.layout import MemoryDesc
from fmtprop.passes.assign import AssignFormats
from fmtprop.passes.nest_concats import NestConcats
from fmtprop.passes.optimal import Certificate, OptimalFormats, expansions, price, resolve_pins
from fmtprop.passes.release_sums import ReleaseSums
from fmtprop.passes.scale_weights import ScaleWeights
from fmtprop.passes.slice_batch import SliceBatch
from fmtprop.passes.target import Candidate, Setting
from fmtprop.system.machine import last_level_cache_nbytes
from fmtprop.tuning import MEASURING, TunedCosts
from fmtprop.tuning.identity import persistent_text

__all__ = ["ALL", "BEST", "DIRECT", "GREEDY", "NAMES", "SLICED", "Contestant", "Contestants"]

#: what they are called, in the store too
NAMES = (
    "optimal",
    "optimal, no node run as several",
    "optimal, batch in slices",
    "propagate",
    "plain",
    "PyTorch's operators",
)
BEST, DIRECT, SLICED, GREEDY, PLAIN, PYTORCH = NAMES

#: those that may be the fastest; the others take their place where all of them fail
ALL = BEST, DIRECT, SLICED, GREEDY

#: what can be dropped of one: nodes run as several, factors of channels in weights
COMPOSED, SCALED = "nodes run as several", "factors in weights"


@dataclass(frozen=True)
class Contestant:
    """A formatted graph that may become the plan.

    Parameters
    ----------
    name : str
        Of the contestant, or of the policy where there is but one.
    graph : Graph
        The formatted graph.
    certificate : Certificate, optional
        How good it is by its costs.
    """

    name: str
    graph: Graph
    certificate: Certificate | None = None

    @cached_property
    def key(self) -> str:
        """A hash of what its graph executes and how, whatever its nodes are called."""
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


class Contestants:
    """The contestants for one model.

    Parameters
    ----------
    normal : Graph
        A normal graph.
    setting : Setting
        Who runs them.
    costs : TunedCosts, optional
        What the optimal ones are optimal by.
    options : Options
        How.
    attempts : Attempts, optional
        Which contestants are dropped because something of theirs failed.
    """

    def __init__(
        self,
        normal: Graph,
        setting: Setting,
        costs: TunedCosts | None,
        options: Options,
        attempts: Attempts | None = None,
    ) -> None:
        self._normal, self._setting, self._options = normal, setting, options
        self._costs, self._attempts = costs, attempts or Attempts()
        self._made: dict[str, Contestant | None] = {}
        #: what comes behind the best in the problem that it solves
        self._behind: Iterator[Contestant] | None = None

    @property
    def ladder(self) -> tuple[str, ...]:
        """Who is the choice as long as nothing has run: the first that can be made; the last ones need least."""
        if self._options.policy != OPTIMAL:
            return tuple(dict.fromkeys((self._options.policy, PLAIN, PYTORCH)))
        # nobody else obeys pins
        return (BEST, DIRECT) if self._options.pin else (BEST, DIRECT, GREEDY, PLAIN, PYTORCH)

    @property
    def best(self) -> Contestant:
        """The choice as long as nothing has run.

        Raises
        ------
        FmtpropError
            Nothing can be made: why the first choice can't.
        """
        for name in self.ladder:
            if (found := self.get(name)) is not None:
                return found
        raise self._attempts.failed[self.ladder[0]]

    def get(self, name: str) -> Contestant | None:
        """Return the contestant of a name, None where the model has none or it was dropped."""
        if name not in self._made:
            self._made[name] = self._attempts.of(name, lambda: self._make(name))
        return None if name in self._attempts.failed else self._made[name]

    def expected(self, contestant: Contestant) -> float:
        """Return the seconds of a run by the costs that the best was chosen by, infinity where nothing tells."""
        if contestant.certificate is not None:
            return contestant.certificate.objective
        return self._propagate if contestant.name == GREEDY and self._propagate else inf

    def _make(self, name: str) -> Contestant | None:
        if name == BEST:
            return self._cheapest()
        if name == DIRECT:
            alone = self._behind or self._solved(self._normal, DIRECT, composed=False)
            return next(alone, None)
        if name == SLICED:
            rewritten = SliceBatch(1, last_level_cache_nbytes() // 2).run(self._normal)
            return None if rewritten is self._normal else next(self._solved(rewritten, name))
        if name == PYTORCH:
            pytorch = replace(self._setting, target=self._setting.fallback)
            return replace(greedy(PLAIN, self._normal, pytorch), name=name)
        return greedy(name, self._normal, self._setting)

    def _cheapest(self) -> Contestant:
        """Return the best by cost, factors of channels where they are or in weights."""
        self._behind = None
        solutions = self._solved(self._normal, BEST, DIRECT)
        best, rewrite = next(solutions), ScaleWeights()
        self._behind = solutions
        scaled = self._normal if self._options.pin else rewrite.run(self._normal)  # pins name nodes as they were
        if scaled is self._normal:
            return best
        others = self._solved(scaled, BEST, DIRECT, pins=rewrite.pins(self._normal))
        other = self._attempts.of(SCALED, lambda: _unless_unsupported(others))
        if other is None or _objective(other) >= _objective(best):
            return best
        self._behind = others
        return other

    def _solved(
        self, normal: Graph, *names: str, pins: Mapping[str, MemoryDesc] | None = None, composed: bool = True
    ) -> Iterator[Contestant]:
        """Yield the best by cost, and then the best in which no node runs as several if that is another, so called."""
        if self._costs is None:
            raise PassError("pass optimal: there are no costs to be optimal by")
        nested = ReleaseSums().run(NestConcats().run(normal))
        verify(nested, Stage.NORMAL)
        options = self._options
        obeyed = {**resolve_pins(nested, options.pin), **(pins or {})}
        solver = OptimalFormats(self._setting, self._costs, obeyed)
        ways: dict[str, list[Candidate]] = {}
        if composed:
            beside = options.tune in MEASURING
            found = self._attempts.of(
                COMPOSED, lambda: expansions(nested, solver, winograd=options.winograd, beside=beside)
            )
            ways = found or {}
        usual = self.get(GREEDY)
        # where `propagate` has no plan, there is nothing to compare with
        baseline = Graph(nested.name) if usual is None else usual.graph if nested is self._normal else None
        for name, (formatted, certificate) in zip(names, solver.solutions(nested, ways, baseline), strict=False):
            verify(formatted, Stage.FORMATTED)
            yield Contestant(name, formatted, replace(certificate, propagate=self._propagate))

    @cached_property
    def _propagate(self) -> float:
        """What `propagate`'s plan costs by the costs that the first solution was chosen by; 0 without such a plan."""
        usual = self.get(GREEDY)
        return 0.0 if usual is None or self._costs is None else price(usual.graph, self._costs)


def _unless_unsupported(solutions: Iterator[Contestant]) -> Contestant | None:
    """Return the first of several, None where no kernel reads what a rewrite made: that is no failure."""
    try:
        return next(solutions)
    except UnsupportedOpError:
        return None


def _objective(contestant: Contestant) -> float:
    return contestant.certificate.objective if contestant.certificate else inf


def greedy(policy: str, normal: Graph, setting: Setting) -> Contestant:
    """Return a greedy policy's plan."""
    graph = AssignFormats(policy, setting).run(normal)
    verify(graph, Stage.FORMATTED)
    return Contestant(policy, graph)
