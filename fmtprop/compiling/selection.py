"""The choice of the plan that is kept: by cost, or by a race of plans where costs do not decide.

Owns the last word between the `optimal` plans and the greedy ones, and the records of races. Assigns no formats itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from time import thread_time

from fmtprop.compiling.attempts import Attempts
from fmtprop.compiling.budget import NODE_SECONDS, Budget
from fmtprop.compiling.entrants import DIRECT, GREEDY, OTHER_SHAPE, Entrant, Entrants, as_before, like_another_shape
from fmtprop.compiling.inputs import random_inputs
from fmtprop.compiling.options import OPTIMAL, Options
from fmtprop.compiling.race import Race, alone, race
from fmtprop.errors import FmtpropError, UnsupportedOpError
from fmtprop.ir import Graph, Node, TensorType
from fmtprop.ir.footprint import activations_nbytes, weights_nbytes
from fmtprop.passes.assignment.identities import Forms
from fmtprop.passes.optimal import Certificate
from fmtprop.runtime.build import Draft
from fmtprop.runtime.constants import ConstantStore, packed_nbytes
from fmtprop.runtime.dummy_weights import runs_on_any_numbers, with_dummy_weights
from fmtprop.store import Store, key_of
from fmtprop.targets.executable import Provider
from fmtprop.targets.registry import setting_for
from fmtprop.tuning import KNOWN, NOMINAL, Basis, TunedCosts, Tuning, costs_for
from fmtprop.tuning.peaks import improve

_LOG = logging.getLogger(__name__)

#: optional work, as users see it
_RACE, _CHECK, CORRECTION = "race of plans", "run to check costs", "plan by corrected costs"

#: seconds of a race, for the efforts "quick" and "patient"
_QUICK_SECONDS, _PATIENT_SECONDS = 0.2, 1.0

#: least rounds of a patient race without a limit of time: other users of a shared machine may decide a single round
_LEAST_ROUNDS = 5

#: the share by which a run may take longer, relative to `propagate`, than its costs promised, before costs are doubted;
#: and by which it may differ from them before they are corrected
_DOUBT_SHARE = 0.15

#: how often a plan is found again: then costs are corrected once more, and the plan stays
_MOST_CORRECTIONS = 2

#: seconds to find a plan again over those of the first time: the targets' answers are known (ResNet-18 0.35, Zen 4)
_SHARE_OF_CORRECTION = 0.5

#: a run of so few seconds is of the call more than of the steps, and teaches nothing about costs
_TRIFLE_SECONDS = 1e-4

#: cost over seconds of a run from which the measured peaks of the machine must be wrong: other users can only make runs
#: slower, and the costs of 6 networks, f32 and bf16, were 0.2 to 1.7 of their seconds
_DISPROVED_RATIO = 3.0

#: cost over the cheapest plan's from which a plan takes no part in the race: costs are not that wrong
FAR_RATIO = 10.0


@dataclass(frozen=True)
class Decision:
    """The plan that is kept, the certificate of the choice by cost, and the result of the race."""

    kept: Entrant
    certificate: Certificate | None = None
    race: Race | None = None
    #: records of the race for the store
    verdict: Mapping[str, str] = field(default_factory=dict)
    #: its draft, if it was in a race
    draft: Draft | None = None


class Selection:
    """The choice among the plans of one model; after a failure, it can be made again.

    `attempts`: records the ways that are dropped after a failure. `tuning`: where the costs of the `optimal` assignment
    came from. `readers`: nodes for which a wrong primitive packed an operand. `sibling`: the plan of another shape. Its
    choices come first, and are tried once.
    """

    def __init__(
        self,
        normal: Graph,
        target: Provider,
        fallback: Provider,
        options: Options,
        store: Store,
        attempts: Attempts,
        budget: Budget,
        lap: Callable[[str], None],
    ) -> None:
        self._normal, self._target, self._fallback = normal, target, fallback
        self._options, self._store, self._attempts, self._lap = options, store, attempts, lap
        self._budget = budget
        self.tuning: Tuning | None = None
        self.readers: list[Node] = []
        self.sibling: Entrant | None = None
        #: the packed constants of the model's plans
        self.forms: Forms | None = None
        #: asked by `optimal`, at each attempt: they know the measured figures, and the rest of the time for measuring
        self._costs: TunedCosts | None = None
        #: whether a run was so fast that the machine's peaks were measured again
        self._recalibrated = False
        #: how often the plan was found again by costs that a run had corrected
        self._corrections = 0
        #: the last race, and the keys of the plans that ran in it
        self._raced: tuple[Entrant, Race, Draft] | None = None
        self._ran: set[str] = set()
        #: nodes of the steps of each plan that ran last
        self._nodes: Mapping[str, Sequence[Node]] = {}
        #: whether compiling may take long
        self._patient = options.tuning.is_patient

    @property
    def basis(self) -> Basis | None:
        """What the costs of `optimal` are made of, with all that runs have taught."""
        return None if self._costs is None else self._costs.basis()

    def decide(self) -> Decision:
        """Assign formats, in several ways where it is not known yet which of them is the fastest; return one."""
        sibling, self.sibling = self.sibling, None  # a plan that fails its check is made anew
        if sibling is not None and self._options.policy == OPTIMAL and not self._options.pin:
            derived = self._attempts.of(OTHER_SHAPE, partial(self._like, sibling))
            if derived is not None:
                self._lap("assign")
                return Decision(derived)
        self._raced = None
        return self._decide()

    def _decide(self) -> Decision:
        options, start = self._options, thread_time()
        rivals = self.rivals()
        best = rivals.best
        entrants, known = [best], None
        if options.policy == OPTIMAL and options.races and not options.pin:
            known = self._winner(rivals)
            entrants = self._entrants(rivals) if known is None else [known]
        self.tuning = self._costs.tuning if self._costs is not None else None
        self._lap("assign")
        assigning = thread_time() - start
        if self._raced is not None and {one.key for one in entrants} <= self._ran:  # corrected costs changed no plan
            kept, result, draft = self._raced
            return self._raced_decision(replace(kept, certificate=None), result, draft, rivals, best)
        is_raced = len(entrants) > 1 or self._is_unclear(entrants[0], rivals, was_raced=known is not None)
        raced = self._race(entrants, rivals) if is_raced else None
        if raced is None:
            kept = rivals.best if len(entrants) > 1 else entrants[0]
            return Decision(kept, self._certificate(kept, rivals))
        kept, result, draft = self._raced = raced
        self._lap("confirm")
        if self._is_disproved(best, rivals, result) and improve(self._store):
            self._costs = None
            return self._decide()
        if self._learned(entrants, rivals, kept, result):
            self._corrections += 1
            again = _SHARE_OF_CORRECTION * assigning + self._seconds_of_race(best, len(entrants))
            if self._corrections <= _MOST_CORRECTIONS and self._budget.allows(CORRECTION, again):
                return self._decide()
            rivals, kept = self.rivals(), replace(kept, certificate=None)
        return self._raced_decision(kept, result, draft, rivals, best)

    def _raced_decision(self, kept: Entrant, result: Race, draft: Draft, rivals: Entrants, best: Entrant) -> Decision:
        """Return the decision that a race made for a plan, maybe against others; `best`: the choice by cost."""
        certificate = self._certificate(kept, rivals, result)
        if len(self._ran) == 1:  # there was no choice, only a check
            return Decision(kept, certificate, draft=draft)
        verdict = {key: kept.name for key in (_winner_key(best, self._patient), _pair_key(best, kept))}
        return Decision(kept, certificate, replace(result, steps=()), verdict, draft)

    # ------------------------------------------------------------------ costs and runs

    def _is_disproved(self, best: Entrant, rivals: Entrants, result: Race) -> bool:
        """Return, at most once, whether a run was so fast that the machine's peaks must be wrong."""
        if self._recalibrated or best.name not in result.names:
            return False
        needed = result.seconds[result.names.index(best.name)]
        self._recalibrated = rivals.expected(best) > _DISPROVED_RATIO * needed
        return self._recalibrated

    def _is_unclear(self, entrant: Entrant, rivals: Entrants, *, was_raced: bool) -> bool:
        """Return whether the only plan should run to hold its costs against it: it never did, or they differ."""
        if self._costs is None or not self._options.races:
            return False
        ran, cost = self._store.learned(_run_key(entrant)), rivals.price(entrant)
        if cost < _TRIFLE_SECONDS or (ran is None and was_raced) or (ran is not None and _agree(cost, ran)):
            return False
        self._budget.run = max(self._budget.run, cost)
        return self._budget.allows(_CHECK, self._seconds_of_race(entrant, 1))

    def _learned(self, entrants: Sequence[Entrant], rivals: Entrants, kept: Entrant, result: Race) -> bool:
        """Return whether costs were corrected, since they did not predict the run of the kept plan."""
        ran = result.median(kept.name)
        if self._costs is None or ran is None or not result.steps or result.is_disturbed:
            return False
        medians = {_run_key(one): result.median(one.name) for one in entrants}
        self._store.learn({key: seconds for key, seconds in medians.items() if seconds is not None})
        if ran < _TRIFLE_SECONDS or _agree(rivals.price(kept), ran):
            return False
        steps: list[tuple[Node, float]] = []
        for name, seconds in zip(result.names, result.steps, strict=True):
            steps += zip(self._nodes[name], seconds, strict=True)
        self._costs.learn(steps)
        return True

    def _certificate(self, kept: Entrant, rivals: Entrants, result: Race | None = None) -> Certificate | None:
        """Return the certificate of the plan that is kept, with its run."""
        found = rivals.certified(kept)
        ran = result.median(kept.name) if result is not None else None
        if ran is None and self._options.races:
            ran = self._store.learned(_run_key(kept))
        return found and replace(found, run=ran or 0.0, corrected=self._corrections > 0)

    def _like(self, other: Entrant) -> Entrant | None:
        setting = setting_for(self._target, self._options.boundary, self._fallback)
        if other.is_checked and _inputs(other.graph) == _inputs(self._normal):
            try:
                return as_before(self._normal, other, setting.boundary, self._target, self._fallback)
            except FmtpropError as error:
                _LOG.info("model %s is planned anew: %s", self._normal.name, error)
                return None
        # they decide little here: nothing is measured for them
        costs = self._costs or self._new_costs(KNOWN)
        return like_another_shape(self._normal, other, setting, costs, self.forms)

    def rivals(self) -> Entrants:
        """Return the entrants; readers without any right packing get other implementations."""
        if self._options.policy == OPTIMAL:
            self._costs = self._costs or self._new_costs()
        setting = setting_for(self._target, self._options.boundary, self._fallback)
        model = self._normal, setting, self._costs, self._options, self._attempts, self._budget
        rivals, failed = Entrants(*model), self._attempts.failed
        rivals.get(rivals.ladder[0])
        unsupported = [name for name, error in failed.items() if isinstance(error, UnsupportedOpError)]
        if not self.readers or not unsupported:
            return rivals
        for reader in self.readers:
            self._target.reject(reader)
        self.readers = []
        for name in unsupported:
            del failed[name]
        return Entrants(*model)

    def _new_costs(self, tune: str | None = None) -> TunedCosts:
        options = self._options
        return costs_for(
            NOMINAL if options.deterministic else tune or options.tuning.costs,
            weights_nbytes=weights_nbytes(self._normal),
            activations_nbytes=activations_nbytes(self._normal),
            budget=options.tune_budget,
            progress=options.progress,
            store=self._store,
            target=self._target,
        )

    # ------------------------------------------------------------------ which is the fastest

    def _entrants(self, rivals: Entrants) -> list[Entrant]:
        """Return the plans to be run against each other, the choice by cost first; none that costs far more."""
        graph, self._budget.run = rivals.best.graph, rivals.expected(rivals.best)
        kinds = len({id(node.choice.handle) for node in graph.nodes() if node.choice is not None})
        self._budget.keep(nodes=len(graph), kinds=kinds, packed_nbytes=packed_nbytes(graph))
        if not self._budget.allows(_RACE, self._seconds_of_race(rivals.best, 2)):
            return [rivals.best]
        best, *others = rivals.field(whole=self._patient)
        return [best, *(one for one in others if rivals.expected(one) <= FAR_RATIO * rivals.expected(best))]

    def _race(self, entrants: Sequence[Entrant], rivals: Entrants) -> tuple[Entrant, Race, Draft] | None:
        """Return the fastest, the times of all, and its draft; None if none can run on the inputs at hand.

        Those that may win run once more, with `DIRECT` among them, where another than the first won or costs promised
        more.
        """
        drafts: dict[str, Draft] = {}
        raced = self._run_in_turns(entrants, rivals, drafts)
        if raced is None or self._patient:
            return raced
        if raced[0] is entrants[0] and _is_kept(rivals.best.certificate, raced[1]):
            return raced
        if not rivals.has_expansions:
            return raced
        self._budget.run = max(self._budget.run, min(raced[1].seconds))
        left = [one for one in entrants if one is entrants[0] or not raced[1].is_beaten(one.name)]
        again = self._seconds_of_race(entrants[0], len(left) + 1) + rivals.seconds / 2
        if not self._budget.allows(f"{_RACE} with {DIRECT!r}", again):
            return raced
        direct = rivals.get(DIRECT)
        if direct is None or direct.key in {entrant.key for entrant in entrants}:
            return raced
        ran = self._ran
        raced = self._run_in_turns([one for one in (*left, direct) if rivals.get(one.name) is one], rivals, drafts)
        self._ran |= ran
        return raced

    def _run_in_turns(
        self, entrants: Sequence[Entrant], rivals: Entrants, known: dict[str, Draft]
    ) -> tuple[Entrant, Race, Draft] | None:
        """Run plans against each other: on any numbers where that tells as much as their own weights."""
        for one in entrants:
            draft = known.get(one.name) or self._attempts.of(one.name, partial(Draft, one.graph, self._target))
            if draft is not None:
                known[one.name] = draft
        drafts = {one.name: known[one.name] for one in entrants if one.name in known}
        if all(runs_on_any_numbers(draft.graph) for draft in drafts.values()):
            makers = with_dummy_weights(drafts)
        else:
            makers = {name: partial(draft.pack, ConstantStore()) for name, draft in drafts.items()}
        made = {name: self._attempts.of(name, maker) for name, maker in makers.items()}
        plans = {name: plan for name, plan in made.items() if plan is not None}
        fewest = _LEAST_ROUNDS if self._patient and self._options.tune_budget is None else 1
        budget, expected = _PATIENT_SECONDS if self._patient else _QUICK_SECONDS, rivals.expected(entrants[0])
        most = self._budget.left
        inputs = random_inputs(self._normal)
        self._nodes = {name: [step.node for step in plan.steps] for name, plan in plans.items()}
        result = None
        if len(entrants) == 1:
            for name, plan in plans.items():
                result = alone(name, plan, inputs, self._attempts, most)
        elif plans:
            result = race(plans, inputs, budget, fewest, expected, self._attempts, most)
        if result is None:
            for name in plans:  # that none can be run on these inputs tells nothing about one of them
                self._attempts.failed.pop(name)
            return None
        name, self._ran = result.names[result.winner], {one.key for one in entrants}
        return next(entrant for entrant in entrants if entrant.name == name), result, drafts[name]

    def _seconds_of_race(self, first: Entrant, plans: int) -> float:
        """Estimate the time of a race: each plan is built, runs once, and once more with warm caches."""
        return plans * (NODE_SECONDS * len(first.graph) + 2 * self._budget.run)

    # ------------------------------------------------------------------ records of earlier races

    def _winner(self, rivals: Entrants) -> Entrant | None:
        """Return the winner of the last race; None if it is unknown. A longer race comes first."""
        if self._options.tuning.costs == "remeasure":
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
    return not result.is_beyond(result.names.index(GREEDY), (1 + _DOUBT_SHARE) * promise.objective / promise.propagate)


def _agree(cost: float, ran: float) -> bool:
    """Return whether costs predict a run."""
    return ran <= (1 + _DOUBT_SHARE) * cost and cost <= (1 + _DOUBT_SHARE) * ran


def _inputs(graph: Graph) -> list[tuple[str, TensorType]]:
    return [(node.name, node.results[0]) for node in graph.input_nodes]


def _run_key(entrant: Entrant) -> str:
    """Return the key of the seconds of a plan's run, on this machine with these threads."""
    return key_of({"run": entrant.key})


def _winner_key(best: Entrant, patient: bool) -> str:
    """Return the key of who beat the choice by cost, or whether it won, on this machine with these threads."""
    return key_of({"race": best.key, "patient": patient})


def _pair_key(best: Entrant, kept: Entrant) -> str:
    """Return the key of one plan having been run against the choice by cost."""
    return key_of({"race": best.key, "kept": kept.key})
