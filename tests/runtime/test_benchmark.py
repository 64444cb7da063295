"""Timing a model: what is counted, how it reads, what is refused."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import fmtprop as fp
from fmtprop.runtime.benchmark import BenchmarkResult, time_runs
from fmtprop.runtime.executor import Executor
from fmtprop.system.timing import Clock
from tests.threads import torch_threads


@pytest.fixture(scope="module")
def net() -> fp.CompiledModel:
    return fp.compile(nn.Linear(8, 4), torch.ones(2, 8))


def test_runs_are_counted_after_the_warm_up():
    calls: list[int] = []
    assert len(time_runs(lambda: calls.append(1), 7, None, 3)) == 7
    assert len(calls) == 10


def clock(ticks: list[float]) -> Clock:
    return iter(ticks).__next__


def test_each_run_is_timed_on_its_own():
    now = clock([0.0, 1.0, 1.5, 10.0, 10.25])
    assert time_runs(lambda: None, 2, None, 0, now) == (0.5, 0.25)


def test_seconds_end_the_runs():
    now = clock([0.0, 0.0, 0.75, 0.75, 0.75, 2.5, 2.5])
    assert time_runs(lambda: None, None, 2.0, 0, now) == (0.75, 1.75)


def test_however_short_the_time_one_run_is_made():
    now = clock([0.0, 5.0, 6.0, 6.0])
    assert time_runs(lambda: None, None, 0.001, 0, now) == (1.0,)


def test_a_second_is_the_default():
    now = clock([0.0, 0.0, 0.5, 0.9, 0.9, 1.1, 1.1])
    assert len(time_runs(lambda: None, None, None, 0, now)) == 2


def test_a_model_times_itself(net):
    result = net.benchmark(runs=5, warmup=0)
    assert (result.runs, result.threads) == (5, torch.get_num_threads())
    assert (result.model, result.precision, result.policy) == (net.graph.name, "f32", net.options.policy)
    assert 0 < result.fastest <= result.quartiles[0] <= result.median <= result.quartiles[1]


def test_it_times_the_inputs_that_it_is_given(net, monkeypatch):
    seen = []
    honest = Executor.run
    monkeypatch.setattr(Executor, "run", lambda self, inputs: seen.append(inputs[0]) or honest(self, inputs))
    x = torch.zeros(2, 8)
    net.benchmark(x, runs=2, warmup=1)
    assert [one is x for one in seen] == [True] * 3


def test_threads_are_those_of_the_run(net):
    for threads in (1, 2):
        with torch_threads(threads):
            assert net.benchmark(runs=1).threads == threads


def test_figures_as_json():
    result = BenchmarkResult("net", "bf16", "plain", 4, (0.25, 0.75))
    assert json.loads(result.to_json()) == {
        "model": "net",
        "precision": "bf16",
        "policy": "plain",
        "threads": 4,
        "runs": 2,
        "median": 0.5,
        "lower_quartile": 0.375,
        "upper_quartile": 0.625,
        "fastest": 0.25,
        "times": [0.25, 0.75],
    }


def test_a_single_run_is_its_own_quartile():
    assert BenchmarkResult("net", "f32", "plain", 1, (0.5,)).quartiles == (0.5, 0.5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"runs": 0}, "runs must be a whole number from 1 to 100000, for a median, got 0"),
        ({"seconds": 0.0}, r"seconds must be a positive time, got 0\.0"),
        ({"seconds": float("nan")}, "seconds must be a positive time, got nan"),
        ({"warmup": -1}, "warmup must be a number of runs from 0 to 100000, got -1"),
        ({"runs": 3, "seconds": 1.0}, r"takes runs or seconds, not both; got runs=3 and seconds=1\.0"),
    ],
)
def test_numbers_out_of_range_are_refused(net, options, message):
    with pytest.raises(fp.InputError, match=message):
        net.benchmark(**options)
