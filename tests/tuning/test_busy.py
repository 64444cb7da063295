"""Tuning beside busy programs finds the costs of a quiet machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import pytest

from fmtprop.store import Store
from fmtprop.tuning import costs_for
from tests.tuning.test_costs import WEIGHTS
from tests.tuning.test_measure import ways


@contextmanager
def busy_programs(number: int) -> Iterator[None]:
    programs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the times of:RuntimeWarning")  # the model answers for what stays disturbed
@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the system does not count waiting")
def test_costs_beside_busy_programs_are_those_of_a_quiet_machine(tmp_path: Path) -> None:
    work = [(node, way) for channels in (32, 64) for node, found in [ways(channels, 56)] for way in found]

    def measured(name: str) -> list[float]:
        costs = costs_for("measure", weights_nbytes=WEIGHTS, store=Store(tmp_path / name), budget=20.0)
        costs.prepare(work, [])
        return [costs.node(*way) for way in work]

    ratios: list[float] = []
    for turn in range(3):  # the machine's own pace changes by as much within a minute
        quiet = measured(f"quiet{turn}")
        with busy_programs(os.cpu_count() or 1):
            busy = measured(f"busy{turn}")
        ratios += [b / q for b, q in zip(busy, quiet, strict=True)]
    assert 1 / 1.1 < median(ratios) < 1.1
