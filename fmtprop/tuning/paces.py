"""Paces: how many times as long as their costs say families of steps take in runs, on this machine.

A model has one share of the peak for a family of implementations, found on other machines; a way that is timed alone
finds other caches than in a plan. A run tells both: where costs do not predict it, its steps are held against their
costs, family by family. The ratios are kept in the store, and every later cost is multiplied by its family's.

Owns the families and their ratios. Must not know how costs are made.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from math import floor, log2

from fmtprop.errors import FmtpropError
from fmtprop.store import Store, key_of

#: from the general to the special: how the cost was found, data type, op, implementation, size
Family = tuple[str, ...]

#: length of the most general family that tells something about its members: source and data type
_LEAST_NAMES = 2

#: a family's steps are grouped by size, a group for each factor of four in their costs: small ones wait for threads and
#: caches, large ones do not
_SIZE_OCTAVES = 2

#: edition of the model of costs: a store that an older fmtprop filled has ratios to other costs, which tell nothing
_EDITION = 2

#: limits of a ratio: a run that was disturbed all the time teaches no nonsense
_LEAST_PACE, _MOST_PACE = 1 / 50, 50.0


class Paces:
    """The ratios that runs on this machine taught.

    `store`: has those of earlier compilations; new ones are added. Without a store, nothing was ever learned.

    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     paces = Paces(Store(pathlib.Path(directory) / "store.sqlite"))
    ...     one, other = ("modelled", "f32", "matmul", "brg"), ("modelled", "f32", "matmul", "gemm")
    ...     paces.learn([(one, 1e-3, 2e-3)])
    ...     paces.of(one, 1e-3), paces.of(one, 1.0), paces.of(other, 1.0), paces.of(("measured", "f32"), 1.0)
    (2.0, 2.0, 2.0, 1.0)
    """

    def __init__(self, store: Store | None) -> None:
        self._store = store
        self._known: dict[Family, float | None] = {}

    def of(self, family: Family, cost: float) -> float:
        """Return the ratio of a family's steps of a size: of the most special family that is known, 1 without any."""
        sized = (*family, _size(cost))
        for length in range(len(sized), _LEAST_NAMES - 1, -1):
            found = self._recorded(sized[:length])
            if found is not None:
                return found
        return 1.0

    def learn(self, steps: Iterable[tuple[Family, float, float]]) -> None:
        """Replace the ratios of all families of some steps.

        `steps`: each step's family, its cost without any pace, and its seconds in a run.
        """
        sums: defaultdict[Family, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for family, cost, seconds in steps:
            sized = (*family, _size(cost))
            for length in range(_LEAST_NAMES, len(sized) + 1):
                for index, value in enumerate((cost, seconds)):
                    sums[sized[:length]][index] += value
        found = {name: min(_MOST_PACE, max(_LEAST_PACE, ran / cost)) for name, (cost, ran) in sums.items() if cost > 0}
        self._known.update(found)
        if self._store is not None:
            self._store.learn({_key(name): pace for name, pace in found.items()})

    def frozen(self) -> Paces:
        """Return the ratios that were asked for or learned here: later ones of the store change nothing in them."""
        copy = Paces(None)
        copy._known = dict(self._known)
        return copy

    def records(self) -> list[tuple[list[str], float]]:
        """Return the ratios that were asked for or learned here, as plain data."""
        return [(list(family), pace) for family, pace in self._known.items() if pace is not None]

    @classmethod
    def of_records(cls, records: object) -> Paces:
        """Return the ratios of some records, and no others; these are not trusted: raises FmtpropError."""
        paces = cls(None)
        for record in records if isinstance(records, list) else [None]:
            match record:
                case [[*family], float(pace)] if all(isinstance(name, str) for name in family):
                    paces._known[tuple(family)] = min(_MOST_PACE, max(_LEAST_PACE, pace))
                case _:
                    raise FmtpropError(f"{record!r} is no ratio of a family of steps")
        return paces

    def _recorded(self, family: Family) -> float | None:
        if family not in self._known:
            self._known[family] = self._store.learned(_key(family)) if self._store is not None else None
        return self._known[family]


def _size(cost: float) -> str:
    return str(floor(log2(max(cost, 1e-9)) / _SIZE_OCTAVES))


def _key(family: Family) -> str:
    return key_of({"pace": list(family), "edition": _EDITION})
