"""Two calls in turns, on a clock that only they move."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import chain, pairwise, repeat

import pytest

from fmtprop.compiling import turns
from tests.clocks import Clock
from tests.threads import torch_threads


def call(clock: Clock, slow: Sequence[float], usual: float) -> Callable[[], None]:
    """Return a call that takes seconds of a list, then the usual ones."""
    seconds = chain(slow, repeat(usual))

    def run() -> None:
        clock.now += next(seconds)

    return run


def test_close_calls_take_turns_until_slow_moments_are_over():
    clock = Clock()
    ours, theirs = call(clock, [0.2, *[0.12] * 6], 0.1), call(clock, [0.2], 0.11)
    assert turns.compare(ours, theirs, watch=clock.watch()) == (True, pytest.approx((0.1, 0.11)))


@pytest.mark.parametrize(
    ("seconds", "runs"), [((0.1, 0.3), 3), ((1e-4, 3e-4), 6), ((1e-4, 1.1e-4), 21), ((2.0, 2.2), 3)]
)
def test_runs_of_each_side(seconds, runs):
    clock, calls = Clock(), []
    ours, theirs = (call(clock, [], one) for one in seconds)
    turns.compare(lambda: (calls.append(1), ours()), theirs, watch=clock.watch())
    assert len(calls) == runs


def test_each_change_of_sides_has_a_rest_and_the_next_run_does_not_count():
    clock, calls = Clock(), []

    def side(name: str, seconds: float) -> Callable[[], None]:
        def run() -> None:
            clock.now += seconds + (0.1 if calls[-1:] == ["rest"] else 0.0)
            calls.append(name)

        return run

    found = turns.compare(side("ours", 0.3), side("theirs", 0.25), lambda: calls.append("rest"), clock.watch())
    assert found == (False, (pytest.approx(0.3), pytest.approx(0.25)))
    for one, other in pairwise(calls):
        assert "rest" in (one, other) or one == other
    assert calls.count("ours") == calls.count("theirs") == 4


def test_with_several_threads_waiting_does_not_count():
    """Beside busy programs, ours waits half of the time, theirs never: ours is faster all the same."""
    clock, calls = Clock(), []

    def ours() -> None:
        calls.append(1)
        clock.now += 0.3
        clock.waited = 0.2

    faster, seconds = turns.compare(ours, call(clock, [], 0.15), watch=clock.watch())
    assert faster and seconds == pytest.approx((0.1, 0.15))
    assert len(calls) > 3, "more turns than on an idle machine"


def test_with_one_thread_waiting_does_not_count():
    with torch_threads(1):
        faster, _ = turns.compare(lambda: time.sleep(0.01), lambda: sum(range(30_000)))
    assert faster
