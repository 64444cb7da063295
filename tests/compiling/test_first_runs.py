"""The first runs of a race, on executors that say how long they take."""

from __future__ import annotations

from math import inf

from fmtprop.compiling.race import run_in_turns
from tests.clocks import Clock


class Said:
    """An executor whose runs take given seconds, the last of them again and again."""

    clock = Clock()

    def __init__(self, *seconds: float) -> None:
        self.seconds = list(seconds)

    def profile(self, inputs, limit=inf):
        needed = self.seconds.pop(0) if len(self.seconds) > 1 else self.seconds[0]
        self.clock.now += min(needed, limit)
        return ([] if needed > limit else [inputs]), [needed]

    def run(self, inputs):
        self.profile(inputs)


def test_the_first_run_of_all_may_pay_for_what_libraries_set_up():
    plans = {"optimal": Said(0.33, 0.0002), "propagate": Said(0.0014)}
    found = run_in_turns(plans, [], 0.0, expected=0.0003, watch=Said.clock.watch())
    assert found is not None and found.names == ("optimal", "propagate") and found.winner == 0


def test_a_plan_that_is_slow_twice_is_out():
    plans = {"optimal": Said(3.0), "propagate": Said(0.0014)}
    found = run_in_turns(plans, [], 0.0, expected=0.0003, watch=Said.clock.watch())
    assert found is not None and found.names == ("propagate",)
