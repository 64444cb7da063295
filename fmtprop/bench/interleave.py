"""Interleaved timing: turns in random order, and the results of a benchmark.

The speed of a machine drifts by 10 to 15 % within an hour, so figures can be compared only if they were taken
alternately. In every round each contender has a turn, in a new random order, and speed-ups are ratios *within* a
round. A contender with wrong outputs is not timed and has no figure.

Must not know the contenders.
"""

from __future__ import annotations

import gc
import json
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, TypeVar

import torch

from fmtprop.bench.compare import Agreement
from fmtprop.bench.environment import Environment
from fmtprop.system import collector
from fmtprop.system.timing import quartiles, seconds_of

#: version of the JSON form
SCHEMA = 1

Runnable = Callable[..., Any]
_Answer = TypeVar("_Answer")


@dataclass(frozen=True)
class Quartiles:
    """Median and quartiles of one quantity over the rounds.

    >>> Quartiles.of([4.0, 1.0, 3.0, 2.0, 5.0])
    Quartiles(low=2.0, median=3.0, high=4.0)
    """

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Quartiles:
        """Summarise at least one value, with linear interpolation between the two nearest."""
        return cls(*quartiles(values))


@dataclass(frozen=True)
class Entry:
    """Results of one contender."""

    name: str
    agreement: Agreement
    #: one figure per round; empty if the outputs disagree
    milliseconds: tuple[float, ...]
    #: summary of ``milliseconds``; ``None`` if the outputs disagree
    latency: Quartiles | None
    #: the reference's time over the contender's time, round by round: 2.0 is twice as fast as the reference. ``None``
    #: unless both agree with the oracle.
    speedup: Quartiles | None


@dataclass(frozen=True)
class Benchmark:
    """The result of a race."""

    reference: str
    rounds: int
    repeats: int
    seed: int
    entries: tuple[Entry, ...]
    environment: Environment

    def __getitem__(self, name: str) -> Entry:
        """Return the entry of a name."""
        for entry in self.entries:
            if entry.name == name:
                return entry
        raise KeyError(name)

    @property
    def failures(self) -> tuple[str, ...]:
        """Reason for each contender that was not timed; empty if all were timed."""
        return tuple(
            f"{entry.name} disagrees with the oracle and was not timed: {entry.agreement.message}"
            if entry.agreement.ran
            else f"{entry.name} {entry.agreement.message}"
            for entry in self.entries
            if not entry.agreement.passed
        )

    def to_dict(self) -> dict[str, Any]:
        """Return nested dictionaries and lists; infinite errors become ``None``, since JSON has no infinity."""
        data = asdict(self)
        for entry in data["entries"]:
            if not math.isfinite(entry["agreement"]["error"]):
                entry["agreement"]["error"] = None
        return data

    def to_json(self) -> str:
        """Return the result as indented JSON text."""
        return json.dumps({"schema": SCHEMA, **self.to_dict()}, indent=2, allow_nan=False)

    def to_text(self) -> str:
        """Return the result as a table for a terminal."""
        from fmtprop.bench.text import benchmark_text

        return benchmark_text(self)


def take_turns(
    turns: Mapping[str, Callable[[], _Answer]],
    rounds: int,
    seed: int,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, list[_Answer]]:
    """Give each contender a turn in every round, in a new random order each time.

    >>> take_turns({"a": lambda: 1.0, "b": lambda: 2.0}, rounds=2, seed=0)
    {'a': [1.0, 1.0], 'b': [2.0, 2.0]}
    """
    answers: dict[str, list[_Answer]] = {name: [] for name in turns}
    shuffler = random.Random(seed)
    done, total = 0, rounds * len(turns)
    for _ in range(rounds):
        order = list(turns)
        shuffler.shuffle(order)
        for name in order:
            answers[name].append(turns[name]())
            done += 1
            if progress is not None:
                progress(done, total)
    return answers


@contextmanager
def uncollected() -> Iterator[None]:
    """Stop the garbage collector: a collection during a timed run would lengthen an arbitrary contender's time."""
    gc.collect()
    with collector.paused():
        yield


def time_turn(run: Runnable, inputs: Sequence[torch.Tensor], repeats: int) -> float:
    """Run once untimed, then return the median milliseconds of some runs."""
    run(*inputs)
    return 1e3 * median(seconds_of(lambda: run(*inputs)) for _ in range(repeats))


def entry_of(name: str, agreement: Agreement, times: Mapping[str, Sequence[float]], reference: str) -> Entry:
    """Summarise the figures of one contender; it has none if its outputs disagree.

    `times`: milliseconds of all timed contenders, one per round.
    """
    if name not in times:
        return Entry(name, agreement, (), None, None)
    own = times[name]
    speedup = None
    if reference in times:
        speedup = Quartiles.of([theirs / mine for theirs, mine in zip(times[reference], own, strict=True)])
    return Entry(name, agreement, tuple(own), Quartiles.of(own), speedup)
