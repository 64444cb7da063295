"""The time that a compilation may take: optional work is left out where it does not fit, and this is recorded.

Owns the limit. Must not know what the work is: its estimates come from those who do it.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from time import thread_time

__all__ = ["Budget"]

#: a compilation may take so many seconds, and so many runs of the model
_SECONDS, _RUNS = 5.0, 6

#: seconds of a node's checks and packing, and bytes of weights that are packed in a second (Zen 4, one thread)
_NODE_SECONDS, _PACKED_NBYTES = 4e-4, 1e9


class Budget:
    """The time of one compilation.

    Parameters
    ----------
    is_limited : bool
        Whether there is a limit; without one, all work fits.
    nodes, weights_nbytes : int
        Size of the model: the stages that cannot be left out keep their time.
    clock : callable
        Seconds of work so far, by default of this thread: a busy machine changes nothing.

    Attributes
    ----------
    run : float
        Expected seconds of a run of the model.
    left_out : dict of str to str
        Work that was left out, and why.

    Examples
    --------
    >>> budget = Budget(clock=lambda: 1.0)
    >>> budget.allows("a race of plans", 2.0), budget.allows("another race", 6.0)
    (True, False)
    >>> budget.left_out
    {'another race': 'takes about 6.0 s, and 5.0 s of 5.0 s are left'}
    """

    def __init__(
        self,
        *,
        is_limited: bool = True,
        nodes: int = 0,
        weights_nbytes: int = 0,
        clock: Callable[[], float] = thread_time,
    ) -> None:
        self._seconds = _SECONDS if is_limited else inf
        self._reserve = _NODE_SECONDS * nodes + weights_nbytes / _PACKED_NBYTES
        self._clock, self._start = clock, clock()
        self.run = 0.0
        self.left_out: dict[str, str] = {}

    @property
    def total(self) -> float:
        """Seconds of the whole compilation."""
        return self._seconds + _RUNS * self.run

    @property
    def left(self) -> float:
        """Seconds that optional work may still take."""
        return max(0.0, self.total - self._reserve - (self._clock() - self._start))

    def allows(self, work: str, seconds: float) -> bool:
        """Return whether optional work fits; otherwise it is recorded as left out.

        Parameters
        ----------
        work : str
            Its name, for the user.
        seconds : float
            Estimate of its time.
        """
        left = self.left
        if seconds <= left:
            return True
        self.left_out[work] = f"takes about {seconds:.1f} s, and {left:.1f} s of {self.total:.1f} s are left"
        return False
