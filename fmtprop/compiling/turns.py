"""Two calls in turns: which of them is the faster."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["Compare", "compare"]

#: least and most timed runs of each side after the first ones, and seconds after which the least are enough
_FEWEST, _TRIALS, _TRIAL_SECONDS = 2, 5, 0.5

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
        times: list[tuple[float, float]] = []
        while len(times) < _TRIALS and (len(times) < _FEWEST or perf_counter() - start < _TRIAL_SECONDS):
            times.append((_seconds(ours), _seconds(theirs)))
    # other processes can only lengthen a run
    figures = min(one for one, _ in times), min(other for _, other in times)
    return figures[0] < figures[1], figures


def _seconds(run: Callable[[], object]) -> float:
    before = perf_counter()
    run()
    return perf_counter() - before
