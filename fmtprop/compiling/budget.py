"""The time that a compilation may take: optional work is left out where it does not fit, and this is recorded.

Owns the limit. Must not know what the work is: its estimates come from those who do it.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from time import thread_time

#: what a compilation may take: seconds, and besides the time of this many runs of the model
SECONDS, RUNS = 5.0, 6

#: seconds in which a node of a plan is placed and its primitive built (Zen 4, one thread)
NODE_SECONDS = 1.5e-4

#: seconds to check a distinct implementation, and bytes that packing writes in a second (Zen 4, one thread)
_KIND_SECONDS, _PACKED_NBYTES = 4e-3, 1.2e9


class Budget:
    """The time of one compilation.

    `is_limited`: whether there is a limit; without one, all work fits. `clock`: seconds of work so far, by default of
    this thread: a busy machine changes nothing. `run`: expected seconds of a run of the model.

    >>> budget = Budget(clock=lambda: 1.0)
    >>> budget.allows("a race of plans", 2.0), budget.allows("another race", 6.0)
    (True, False)
    >>> budget.left_out
    {'another race': 'takes about 6.0 s, and 5.0 s of 5.0 s are left'}
    """

    def __init__(self, *, is_limited: bool = True, clock: Callable[[], float] = thread_time) -> None:
        self._seconds = SECONDS if is_limited else inf
        self._reserve = 0.0
        self._clock, self._start = clock, clock()
        self.run = 0.0
        self.left_out: dict[str, str] = {}

    @property
    def total(self) -> float:
        """Seconds of the whole compilation."""
        return self._seconds + RUNS * self.run

    @property
    def left(self) -> float:
        """Seconds that optional work may still take."""
        return max(0.0, self.total - self._reserve - (self._clock() - self._start))

    def keep(self, *, nodes: int, kinds: int, packed_nbytes: int) -> None:
        """Keep the time of the stages that cannot be left out: checks, and the packing of weights."""
        self._reserve = NODE_SECONDS * nodes + _KIND_SECONDS * kinds + packed_nbytes / _PACKED_NBYTES

    def allows(self, work: str, seconds: float) -> bool:
        """Return whether optional work fits; otherwise it is recorded as left out."""
        left = self.left
        if seconds <= left:
            return True
        self.left_out[work] = f"takes about {seconds:.1f} s, and {left:.1f} s of {self.total:.1f} s are left"
        return False
