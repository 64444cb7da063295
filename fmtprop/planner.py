"""From a normal graph to the plan that is kept: formats assigned, frozen, checked, and compared by running.

Owns the loop around primitives that fail their check, and the last word between the `optimal` plans and the greedy
ones. Decides no format itself.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from fmtprop import dnnl
from fmtprop.compiled import random_inputs
from fmtprop.errors import PlanError
from fmtprop.ir.graph import Graph
from fmtprop.ir.verify import Stage, verify
from fmtprop.options import OPTIMAL, Options
from fmtprop.passes.assign import AssignFormats
from fmtprop.passes.merge_siblings import MergeSiblings
from fmtprop.passes.nest_concats import NestConcats
from fmtprop.passes.optimal import Certificate, OptimalFormats, expansions, price, resolve_pins
from fmtprop.passes.slice_batch import SliceBatch
from fmtprop.runtime import Plan, build_plan
from fmtprop.runtime.contest import Contest, contest
from fmtprop.runtime.rehearsal import can_rehearse, rehearse
from fmtprop.runtime.selfcheck import Memory, Mismatch, check_steps
from fmtprop.stages import make_room, weights_nbytes
from fmtprop.targets import OneDnnTarget, ReferenceTarget
from fmtprop.tensor_planner import plan_tensors
from fmtprop.tuning import MEASURING, TunedCosts, Tuning, TuningCache, costs_for
from fmtprop.tuning.cache import key_of
from fmtprop.tuning.machine import last_level_cache_nbytes

__all__ = ["Planned", "make_plan"]

#: how often a plan whose own check failed is planned again around the failure
_ATTEMPTS = 5

#: seconds for running plans against each other, where compiling is to be quick and where the plan is to be good
_QUICK, _PATIENT = 0.2, 1.0

#: the share by which a run may take longer than costs promised, beside `propagate`, before the costs are doubted
_DOUBT = 0.05

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
    tuning : Tuning, optional
        Where the costs of the `optimal` assignment came from.
    contest : Contest, optional
        How long the plans took that were run against each other: those by cost first, `propagate`'s last.
    """

    graph: Graph
    plan: Plan
    certificate: Certificate | None = None
    contest: Contest | None = None
    tuning: Tuning | None = None


def make_plan(normal: Graph, options: Options, lap: Lap, again: Callable[[], Graph] | None = None) -> Planned:
    """Assign formats by the policy, and freeze the result.

    Parameters
    ----------
    normal : Graph
        A normal graph.
    options : Options
        How.
    lap : callable
        Told of each stage that ended.
    again : callable, optional
        Makes the normal graph anew. With it, the graph's constants are dropped one by one as they are packed, so that
        memory never holds all weights twice.

    Raises
    ------
    PlanError
        The plan's own check failed and could not be planned around.
    UnsupportedOpError
        Nobody can run an op, or a pin can't be obeyed.
    """
    if options.target == "mkldnn":
        return Planned(*plan_tensors(normal, options, lap))
    return _Planner(normal, options, lap, again).run()


@dataclass(frozen=True)
class _Contestant:
    """A formatted graph that may become the plan, what it is called, and how good it is by its costs."""

    name: str
    graph: Graph
    certificate: Certificate | None = None

    @cached_property
    def key(self) -> str:
        """A hash of what its graph executes and how."""
        digest = hashlib.sha256()
        for node in self.graph.nodes():
            choice = node.choice
            if choice is not None:
                tail = tuple((post_op.op, post_op.attrs) for post_op in node.post_ops)
                inputs = tuple(self.graph.inputs(node.name).items())
                how = (node.op, node.attrs, tail, choice.target, choice.impl, choice.operands, node.descs, inputs)
                digest.update(repr(how).encode())
        return digest.hexdigest()


