"""A clock that only tests move."""

from __future__ import annotations

from fmtprop.system.timing import Stopwatch


class Clock:
    """Seconds, moved by what runs; a part of them is waiting."""

    def __init__(self) -> None:
        self.now = self.waited = 0.0

    def lap(self) -> float:
        waited, self.waited = self.waited, 0.0
        return waited

    def close(self) -> None:
        pass

    def watch(self, *, of_thread: bool = False) -> Stopwatch:
        """Return a stopwatch on this clock."""
        return Stopwatch(of_thread=of_thread, now=lambda: self.now, waiting=self)
