"""Which costs a compilation uses: modelled, measured, or what the cache knows and the model elsewhere.

Owns when something is measured, and how measured and modelled figures are made comparable. How a figure is measured,
modelled or stored is its neighbours' affair.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from statistics import median
from time import perf_counter
from typing import Any

from fmtprop import dnnl
from fmtprop.errors import FmtpropError
from fmtprop.ir.node import Node
from fmtprop.layout import MemoryDesc
from fmtprop.passes.target import Candidate, Target
from fmtprop.store import Store, key_of
from fmtprop.targets import OneDnnTarget
from fmtprop.tuning.identity import describe, describe_reorder, group_of, identity_of, is_timed
from fmtprop.tuning.measure import Bench, Job, Progress, job_of, job_of_reorder
from fmtprop.tuning.peaks import peaks
from fmtprop.tuning.roofline import CACHE_NBYTES, ModelCosts

#: where costs may come from
TUNES = ("auto", "model", "measure", "remeasure")

#: those that time what they do not know
MEASURING = ("measure", "remeasure")

#: a way that the model takes to be so many times slower than the node's best is not worth a measurement
_HOPELESS = 20.0

#: share of a network's time that a reorder must save to be worth having. Costs are true to some percent, so a plan
#: with more reorders that is better by less is not better: DenseNet-121 had five for 0.5 % (measured), ran no faster;
#: for AVX-512 ViT had 37 for 2 % (modelled)
_DOUBT = 1.5e-3

#: seconds between two writings of the cache
_SAVE = 5.0


def disturbance(src: MemoryDesc, dst: MemoryDesc) -> float:
    """Return the seconds that a reorder costs its neighbours in a plan: one more step, and the data that it evicts.

    A reorder that is timed alone looks cheaper than it is. Plans of DenseNet-121, ShuffleNetV2 and Inception v3 with
    between 0 and 76 reorders, equal by measured cost, were as fast or faster with fewer: up to 20 us for each that
    moves much puts them in the order in which they ran.

    Examples
    --------
    >>> small, large = MemoryDesc((1, 8), "f32"), MemoryDesc((1, 64, 56, 56), "f32")
    >>> round(disturbance(small, small) * 1e6, 1), round(disturbance(large, large) * 1e6, 1)
    (2.0, 20.0)
    """
    return 2e-6 + min(18e-6, (src.nbytes + dst.nbytes) / 12.5e9)


@dataclass(frozen=True)
class Tuning:
    """Where the costs of a compilation came from.

    Parameters
    ----------
    measured, cached, modelled : int
        Distinct ways to run a node, and reorders, that were timed now, earlier, and not at all, of all that were asked
        about.
    seconds : float
        Time spent on measuring.
    """

    measured: int = 0
    cached: int = 0
    modelled: int = 0
    seconds: float = 0.0


def costs_for(
    tune: str = "auto",
    *,
    weights_nbytes: int,
    activations_nbytes: int | None = None,
    budget: float | None = None,
    progress: Progress | None = None,
    store: Store | None = None,
    target: Target | None = None,
) -> TunedCosts:
    """Return the costs that a compilation is to use, for the number of threads that is set now.

    Parameters
    ----------
    tune : {"auto", "model", "measure", "remeasure"}
        ``"model"`` measures the machine's peaks only, once; ``"measure"`` times what the cache does not know,
        ``"remeasure"`` everything, and replaces what the cache knows;
        ``"auto"`` takes what the cache knows about all ways to run a node, and the model elsewhere.
    weights_nbytes : int
        Bytes of all weights of the network: how far away weights are.
    activations_nbytes : int, optional
        Bytes of the most activations that a node reads and writes, where that is known: how far away these are.
    budget : float, optional
        Seconds for measuring, 0 for nothing but what is known; by default no limit.
    progress : callable, optional
        Told (done, total) while problems are measured.
    store : Store, optional
        What was measured before; by default the user's.
    target : Target, optional
        Who is asked for the reorders that are timed; by default oneDNN.

    Returns
    -------
    TunedCosts
        Fits `Costs` of :mod:`fmtprop.passes.target`.

    Raises
    ------
    FmtpropError
        There is no such `tune`.
    """
    if tune not in TUNES:
        raise FmtpropError(f"unknown tune {tune!r}; known: {', '.join(TUNES)}")
    known = store if store is not None else Store()
    small = activations_nbytes is not None and activations_nbytes <= CACHE_NBYTES
    figures = peaks(known, weights_nbytes) if small else peaks(known)
    model = ModelCosts(figures, weights_nbytes, 16 if "avx512" in dnnl.lib().isa else 8)
    return TunedCosts(model, known, tune, weights_nbytes, inf if budget is None else budget, progress, target)


@dataclass
class _Group:
    """Ways to run equal nodes, or one reorder: what is measured together."""

    #: identity -> the way
    ways: dict[Hashable, Any] = field(default_factory=dict)
    #: identity -> the model's seconds
    modelled: dict[Hashable, float] = field(default_factory=dict)
    #: identity -> key in the cache, of those that are worth a measurement
    keys: dict[Hashable, str] = field(default_factory=dict)
    #: how many nodes of the network it is about
    count: int = 0

    @property
    def weight(self) -> float:
        """Seconds of the network that it is about."""
        return self.count * min(self.modelled.values())


class TunedCosts:
    """Measured figures where there are some, modelled ones elsewhere.

    Parameters
    ----------
    model : ModelCosts
        For what is not measured.
    store : Store
        What was measured before; extended.
    tune : str
        See :func:`costs_for`.
    weights_nbytes : int
        Bytes of all weights of the network.
    budget : float
        Seconds for measuring.
    progress : callable, optional
        Told (done, total).
    target : Target, optional
        Who is asked for reorders.

    Notes
    -----
    A modelled figure is multiplied by the median ratio of measured to modelled figures of the same op and
    implementation, else of the same op, else of everything that is known: so it is comparable with measured ones.
    Ways of the reference target are always modelled.
    """

    def __init__(
        self,
        model: ModelCosts,
        store: Store,
        tune: str,
        weights_nbytes: int,
        budget: float = inf,
        progress: Progress | None = None,
        target: Target | None = None,
    ) -> None:
        self.model, self.store, self.tune = model, store, tune
        self._target = target or OneDnnTarget()
        self.tuning = Tuning()
        self._weights_nbytes, self._budget, self._progress = weights_nbytes, budget, progress
        #: measured seconds, by identity
        self._known: dict[Hashable, float] = {}
        #: groups of which some figures are missing, so that none is used
        self._partial: set[Hashable] = set()
        #: reorders that oneDNN does not have
        self._absent: set[Hashable] = set()
        #: what was asked about, and what of it has a measured figure that counts
        self._asked: set[Hashable] = set()
        self._used: set[Hashable] = set()
        #: what was timed by this object, and how long that took
        self._fresh: set[Hashable] = set()
        self._seconds = 0.0
        #: seconds that every reorder must save beside its own
        self._doubt = 0.0
        self._ratios: dict[Hashable, float] = {}
        self._answers: dict[Hashable, float] = {}

    # ------------------------------------------------------------------ Costs

    def prepare(
        self, work: Sequence[tuple[Node, Candidate]], reorders: Sequence[tuple[MemoryDesc, MemoryDesc]]
    ) -> None:
        """Look up what will be asked, and time it if that was asked for: what weighs most in the network first."""
        if self.tune == "model":
            self._asked |= _distinct(work) | set(reorders)
            self.tuning = Tuning(modelled=len(self._asked))
            self._doubt = _DOUBT * self._network_seconds(work)
            return
        groups = self._groups(work) | self._reorder_groups(reorders)
        if self.tune != "remeasure":
            for group in groups.values():
                found = {identity: self.store.figure(key) for identity, key in group.keys.items()}
                self._known.update({identity: value for identity, value in found.items() if value is not None})
        self._partial -= groups.keys()
        if self.tune in MEASURING:
            self._measure(groups)
        else:
            self._partial |= {name for name, group in groups.items() if not group.keys.keys() <= self._known.keys()}
        self._asked |= {identity for group in groups.values() for identity in group.ways}
        whole = {identity for name, group in groups.items() if name not in self._partial for identity in group.keys}
        self._used |= whole & self._known.keys()
        measured = len(self._used & self._fresh)
        self.tuning = Tuning(measured, len(self._used) - measured, len(self._asked) - len(self._used), self._seconds)
        self._compare(groups)
        self._answers.clear()
        self._doubt = _DOUBT * self._network_seconds(work)

    def node(self, node: Node, candidate: Candidate) -> float:
        """Return the seconds that a node takes when it runs so."""
        if candidate.target == "view" or node.is_boundary:
            return 0.0
        identity = identity_of(node, candidate)
        answer = self._answers.get(identity)
        if answer is None:
            answer = self._known.get(identity) if group_of(node, candidate) not in self._partial else None
            if answer is None:
                answer = self.model.node(node, candidate) * self._ratio(_family(node, candidate))
            self._answers[identity] = answer
        return answer

    def reorder(self, src: MemoryDesc, dst: MemoryDesc) -> float | None:
        """Return the seconds of a reorder, 0 for none, or None where there is none.

        To the time of its own comes what its neighbours in a plan lose (see :func:`disturbance`) and a share of the
        whole network's time: the doubt in the figures.
        """
        if src == dst:
            return 0.0
        if (src, dst) in self._absent:
            return None
        known = self._known.get((src, dst))
        if known is None:
            modelled = self.model.reorder(src, dst)
            if modelled is None:
                return None
            known = modelled * self._ratio(("reorder", self.model.reorder_kind(src, dst)))
        return known + disturbance(src, dst) + self._doubt

    def _network_seconds(self, work: Sequence[tuple[Node, Candidate]]) -> float:
        """Return the time of the network without reorders, every node by its best way."""
        best: dict[str, float] = {}
        for node, candidate in work:
            best[node.name] = min(best.get(node.name, inf), self.node(node, candidate))
        return sum(best.values())

    # ------------------------------------------------------------------ groups

    def _groups(self, work: Sequence[tuple[Node, Candidate]]) -> dict[Hashable, _Group]:
        groups: dict[Hashable, _Group] = {}
        names: dict[Hashable, set[str]] = {}
        for node, candidate in work:
            if candidate.target == "view" or node.is_boundary:
                continue
            name = group_of(node, candidate)
            group = groups.setdefault(name, _Group())
            names.setdefault(name, set()).add(node.name)
            group.ways.setdefault(identity_of(node, candidate), (node, candidate))
        for name, group in groups.items():
            group.count = len(names[name])
            group.modelled = {identity: self.model.node(*way) for identity, way in group.ways.items()}
            candidates = [candidate for _, candidate in group.ways.values() if is_timed(candidate)]
            real = any(not candidate.is_ref for candidate in candidates)
            far = _HOPELESS * min(group.modelled.values())
            for identity, (node, candidate) in group.ways.items():
                hopeless = (candidate.is_ref and real) or group.modelled[identity] > far
                if is_timed(candidate) and not hopeless:
                    group.keys[identity] = key_of(describe(node, candidate, self._weights_nbytes))
        return groups

    def _reorder_groups(self, reorders: Sequence[tuple[MemoryDesc, MemoryDesc]]) -> dict[Hashable, _Group]:
        groups: dict[Hashable, _Group] = {}
        for pair, count in Counter(reorders).items():
            seconds = self.model.reorder(*pair)
            if seconds:
                groups[pair] = _Group({pair: pair}, {pair: seconds}, {pair: key_of(describe_reorder(*pair))}, count)
        return groups

    # ------------------------------------------------------------------ measuring

    def _measure(self, groups: Mapping[Hashable, _Group]) -> None:
        """Time what has a key and no figure, as far as the time allows."""
        start = perf_counter()
        deadline = start + self._budget - self._seconds
        if start >= deadline:
            return
        missing = [group for group in groups.values() if not group.keys.keys() <= self._known.keys()]
        missing.sort(key=lambda group: -group.weight)
        jobs = [self._jobs(group) for group in missing]
        if not any(jobs):
            return
        bench = Bench((job for some in jobs for job in some), self._weights_nbytes)
        unsaved: dict[str, float] = {}
        saved = start

        def done(index: int, found: Mapping[Hashable, float]) -> None:
            nonlocal saved
            self._known.update(found)
            self._fresh.update(found)
            unsaved.update({missing[index].keys[identity]: seconds for identity, seconds in found.items()})
            if perf_counter() - saved > _SAVE:
                self.store.add_figures(unsaved, sync=True)
                unsaved.clear()
                saved = perf_counter()

        try:
            bench.seconds(jobs, deadline, done, self._progress)
        finally:
            self.store.add_figures(unsaved, sync=True)
            self._seconds += perf_counter() - start

    def _jobs(self, group: _Group) -> list[Job]:
        """Return the jobs of a group, the most promising first.

        All its ways are timed although some may be known: figures of another hour are not comparable.
        """
        jobs = []
        for identity in sorted(group.keys, key=lambda identity: group.modelled[identity]):
            first, second = group.ways[identity]
            if isinstance(first, Node):
                jobs.append(job_of(identity, first, second))
                continue
            job = job_of_reorder(identity, first, second, self._target)
            if job is not None:
                jobs.append(job)
            elif not (first.is_plain and second.is_plain):  # such are copied by another target, at the modelled cost
                self._absent.add(identity)
        return jobs

    # ------------------------------------------------------------------ comparing

    def _compare(self, groups: Mapping[Hashable, _Group]) -> None:
        """Find how measured figures relate to modelled ones."""
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


def _family(node: Node, candidate: Candidate) -> tuple[str, str]:
    return node.op, f"{candidate.target}/{candidate.impl}"


def _distinct(work: Sequence[tuple[Node, Candidate]]) -> set[Hashable]:
    return {identity_of(node, candidate) for node, candidate in work}
