"""Two calls in turns: which of them is the faster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from math import inf
from time import perf_counter, thread_time

import torch
from torch.utils._python_dispatch import _disable_current_modes

#: least and most timed runs of each side after the first ones, and seconds after which the least are enough
_FEWEST, _TRIALS, _TRIAL_SECONDS = 2, 5, 0.5

#: sides that differ by a smaller ratio take more turns, at most so many, and none after so many seconds
_CLOSE_RATIO, _CLOSE_TRIALS, _CLOSE_SECONDS = 1.15, 20, 3.0

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
    ours, theirs : callable
        The sides.
    rest : callable, optional
        Returns the memory that a side keeps between its runs. It is called before each change of sides, so that a
        comparison needs as much memory as the larger side. The next run, which takes new memory, does not count.

    Notes
    -----
    With one thread, seconds are those of its work: on a busy machine, a run waits several times as long as it works.
    """
    clock = thread_time if torch.get_num_threads() == 1 else perf_counter
    with _disable_current_modes():  # AOTAutograd watches each operator of a function's first call
        start = clock()
        first = _seconds(ours, clock), _seconds(theirs, clock, rest)
        if sum(first) > _LONG_SECONDS and first[1] > _CLEAR_RATIO * first[0]:
            return True, first
        sides, figures, at = (ours, theirs), [inf, inf], 1
        for turn in count(1):
            for is_other in (False, True):
                if is_other:
                    at = 1 - at
                    if rest is not None:
                        _seconds(sides[at], clock, rest)
                # other processes can only lengthen a run
                figures[at] = min(figures[at], _seconds(sides[at], clock))
            if turn >= _FEWEST and not _needs_turns(turn, clock() - start, figures):
                break
    return figures[0] < figures[1], (figures[0], figures[1])


def _needs_turns(turns: int, seconds: float, figures: Sequence[float]) -> bool:
    """Return whether the figures of some turns, which took so many seconds, do not decide yet."""
    if max(figures) < _CLOSE_RATIO * min(figures):
        return turns < _CLOSE_TRIALS and seconds < _CLOSE_SECONDS
    return turns < _TRIALS and seconds < _TRIAL_SECONDS


def _seconds(run: Callable[[], object], clock: Callable[[], float], rest: Callable[[], object] | None = None) -> float:
    if rest is not None:
        rest()
    before = clock()
    run()
    return clock() - before
