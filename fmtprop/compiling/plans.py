"""Plans by key: which keys get one, and when; the one that was used longest ago goes first."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Final, Generic, TypeVar

from fmtprop.errors import OptionError
from fmtprop.system.locks import ProcessLock

Key = TypeVar("Key", bound=Hashable)
Plan = TypeVar("Plan")

#: calls of a shape before it takes the place of another one's plan: a plan costs ten calls of PyTorch and more, and of
#: sizes that are all different (lines of text, sentences) most never come again
CALLS_FOR_PLAN: Final = 3

#: keys whose calls are counted: some hundred kilobytes
_MOST_COUNTED: Final = 1024


class Plans(Generic[Key, Plan]):
    """The plans of a model for several shapes; any number of threads may ask for one.

    `most`: plans that are kept: users know it as ``max_shapes``. As long as there is room, a key gets a plan at its
    first call. Then it takes another one's place at its third call; until then it is rare, and its caller runs PyTorch.

    >>> plans = Plans(most=2)
    >>> [plans.get(key, lambda key=key: key * 10) for key in (1, 2, 1, 3)]
    [10, 20, 10, 30]
    >>> list(plans)
    [1, 3]
    >>> [plans.is_rare(4) for _ in range(3)]
    [True, True, False]
    """

    def __init__(self, most: int) -> None:
        if not isinstance(most, int) or most < 1:
            raise OptionError(f"max_shapes must be a whole number of at least 1, got {most!r}")
        self.most = most
        self._known: OrderedDict[Key, Plan] = OrderedDict()
        self._making = ProcessLock()
        #: calls with keys that have no plan
        self._unplanned: Counter[Key] = Counter()
        #: processor time of the last plan's making, if any was made; and whether a run of a rare key once took longer
        self._seconds, self._is_slow = float("inf"), False

    def __iter__(self) -> Iterator[Key]:
        """Yield the keys, the one that was used last at the end."""
        return iter(list(self._known))

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, key: object) -> bool:
        return key in self._known

    def add(self, key: Key, plan: Plan) -> None:
        """Keep a plan that was made elsewhere."""
        with self._making.current:
            self._keep(key, plan)

    def items(self) -> list[tuple[Key, Plan]]:
        """Return the keys with their plans, the one that was used last at the end."""
        return list(self._known.items())

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

    @property
    def is_full(self) -> bool:
        """Whether another plan takes the place of one."""
        return len(self._known) >= self.most

    @property
    def rare(self) -> int:
        """The number of keys that were called and have no plan yet."""
        return len(self._unplanned)

    def is_rare(self, key: Key) -> bool:
        """Count a call of a key without a plan; return whether it is to be run without one."""
        if not self.is_full or self._is_slow:
            return False
        if len(self._unplanned) >= _MOST_COUNTED:
            self._unplanned.clear()
        self._unplanned[key] += 1
        if self._unplanned[key] < CALLS_FOR_PLAN:
            return True
        self._unplanned.pop(key, None)  # another thread may have met it too
        return False

    def note_run(self, seconds: float) -> None:
        """Take note of a run without a plan: where these take as long as a plan, every key gets one from now on.

        `seconds`: of this thread's processor time, which waiting for other programs does not lengthen.
        """
        self._is_slow = self._is_slow or seconds > self._seconds

    def get(self, key: Key, make: Callable[[], Plan], is_valid: Callable[[Plan], bool] = lambda plan: True) -> Plan:
        """Return the plan of a key; it is made if there is none, or none that is valid."""
        plan = self.known(key)
        if plan is not None and is_valid(plan):
            return plan
        with self._making.current:
            plan = self.known(key)
            if plan is None or not is_valid(plan):  # else another thread has made it
                start = time.thread_time()
                plan = make()
                self._seconds = time.thread_time() - start
                self._keep(key, plan)
        return plan

    def _keep(self, key: Key, plan: Plan) -> None:
        self._known[key] = plan
        self._known.move_to_end(key)
        while len(self._known) > self.most:
            self._known.popitem(last=False)
