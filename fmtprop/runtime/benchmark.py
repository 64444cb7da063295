"""Timing of whole runs: a few warm-up runs, then each run by itself. Must not know the function that runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

from fmtprop.errors import InputError
from fmtprop.system.limits import MAX_RUNS
from fmtprop.system.printable import counted
from fmtprop.system.timing import Clock, quartiles, seconds_of


@dataclass(frozen=True)
class BenchmarkResult:
    """Times of a model's runs.

    >>> result = BenchmarkResult("net", "f32", "propagate", 2, (0.004, 0.001, 0.002, 0.003, 0.005))
    >>> print(result)
    net: 3.000 ms median [2.000, 4.000 quartiles], 1.000 ms fastest of 5 runs; f32, propagate, 2 threads
    >>> result.median, result.fastest, result.runs
    (0.003, 0.001, 5)
    """

    model: str
    #: `precision`, `policy`: data type of compute-intensive ops, and policy of the choice of formats
    precision: str
    policy: str
    threads: int
    #: seconds of each run, in order
    times: tuple[float, ...]

    @property
    def runs(self) -> int:
        """Number of runs."""
        return len(self.times)

    @property
    def median(self) -> float:
        """Median seconds."""
        return median(self.times)

    @property
    def quartiles(self) -> tuple[float, float]:
        """Lower and upper quartile in seconds."""
        low, _, high = quartiles(self.times)
        return low, high

    @property
    def fastest(self) -> float:
        """Seconds of the fastest run."""
        return min(self.times)

    def to_json(self) -> str:
        """Return the figures as JSON text; times in seconds."""
        low, high = self.quartiles
        data: dict[str, Any] = {
            "model": self.model,
            "precision": self.precision,
            "policy": self.policy,
            "threads": self.threads,
            "runs": self.runs,
            "median": self.median,
            "lower_quartile": low,
            "upper_quartile": high,
            "fastest": self.fastest,
            "times": list(self.times),
        }
        return json.dumps(data)

    def __str__(self) -> str:
        low, high = self.quartiles
        return (
            f"{self.model}: {self.median * 1e3:.3f} ms median [{low * 1e3:.3f}, {high * 1e3:.3f} quartiles], "
            f"{self.fastest * 1e3:.3f} ms fastest of {self.runs} runs; {self.precision}, {self.policy}, "
            f"{counted(self.threads, 'thread')}"
        )


def time_runs(
    run: Callable[[], object], runs: int | None, seconds: float | None, warmup: int, now: Clock = perf_counter
) -> tuple[float, ...]:
    """Call a function again and again and return the seconds of each call.

    `seconds`: time limit if ``runs`` is not given, with at least one call. Default: one second.
    """
    if runs is not None and seconds is not None:
        raise InputError(f"benchmark takes runs or seconds, not both; got runs={runs} and seconds={seconds}")
    if runs is not None and (not isinstance(runs, int) or not 1 <= runs <= MAX_RUNS):
        raise InputError(f"runs must be a whole number from 1 to {MAX_RUNS}, for a median, got {runs!r}")
    if seconds is not None and (not isinstance(seconds, int | float) or not 0 < seconds < float("inf")):
        raise InputError(f"seconds must be a positive time, got {seconds!r}")
    if not isinstance(warmup, int) or not 0 <= warmup <= MAX_RUNS:
        raise InputError(f"warmup must be a number of runs from 0 to {MAX_RUNS}, got {warmup!r}")
    for _ in range(warmup):
        run()
    times: list[float] = []
    end = now() + (seconds if seconds is not None else 1.0)
    while len(times) < runs if runs is not None else not times or now() < end:
        times.append(seconds_of(run, now))
    return tuple(times)
