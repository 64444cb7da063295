"""From a normal graph to the plan that is kept: formats assigned, frozen, checked, and compared by running.

Owns the loop around primitives that fail their check, and the last word between the `optimal` plan and the greedy
one. Decides no format itself.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

from fmtprop.compiled import random_inputs
from fmtprop.errors import PlanError
from fmtprop.ir.graph import Graph
from fmtprop.ir.verify import Stage, verify
from fmtprop.options import OPTIMAL, Options
from fmtprop.passes.assign import AssignFormats
from fmtprop.passes.nest_concats import NestConcats
from fmtprop.passes.optimal import Certificate, OptimalFormats, price, resolve_pins
from fmtprop.passes.target import Costs
from fmtprop.runtime import Plan, build_plan
from fmtprop.runtime.contest import Contest, contest
from fmtprop.runtime.selfcheck import Memory, Mismatch, check_steps, key_of
from fmtprop.stages import weights_nbytes
from fmtprop.targets import OneDnnTarget, ReferenceTarget
from fmtprop.tuning import TuningCache, costs_for

__all__ = ["Planned", "make_plan"]

#: how often a plan whose own check failed is planned again around the failure
_ATTEMPTS = 5

#: called with the name of the stage that ended
Lap = Callable[[str], None]


@dataclass(frozen=True)
class Planned:
    """A model that is ready to run, and why it is as it is.

    Parameters
    ----------
    graph : Graph
        The formatted graph.
    plan : Plan
        The frozen plan.
    certificate : Certificate, optional
        How good the `optimal` assignment is by its costs.
    contest : Contest, optional
        How long the `optimal` and the `propagate` plan took when both were run.
    """

    graph: Graph
    plan: Plan
    certificate: Certificate | None = None
    contest: Contest | None = None


def make_plan(normal: Graph, options: Options, lap: Lap) -> Planned:
    """Assign formats by the policy, and freeze the result.

    Parameters
    ----------
    normal : Graph
        A normal graph.
    options : Options
        How.
    lap : callable
        Told of each stage that ended.

    Raises
    ------
    PlanError
        The plan's own check failed and could not be planned around.
    UnsupportedOpError
        Nobody can run an op, or a pin can't be obeyed.
    """
    return _Planner(normal, options, lap).run()


class _Planner:
    def __init__(self, normal: Graph, options: Options, lap: Lap) -> None:
        self.normal, self.options, self.lap = normal, options, lap
        self.target, self.fallback = OneDnnTarget(), ReferenceTarget()
        self.memory = Memory() if options.verify != "off" else None

    def run(self) -> Planned:
        if self.options.policy != OPTIMAL:
            return self._checked(lambda: (self._greedy(self.options.policy), None))
        cache = TuningCache()
        costs = self._costs(cache)
        best = self._checked(lambda: self._optimal(costs))
        greedy = self._greedy("propagate")
        if not self.options.confirm or self.options.pin or _same(greedy, best.graph):
            return best
        return self._confirm(best, greedy, cache)

    # ------------------------------------------------------------------ assigning

    def _greedy(self, policy: str) -> Graph:
        return AssignFormats(policy, self.target, self.fallback, self.options.boundary).run(self.normal)

    def _optimal(self, costs: Costs) -> tuple[Graph, Certificate]:
        graph = NestConcats().run(self.normal)
        pins = resolve_pins(graph, self.options.pin)
        solver = OptimalFormats(self.target, self.fallback, costs, self.options.boundary, pins)
        formatted, certificate = solver.solve(graph)
        return formatted, replace(certificate, propagate=price(self._greedy("propagate"), costs))

    def _costs(self, cache: TuningCache) -> Costs:
        options = self.options
        weights = weights_nbytes(self.normal)
        return costs_for(
            options.tune, weights_nbytes=weights, budget=options.tune_budget, progress=options.progress, cache=cache
        )

    # ------------------------------------------------------------------ freezing

    def _checked(self, assign: Callable[[], tuple[Graph, Certificate | None]]) -> Planned:
        """Assign and freeze, again where a primitive of the plan gives a wrong answer."""
        for _ in range(_ATTEMPTS):
            formatted, certificate = assign()
            verify(formatted, Stage.FORMATTED)
            self.lap("assign")
            plan = build_plan(formatted, self.target)
            self.lap("plan")
            wrong = check_steps(plan.steps, self.memory) if self.memory is not None else []
            self.lap("check")
            if not wrong:
                return Planned(formatted, plan, certificate)
            self._reroute(wrong)
        raise PlanError(f"model {self.normal.name}: primitives keep failing their check; the last: {wrong[0]}")

    def _reroute(self, wrong: list[Mismatch]) -> None:
        for mismatch in wrong:
            warnings.warn(f"{mismatch}; planning around it", RuntimeWarning, stacklevel=6)
            self.target.reject(mismatch.node)

    # ------------------------------------------------------------------ confirming

    def _confirm(self, best: Planned, greedy: Graph, cache: TuningCache) -> Planned:
        """Run the `optimal` plan against `propagate`'s; keep the faster, and remember which it was."""
        other = self._checked(lambda: (greedy, None))
        key = _contest_key(best.plan, other.plan)
        known = cache.get(key)
        if known is not None:
            kept = best if known == 1.0 else replace(other, certificate=best.certificate)
            self.lap("confirm")
            return kept
        result = contest([best.plan, other.plan], random_inputs(self.normal))
        cache.add({key: 1.0 + result.winner})
        self.lap("confirm")
        kept = best if result.winner == 0 else replace(other, certificate=best.certificate)
        return replace(kept, contest=result)


def _same(a: Graph, b: Graph) -> bool:
    """Whether two formatted graphs run the same primitives on the same formats."""
    return _choices(a) == _choices(b)


def _choices(graph: Graph) -> list[tuple[object, ...]]:
    found: list[tuple[object, ...]] = []
    for node in graph.nodes():
        choice = node.choice
        if choice is not None:
            found.append((node.op, choice.target, choice.impl, tuple(sorted(choice.operands)), node.descs))
    return found


def _contest_key(*plans: Plan) -> str:
    digest = hashlib.sha256()
    for plan in plans:
        for step in plan.steps:
            digest.update(key_of(step).encode())
        digest.update(f"/{plan.arena_nbytes}/{plan.constant_nbytes}/".encode())
    return f"contest-{digest.hexdigest()}"
