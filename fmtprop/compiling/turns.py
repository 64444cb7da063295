"""Two calls in turns: which of them is the faster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from math import inf

import torch

from fmtprop.ops.pytorch import without_modes
from fmtprop.system.timing import Stopwatch

#: least and most timed runs of each side after the first ones, and seconds after which the least are enough
_FEWEST, _TRIALS, _TRIAL_SECONDS = 2, 5, 0.5

#: sides whose times are closer than this ratio take more turns: most turns, and seconds after which there are no more
_CLOSE_RATIO, _CLOSE_TRIALS, _CLOSE_SECONDS = 1.15, 20, 3.0

#: share of a run that a thread may wait for a processor
_WAITED_SHARE = 0.05

#: the first runs decide alone if they take more than these seconds in all, and PyTorch's takes twice the plan's time
_LONG_SECONDS, _CLEAR_RATIO = 0.5, 2.0

#: returns whether the first of two calls is faster, and the seconds of both; a third one returns memory
Compare = Callable[[Callable[[], object], Callable[[], object], Callable[[], object]], tuple[bool, tuple[float, float]]]


def compare(
    ours: Callable[[], object],
    theirs: Callable[[], object],
    rest: Callable[[], object] | None = None,
    watch: Stopwatch | None = None,
) -> tuple[bool, tuple[float, float]]:
    """Return whether ours is faster, and the least seconds of both, run in turns.

    `rest`: returns the memory that a side keeps between its runs. It is called before each change of sides, so that a
    comparison needs as much memory as the larger side. The next run, which takes new memory, does not count. `watch`:
    default: seconds of this thread's work if it has no others, else of all but waiting.

    On a busy machine, a run waits several times as long as it works. With one thread, seconds are those of its work;
    with several, those in which none of them waited for a processor. Where one waited, sides take as many turns as
    close ones.
    """
    sides, is_disturbed = (ours, theirs), False
    # AOTAutograd watches each operator of a function's first call
    with without_modes(), watch or Stopwatch(of_thread=torch.get_num_threads() == 1) as stopwatch:

        def seconds(at: int, rests: bool) -> float:
            nonlocal is_disturbed
            if rests and rest is not None:
                rest()
            taken = stopwatch.time(sides[at])
            is_disturbed |= stopwatch.was_disturbed(_WAITED_SHARE)
            return taken

        start = stopwatch.now()
        first = seconds(0, False), seconds(1, True)
        if sum(first) > _LONG_SECONDS and first[1] > _CLEAR_RATIO * first[0]:
            return True, first
        figures, at = [inf, inf], 1
        for turn in count(1):
            for changes in (False, True):
                if changes:
                    at = 1 - at
                    if rest is not None:
                        seconds(at, True)
                # other processes can only lengthen a run
                figures[at] = min(figures[at], seconds(at, False))
            if turn >= _FEWEST and not _needs_turns(turn, stopwatch.now() - start, figures, is_disturbed):
                break
    return figures[0] < figures[1], (figures[0], figures[1])


def _needs_turns(turns: int, seconds: float, figures: Sequence[float], is_disturbed: bool) -> bool:
    """Return whether more turns are needed: those so far, and their seconds, do not decide."""
    if is_disturbed or max(figures) < _CLOSE_RATIO * min(figures):
        return turns < _CLOSE_TRIALS and seconds < _CLOSE_SECONDS
    return turns < _TRIALS and seconds < _TRIAL_SECONDS
