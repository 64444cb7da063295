"""Plans by key: each is made at its first use, and the one that was used longest ago goes first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

from fmtprop.errors import OptionError
from fmtprop.system.locks import ProcessLock

Key = TypeVar("Key", bound=Hashable)
Plan = TypeVar("Plan")


class Plans(Generic[Key, Plan]):
    """The plans of a model for several shapes; any number of threads may ask for one.

    `most`: plans that are kept: users know it as ``max_shapes``.

    >>> plans = Plans(most=2)
    >>> [plans.get(key, lambda key=key: key * 10) for key in (1, 2, 1, 3)]
    [10, 20, 10, 30]
    >>> list(plans)
    [1, 3]
    """

    def __init__(self, most: int) -> None:
        if not isinstance(most, int) or most < 1:
            raise OptionError(f"max_shapes must be a whole number of at least 1, got {most!r}")
        self.most = most
        self._known: OrderedDict[Key, Plan] = OrderedDict()
        self._making = ProcessLock()

    def __iter__(self) -> Iterator[Key]:
        """Yield the keys, the one that was used last at the end."""
        return iter(list(self._known))

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, key: object) -> bool:
        return key in self._known

    def add(self, key: Key, plan: Plan) -> None:
        """Keep a plan that was made elsewhere."""
        self.get(key, lambda: plan)

    def values(self) -> list[Plan]:
        """Return the plans, the one that was used last at the end."""
        return list(self._known.values())

    def known(self, key: Key) -> Plan | None:
        """Return the plan of a key, if there is one; it counts as used."""
        plan = self._known.get(key)
        if plan is not None:
            try:
                self._known.move_to_end(key)
            except KeyError:
                return plan  # another thread's new plan has just taken its place
        return plan

    def get(self, key: Key, make: Callable[[], Plan], is_valid: Callable[[Plan], bool] = lambda plan: True) -> Plan:
        """Return the plan of a key; it is made if there is none, or none that is valid."""
        plan = self.known(key)
        if plan is not None and is_valid(plan):
            return plan
        with self._making.current:
            plan = self.known(key)
            if plan is None or not is_valid(plan):  # else another thread has made it
                plan = self._known[key] = make()
                self._known.move_to_end(key)
                while len(self._known) > self.most:
                    self._known.popitem(last=False)
        return plan
