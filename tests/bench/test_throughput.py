"""The throughput benchmark: everyone's answers are compared, rates are images over time, wrong outputs have none."""

from __future__ import annotations

import math

import pytest

from benchmarks import bench_throughput
from benchmarks.bench_throughput import PEER, STREAMS
from fmtprop.bench import Agreement, Benchmark
from fmtprop.bench.environment import Environment
from fmtprop.bench.interleave import entry_of
from tests.threads import torch_threads

GOOD, WRONG = Agreement(True, 0.0, 1e-4), Agreement(False, math.inf, 1e-4, "output 0: wrong")


def result(streams: Agreement) -> Benchmark:
    times = {PEER: [100.0, 200.0], STREAMS: [50.0, 100.0]} if streams.passed else {PEER: [100.0, 200.0]}
    entries = (entry_of(STREAMS, streams, times, PEER), entry_of(PEER, GOOD, times, PEER))
    return Benchmark(PEER, 2, 1, 0, entries, Environment("A CPU", (), 2, 2, {}))


def test_rates_are_images_per_second_and_ratios_the_peers_time_over_theirs() -> None:
    found = bench_throughput.rates(result(GOOD), 10)
    assert found[STREAMS][0].median == pytest.approx(150.0)
    assert found[STREAMS][1].median == 2.0
    assert found[PEER][1].median == 1.0


def test_targets_are_shown_and_wrong_outputs_have_no_figures() -> None:
    assert "≥ 1: met" in bench_throughput.render("resnet50", result(GOOD), 10)
    text = bench_throughput.render("resnet50", result(WRONG), 10)
    assert "met" not in text
    assert f"{STREAMS} disagrees with the oracle and was not timed: output 0: wrong" in text


@pytest.mark.parametrize("streams", [None, 1, 2])
def test_all_images_of_a_turn_are_computed_and_compared(streams: int | None) -> None:
    with torch_threads():
        prepared = bench_throughput.compiled_streams("chain", 5, 2, streams)
        assert prepared.agreement.passed
        assert len(prepared.run()) == 5
