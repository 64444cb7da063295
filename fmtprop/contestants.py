"""The plans that may turn out to be the fastest for a model: each has a name, and is made when it is wanted.

Decides no format itself, and runs nothing: who is asked for which of them, and which one is kept, is the planner's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

from fmtprop.errors import UnsupportedOpError
from fmtprop.ir.graph import Graph
from fmtprop.ir.verify import Stage, verify
from fmtprop.layout import MemoryDesc
from fmtprop.machine import last_level_cache_nbytes
from fmtprop.options import Options
from fmtprop.passes.assign import AssignFormats
from fmtprop.passes.merge_siblings import MergeSiblings
from fmtprop.passes.nest_concats import NestConcats
from fmtprop.passes.optimal import Certificate, OptimalFormats, expansions, price, resolve_pins
from fmtprop.passes.scale_weights import ScaleWeights
from fmtprop.passes.slice_batch import SliceBatch
from fmtprop.passes.target import Target
from fmtprop.tuning import MEASURING, TunedCosts
from fmtprop.tuning.problem import persistent_text

__all__ = ["BEST", "DIRECT", "GREEDY", "MERGED", "NAMES", "SLICED", "Contestant", "Contestants"]

#: what they are called: on disk, a winner is its place in this list
NAMES = (
    "optimal",
    "optimal, no node run as several",
    "optimal, batch in slices",
    "optimal, siblings merged",
    "propagate",
)
BEST, DIRECT, SLICED, MERGED, GREEDY = NAMES


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
    target, fallback : Target
        Who is asked, and who runs what the first can't.
    costs : TunedCosts
        What the optimal ones are optimal by.
    options : Options
        How.
    """

    def __init__(self, normal: Graph, target: Target, fallback: Target, costs: TunedCosts, options: Options) -> None:
        self._normal, self._costs, self._options = normal, costs, options
        self._solver = OptimalFormats(target, fallback, costs, options.boundary)
        self._greedy = greedy(GREEDY, normal, target, fallback, options)
        #: the choice by cost
        self.best, self._solutions = self._cheapest()
        self._made: dict[str, Contestant | None] = {BEST: self.best, GREEDY: self._greedy}

    def get(self, name: str) -> Contestant | None:
        """Return the contestant of a name, None where the model has none."""
        if name not in self._made:
            self._made[name] = self._make(name)
        return self._made[name]

    def _make(self, name: str) -> Contestant | None:
        if name == DIRECT:
            return next(self._solutions, None)
        rewrite = SliceBatch(1, last_level_cache_nbytes() // 2) if name == SLICED else MergeSiblings()
        rewritten = rewrite.run(self._normal)
        return None if rewritten is self._normal else next(self._solved(rewritten, name))

    def _cheapest(self) -> tuple[Contestant, Iterator[Contestant]]:
        """Return the best by cost, factors of channels where they are or in weights, and what solutions are left."""
        solutions = self._solved(self._normal, BEST, DIRECT)
        best, rewrite = next(solutions), ScaleWeights()
        scaled = self._normal if self._options.pin else rewrite.run(self._normal)  # pins name nodes as they were
        if scaled is self._normal:
            return best, solutions
        others = self._solved(scaled, BEST, DIRECT, pins=rewrite.pins(self._normal))
        try:
            other = next(others)
        except UnsupportedOpError:  # no kernel reads such weights as they are made
            return best, solutions
        return (other, others) if _objective(other) < _objective(best) else (best, solutions)

    def _solved(self, normal: Graph, *names: str, pins: Mapping[str, MemoryDesc] | None = None) -> Iterator[Contestant]:
        """Yield the best by cost, and then the best in which no node runs as several if that is another, so called."""
        nested = NestConcats().run(normal)
        options = self._options
        pinned = replace(self._solver, pins={**resolve_pins(nested, options.pin), **(pins or {})})
        beside = options.tune in MEASURING
        composed = expansions(nested, self._solver, winograd=options.winograd, beside=beside)
        baseline = self._greedy.graph if nested is self._normal else None
        for name, (formatted, certificate) in zip(names, pinned.solutions(nested, composed, baseline), strict=False):
            verify(formatted, Stage.FORMATTED)
            yield Contestant(name, formatted, replace(certificate, propagate=self._propagate))

    @cached_property
    def _propagate(self) -> float:
        """What `propagate`'s plan costs by the costs that the first solution was chosen by."""
        return price(self._greedy.graph, self._costs)


def _objective(contestant: Contestant) -> float:
    return contestant.certificate.objective if contestant.certificate else inf


def greedy(policy: str, normal: Graph, target: Target, fallback: Target, options: Options) -> Contestant:
    """Return a greedy policy's plan."""
    graph = AssignFormats(policy, target, fallback, options.boundary).run(normal)
    verify(graph, Stage.FORMATTED)
    return Contestant(policy, graph)
