"""Interleaved timing: turns in varying order, paired ratios, and what JSON says of them."""

from __future__ import annotations

import gc
import json
import math
import time

import pytest
import torch

from fmtprop.bench import Agreement, Benchmark, Environment, Quartiles, compare_outputs
from fmtprop.bench.interleave import entry_of, take_turns, time_turn, uncollected

X = torch.arange(1.0, 5.0)
PASSED = Agreement(True, 0.0, 1e-4)
WRONG = compare_outputs(X[:2], X, 1e-4)


def test_a_turn_is_the_median_of_its_timed_runs() -> None:
    delays = iter([0.03, 0.004, 0.004, 0.05])  # the first one warms the caches
    assert 3.9 < time_turn(lambda: time.sleep(next(delays)), (), repeats=3) < 30


def test_ratios_are_paired_within_a_round() -> None:
    """A machine that becomes slower from round to round changes every figure and no ratio."""
    times = {"reference": [10.0, 20.0, 40.0], "half": [5.0, 10.0, 20.0]}
    half = entry_of("half", PASSED, times, "reference")
    assert half.speedup == Quartiles(2.0, 2.0, 2.0)
    assert half.milliseconds == (5.0, 10.0, 20.0)
    assert half.latency == Quartiles(7.5, 10.0, 15.0)
    assert entry_of("reference", PASSED, times, "reference").speedup == Quartiles(1.0, 1.0, 1.0)


def test_wrong_outputs_get_no_figures_and_a_wrong_reference_no_speedup() -> None:
    wrong = entry_of("wrong", WRONG, {"right": [1.0]}, "wrong")
    assert wrong.milliseconds == () and wrong.latency is None and wrong.speedup is None
    right = entry_of("right", PASSED, {"right": [1.0]}, "wrong")
    assert right.latency is not None and right.speedup is None


def test_every_round_has_everyone_in_varying_order() -> None:
    log: list[str] = []
    turns: list[tuple[int, int]] = []
    answers = take_turns(
        {name: lambda name=name: log.append(name) for name in "abc"},  # type: ignore[misc]
        8,
        seed=0,
        progress=lambda done, total: turns.append((done, total)),
    )
    orders = {tuple(log[start : start + 3]) for start in range(0, 24, 3)}
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)
    assert len(orders) > 1
    assert turns == [(done, 24) for done in range(1, 25)]
    assert {name: len(given) for name, given in answers.items()} == {"a": 8, "b": 8, "c": 8}


def test_garbage_collection_is_restored_after_an_error() -> None:
    assert gc.isenabled()
    with pytest.raises(RuntimeError, match="late"), uncollected():
        assert not gc.isenabled()
        raise RuntimeError("late")
    assert gc.isenabled()


def test_json_is_complete_and_strict() -> None:
    environment = Environment("cpu", ("avx2",), 4, 2, {"torch": "2"})
    entries = [entry_of(*one, {"right": [1.0, 2.0]}, "right") for one in (("right", PASSED), ("short", WRONG))]
    result = Benchmark("right", 2, 3, 0, tuple(entries), environment)
    data = json.loads(result.to_json())
    assert data["environment"] == {
        "cpu": "cpu", "isa": ["avx2"], "cpus": 4, "threads": 2, "versions": {"torch": "2"},
    }  # fmt: skip
    assert data["reference"] == "right" and data["rounds"] == 2
    right, short = data["entries"]
    assert len(right["milliseconds"]) == 2
    assert right["speedup"]["median"] == 1.0
    assert short["agreement"] == {
        "passed": False,
        "error": None,
        "tolerance": 1e-4,
        "message": "output 0: shape (2,), expected (4,)",
        "ran": True,
    }
    with pytest.raises(KeyError):
        result["absent"]


@pytest.mark.parametrize(
    ("actual", "expected", "error"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 2.5], [1.0, 2.0], 0.25),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([0.5, 0.0], [0.0, 0.0], 0.5),  # nothing to be relative to
        ([math.nan, 1.0], [1.0, 1.0], math.inf),
        ([math.nan, 1.0], [math.nan, 1.0], 0.0),
        ([1.0, 1.0], [math.nan, 1.0], math.inf),
        ([math.inf, 1.0], [math.inf, 1.0], 0.0),
        ([-math.inf, 1.0], [math.inf, 1.0], math.inf),
        ([], [], 0.0),
    ],
)
def test_compare_outputs(actual: list[float], expected: list[float], error: float) -> None:
    agreement = compare_outputs(torch.tensor(actual), torch.tensor(expected), tolerance=0.01)
    assert agreement.error == pytest.approx(error)
    assert agreement.passed == (error <= 0.01)


def test_compare_nested_outputs_reports_the_one_that_differs() -> None:
    expected = (X, {"a": X, "b": [X]})
    assert compare_outputs((X, {"a": X, "b": [X]}), expected, 0.0).passed
    assert compare_outputs((X, {"a": X, "b": [X + 1]}), expected, 0.01).message.startswith("output 2: largest")
    assert compare_outputs((X, X), expected, 0.01).message == "2 outputs, expected 3"
