"""Rulers of time, for all who let things run in turns: a stopwatch without waiting, and quartiles.

A stopwatch takes its clock from the caller, so tests of a race move the clock themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import quantiles
from time import perf_counter, thread_time
from typing import Protocol

from fmtprop.system.waiting import Waiting

#: seconds since any moment
Clock = Callable[[], float]


class WaitingClock(Protocol):
    """Who knows how long threads waited for a processor, such as :class:`~fmtprop.system.waiting.Waiting`."""

    def lap(self) -> float:
        """Return the seconds that a thread waited since the last call."""

    def close(self) -> None:
        """Release what it holds."""


class Stopwatch:
    """Seconds of runs, without those in which a thread waited for a processor that other programs used.

    `of_thread`: whether all work is the calling thread's: then its own seconds count, and waiting is not a part of
    them. `now`: default: Python's clock of such seconds. `waiting`: default: Linux's figures of this process's threads.

    >>> ticks = iter([1.0, 4.0])
    >>> with Stopwatch(now=lambda: next(ticks)) as watch:
    ...     watch.start()
    ...     watch.stop() <= 3.0
    True
    """

    def __init__(
        self, *, of_thread: bool = False, now: Clock | None = None, waiting: WaitingClock | None = None
    ) -> None:
        self.now = now or (thread_time if of_thread else perf_counter)
        #: seconds of waiting in the last run
        self.waited = 0.0
        self._of_thread, self._waiting = of_thread, waiting or Waiting()
        self._before = self._taken = self._all = self._all_waited = 0.0

    def __enter__(self) -> Stopwatch:
        return self

    def __exit__(self, *error: object) -> None:
        self._waiting.close()

    def start(self) -> None:
        """Begin a run."""
        self._waiting.lap()
        self._before = self.now()

    def stop(self) -> float:
        """End a run, and return its seconds without waiting; with it, if threads waited longer than the run took."""
        self._taken = self.now() - self._before
        self.waited = self._waiting.lap()
        self._all += self._taken
        self._all_waited += self.waited
        return self._taken if self._of_thread or self.waited >= self._taken else self._taken - self.waited

    def time(self, run: Callable[[], object]) -> float:
        """Return the seconds of a call, without waiting."""
        self.start()
        run()
        return self.stop()

    def was_disturbed(self, share: float) -> bool:
        """Return whether more than a share of the last run was waiting."""
        return self.waited > share * self._taken

    def is_disturbed(self, share: float) -> bool:
        """Return whether more than a share of all runs was waiting."""
        return self._all_waited > share * self._all


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return lower quartile, median and upper quartile, interpolating linearly between the two nearest values.

    >>> quartiles([4.0, 1.0, 3.0, 2.0])
    (1.75, 2.5, 3.25)
    """
    if len(values) == 1:  # before Python 3.13 the library requires two
        return values[0], values[0], values[0]
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return low, middle, high


def seconds_of(run: Callable[[], object], now: Clock = perf_counter) -> float:
    """Return the seconds of a call by the wall clock."""
    start = now()
    run()
    return now() - start
