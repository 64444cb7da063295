"""The first runs of a race, on executors that say how long they take."""

from __future__ import annotations

from math import inf

from fmtprop.compiling.attempts import Attempts
from fmtprop.compiling.race import _Clock, _first_runs


class Said:
    """An executor whose runs take given seconds."""

    def __init__(self, *seconds: float) -> None:
        self.seconds = list(seconds)

    def profile(self, inputs, limit=inf):
        needed = self.seconds.pop(0)
        return ([] if needed > limit else [inputs]), [needed]


def test_the_first_run_of_all_may_pay_for_what_libraries_set_up():
    plans = {"optimal": Said(0.33, 0.0002), "propagate": Said(0.0014)}
    assert _first_runs(plans, [], 0.0003, Attempts(), {}, _Clock()) == {"optimal": 0.0002, "propagate": 0.0014}


def test_a_plan_that_is_slow_twice_is_out():
    plans = {"optimal": Said(3.0, 3.0), "propagate": Said(0.0014)}
    assert _first_runs(plans, [], 0.0003, Attempts(), {}, _Clock()) == {"propagate": 0.0014}
