"""From a normal graph to the plan that is kept: formats assigned, frozen, checked, and compared by running.

Owns the loop around primitives that fail their check, and the last word between the `optimal` plans and the greedy
ones. Decides no format itself.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from fmtprop.compiling.attempts import Attempts
from fmtprop.compiling.compiled import random_inputs
from fmtprop.compiling.contest import Contest, contest
from fmtprop.compiling.contestants import DIRECT, GREEDY, Contestant, Contestants
from fmtprop.compiling.options import OPTIMAL, Options
from fmtprop.compiling.stages import make_room
from fmtprop.compiling.tensor_planner import plan_tensors
from fmtprop.errors import PlanError, UnsupportedOpError
from fmtprop.ir.footprint import activations_nbytes, weights_nbytes
from fmtprop.ir.graph import Graph
from fmtprop.ir.node import Node
from fmtprop.passes.optimal import Certificate
from fmtprop.passes.target import Setting
from fmtprop.runtime import Plan, build_plan
from fmtprop.runtime.rehearsal import can_rehearse, outline, rehearsals
from fmtprop.runtime.selfcheck import Mismatch, check_steps
from fmtprop.store import Store, key_of
from fmtprop.targets import OneDnnTarget, ReferenceTarget
from fmtprop.tuning import MEASURING, TunedCosts, Tuning, costs_for

__all__ = ["Planned", "make_plan"]

#: how often a plan whose own check failed is planned again around the failure
_ATTEMPTS = 5

#: seconds for running plans against each other, where compiling is to be quick and where the plan is to be good
_QUICK, _PATIENT = 0.2, 1.0

#: rounds of that at least where the plan is to be good and time has no limit: neighbours on a shared machine decide one
_ROUNDS = 5

#: the share by which a run may take longer than costs promised, beside `propagate`, before the costs are doubted
_DOUBT = 0.15

#: how many times as much a plan may cost as the cheapest and still be run: costs are not that wrong
_FAR = 10.0

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
    dropped : mapping of str to str
        What failed on the way and was left out, and why.
    """

    graph: Graph
    plan: Plan
    certificate: Certificate | None = None
    contest: Contest | None = None
    tuning: Tuning | None = None
    dropped: Mapping[str, str] = field(default_factory=dict)


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
        No plan passes its own check.
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
    verdict: Mapping[str, str] = field(default_factory=dict)
    #: what ran there, but for its weights
    outline: Plan | None = None


