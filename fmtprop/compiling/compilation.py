"""A compilation: from an imported graph to the plan that is kept, with the result of each stage.

Owns the order of the stages, the loop around primitives that fail their check, and the last word between the `optimal`
plans and the greedy ones. Decides no format itself.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter

import torch

from fmtprop.compiling.attempts import Attempts
from fmtprop.compiling.entrants import DIRECT, GREEDY, Entrant, Entrants
from fmtprop.compiling.options import OPTIMAL, Options
from fmtprop.compiling.race import Race, race
from fmtprop.compiling.readable import with_constants
from fmtprop.compiling.stages import check_memory, make_room, normalise, random_inputs
from fmtprop.errors import PlanError, UnsupportedOpError
from fmtprop.ir.footprint import activations_nbytes, weights_nbytes
from fmtprop.ir.graph import Graph
from fmtprop.ir.node import Node
from fmtprop.ir.tensors import defer
from fmtprop.ir.verify import Stage, verify
from fmtprop.passes.base import Observer
from fmtprop.passes.for_threads import ForThreads
from fmtprop.passes.optimal import Certificate
from fmtprop.runtime import Plan, build_plan
from fmtprop.runtime.constants import ConstantStore
from fmtprop.runtime.dummy_weights import runs_on_any_numbers, with_dummy_weights, without_weights
from fmtprop.runtime.selfcheck import Mismatch, check_steps
from fmtprop.runtime.threads import on_cpu, running_with
from fmtprop.runtime.weights import PackedForms, SharedForms
from fmtprop.store import Store, key_of
from fmtprop.targets import ReferenceTarget
from fmtprop.targets.executable import Provider, Targets, implementation
from fmtprop.targets.registry import provider, setting_for
from fmtprop.tuning import TunedCosts, Tuning, costs_for
from fmtprop.tuning.peaks import improve

__all__ = ["Compilation"]

#: how often a model is planned again after a failed check of its plan
_ATTEMPTS = 5

#: seconds of a race, for the efforts "quick" and "patient"
_QUICK, _PATIENT = 0.2, 1.0

#: least rounds of a patient race without a limit of time: other users of a shared machine may decide a single round
_ROUNDS = 5

#: the share by which a run may take longer, relative to `propagate`, than its costs promised, before costs are doubted
_DOUBT = 0.15

#: a run that is so many times faster than its cost disproves the measured peaks of the machine (other users can only
#: make runs slower; the costs of 6 networks, f32 and bf16, were 0.2 to 1.7 times their seconds)
_DISPROVED = 3.0

#: a plan that costs so many times as much as the cheapest does not run: costs are not that wrong
_FAR = 10.0

#: a stage that ended -> the name of the next one, as users see it
_NEXT = {
    "": "normalising",
    "normalise": "choosing formats",
    "assign": "comparing plans",
    "confirm": "checking primitives",
    "check": "packing weights",
    "plan": "",
}


@dataclass(frozen=True)
class _Chosen:
    """The plan that is kept, the certificate of the choice by cost, and the result of the race."""

    kept: Entrant
    certificate: Certificate | None = None
    race: Race | None = None
    #: records of the race for the store
    verdict: Mapping[str, str] = field(default_factory=dict)
    #: the plan of the race, without its weights
    unpacked: Plan | None = None


class Compilation:
    """A model on its way to a plan, with the results of the stages so far; at the end, its graphs have no constants.

    Parameters
    ----------
    imported : Graph
        Imported.
    options : Options
        How.
    owned : bool
        Whether nobody else has the graph's constants: then they go one by one as they are packed, so that memory never
        holds all weights twice.
    shared : SharedForms, optional
        Packed forms of the model's tensors that plans for other shapes have.

    Attributes
    ----------
    imported, normal, formatted : Graph
        After the import, the rewrites and the choice of formats.
    precision : str
        The data type that compute-intensive ops really run in.
    tuning : Tuning or None
        Where the costs of the `optimal` assignment came from.
    certificate : Certificate or None
        How good the `optimal` assignment is by its costs.
    race : Race or None
        How long the plans took that were run against each other.
    wrong : list of Mismatch
        Primitives that failed their check, and around which was planned.
    plan : Plan
        The frozen plan.
    dropped : mapping of str to str
        Ways to run the model that failed and were left out, and why.
    seconds : dict of str to float
        Time that each stage took.
    weights : PackedForms
        The constants, as plans for any number of threads have them.
    """

    normal: Graph
    formatted: Graph
    plan: Plan

    def __init__(
        self, imported: Graph, options: Options, *, owned: bool = False, shared: SharedForms | None = None
    ) -> None:
        self.imported, self.options, self.owned = imported, options, owned
        self.precision = options.dtype
        self.certificate: Certificate | None = None
        self.race: Race | None = None
        self.tuning: Tuning | None = None
        self.wrong: list[Mismatch] = []
        self.dropped: Mapping[str, str] = {}
        self.seconds: dict[str, float] = {}
        #: the constants of all plans for the formatted graph
        self.weights = PackedForms(shared)
        self._last = perf_counter()
        self._target, self._fallback = provider(options.target)(), ReferenceTarget()
        self._store = Store()
        self._checked = options.verify != "off"
        #: asked by `optimal`, at each attempt: they know the measured figures, and the rest of the time for measuring
        self._costs: TunedCosts | None = None
        #: whether a run was so fast that the machine's peaks were measured again
        self._recalibrated = False
        #: whether compiling may take long
        self._patient = options.tuning.is_patient
        self._attempts = Attempts()
        #: how often plans were made anew around primitives that give a wrong answer
        self._rerouted = 0
        #: nodes for which such a primitive packed an operand
        self._readers: list[Node] = []

    # ------------------------------------------------------------------ stages

    def run(self) -> Plan:
        """Go through all stages.

        Raises
        ------
        PlanError
            No plan passes its own check, or this machine has too little memory for any.
        UnsupportedOpError
            Nobody can run an op, or a pin can't be obeyed.
        """
        check_memory(self.imported)
        self.normalise()
        self._freeze()
        self._costs = None  # much, and of no more use
        self.imported = self.imported.copy()  # the caller's own keeps its constants
        for graph in (self.imported, self.normal, self.formatted):
            graph.constants.clear()
        return self.plan

    def normalise(self, observer: Observer | None = None) -> Graph:
        """Bring the imported graph to normal form."""
        options = self.options
        self._begin("")
        self.normal, self.precision = normalise(
            defer(self.imported), options.dtype, observer, target=self._target, special_values=options.special_values
        )
        if self.owned:  # of folded weights, only the results are kept
            self.imported.constants.clear()
            make_room(self.normal)
        self._lap("normalise")
        return self.normal

    def choose(self) -> Entrant:
        """Assign formats to the normal graph by the policy, and by costs alone; run nothing."""
        best = self._rivals().best
        self.formatted, self.certificate = best.graph, best.certificate
        self.dropped = self._attempts.settle(self.normal.name, best.name, 5)
        return best

    def _freeze(self) -> None:
        """Choose, check and freeze: again where a primitive gives a wrong answer, or a plan can't be made."""
        while True:
            chosen = self._chosen()
            name, graph = chosen.kept.name, chosen.kept.graph
            self._target.forget()
            wrong = self._attempts.of(name, partial(self._mismatches, chosen))
            self._lap("check")
            if wrong:
                self._reroute(wrong)
            if wrong is None or wrong:
                continue
            if self.owned:
                self.normal.constants.clear()  # the formatted graph has them still
            make_room(graph)
            plan = self._attempts.of(name, partial(self._build, graph, self._target))
            self._lap("plan")
            if plan is not None:
                break
            if self.owned:  # nothing is left of the constants that were packed
                raise self._attempts.failed[name]
        for key, winner in chosen.verdict.items():
            self._store.remember(key, winner)
        self.plan, self.formatted, self.certificate, self.race = plan, graph, chosen.certificate, chosen.race
        self.dropped = self._attempts.settle(self.normal.name, name, 8)

    def _build(self, graph: Graph, target: Provider) -> Plan:
        return build_plan(graph, target, consume=self.owned, constants=ConstantStore(self.weights))

    def plan_for(self, threads: int) -> Plan:
        """Make the plan for another number of threads: in the same formats, by primitives that are chosen anew.

        Returns
        -------
        Plan
            It shares the packed constants. The first plan, with a warning, where a node has no primitive.

        Raises
        ------
        PlanError
            Primitives keep failing their check.
        """
        targets = Targets()
        renewed = ForThreads(lambda node: targets.of(implementation(node)), self._fallback)
        name = self.formatted.name
        with running_with(threads), on_cpu(), torch.autocast("cpu", enabled=False):
            for _ in range(_ATTEMPTS):
                try:
                    graph = renewed.run(self.with_constants())
                except UnsupportedOpError as error:
                    warnings.warn(
                        f"model {name} keeps running with {self.plan.threads} threads: {error}; compile it again with "
                        f"{threads}",
                        RuntimeWarning,
                        stacklevel=2,
                    )
                    return self.plan
                verify(graph, Stage.FORMATTED)
                plan = self._build(graph, self._target)
                wrong = check_steps(plan.steps, self._store, plan.packed) if self._checked else []
                if not wrong:
                    return plan
                for mismatch in wrong:
                    warnings.warn(f"{mismatch}; choosing another implementation", RuntimeWarning, stacklevel=2)
                    targets.reject(mismatch.node)
        raise PlanError(
            f"model {name}: primitives for {threads} threads keep failing their check; the last: {wrong[0]}"
        )

    def with_constants(self) -> Graph:
        """Return the formatted graph with constants that are read from packed forms where somebody needs them.

        Where only products of a constant are left, these are constants.

        ``fmtprop.save(net.compilation.with_constants(), "plan.onnx")`` shows a plan in viewers of ONNX models.
        """
        return with_constants(self.formatted, self.weights)

    def _begin(self, ended: str) -> None:
        if self.options.stage is not None:
            self.options.stage(_NEXT[ended])

    def _lap(self, stage: str) -> None:
        """Note the time of a stage that ended; tell somebody of the one that begins."""
        now = perf_counter()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._last
        self._last = now
        if _NEXT[stage]:
            self._begin(stage)

    def _mismatches(self, chosen: _Chosen) -> list[Mismatch]:
        """Return the primitives with a wrong result. A check needs memory, so it comes before weights are packed."""
        kept = chosen.kept
        if not self._checked:
            return []
        key = key_of({"plan": kept.key})
        if self._store.has_passed(key):
            return []
        plan = chosen.unpacked or without_weights(kept.graph, self._target)
        wrong = check_steps(plan.steps, self._store, plan.packed)
        if not wrong:
            self._store.add_passed([key])
        elif self._rerouted == _ATTEMPTS:
            raise PlanError(f"model {self.normal.name}: primitives keep failing their check; the last: {wrong[0]}")
        return wrong

    def _reroute(self, wrong: list[Mismatch]) -> None:
        self._rerouted += 1
        self.wrong += wrong
        for mismatch in wrong:
            warnings.warn(f"{mismatch}; planning around it", RuntimeWarning, stacklevel=7)
            for target in (self._target, self._fallback):
                target.reject(mismatch.node)
        self._readers = [mismatch.reader for mismatch in wrong if mismatch.reader is not None]

    # ------------------------------------------------------------------ which plan

    def _chosen(self) -> _Chosen:
        """Assign formats, in several ways where it is not known yet which of them is the fastest."""
        options, rivals = self.options, self._rivals()
        best = rivals.best
        entrants = [best]
        if options.policy == OPTIMAL and options.confirm and not options.pin:
            known = self._winner(rivals)
            entrants = self._entrants(rivals) if known is None else [known]
        self.tuning = self._costs.tuning if self._costs is not None else None
        self._lap("assign")
        raced = self._race(entrants, rivals) if len(entrants) > 1 else None
        if raced is None:
            kept = rivals.best if len(entrants) > 1 else entrants[0]
            return _Chosen(kept, kept.certificate or best.certificate)
        kept, result, plan = raced
        self._lap("confirm")
        if not self._recalibrated and best.name in result.names:
            promised, needed = rivals.expected(best), result.seconds[result.names.index(best.name)]
            self._recalibrated = promised > _DISPROVED * needed
            if self._recalibrated and improve(self._store):
                del raced, plan  # numbers that stand in for weights
                self._costs = None
                return self._chosen()
        verdict = {
            _winner_key(best, self._patient): kept.name,
            _pair_key(best, kept): kept.name,
        }
        return _Chosen(kept, kept.certificate or best.certificate, result, verdict, replace(plan, constants=()))

    def _rivals(self) -> Entrants:
        """Return who may become the plan; where nobody packs for some readers any more, others run these."""
        if self.options.policy == OPTIMAL:
            self._costs = self._costs or self._new_costs()
        setting = setting_for(self._target, self.options.boundary, self._fallback)
        model = self.normal, setting, self._costs, self.options, self._attempts
        rivals, failed = Entrants(*model), self._attempts.failed
        rivals.get(rivals.ladder[0])
        unsupported = [name for name, error in failed.items() if isinstance(error, UnsupportedOpError)]
        if not self._readers or not unsupported:
            return rivals
        for reader in self._readers:
            self._target.reject(reader)
        self._readers = []
        for name in unsupported:
            del failed[name]
        return Entrants(*model)

    def _new_costs(self) -> TunedCosts:
        options = self.options
        return costs_for(
            options.tuning.costs,
            weights_nbytes=weights_nbytes(self.normal),
            activations_nbytes=activations_nbytes(self.normal),
            budget=options.tune_budget,
            progress=options.progress,
            store=self._store,
            target=self._target,
        )

    # ------------------------------------------------------------------ which is the fastest

    def _entrants(self, rivals: Entrants) -> list[Entrant]:
        """Return the plans to be run against each other, the choice by cost first; none that costs far more."""
        best, *others = rivals.field(whole=self._patient)
        return [best, *(one for one in others if rivals.expected(one) <= _FAR * rivals.expected(best))]

    def _race(self, entrants: Sequence[Entrant], rivals: Entrants) -> tuple[Entrant, Race, Plan] | None:
        """Return the fastest, the times of all, and its plan; None if none can run on the inputs at hand.

        All run once more, with `DIRECT` among them, where another than the first won or costs promised more.
        """
        raced = self._run_in_turns(entrants, rivals)
        if raced is None or self._patient:
            return raced
        if raced[0] is entrants[0] and _is_kept(rivals.best.certificate, raced[1]):
            return raced
        direct = rivals.get(DIRECT)
        if direct is None or direct.key in {entrant.key for entrant in entrants}:
            return raced
        del raced  # it holds the numbers that stand in for weights
        return self._run_in_turns([one for one in (*entrants, direct) if rivals.get(one.name) is one], rivals)

    def _run_in_turns(self, entrants: Sequence[Entrant], rivals: Entrants) -> tuple[Entrant, Race, Plan] | None:
        """Run plans against each other: on any numbers where that tells as much as their own weights."""
        graphs = {entrant.name: entrant.graph for entrant in entrants}
        if all(map(runs_on_any_numbers, graphs.values())):
            makers = with_dummy_weights(graphs, self._target)
        else:
            makers = {name: partial(build_plan, graph, self._target) for name, graph in graphs.items()}
        made = {name: self._attempts.of(name, maker) for name, maker in makers.items()}
        plans = {name: plan for name, plan in made.items() if plan is not None}
        fewest = _ROUNDS if self._patient and self.options.tune_budget is None else 1
        budget, expected = _PATIENT if self._patient else _QUICK, rivals.expected(entrants[0])
        result = race(plans, random_inputs(self.normal), budget, fewest, expected, self._attempts) if plans else None
        if result is None:
            for name in plans:  # that none can be run on these inputs tells nothing about one of them
                self._attempts.failed.pop(name)
            return None
        name = result.names[result.winner]
        return next(entrant for entrant in entrants if entrant.name == name), result, plans[name]

    # ------------------------------------------------------------------ records of earlier races

    def _winner(self, rivals: Entrants) -> Entrant | None:
        """Return the winner of the last race; None if it is unknown. A longer race comes first."""
        if self.options.tuning.costs == "remeasure":
            return None
        for patient in (True,) if self._patient else (True, False):
            name = self._store.verdict(_winner_key(rivals.best, patient))
            kept = rivals.get(name) if name in rivals.names else None
            # by other costs, another plan may have the same name
            if kept is not None and self._store.verdict(_pair_key(rivals.best, kept)) is not None:
                return kept
        return None


def _is_kept(promise: Certificate | None, result: Race) -> bool:
    """Return whether the choice by cost, the first plan, saved as much time over `propagate` as its costs promised."""
    if promise is None or GREEDY not in result.names[1:] or not promise.propagate:
        return True
    return not result.is_beyond(result.names.index(GREEDY), (1 + _DOUBT) * promise.objective / promise.propagate)


def _winner_key(best: Entrant, patient: bool) -> str:
    """Return the key of who beat the choice by cost, or whether it won, on this machine with these threads."""
    return key_of({"race": best.key, "patient": patient})


def _pair_key(best: Entrant, kept: Entrant) -> str:
    """Return the key of one plan having been run against the choice by cost."""
    return key_of({"race": best.key, "kept": kept.key})
