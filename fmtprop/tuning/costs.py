"""Costs that a compilation uses: modelled, measured, or from the cache where possible.

Owns the decision to measure, and the scaling that makes measured and modelled figures comparable. Other modules
measure, model and store figures.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import median

from fmtprop import dnnl
from fmtprop.errors import FmtpropError
from fmtprop.ir.node import Node
from fmtprop.layout import MemoryDesc
from fmtprop.passes.target import Candidate, CostModel, candidate_of
from fmtprop.store import Store, key_of
from fmtprop.targets import OneDnnTarget
from fmtprop.targets.executable import Provider
from fmtprop.tuning.identity import describe, describe_reorder, group_of, identity_of, is_timed
from fmtprop.tuning.measure import Progress
from fmtprop.tuning.paces import Family, Paces
from fmtprop.tuning.peaks import are_measured, keys_of_peaks, nominal_peaks, peaks
from fmtprop.tuning.roofline import ModelCosts
from fmtprop.tuning.tuner import Group, Tuner

#: values of the option `tune`
TUNES = ("auto", "model", "measure", "remeasure")

#: modelled costs by figures that are not measured: the same in every process
NOMINAL = "nominal"

#: modelled costs by the figures of this machine that are known, nominal ones where it was never measured: for choices
#: that decide little, and must be quick
KNOWN = "known"

#: values with which unknown costs are measured
MEASURING = ("measure", "remeasure")

#: how a cost was found
MEASURED, MODELLED = "measured", "modelled"

#: a way to run a node is not measured if, by the model, its time over the best way's is above this. The model is wrong
#: by a factor of 8 at most, so such a way cannot win
_HOPELESS = 20.0

#: share of a network's time that a reorder must save. Costs have errors of a few percent, so more reorders for a
#: smaller gain are no gain: DenseNet-121 had five reorders for 0.5 % (measured) and ran no faster; ViT for AVX-512 had
#: 37 for 2 % (modelled)
_DOUBT_SHARE = 1.5e-3

#: share of an average node's time that a reorder must save at most: the errors are those of its neighbours' costs, and
#: a step of training has many times as many nodes as a network. A step of DenseNet-121 took 1.76 s with 419 reorders,
#: chosen by a share of 3e-4 of its time, and 1.86 s with 324 (AVX-512, one thread)
_DOUBT_OF_NODE = 0.5


def disturbance(src: MemoryDesc, dst: MemoryDesc) -> float:
    """Return the seconds that a reorder costs its neighbours in a plan: one more step, and evicted data.

    A reorder that is timed alone looks cheaper than it is in a plan. Plans of DenseNet-121, ShuffleNetV2 and Inception
    v3 with 0 to 76 reorders had equal measured costs, but plans with fewer reorders were as fast or faster. With up to
    20 us added for each large reorder, costs rank the plans by their real times.

    >>> small, large = MemoryDesc((1, 8), "f32"), MemoryDesc((1, 64, 56, 56), "f32")
    >>> round(disturbance(small, small) * 1e6, 1), round(disturbance(large, large) * 1e6, 1)
    (2.0, 20.0)
    """
    return 2e-6 + min(18e-6, (src.nbytes + dst.nbytes) / 12.5e9)


@dataclass(frozen=True)
class Tuning:
    """Sources of a compilation's costs.

    Parameters
    ----------
    measured, cached, modelled : int
        Numbers of distinct ways to run a node, and of reorders, with a cost that was measured now, measured earlier,
        or modelled.
    seconds : float
        Time spent on measuring.
    """

    measured: int = 0
    cached: int = 0
    modelled: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Basis:
    """What modelled costs are made of: figures of the machine, and what runs had taught.

    Later runs teach more, and other processes share the store. A plan that was proved the cheapest may not be by costs
    of another basis, so what tells of a plan afterwards takes the one by which it was chosen.
    """

    #: None: of the figures that the store has
    model: CostModel | None
    paces: Paces


def costs_for(
    tune: str = "auto",
    *,
    weights_nbytes: int,
    activations_nbytes: int | None = None,
    budget: float | None = None,
    progress: Progress | None = None,
    store: Store | None = None,
    target: Provider | None = None,
    basis: Basis | None = None,
) -> TunedCosts:
    """Return the costs for a compilation, with the present number of threads.

    `tune`: ``"nominal"`` measures nothing at all (``deterministic=True``), nor does ``"known"``, which has the figures
    that were measured before (arithmetic of a type other than f32 is measured when it is first asked for).
    ``"model"`` measures only the machine's peaks, once. ``"measure"`` measures the figures that the cache lacks.
    ``"remeasure"`` measures all figures and replaces the cache's. ``"auto"`` uses the cache's figures if it has all for
    a node, and the model otherwise.
    `activations_nbytes`: largest number of bytes of activations that a node reads and writes, if known; together with
    that of weights, it decides from which level of memory weights come. `budget`: seconds for measuring; 0 to measure
    nothing. Default: no limit. `progress`: told (done, total) while problems are measured. `store`: figures measured
    before. Default: the user's store. `target`: target of the nodes; its reorders are timed. Default: oneDNN.
    `basis`: of earlier costs, to get the same ones. Default: what the store has.
    """
    if tune not in (*TUNES, NOMINAL, KNOWN):
        raise FmtpropError(f"unknown tune {tune!r}; known: {', '.join(TUNES)}")
    known, target = store if store is not None else Store(), target or OneDnnTarget()
    if tune == KNOWN and not are_measured(known):
        tune = NOMINAL
    model, footprint = (basis.model if basis else None) or target.model(), weights_nbytes + (activations_nbytes or 0)
    if model is None:
        figures = nominal_peaks() if tune == NOMINAL else peaks(known, 0 if tune == KNOWN else footprint)
        model = ModelCosts(figures, footprint, dnnl.lib().lanes, has_tiles=dnnl.lib().has_tiles)
    paces = basis.paces if basis else Paces(None if tune == NOMINAL else known)
    tune = "model" if tune in (NOMINAL, KNOWN) else tune
    return TunedCosts(model, known, tune, weights_nbytes, inf if budget is None else budget, progress, target, paces)


class TunedCosts:
    """Measured figures if there are any, otherwise modelled ones.

    `model`: model of figures that are not measured. `progress`: called with (done, total). `paces`: what runs taught
    about costs. Default: the store's.

    To be comparable with measured figures, a modelled figure is multiplied by the median ratio of measured to modelled
    figures of the same op and implementation, else of the same op, else of all known figures. Ways of the reference
    target are always modelled.
    """

    def __init__(
        self,
        model: CostModel,
        store: Store,
        tune: str,
        weights_nbytes: int,
        budget: float = inf,
        progress: Progress | None = None,
        target: Provider | None = None,
        paces: Paces | None = None,
    ) -> None:
        self.model, self.store, self.tune = model, store, tune
        self.tuning = Tuning()
        self._weights_nbytes = weights_nbytes
        self._tuner = Tuner(store, target or OneDnnTarget(), weights_nbytes, budget, progress)
        #: measured seconds, by identity
        self._known: dict[Hashable, float] = {}
        #: groups with missing figures: none of their figures is used
        self._partial: set[Hashable] = set()
        #: identities that were requested, and those with a measured figure in use
        self._asked: set[Hashable] = set()
        self._used: set[Hashable] = set()
        #: identities that this object timed
        self._fresh: set[Hashable] = set()
        #: seconds that a reorder must save in addition to its own time
        self._doubt = 0.0
        self._paces = paces or Paces(store)
        self._ratios: dict[Hashable, float] = {}
        self._answers: dict[Hashable, float] = {}

    def basis(self) -> Basis:
        """Return what the modelled costs are made of, as it is now."""
        return Basis(self.model, self._paces.frozen())

    # ------------------------------------------------------------------ Costs

    def prepare(
        self, work: Sequence[tuple[Node, Candidate]], reorders: Sequence[tuple[MemoryDesc, MemoryDesc]]
    ) -> None:
        """Look up figures, and measure missing ones if `tune` says so: first those with the largest share of time."""
        peaks_alone = self.tune not in MEASURING and not self.store.has_figures(besides=keys_of_peaks().values())
        if self.tune == "model" or peaks_alone:
            self._asked |= {identity_of(*way) for way in work if _costs_time(*way)}
            self._asked |= {pair for pair in reorders if self.model.reorder(*pair)}
            self.tuning = Tuning(modelled=len(self._asked))
            self._doubt = self._doubt_of(work)
            return
        groups = self._groups(work) | self._reorder_groups(reorders)
        if self.tune != "remeasure":
            for group in groups.values():
                self._known.update(self._recorded(group))
        self._partial -= groups.keys()
        if self.tune in MEASURING:
            missing = [group for group in groups.values() if not group.keys.keys() <= self._known.keys()]
            found = self._tuner.measure(missing, self.model)
            self._known.update(found)
            self._fresh.update(found)
        else:
            self._partial |= {name for name, group in groups.items() if not group.keys.keys() <= self._known.keys()}
        self._asked |= {identity for group in groups.values() for identity in group.ways}
        whole = {identity for name, group in groups.items() if name not in self._partial for identity in group.keys}
        self._used |= whole & self._known.keys()
        measured = len(self._used & self._fresh)
        self.tuning = Tuning(
            measured, len(self._used) - measured, len(self._asked) - len(self._used), self._tuner.seconds
        )
        self._compare(groups)
        self._answers.clear()
        self._doubt = self._doubt_of(work)

    def node(self, node: Node, candidate: Candidate) -> float:
        """Return the seconds of a way to run a node."""
        if not _costs_time(node, candidate):
            return 0.0
        identity = identity_of(node, candidate)
        answer = self._answers.get(identity)
        if answer is None:
            answer = self._known.get(identity) if group_of(node, candidate) not in self._partial else None
            if answer is not None:
                answer *= self._paces.of(_family_of(node, candidate, MEASURED), answer)
            else:
                answer = self._modelled(node, candidate) * self._ratio(_family(node, candidate))
            self._answers[identity] = answer
        return answer

    def reorder(self, src: MemoryDesc, dst: MemoryDesc) -> float | None:
        """Return the seconds of a reorder, 0 for equal formats, None if no reorder exists.

        Added to its own time are the loss of its neighbours (see :func:`disturbance`) and a share of the network's
        time, for the errors of the figures.
        """
        if src == dst:
            return 0.0
        if (src, dst) in self._tuner.absent:
            return None
        known = self._known.get((src, dst))
        if known is not None:
            known *= self._paces.of(self._family_of_reorder(src, dst, MEASURED), known)
        else:
            modelled = self._modelled_reorder(src, dst)
            if modelled is None:
                return None
            known = modelled * self._ratio(("reorder", self.model.reorder_kind(src, dst)))
        return known + disturbance(src, dst) + self._doubt

    def learn(self, steps: Iterable[tuple[Node, float]]) -> None:
        """Learn from a run where costs did not predict it: all later costs of these families are multiplied.

        `steps`: the node of each step, with its choice, and the seconds that it took.
        """
        self._paces.learn((*found, seconds) for node, seconds in steps if (found := self._learnable(node)) is not None)
        self._answers.clear()

    def _learnable(self, node: Node) -> tuple[Family, float] | None:
        """Return the family of a step and its cost without a pace; None if it has no cost."""
        candidate = candidate_of(node)
        if node.choice is None or not _costs_time(node, candidate):
            return None
        if node.op == "reorder" and node.descs[0].dtype is candidate.operands["src"].dtype:
            pair = candidate.operands["src"], node.descs[0]
            known = self._known.get(pair)
            cost = self.model.reorder(*pair) if known is None else known
            return (self._family_of_reorder(*pair, MODELLED if known is None else MEASURED), cost) if cost else None
        known = None if group_of(node, candidate) in self._partial else self._known.get(identity_of(node, candidate))
        cost = self.model.node(node, candidate) if known is None else known
        return (_family_of(node, candidate, MODELLED if known is None else MEASURED), cost) if cost else None

    def _modelled(self, node: Node, candidate: Candidate) -> float:
        cost = self.model.node(node, candidate)
        return cost * self._paces.of(_family_of(node, candidate, MODELLED), cost)

    def _modelled_reorder(self, src: MemoryDesc, dst: MemoryDesc) -> float | None:
        cost = self.model.reorder(src, dst)
        return cost and cost * self._paces.of(self._family_of_reorder(src, dst, MODELLED), cost)

    def _family_of_reorder(self, src: MemoryDesc, dst: MemoryDesc, source: str) -> Family:
        return source, str(dst.dtype), "reorder", self.model.reorder_kind(src, dst)

    def is_measured(self, identity: Hashable) -> bool:
        """Return whether the figure of a way to run a node, or of a pair of formats, was measured."""
        return identity in self._used

    def _recorded(self, group: Group) -> dict[Hashable, float]:
        """Return the recorded figures of a group. What no machine can need was measured wrongly, and does not count."""
        found = {}
        for identity, key in group.keys.items():
            seconds = self.store.figure(key)
            if seconds is not None and (group.allows(identity, seconds, self.model) or self.store.has_passed(key)):
                found[identity] = seconds
        return found

    def _doubt_of(self, work: Sequence[tuple[Node, Candidate]]) -> float:
        """Return the seconds that a reorder must save, by the best way to run each node of the network."""
        best: dict[str, float] = {}
        for node, candidate in work:
            best[node.name] = min(best.get(node.name, inf), self.node(node, candidate))
        return min(_DOUBT_SHARE, _DOUBT_OF_NODE / max(1, len(best))) * sum(best.values())

    # ------------------------------------------------------------------ groups

    def _groups(self, work: Sequence[tuple[Node, Candidate]]) -> dict[Hashable, Group]:
        groups: dict[Hashable, Group] = {}
        names: dict[Hashable, set[str]] = {}
        for node, candidate in work:
            if not _costs_time(node, candidate):
                continue
            name = group_of(node, candidate)
            group = groups.setdefault(name, Group())
            names.setdefault(name, set()).add(node.name)
            group.ways.setdefault(identity_of(node, candidate), (node, candidate))
        for name, group in groups.items():
            group.count = len(names[name])
            group.modelled = {identity: self._modelled(*way) for identity, way in group.ways.items()}
            candidates = [candidate for _, candidate in group.ways.values() if is_timed(candidate)]
            real = any(not candidate.is_ref for candidate in candidates)
            far = _HOPELESS * min(group.modelled.values())
            for identity, (node, candidate) in group.ways.items():
                hopeless = (candidate.is_ref and real) or group.modelled[identity] > far
                if is_timed(candidate) and not hopeless:
                    group.keys[identity] = key_of(describe(node, candidate, self._weights_nbytes))
        return groups

    def _reorder_groups(self, reorders: Sequence[tuple[MemoryDesc, MemoryDesc]]) -> dict[Hashable, Group]:
        groups: dict[Hashable, Group] = {}
        for pair, count in Counter(reorders).items():
            seconds = self._modelled_reorder(*pair)
            if seconds:
                groups[pair] = Group({pair: pair}, {pair: seconds}, {pair: key_of(describe_reorder(*pair))}, count)
        return groups

    # ------------------------------------------------------------------ comparing

    def _compare(self, groups: Mapping[Hashable, Group]) -> None:
        """Compute the ratios of measured to modelled figures."""
        found: dict[Hashable, list[float]] = {}
        for group in groups.values():
            for identity in group.keys.keys() & self._known.keys():
                first, second = group.ways[identity]
                ratio = self._known[identity] / group.modelled[identity]
                if isinstance(first, Node):
                    op, impl = _family(first, second)
                else:
                    op, impl = "reorder", self.model.reorder_kind(first, second)
                for family in ((op, impl), op, None):
                    found.setdefault(family, []).append(ratio)
        self._ratios.update({family: median(ratios) for family, ratios in found.items()})

    def _ratio(self, family: tuple[str, str]) -> float:
        for name in (family, family[0], None):
            if name in self._ratios:
                return self._ratios[name]
        return 1.0


def _costs_time(node: Node, candidate: Candidate) -> bool:
    return candidate.target != "view" and not node.is_boundary


def _family_of(node: Node, candidate: Candidate, source: str) -> Family:
    """Return the family of a way to run a node, whose cost was found so."""
    return source, str(candidate.results[0].dtype), node.op, f"{candidate.target}/{candidate.impl}"


def _family(node: Node, candidate: Candidate) -> tuple[str, str]:
    return node.op, f"{candidate.target}/{candidate.impl}"
