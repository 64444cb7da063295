"""From a normal graph to the plan that is kept: formats assigned, frozen, checked, and compared by running.

Owns the loop around primitives that fail their check, and the last word between the `optimal` plans and the greedy
ones. Decides no format itself.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fmtprop.compiled import random_inputs
from fmtprop.contestants import BEST, DIRECT, GREEDY, NAMES, SLICED, Contestant, Contestants, greedy
from fmtprop.errors import PlanError, UnsupportedOpError
from fmtprop.ir.graph import Graph
from fmtprop.ir.node import Node
from fmtprop.options import OPTIMAL, Options
from fmtprop.passes.optimal import Certificate
from fmtprop.runtime import Plan, build_plan
from fmtprop.runtime.contest import Contest, contest
from fmtprop.runtime.rehearsal import can_rehearse, outline, rehearse
from fmtprop.runtime.selfcheck import Mismatch, PassedChecks, check_steps
from fmtprop.stages import activations_nbytes, make_room, weights_nbytes
from fmtprop.targets import OneDnnTarget, ReferenceTarget
from fmtprop.tensor_planner import plan_tensors
from fmtprop.tuning import MEASURING, TunedCosts, Tuning, TuningCache, costs_for
from fmtprop.tuning.cache import key_of

__all__ = ["Planned", "make_plan"]

#: how often a plan whose own check failed is planned again around the failure
_ATTEMPTS = 5

#: seconds for running plans against each other, where compiling is to be quick and where the plan is to be good
_QUICK, _PATIENT = 0.2, 1.0

#: rounds of that at least where the plan is to be good and time has no limit: neighbours on a shared machine decide one
_ROUNDS = 5

#: the share by which a run may take longer than costs promised, beside `propagate`, before the costs are doubted
_DOUBT = 0.15

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
        How long the plans took that were run against each other.
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
class _Chosen:
    """The plan that is kept, how good the choice by cost is, and what running it against others showed."""

    kept: Contestant
    certificate: Certificate | None = None
    contest: Contest | None = None
    #: what is remembered of the contest
    verdict: Mapping[str, float] = field(default_factory=dict)
    #: what ran there, but for its weights
    outline: Plan | None = None


class _Planner:
    def __init__(self, normal: Graph, options: Options, lap: Lap, again: Callable[[], Graph] | None) -> None:
        self.normal, self.options, self.lap, self.again = normal, options, lap, again
        self.target, self.fallback = OneDnnTarget(), ReferenceTarget()
        self.memory = PassedChecks() if options.verify != "off" else None
        self.cache = TuningCache()
        #: asked by `optimal`, at each attempt: they know then what was measured, and what is left of the time for it
        self.costs: TunedCosts | None = None
        self.tuning: Tuning | None = None
        #: whether compiling may take long
        self.patient = options.tune in MEASURING

    def run(self) -> Planned:
        """Assign and freeze, again where a primitive of a plan gives a wrong answer."""
        wrong: list[Mismatch] = []
        readers: list[Node] = []
        for _ in range(_ATTEMPTS):
            try:
                chosen = self._chosen()
            except UnsupportedOpError:
                if not wrong:
                    raise
                if not readers:
                    break  # nobody is left
                for reader in readers:  # nobody else packs for them
                    self.target.reject(reader)
                readers = []
                continue
            if self.again is not None:
                self.normal.constants.clear()  # the formatted graph has them still
            self.target.forget()
            graph = chosen.kept.graph
            wrong = self._check_unpacked(chosen)
            self.lap("check")
            if not wrong:
                make_room(self.normal)
                plan = build_plan(graph, self.target, consume=self.again is not None)
                self.lap("plan")
                wrong = check_steps(plan.steps, self.memory, plan.packed) if self.memory is not None else []
                self.lap("check")
            if not wrong:
                self.cache.add(chosen.verdict)
                return Planned(graph, plan, chosen.certificate, chosen.contest, self.tuning)
            self._reroute(wrong)
            readers = [mismatch.reader for mismatch in wrong if mismatch.reader is not None]
            if self.again is not None:
                self.normal = self.again()
        raise PlanError(f"model {self.normal.name}: primitives keep failing their check; the last: {wrong[0]}")

    def _check_unpacked(self, chosen: _Chosen) -> list[Mismatch]:
        """Return what gives a wrong answer, while memory does not hold packed weights yet: a check takes its own."""
        kept = chosen.kept
        if self.memory is None or not can_rehearse(kept.graph):
            return []
        key = key_of({"plan": kept.key})
        if key in self.memory:
            return []
        plan = chosen.outline or outline(kept.graph, self.target)
        wrong = check_steps(plan.steps, self.memory, plan.packed)
        if not wrong:
            self.memory.add([key])
        return wrong

    def _reroute(self, wrong: list[Mismatch]) -> None:
        for mismatch in wrong:
            warnings.warn(f"{mismatch}; planning around it", RuntimeWarning, stacklevel=6)
            self.target.reject(mismatch.node)

    def _chosen(self) -> _Chosen:
        """Assign formats, in several ways where it is not known yet which of them is the fastest."""
        options = self.options
        if options.policy != OPTIMAL:
            kept = greedy(options.policy, self.normal, self.target, self.fallback, options)
            self.lap("assign")
            return _Chosen(kept)
        self.costs = costs = self.costs or self._new_costs()
        rivals = Contestants(self.normal, self.target, self.fallback, costs, options)
        entrants = [rivals.best]
        if options.confirm and not options.pin:
            known = self._winner(rivals)
            entrants = self._entrants(rivals) if known is None else [known]
        self.tuning = costs.tuning
        self.lap("assign")
        if len(entrants) == 1:
            return _Chosen(entrants[0], entrants[0].certificate or rivals.best.certificate)
        kept, result, plan = self._contest(entrants, rivals)
        self.lap("confirm")
        verdict = {
            _place_key(rivals.best, self.patient): 1.0 + NAMES.index(kept.name),
            _pair_key(rivals.best, kept): 1.0,
        }
        return _Chosen(kept, kept.certificate or rivals.best.certificate, result, verdict, replace(plan, constants=()))

    def _new_costs(self) -> TunedCosts:
        options = self.options
        return costs_for(
            options.tune,
            weights_nbytes=weights_nbytes(self.normal),
            activations_nbytes=activations_nbytes(self.normal),
            budget=options.tune_budget,
            progress=options.progress,
            cache=self.cache,
        )

    # ------------------------------------------------------------------ which is the fastest

    def _entrants(self, rivals: Contestants) -> list[Contestant]:
        """Return the plans to be run against each other, the choice by cost first."""
        distinct: dict[str, Contestant] = {}
        for one in map(rivals.get, NAMES if self.patient else (BEST, SLICED, GREEDY)):
            if one is not None:
                distinct.setdefault(one.key, one)
        return list(distinct.values())

    def _contest(self, entrants: Sequence[Contestant], rivals: Contestants) -> tuple[Contestant, Contest, Plan]:
        """Return the fastest, how long each took, and what ran.

        `DIRECT` comes last where another won or costs promised more.
        """
        result, plan = self._race(entrants)
        kept = entrants[result.winner]
        if not self.patient and (result.winner or not _is_kept(entrants, result)):
            direct = rivals.get(DIRECT)
            if direct is not None and direct.key not in {entrant.key for entrant in entrants}:
                del plan  # it holds the numbers that stand in for weights
                last, plan = self._race([kept, direct])
                relative = last.seconds[1] / last.seconds[0]  # both races' seconds are not of the same minute
                seconds = (*result.seconds, relative * result.seconds[result.winner])
                result = replace(result, names=(*result.names, direct.name), seconds=seconds, runs=())
                if last.winner:
                    kept, result = direct, replace(result, winner=len(entrants))
        return kept, result, plan

    def _race(self, entrants: Sequence[Contestant]) -> tuple[Contest, Plan]:
        """Run plans against each other: on any numbers where that tells as much as their own weights."""
        graphs = [entrant.graph for entrant in entrants]
        if all(map(can_rehearse, graphs)):
            plans = rehearse(graphs, self.target)
        else:
            plans = [build_plan(graph, self.target) for graph in graphs]
        fewest = _ROUNDS if self.patient and self.options.tune_budget is None else 1
        result = contest(plans, random_inputs(self.normal), _PATIENT if self.patient else _QUICK, fewest)
        return replace(result, names=tuple(entrant.name for entrant in entrants)), plans[result.winner]

    # ------------------------------------------------------------------ what is remembered

    def _winner(self, rivals: Contestants) -> Contestant | None:
        """Return who won when the plans were last run, None where that is not known: what ran longer comes first."""
        if self.options.tune == "remeasure":
            return None
        for patient in (True,) if self.patient else (True, False):
            place = self.cache.get(_place_key(rivals.best, patient))
            if place is not None and 1 <= place <= len(NAMES):
                kept = rivals.get(NAMES[int(place) - 1])
                # by other costs, another plan may have the same name
                if kept is not None and self.cache.get(_pair_key(rivals.best, kept)) is not None:
                    return kept
        return None


def _is_kept(entrants: Sequence[Contestant], result: Contest) -> bool:
    """Say whether the choice by cost, which is the first, saved what costs promised beside `propagate`."""
    promise = entrants[0].certificate
    if promise is None or GREEDY not in result.names:
        return True
    return not result.is_beyond(result.names.index(GREEDY), (1 + _DOUBT) * promise.objective / promise.propagate)


def _place_key(best: Contestant, patient: bool) -> str:
    """Return the key of who beat the choice by cost, or whether it won, on this machine with these threads."""
    return key_of({"contest": best.key, "patient": patient})


def _pair_key(best: Contestant, kept: Contestant) -> str:
    """Return the key of one plan having been run against the choice by cost."""
    return key_of({"contest": best.key, "kept": kept.key})
