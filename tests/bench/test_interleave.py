"""Interleaved timing: comparison before figures, paired ratios, and every refusal."""

from __future__ import annotations

import gc
import json
import math
import time
from collections.abc import Callable

import pytest
import torch

from fmtprop.bench import Environment, Quartiles, compare_outputs
from fmtprop.bench import interleave as interleave_module
from fmtprop.bench.interleave import interleave
from fmtprop.errors import FmtpropError

X = torch.arange(1.0, 5.0)


def sleeper(seconds: float, log: list[float] | None = None) -> Callable[[torch.Tensor], torch.Tensor]:
    def run(x: torch.Tensor) -> torch.Tensor:
        if log is not None:
            log.append(seconds)
        time.sleep(seconds)
        return 2 * x

    return run


def double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def test_speedup_is_the_reference_over_the_callable() -> None:
    result = interleave(
        {"slow": sleeper(0.02), "fast": sleeper(0.004)}, [X], oracle=double, reference="slow", rounds=5, rest=0.0
    )
    fast = result["fast"]
    assert fast.latency is not None and fast.speedup is not None
    assert fast.latency.median > 3.9  # milliseconds; a busy machine oversleeps, so there is no upper bound
    assert fast.speedup.median > 1
    assert len(fast.milliseconds) == 5
    slow = result["slow"]
    assert slow.speedup == Quartiles(1.0, 1.0, 1.0)
    assert [entry.name for entry in result.entries] == ["slow", "fast"]


def test_ratios_are_paired_within_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that becomes slower from round to round changes every figure and no ratio."""
    drift = {"reference": iter([10.0, 20.0, 40.0]), "half": iter([5.0, 10.0, 20.0])}
    runs = {name: (lambda x, name=name: 2 * x) for name in drift}
    by_run = {id(run): name for name, run in runs.items()}
    monkeypatch.setattr(interleave_module, "time_turn", lambda run, *_: next(drift[by_run[id(run)]]))
    result = interleave(runs, [X], oracle=double, reference="reference", rounds=3)
    assert result["half"].speedup == Quartiles(2.0, 2.0, 2.0)
    assert result["half"].milliseconds == (5.0, 10.0, 20.0)
    assert result["half"].latency == Quartiles(7.5, 10.0, 15.0)


def test_wrong_outputs_get_no_figures() -> None:
    calls: list[float] = []

    def wrong(x: torch.Tensor) -> torch.Tensor:
        calls.append(0.0)
        return 2 * x + torch.tensor([0.0, 0.0, 0.0, 0.1])

    result = interleave({"right": double, "wrong": wrong}, [X], oracle=double, reference="right", rounds=2, rest=0.0)
    entry = result["wrong"]
    assert len(calls) == 1, "a callable that disagrees must not be timed"
    assert not entry.agreement.passed
    assert entry.milliseconds == () and entry.latency is None and entry.speedup is None
    assert entry.agreement.message == "output 0: largest relative error 0.0125 exceeds the tolerance 0.0001"
    assert result["right"].speedup is not None


def test_wrong_reference_leaves_no_speedup() -> None:
    result = interleave(
        {"right": double, "wrong": lambda x: 3 * x}, [X], oracle=double, reference="wrong", rounds=2, rest=0.0
    )
    assert result["right"].latency is not None
    assert result["right"].speedup is None


def test_outputs_that_alias_a_shared_buffer_do_not_fool_the_comparison() -> None:
    """The oracle's outputs are kept, even if it reuses their memory."""
    buffer = torch.zeros(4)

    def oracle(x: torch.Tensor) -> torch.Tensor:
        return torch.mul(x, 2, out=buffer)

    def clobber(x: torch.Tensor) -> torch.Tensor:
        return torch.mul(x, 5, out=buffer)

    result = interleave({"clobber": clobber}, [X], oracle=oracle, reference="clobber", rounds=1, rest=0.0)
    assert not result["clobber"].agreement.passed


def test_every_round_runs_every_callable_in_varying_order() -> None:
    log: list[float] = []
    runs = {str(delay): sleeper(delay, log) for delay in (0.0, 1e-5, 2e-5)}
    turns: list[tuple[int, int]] = []
    interleave(
        runs, [X], oracle=double, reference="0.0", rounds=8, repeats=1, warmup=0, rest=0.0,
        progress=lambda done, total: turns.append((done, total)),
    )  # fmt: skip
    timed = log[3::2]  # after the comparison, an untimed and a timed run in each turn
    orders = {tuple(timed[start : start + 3]) for start in range(0, 24, 3)}
    assert all(sorted(order) == [0.0, 1e-5, 2e-5] for order in orders)
    assert len(orders) > 1
    assert turns == [(done, 24) for done in range(1, 25)]


def test_tolerance_by_name() -> None:
    runs = {"exact": double, "bf16": lambda x: (2 * x).to(torch.bfloat16) * 1.01}
    tolerance = {"exact": 0.0, "bf16": 0.02}
    result = interleave(runs, [X], oracle=double, reference="exact", tolerance=tolerance, rounds=1, rest=0.0)
    assert result["bf16"].agreement.passed
    assert 0 < result["bf16"].agreement.error < 0.02
    assert not interleave(runs, [X], oracle=double, reference="exact", rounds=1)["bf16"].agreement.passed


def test_garbage_collection_is_restored_after_an_error() -> None:
    calls = iter(range(100))

    def fails_late(x: torch.Tensor) -> torch.Tensor:
        if next(calls) > 4:
            raise RuntimeError("late")
        return 2 * x

    assert gc.isenabled()
    with pytest.raises(RuntimeError, match="late"):
        interleave({"late": fails_late}, [X], oracle=double, reference="late", rounds=3, rest=0.0)
    assert gc.isenabled()


def test_json_is_complete_and_strict() -> None:
    environment = Environment("cpu", ("avx2",), 4, 2, {"torch": "2"})
    result = interleave(
        {"right": double, "short": lambda x: x[:2]}, [X], oracle=double, reference="right", rounds=2, rest=0.0,
        environment=environment,
    )  # fmt: skip
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"reference": "b"}, "interleave: reference 'b' is not one of the callables: a"),
        ({"rounds": 0}, "interleave: rounds is 0, must be at least 1"),
        ({"repeats": 0}, "interleave: repeats is 0, must be at least 1"),
        ({"warmup": -1}, "interleave: warmup is -1, must be at least 0"),
        (
            {"tolerance": {"b": 1.0}},
            "interleave: tolerance must have the same keys as callables; they differ in ['a', 'b']",
        ),
    ],
)
def test_arguments_are_checked(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(FmtpropError) as caught:
        interleave({"a": double}, [X], **{"oracle": double, "reference": "a", **arguments})  # type: ignore[arg-type]
    assert str(caught.value) == message
