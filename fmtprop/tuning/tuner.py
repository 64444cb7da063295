"""Measuring what the cache lacks: which ways are timed, in which order, and which figures are believed.

A figure is believed if it is possible on this machine and was not disturbed. Others are timed once more after all the
rest. What is then the same again is believed, too; the remaining ones are left to the model, with one warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from fmtprop.ir.node import Node
from fmtprop.passes.target import CostModel
from fmtprop.store import Store
from fmtprop.targets.executable import Provider
from fmtprop.tuning.measure import Bench, Job, Progress, job_of, job_of_reorder

#: least seconds between two writes of the cache
_SAVE_SECONDS = 5.0

#: two figures of different moments are the same if they differ by no more than this factor
_SAME_RATIO = 1.5


@dataclass
class Group:
    """Ways to run equal nodes, or one reorder; a group is measured together."""

    #: identity -> node and way to run it, or two formats
    ways: dict[Hashable, Any] = field(default_factory=dict)
    #: identity -> the model's seconds
    modelled: dict[Hashable, float] = field(default_factory=dict)
    #: identity -> key in the cache, for the ways that are worth a measurement
    keys: dict[Hashable, str] = field(default_factory=dict)
    #: number of the network's nodes in the group
    count: int = 0

    @property
    def weight(self) -> float:
        """Seconds of the network that the group takes."""
        return self.count * min(self.modelled.values())

    def allows(self, identity: Hashable, seconds: float, model: CostModel) -> bool:
        """Return whether this machine can need these seconds for a way."""
        what, how = self.ways[identity]
        least, most = model.bounds(what, how, self.modelled[identity])
        return least <= seconds <= most


class Tuner:
    """Times groups of ways within a limit of time.

    `progress`: called with (done, total). `absent`: reorders that the target does not have.
    """

    def __init__(
        self, store: Store, target: Provider, weights_nbytes: int, budget: float, progress: Progress | None
    ) -> None:
        self._store, self._target, self._weights_nbytes = store, target, weights_nbytes
        self._budget, self._progress = budget, progress
        self.seconds = 0.0
        self.absent: set[Hashable] = set()

    def measure(self, groups: Sequence[Group], model: CostModel) -> dict[Hashable, float]:
        """Return the figures of some groups, as far as there is time for them, and record them.

        `groups`: in any order; those with the largest share of the network's time come first. Warns RuntimeWarning if
        figures of some ways are not to be believed.
        """
        start = perf_counter()
        deadline = start + self._budget - self.seconds
        if start >= deadline or not groups:
            return {}
        try:
            ordered = sorted(groups, key=lambda group: -group.weight)
            found, suspects = self._timed(ordered, deadline, model, {})
            again = [group for group in ordered if group.ways.keys() & suspects.keys()]
            if again and perf_counter() < deadline:
                more, suspects = self._timed(again, deadline, model, suspects)
                found |= more
        finally:
            self.seconds += perf_counter() - start
        if suspects:
            warnings.warn(
                f"the times of {len(suspects)} of {sum(len(group.keys) for group in groups)} ways to run a node are "
                "not possible, or were disturbed by other programs; their costs are modelled",
                RuntimeWarning,
                stacklevel=2,
            )
        return found

    def _timed(
        self, groups: Sequence[Group], deadline: float, model: CostModel, before: Mapping[Hashable, float]
    ) -> tuple[dict[Hashable, float], dict[Hashable, float]]:
        """Return the figures that are believed, and the others; `before` has those of an earlier moment."""
        jobs = [self._jobs(group) for group in groups]
        believed: dict[Hashable, float] = {}
        suspects: dict[Hashable, float] = {}
        if not any(jobs):
            return believed, suspects
        bench = Bench((job for some in jobs for job in some), self._weights_nbytes)
        unsaved: dict[str, float] = {}
        saved = perf_counter()

        def done(index: int, found: Mapping[Hashable, float]) -> None:
            nonlocal saved
            group = groups[index]
            for identity, seconds in found.items():
                key, is_possible = group.keys[identity], group.allows(identity, seconds, model)
                is_same = identity in before and seconds / _SAME_RATIO <= before[identity] <= seconds * _SAME_RATIO
                if identity in bench.doubtful or not (is_possible or is_same):
                    suspects[identity] = seconds
                    continue
                believed[identity] = unsaved[key] = seconds
                if not is_possible:
                    self._store.add_passed([key])  # strange, but true: two moments agree
            if perf_counter() - saved > _SAVE_SECONDS:
                self._store.add_figures(unsaved, sync=True)
                unsaved.clear()
                saved = perf_counter()

        try:
            bench.seconds(jobs, deadline, done, self._progress)
        finally:
            self._store.add_figures(unsaved, sync=True)
        return believed, suspects

    def _jobs(self, group: Group) -> list[Job]:
        """Return the jobs of a group, the most promising first.

        All its ways are timed although some may be known: figures of different hours are not comparable.
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
            elif not (first.is_plain and second.is_plain):  # copied by another target, at the modelled cost
                self.absent.add(identity)
        return jobs