class _Planner:
    def __init__(self, normal: Graph, options: Options, lap: Lap, again: Callable[[], Graph] | None) -> None:
        self.normal, self.options, self.lap, self.again = normal, options, lap, again
        self.target, self.fallback = OneDnnTarget(), ReferenceTarget()
        self.store = Store()
        self.checked = options.verify != "off"
        #: asked by `optimal`, at each attempt: they know then what was measured, and what is left of the time for it
        self.costs: TunedCosts | None = None
        self.tuning: Tuning | None = None
        #: whether compiling may take long
        self.patient = options.tune in MEASURING
        self.attempts = Attempts()
        #: how often plans were made anew around primitives that give a wrong answer
        self.rerouted = 0
        #: nodes for which such a primitive packed an operand
        self.readers: list[Node] = []

    def run(self) -> Planned:
        """Assign and freeze, again where a primitive of a plan gives a wrong answer, or a plan can't be made."""
        while True:
            chosen = self._chosen()
            outcome = self.attempts.of(chosen.kept.name, partial(self._finished, chosen))
            if isinstance(outcome, Planned):
                return replace(outcome, dropped=self.attempts.settle(self.normal.name, chosen.kept.name, 7))
            if outcome is not None:
                self._reroute(outcome)
            if self.again is not None:
                self.normal = self.again()

    def _finished(self, chosen: _Chosen) -> Planned | list[Mismatch]:
        """Freeze the graph that is kept; return the primitives that give a wrong answer, if there are such."""
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
            wrong = check_steps(plan.steps, self.store, plan.packed) if self.checked else []
            self.lap("check")
        if not wrong:
            for key, name in chosen.verdict.items():
                self.store.remember(key, name)
            return Planned(graph, plan, chosen.certificate, chosen.contest, self.tuning)
        if self.rerouted == _ATTEMPTS:
            raise PlanError(f"model {self.normal.name}: primitives keep failing their check; the last: {wrong[0]}")
        return wrong

    def _check_unpacked(self, chosen: _Chosen) -> list[Mismatch]:
        """Return what gives a wrong answer, while memory does not hold packed weights yet: a check takes its own."""
        kept = chosen.kept
        if not self.checked or not can_rehearse(kept.graph):
            return []
        key = key_of({"plan": kept.key})
        if self.store.has_passed(key):
            return []
        plan = chosen.outline or outline(kept.graph, self.target)
        wrong = check_steps(plan.steps, self.store, plan.packed)
        if not wrong:
            self.store.add_passed([key])
        return wrong

    def _reroute(self, wrong: list[Mismatch]) -> None:
        self.rerouted += 1
        for mismatch in wrong:
            warnings.warn(f"{mismatch}; planning around it", RuntimeWarning, stacklevel=6)
            for target in (self.target, self.fallback):
                target.reject(mismatch.node)
        self.readers = [mismatch.reader for mismatch in wrong if mismatch.reader is not None]

    # ------------------------------------------------------------------ which plan

    def _chosen(self) -> _Chosen:
        """Assign formats, in several ways where it is not known yet which of them is the fastest."""
        options, rivals = self.options, self._rivals()
        best = rivals.best
        entrants = [best]
        if options.policy == OPTIMAL and options.confirm and not options.pin:
            known = self._winner(rivals)
            entrants = self._entrants(rivals) if known is None else [known]
        self.tuning = self.costs.tuning if self.costs is not None else None
        self.lap("assign")
        raced = self._contest(entrants, rivals) if len(entrants) > 1 else None
        if raced is None:
            kept = rivals.best if len(entrants) > 1 else entrants[0]
            return _Chosen(kept, kept.certificate or best.certificate)
        kept, result, plan = raced
        self.lap("confirm")
        verdict = {
            _winner_key(best, self.patient): kept.name,
            _pair_key(best, kept): kept.name,
        }
        return _Chosen(kept, kept.certificate or best.certificate, result, verdict, replace(plan, constants=()))

    def _rivals(self) -> Contestants:
        """Return who may become the plan; where nobody packs for some readers any more, others run these."""
        if self.options.policy == OPTIMAL:
            self.costs = self.costs or self._new_costs()
        setting = Setting(self.target, self.fallback, self.options.boundary)
        model = self.normal, setting, self.costs, self.options, self.attempts
        rivals, failed = Contestants(*model), self.attempts.failed
        rivals.get(rivals.ladder[0])
        unsupported = [name for name, error in failed.items() if isinstance(error, UnsupportedOpError)]
        if not self.readers or not unsupported:
            return rivals
        for reader in self.readers:
            self.target.reject(reader)
        self.readers = []
        for name in unsupported:
            del failed[name]
        return Contestants(*model)

    def _new_costs(self) -> TunedCosts:
        options = self.options
        return costs_for(
            options.tune,
            weights_nbytes=weights_nbytes(self.normal),
            activations_nbytes=activations_nbytes(self.normal),
            budget=options.tune_budget,
            progress=options.progress,
            store=self.store,
        )

    # ------------------------------------------------------------------ which is the fastest

    def _entrants(self, rivals: Contestants) -> list[Contestant]:
        """Return the plans to be run against each other, the choice by cost first; none that costs far more."""
        best, *others = rivals.field(whole=self.patient)
        return [best, *(one for one in others if rivals.expected(one) <= _FAR * rivals.expected(best))]

    def _contest(self, entrants: Sequence[Contestant], rivals: Contestants) -> tuple[Contestant, Contest, Plan] | None:
        """Return the fastest, how long each took, and what ran; None where the numbers at hand suit none of them.

        All run once more, with `DIRECT` among them, where another than the first won or costs promised more.
        """
        raced = self._race(entrants, rivals)
        if raced is None or self.patient:
            return raced
        if raced[0] is entrants[0] and _is_kept(rivals.best.certificate, raced[1]):
            return raced
        direct = rivals.get(DIRECT)
        if direct is None or direct.key in {entrant.key for entrant in entrants}:
            return raced
        del raced  # it holds the numbers that stand in for weights
        return self._race([one for one in (*entrants, direct) if rivals.get(one.name) is one], rivals)

    def _race(self, entrants: Sequence[Contestant], rivals: Contestants) -> tuple[Contestant, Contest, Plan] | None:
        """Run plans against each other: on any numbers where that tells as much as their own weights."""
        graphs = {entrant.name: entrant.graph for entrant in entrants}
        if all(map(can_rehearse, graphs.values())):
            makers = rehearsals(graphs, self.target)
        else:
            makers = {name: partial(build_plan, graph, self.target) for name, graph in graphs.items()}
        made = {name: self.attempts.of(name, maker) for name, maker in makers.items()}
        plans = {name: plan for name, plan in made.items() if plan is not None}
        fewest = _ROUNDS if self.patient and self.options.tune_budget is None else 1
        budget, expected = _PATIENT if self.patient else _QUICK, rivals.expected(entrants[0])
        result = contest(plans, random_inputs(self.normal), budget, fewest, expected, self.attempts) if plans else None
        if result is None:
            for name in plans:  # that none can be run on these inputs tells nothing about one of them
                self.attempts.failed.pop(name)
            return None
        name = result.names[result.winner]
        return next(entrant for entrant in entrants if entrant.name == name), result, plans[name]

    # ------------------------------------------------------------------ what is remembered

    def _winner(self, rivals: Contestants) -> Contestant | None:
        """Return who won when the plans were last run, None where that is not known: what ran longer comes first."""
        if self.options.tune == "remeasure":
            return None
        for patient in (True,) if self.patient else (True, False):
            name = self.store.verdict(_winner_key(rivals.best, patient))
            kept = rivals.get(name) if name in rivals.names else None
            # by other costs, another plan may have the same name
            if kept is not None and self.store.verdict(_pair_key(rivals.best, kept)) is not None:
                return kept
        return None


def _is_kept(promise: Certificate | None, result: Contest) -> bool:
    """Say whether the choice by cost, which is the first, saved what costs promised beside `propagate`."""
    if promise is None or GREEDY not in result.names[1:] or not promise.propagate:
        return True
    return not result.is_beyond(result.names.index(GREEDY), (1 + _DOUBT) * promise.objective / promise.propagate)


def _winner_key(best: Contestant, patient: bool) -> str:
    """Return the key of who beat the choice by cost, or whether it won, on this machine with these threads."""
    return key_of({"contest": best.key, "patient": patient})


def _pair_key(best: Contestant, kept: Contestant) -> str:
    """Return the key of one plan having been run against the choice by cost."""
    return key_of({"contest": best.key, "kept": kept.key})