class _Planner:
    def __init__(self, normal: Graph, options: Options, lap: Lap, again: Callable[[], Graph] | None) -> None:
        self.normal, self.options, self.lap, self.again = normal, options, lap, again
        self.target, self.fallback = OneDnnTarget(), ReferenceTarget()
        self.memory = Memory() if options.verify != "off" else None
        self.cache = TuningCache()
        self.tuning: Tuning | None = None
        #: made when it is wanted: the best plan in which no node runs as several
        self.spare: Iterator[_Contestant] = iter(())

    def run(self) -> Planned:
        """Assign and freeze, again where a primitive of a plan gives a wrong answer."""
        for _ in range(_ATTEMPTS):
            contestants = self._contestants()
            self.lap("assign")
            key = _contest_key(contestants)
            certificate = contestants[0].certificate  # of the choice by cost, whichever plan turns out the faster
            kept, result = self._verdict(key, contestants), None
            if kept is None:
                kept, result = self._contest(contestants)
            del contestants
            self.spare = iter(())
            if self.again is not None:
                self.normal.constants.clear()  # the formatted graph has them still
            self.target.forget()
            make_room(self.normal)
            plan = build_plan(kept.graph, self.target, consume=self.again is not None)
            self.lap("plan")
            wrong = check_steps(plan.steps, self.memory) if self.memory is not None else []
            self.lap("check")
            if not wrong:
                if result is not None:
                    self.cache.add({key: 1.0 + result.winner})
                return Planned(kept.graph, plan, kept.certificate or certificate, result, self.tuning)
            self._reroute(wrong)
            if self.again is not None:
                self.normal = self.again()
        raise PlanError(f"model {self.normal.name}: primitives keep failing their check; the last: {wrong[0]}")

    def _contest(self, contestants: Sequence[_Contestant]) -> tuple[_Contestant, Contest]:
        """Return the fastest, and how long each took: the spare one comes last, where costs promised too much."""
        result = self._race(contestants)
        kept = contestants[result.winner]
        promise = contestants[0].certificate
        if promise is not None and (result.winner or not _is_kept(promise, result)):
            spare = next(self.spare, None)
            if spare is not None and spare.key not in {contestant.key for contestant in contestants}:
                last = self._race([kept, spare])
                relative = last.seconds[1] / last.seconds[0]  # both races' seconds are not of the same minute
                seconds = (*result.seconds, relative * result.seconds[result.winner])
                result = replace(result, names=(*result.names, spare.name), seconds=seconds)
                if last.winner:
                    kept, result = spare, replace(result, winner=len(contestants))
        self.lap("confirm")
        return kept, result

    def _race(self, contestants: Sequence[_Contestant]) -> Contest:
        """Run the contestants against each other: on any numbers where that tells as much as their own weights."""
        graphs = [contestant.graph for contestant in contestants]
        if all(map(can_rehearse, graphs)):
            plans = rehearse(graphs, self.target)
        else:
            plans = [build_plan(graph, self.target) for graph in graphs]
        result = contest(plans, random_inputs(self.normal), _PATIENT if self.options.tune in MEASURING else _QUICK)
        return replace(result, names=tuple(contestant.name for contestant in contestants))

    def _reroute(self, wrong: list[Mismatch]) -> None:
        for mismatch in wrong:
            warnings.warn(f"{mismatch}; planning around it", RuntimeWarning, stacklevel=6)
            self.target.reject(mismatch.node)

    def _verdict(self, key: str, contestants: Sequence[_Contestant]) -> _Contestant | None:
        """Return the one that was the fastest when they were last run, the spare one among them, or None."""
        if len(contestants) == 1:
            return contestants[0]
        known = None if self.options.tune == "remeasure" else self.cache.get(key)
        place = len(contestants) + 1 if known is None else int(known) - 1
        if 0 <= place < len(contestants):
            return contestants[place]
        return next(self.spare, None) if place == len(contestants) else None

    # ------------------------------------------------------------------ assigning

    def _contestants(self) -> list[_Contestant]:
        """Return the graphs of which the fastest becomes the plan, the one preferred by cost first."""
        if self.options.policy != OPTIMAL:
            return [_Contestant(self.options.policy, self._greedy(self.options.policy))]
        costs = self._costs()
        greedy = self._greedy("propagate")
        solver = OptimalFormats(self.target, self.fallback, costs, self.options.boundary)
        solutions = self._solved("optimal", solver, self.normal, greedy)
        found = [next(solutions)]
        self.tuning = costs.tuning
        if not self.options.confirm or self.options.pin:
            return found
        if self.options.tune in MEASURING:
            found += solutions
        else:
            self.spare = solutions
        sliced = SliceBatch(1, last_level_cache_nbytes() // 2).run(self.normal)
        if sliced is not self.normal:
            found.append(next(self._solved("optimal, batch in slices", solver, sliced, greedy)))
        if self.options.tune in MEASURING:
            merged = MergeSiblings().run(self.normal)
            if merged is not self.normal:
                found.append(next(self._solved("optimal, siblings merged", solver, merged, greedy)))
        found.append(_Contestant("propagate", greedy))
        distinct: dict[str, _Contestant] = {}
        for contestant in found:
            distinct.setdefault(contestant.key, contestant)
        return list(distinct.values())

    def _greedy(self, policy: str) -> Graph:
        graph = AssignFormats(policy, self.target, self.fallback, self.options.boundary).run(self.normal)
        verify(graph, Stage.FORMATTED)
        return graph

    def _solved(self, name: str, solver: OptimalFormats, normal: Graph, greedy: Graph) -> Iterator[_Contestant]:
        """Yield the best by cost, and then the best in which no node runs as several if that is another."""
        nested = NestConcats().run(normal)
        pinned = replace(solver, pins=resolve_pins(nested, self.options.pin))
        measuring = self.options.tune in MEASURING
        composed = expansions(nested, solver, winograd=self.options.winograd, beside=measuring)
        baseline = greedy if nested is self.normal else None
        for formatted, certificate in pinned.solutions(nested, composed, baseline):
            verify(formatted, Stage.FORMATTED)
            yield _Contestant(name, formatted, replace(certificate, propagate=price(greedy, solver.costs)))
            name += ", no node run as several"

    def _costs(self) -> TunedCosts:
        options = self.options
        return costs_for(
            options.tune,
            weights_nbytes=weights_nbytes(self.normal),
            budget=options.tune_budget,
            progress=options.progress,
            cache=self.cache,
        )


def _is_kept(promise: Certificate, result: Contest) -> bool:
    """Say whether the plan by cost, which was run first, saved what costs promised beside `propagate`, run last."""
    return result.seconds[0] * promise.propagate <= (1 + _DOUBT) * result.seconds[-1] * promise.objective


def _contest_key(contestants: Sequence[_Contestant]) -> str:
    """Return what the verdict of a contest is remembered by: all that was run, on which machine, with which threads."""
    keys = [contestant.key for contestant in contestants]
    return key_of({"contest": keys, "threads": dnnl.lib().threads})
