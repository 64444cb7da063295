"""Two calls in turns: which of them is the faster."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from math import inf
from time import perf_counter

from torch.utils._python_dispatch import _disable_current_modes

#: least and most timed runs of each side after the first ones, and seconds after which the least are enough
_FEWEST, _TRIALS, _TRIAL_SECONDS = 2, 5, 0.5

#: sides that differ by a smaller ratio take more turns, at most so many, and none after so many seconds
_CLOSE_RATIO, _CLOSE_TRIALS, _CLOSE_SECONDS = 1.15, 20, 3.0

#: first runs of more seconds in all decide, if PyTorch's takes so many times as long as the plan's
_LONG_SECONDS, _CLEAR_RATIO = 0.5, 2.0

#: returns whether the first of two calls is faster, and the seconds of both
Compare = Callable[[Callable[[], object], Callable[[], object]], tuple[bool, tuple[float, float]]]


def compare(ours: Callable[[], object], theirs: Callable[[], object]) -> tuple[bool, tuple[float, float]]:
    """Return whether ours is faster, and the least seconds of both, run in turns."""
    with _disable_current_modes():  # AOTAutograd watches each operator of a function's first call
        start = perf_counter()
        first = _seconds(ours), _seconds(theirs)
        if sum(first) > _LONG_SECONDS and first[1] > _CLEAR_RATIO * first[0]:
            return True, first
        figures = inf, inf
        for turn in count(1):
            # other processes can only lengthen a run
            figures = min(figures[0], _seconds(ours)), min(figures[1], _seconds(theirs))
            if turn >= _FEWEST and not _needs_turns(turn, perf_counter() - start, figures):
                break
    return figures[0] < figures[1], figures


def _needs_turns(turns: int, seconds: float, figures: tuple[float, float]) -> bool:
    """Return whether the figures of some turns, which took so many seconds, do not decide yet."""
    if max(figures) < _CLOSE_RATIO * min(figures):
        return turns < _CLOSE_TRIALS and seconds < _CLOSE_SECONDS
    return turns < _TRIALS and seconds < _TRIAL_SECONDS


def _seconds(run: Callable[[], object]) -> float:
    before = perf_counter()
    run()
    return perf_counter() - before
