"""Two calls in turns: which of them is the faster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from math import inf
from time import perf_counter, thread_time

import torch
from torch.utils._python_dispatch import _disable_current_modes

from fmtprop.system.waiting import Waiting

#: least and most timed runs of each side after the first ones, and seconds after which the least are enough
_FEWEST, _TRIALS, _TRIAL_SECONDS = 2, 5, 0.5

#: sides that differ by a smaller ratio take more turns, at most so many, and none after so many seconds
_CLOSE_RATIO, _CLOSE_TRIALS, _CLOSE_SECONDS = 1.15, 20, 3.0

#: share of a run that a thread may wait for a processor
_WAITED_SHARE = 0.05

#: first runs of more seconds in all decide, if PyTorch's takes so many times as long as the plan's
_LONG_SECONDS, _CLEAR_RATIO = 0.5, 2.0

#: returns whether the first of two calls is faster, and the seconds of both; a third one returns memory
Compare = Callable[[Callable[[], object], Callable[[], object], Callable[[], object]], tuple[bool, tuple[float, float]]]


def compare(
    ours: Callable[[], object], theirs: Callable[[], object], rest: Callable[[], object] | None = None
) -> tuple[bool, tuple[float, float]]:
    """Return whether ours is faster, and the least seconds of both, run in turns.

    Parameters
    ----------
    rest : callable, optional
        Returns the memory that a side keeps between its runs. It is called before each change of sides, so that a
        comparison needs as much memory as the larger side. The next run, which takes new memory, does not count.

    Notes
    -----
    On a busy machine, a run waits several times as long as it works. With one thread, seconds are those of its work;
    with several, those in which none of them waited for a processor. Where one waited, sides take as many turns as
    close ones.
    """
    with (
        _disable_current_modes(),
        _Stopwatch() as watch,
    ):  # AOTAutograd watches each operator of a function's first call
        start = watch.clock()
        first = watch.seconds(ours), watch.seconds(theirs, rest)
        if sum(first) > _LONG_SECONDS and first[1] > _CLEAR_RATIO * first[0]:
            return True, first
        sides, figures, at = (ours, theirs), [inf, inf], 1
        for turn in count(1):
            for is_other in (False, True):
                if is_other:
                    at = 1 - at
                    if rest is not None:
                        watch.seconds(sides[at], rest)
                # other processes can only lengthen a run
                figures[at] = min(figures[at], watch.seconds(sides[at]))
            if turn >= _FEWEST and not _needs_turns(turn, watch.clock() - start, figures, watch.is_disturbed):
                break
    return figures[0] < figures[1], (figures[0], figures[1])


def _needs_turns(turns: int, seconds: float, figures: Sequence[float], is_disturbed: bool) -> bool:
    """Return whether the figures of some turns, which took so many seconds, do not decide yet."""
    if is_disturbed or max(figures) < _CLOSE_RATIO * min(figures):
        return turns < _CLOSE_TRIALS and seconds < _CLOSE_SECONDS
    return turns < _TRIALS and seconds < _TRIAL_SECONDS


class _Stopwatch:
    """Seconds of runs, without those in which a thread waited for a processor that other programs used."""

    def __init__(self) -> None:
        self._is_alone = torch.get_num_threads() == 1
        self.clock = thread_time if self._is_alone else perf_counter
        self._waiting = Waiting()
        #: whether a thread waited during a run
        self.is_disturbed = False

    def __enter__(self) -> _Stopwatch:
        return self

    def __exit__(self, *error: object) -> None:
        self._waiting.close()

    def seconds(self, run: Callable[[], object], rest: Callable[[], object] | None = None) -> float:
        if rest is not None:
            rest()
        self._waiting.lap()
        before = self.clock()
        run()
        taken = self.clock() - before
        waited = self._waiting.lap()
        self.is_disturbed |= waited > _WAITED_SHARE * taken
        return taken if self._is_alone else max(0.0, taken - waited)
