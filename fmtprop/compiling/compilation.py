"""A compilation: from an imported graph to the plan that is kept, with the result of each stage.

Owns the order of the stages, and the loop around primitives that fail their check. Decides no format itself;
:mod:`~fmtprop.compiling.selection` has the choice among plans.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import partial
from time import perf_counter

from fmtprop.compiling.attempts import Attempts
from fmtprop.compiling.budget import Budget
from fmtprop.compiling.entrants import OTHER_SHAPE, Entrant, name_of_rewrite
from fmtprop.compiling.options import Options
from fmtprop.compiling.planned import ATTEMPTS, Planned
from fmtprop.compiling.selection import Selection
from fmtprop.compiling.stages import check_memory, make_room, normalise
from fmtprop.errors import PlanError
from fmtprop.ir.footprint import weights_nbytes
from fmtprop.ir.graph import Graph
from fmtprop.ir.tensors import defer
from fmtprop.passes.base import Observer
from fmtprop.passes.pipeline import STRUCTURAL
from fmtprop.runtime import Plan
from fmtprop.runtime.build import Draft
from fmtprop.runtime.constants import ConstantStore
from fmtprop.runtime.selfcheck import Mismatch, check_steps, likenesses
from fmtprop.runtime.weights import PackedForms, SharedForms
from fmtprop.store import key_of

#: formatted nodes for each imported one, and for each distinct implementation: guesses until formats are chosen
_FORMATTED_NODES, _NODES_OF_A_KIND = 2, 30

#: a stage that ended -> the name of the next one, as users see it
_NEXT = {
    "": "normalising",
    "normalise": "choosing formats",
    "assign": "comparing plans",
    "confirm": "checking primitives",
    "check": "packing weights",
    "plan": "",
}


class Compilation(Planned):
    """A model on its way to a plan, with the results of the stages so far; at the end, its graphs have no constants.

    `owned`: whether the compilation alone has the graph's constants: each is dropped when it is packed, so memory never
    holds all weights twice. `shared`: packed forms of the model's tensors that plans for other shapes have. `sibling`:
    the plan of another shape: its choices are taken where they are possible. `alike`: likenesses of the primitives that
    passed in plans for other shapes, to which this plan's are added. `fused`: the target's answers about fusions for
    other shapes, likewise. `idle`: passes that change nothing for any shape.
    `imported`, `normal`, `formatted`: after
    the import, the rewrites and the choice of formats. `precision`: the data type that compute-intensive ops really run
    in. `tuning`: where the costs of the `optimal` assignment came from. `certificate`: how good the `optimal`
    assignment is by its costs. `race`: how long the plans took that were run against each other. `wrong`: primitives
    that failed their check, and around which was planned. `dropped`: ways to run the model that failed and were left
    out, and why. `left_out`: optional work for which there was no time, and its estimate. `weights`: the constants, as
    plans for any number of threads have them. `is_like_another_shape`: whether the plan has the choices of another
    shape's plan.
    """

    normal: Graph
    kept: Entrant

    def __init__(
        self,
        imported: Graph,
        options: Options,
        *,
        owned: bool = False,
        shared: SharedForms | None = None,
        sibling: Entrant | None = None,
        alike: set[object] | None = None,
        fused: dict[object, bool] | None = None,
        idle: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__(options, PackedForms(shared), owned=owned)
        self.imported = imported
        self._sibling = self._like = sibling
        self._alike, self._fused = alike, fused
        self.idle = idle
        self._last = perf_counter()
        self._attempts = Attempts()
        limited = not (options.tuning.is_patient or options.deterministic) and options.tune_budget is None
        self._budget = Budget(is_limited=limited)
        nodes = _FORMATTED_NODES * len(imported)
        self._budget.keep(nodes=nodes, kinds=nodes // _NODES_OF_A_KIND, packed_nbytes=2 * weights_nbytes(imported))
        self.left_out = self._budget.left_out
        #: how often plans were made anew around primitives that give a wrong answer
        self._rerouted = 0

    # ------------------------------------------------------------------ stages

    def run(self) -> Plan:
        """Go through all stages.

        Raises PlanError if no plan passes its own check, or this machine has too little memory for any, and
        UnsupportedOpError if no target can run an op, or a pin can't be obeyed.
        """
        check_memory(self.imported)
        self.normalise()
        self._freeze()
        del self._selection  # its costs are much, and of no more use
        self.imported = self.imported.copy()  # the caller's own keeps its constants
        for graph in (self.imported, self.normal, self.formatted):
            graph.constants.clear()
        return self.plan

    def normalise(self, observer: Observer | None = None) -> Graph:
        """Bring the imported graph to normal form."""
        options, graph = self.options, defer(self.imported)
        idle = None
        is_first = self._sibling is None or self._sibling.is_checked
        if self._alike is not None and is_first:  # for the model's next shapes
            observer = idle = _Idle(graph, observer)
        self._begin("")
        self.normal, self.precision = normalise(
            graph,
            options.dtype,
            observer,
            target=self._target,
            special_values=options.special_values,
            weights=options.weights,
            embeddings=options.embeddings,
            keep_float=tuple(options.keep_float),
            like=None if self._sibling is None else self._sibling.graph,
            fused=self._fused,
            idle=self.idle,
        )
        self.idle = self.idle if idle is None else frozenset(idle.names & STRUCTURAL)
        if self.owned:  # of folded weights, only the results are kept
            self.imported.constants.clear()
            make_room(self.normal)
        self._selection = Selection(
            self.normal, self._target, self._fallback, options, self._store, self._attempts, self._budget, self._lap
        )
        self._selection.sibling, self._sibling = self._sibling, None
        self._selection.forms = self.weights
        self._lap("normalise")
        return self.normal

    def choose(self) -> Entrant:
        """Assign formats to the normal graph by the policy, and by costs alone; run nothing."""
        best = self._selection.rivals().best
        self.formatted, self.certificate = best.graph, best.certificate
        self.dropped = self._attempts.settle(self.normal.name, best.name, 5)
        return best

    def _freeze(self) -> None:
        """Choose, check and freeze: again where a primitive gives a wrong answer, or a plan can't be made."""
        while True:
            chosen = self._selection.decide()
            self.tuning, self.basis = self._selection.tuning, self._selection.basis
            name, graph = chosen.kept.name, chosen.kept.graph
            self._target.forget()
            draft = chosen.draft or self._attempts.of(name, partial(Draft, graph, self._target))
            wrong = (
                self._attempts.of(name, partial(self._mismatches, chosen.kept, draft)) if draft is not None else None
            )
            self._lap("check")
            if wrong:
                self._reroute(wrong)
            if draft is None or wrong is None or wrong:
                continue
            if self.owned:
                self.normal.constants.clear()  # the formatted graph has them still
            if name != OTHER_SHAPE or (self._like is not None and self._like.is_checked):  # others are packed already
                make_room(graph)
            store = ConstantStore(self.weights)
            plan = self._attempts.of(name, partial(draft.pack, store, consume=self.owned))
            self._lap("plan")
            if plan is not None:
                break
            if self.owned:  # nothing is left of the constants that were packed
                raise self._attempts.failed[name]
        for key, winner in chosen.verdict.items():
            self._store.remember(key, winner)
        self.plan, self.formatted, self.certificate, self.race = plan, graph, chosen.certificate, chosen.race
        self.kept, self._like = replace(chosen.kept, threads=plan.threads), None
        self.dropped = self._attempts.settle(self.normal.name, name, 8)
        self.is_like_another_shape, self.rewrite = name == OTHER_SHAPE, name_of_rewrite(chosen.kept)

    def _begin(self, ended: str) -> None:
        if self.options.stage is not None:
            self.options.stage(_NEXT[ended])

    def _lap(self, stage: str) -> None:
        """Note the time of a stage that ended; announce the one that begins."""
        now = perf_counter()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._last
        self._last = now
        if _NEXT[stage]:
            self._begin(stage)

    def _mismatches(self, kept: Entrant, draft: Draft) -> list[Mismatch]:
        """Return the primitives with a wrong result. A check needs memory, so it comes before weights are packed."""
        if not self._checked:
            return []
        # most primitives of a plan for another shape are known: its key takes longer than to ask for each
        like = self._like if kept.name == OTHER_SHAPE else None
        key = None if kept.name == OTHER_SHAPE else key_of({"plan": kept.key})
        has_passed = key is not None and self._store.has_passed(key)
        if has_passed or (like is not None and like.is_checked and like.key == kept.key):
            if self._alike is not None:
                self._alike |= likenesses(draft.plan)
            return []
        wrong = check_steps(draft.plan.steps, self._store, draft.plan.packed, self._alike)
        if not wrong and key is not None:
            self._store.add_passed([key])
        elif self._rerouted == ATTEMPTS:
            raise PlanError(f"model {self.normal.name}: primitives keep failing their check; the last: {wrong[0]}")
        return wrong

    def _reroute(self, wrong: list[Mismatch]) -> None:
        self._rerouted += 1
        self.wrong += wrong
        for mismatch in wrong:
            warnings.warn(f"{mismatch}; planning around it", RuntimeWarning, stacklevel=7)
            for target in (self._target, self._fallback):
                target.reject(mismatch.node)
        self._selection.readers = [mismatch.reader for mismatch in wrong if mismatch.reader is not None]


class _Idle:
    """An observer of passes that notes those that change nothing."""

    def __init__(self, graph: Graph, others: Observer | None) -> None:
        self._graph, self._others = graph, others
        self.names: set[str] = set()

    def __call__(self, name: str, graph: Graph) -> None:
        if graph.is_copy_of(self._graph):
            self.names.add(name)
        self._graph = graph
        if self._others is not None:
            self._others(name, graph)
