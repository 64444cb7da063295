"""Interleaved timing of several callables, after their answers have been compared.

Machines drift by 10 to 15 % within an hour, so two figures mean something together only if they were taken
alternately: every round runs every callable once, in a new random order, and speed-ups are ratios *within* a round.
A callable whose outputs differ from the oracle's is not timed at all, so there is no figure to quote.

Knows nothing of the callables; they take torch tensors and return them.
"""

from __future__ import annotations

import gc
import json
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any, TypeVar

import torch

from fmtprop.bench.compare import Agreement, compare_outputs, tensors_of
from fmtprop.bench.environment import Environment
from fmtprop.errors import FmtpropError
from fmtprop.runtime.benchmark import quartiles
from fmtprop.system import collector

__all__ = [
    "Benchmark",
    "Entry",
    "Quartiles",
    "entry_of",
    "interleave",
    "take_turns",
    "time_turn",
    "uncollected",
]

#: version of the JSON form
SCHEMA = 1

Runnable = Callable[..., Any]
_Answer = TypeVar("_Answer")


@dataclass(frozen=True)
class Quartiles:
    """Median and quartiles of one quantity over the rounds.

    Examples
    --------
    >>> Quartiles.of([4.0, 1.0, 3.0, 2.0, 5.0])
    Quartiles(low=2.0, median=3.0, high=4.0)
    """

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Quartiles:
        """Summarise at least one value, interpolating linearly between the two nearest."""
        return cls(*quartiles(values))


@dataclass(frozen=True)
class Entry:
    """One callable's result.

    Parameters
    ----------
    name : str
        Its key.
    agreement : Agreement
        The comparison that came first.
    milliseconds : tuple of float
        One figure per round; empty if the outputs disagree.
    latency : Quartiles or None
        Summary of ``milliseconds``; ``None`` if the outputs disagree.
    speedup : Quartiles or None
        The reference's time over this callable's, round by round, so 2.0 is twice as fast as the reference;
        ``None`` unless both agree with the oracle.
    """

    name: str
    agreement: Agreement
    milliseconds: tuple[float, ...]
    latency: Quartiles | None
    speedup: Quartiles | None


@dataclass(frozen=True)
class Benchmark:
    """The result of :func:`interleave`.

    Parameters
    ----------
    reference : str
        Name of the callable that speed-ups are relative to.
    rounds, repeats, seed : int
        How it was measured.
    entries : tuple of Entry
        In the order in which the callables were given.
    environment : Environment
        Machine and libraries.
    """

    reference: str
    rounds: int
    repeats: int
    seed: int
    entries: tuple[Entry, ...]
    environment: Environment

    def __getitem__(self, name: str) -> Entry:
        """Return the entry of one callable."""
        for entry in self.entries:
            if entry.name == name:
                return entry
        raise KeyError(name)

    @property
    def failures(self) -> tuple[str, ...]:
        """What is wrong with each callable that was not timed; empty if all were."""
        return tuple(
            f"{entry.name} disagrees with the oracle and was not timed: {entry.agreement.message}"
            if entry.agreement.ran
            else f"{entry.name} {entry.agreement.message}"
            for entry in self.entries
            if not entry.agreement.passed
        )

    def to_dict(self) -> dict[str, Any]:
        """Return nested dictionaries and lists; infinite errors become ``None``, which JSON can carry."""
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


def interleave(
    callables: Mapping[str, Runnable],
    inputs: Sequence[torch.Tensor],
    *,
    oracle: Runnable,
    reference: str,
    tolerance: float | Mapping[str, float] = 1e-4,
    rounds: int = 20,
    repeats: int = 3,
    warmup: int = 3,
    rest: float = 0.01,
    seed: int = 0,
    environment: Environment | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Benchmark:
    """Time several callables on the same inputs, alternately, after comparing their outputs.

    Each turn of a callable is a rest, one untimed run that warms the caches again, then ``repeats`` timed runs
    whose median is the turn's figure.

    Parameters
    ----------
    callables : mapping of str to callable
        What to time; each is called with the inputs.
    inputs : sequence of torch.Tensor
        Arguments of every call.
    oracle : callable
        Gives the right outputs, normally the module in torch eager; it is run once and not timed.
    reference : str
        Key of the callable that speed-ups are relative to.
    tolerance : float or mapping of str to float, optional
        Largest relative error, for all callables or by key.
    rounds : int, optional
        Turns of every callable.
    repeats : int, optional
        Timed runs in a turn.
    warmup : int, optional
        Untimed runs of every callable before the first round, beside the one that is compared.
    rest : float, optional
        Seconds of sleep before a turn. Thread pools of the previous callable spin for a while after its last run
        and would otherwise take the cores from the next one.
    seed : int, optional
        Seed of the order within the rounds.
    environment : Environment, optional
        Recorded with the result; captured if not given.
    progress : callable, optional
        Called with (turns done, turns in all) after each turn.

    Returns
    -------
    Benchmark
        Entries in the order of ``callables``. Those that disagree with the oracle have no figures.

    Raises
    ------
    FmtpropError
        If the reference or a tolerance names no callable or is missing, or a count is out of range.

    Examples
    --------
    >>> x = torch.ones(4)
    >>> result = interleave(
    ...     {"double": lambda x: 2 * x, "wrong": lambda x: 3 * x}, [x],
    ...     oracle=lambda x: x + x, reference="double", rounds=2, rest=0.0,
    ... )
    >>> result["double"].speedup.median, result["wrong"].speedup
    (1.0, None)
    >>> result["wrong"].agreement.message
    'output 0: largest relative error 0.5 exceeds the tolerance 0.0001'
    """
    tolerances = _tolerances(callables, tolerance)
    _check_arguments(callables, reference, rounds, repeats, warmup)
    expected = [tensor.clone() for tensor in tensors_of(oracle(*inputs))]
    agreements = {
        name: compare_outputs(tensors_of(run(*inputs)), expected, tolerances[name]) for name, run in callables.items()
    }
    timed = {name: run for name, run in callables.items() if agreements[name].passed}
    for run in timed.values():
        for _ in range(warmup):
            run(*inputs)
    turns = {name: partial(time_turn, run, inputs, repeats, rest) for name, run in timed.items()}
    with uncollected():
        times = take_turns(turns, rounds, seed, progress)
    return Benchmark(
        reference=reference,
        rounds=rounds,
        repeats=repeats,
        seed=seed,
        entries=tuple(entry_of(name, agreements[name], times, reference) for name in callables),
        environment=environment or Environment.capture(),
    )


def take_turns(
    turns: Mapping[str, Callable[[], _Answer]],
    rounds: int,
    seed: int,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, list[_Answer]]:
    """Let everyone have a turn in every round, in a new random order each time.

    Parameters
    ----------
    turns : mapping of str to callable
        Each takes one turn and returns its answer: a figure, or several.
    rounds : int
        Turns of everyone.
    seed : int
        Seed of the orders.
    progress : callable, optional
        Called with (turns done, turns in all) after each turn.

    Returns
    -------
    dict of str to list
        One answer per round.

    Examples
    --------
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
    """Keep the garbage collector away: a collection in a timed run would be charged to whoever allocates next."""
    gc.collect()
    with collector.paused():
        yield


def time_turn(run: Runnable, inputs: Sequence[torch.Tensor], repeats: int, rest: float = 0.0) -> float:
    """Rest, run once untimed, then return the median milliseconds of some runs.

    Parameters
    ----------
    run : callable
        Called with the inputs.
    inputs : sequence of torch.Tensor
        Arguments.
    repeats : int
        Timed runs.
    rest : float, optional
        Seconds of sleep before.

    Returns
    -------
    float
        Milliseconds.
    """
    time.sleep(rest)
    run(*inputs)
    figures = []
    for _ in range(repeats):
        start = time.perf_counter_ns()
        run(*inputs)
        figures.append((time.perf_counter_ns() - start) * 1e-6)
    return median(figures)


def entry_of(name: str, agreement: Agreement, times: Mapping[str, Sequence[float]], reference: str) -> Entry:
    """Summarise the figures of one callable, which has none if its outputs disagree.

    Parameters
    ----------
    name : str
        Its key.
    agreement : Agreement
        The comparison.
    times : mapping of str to sequence of float
        Milliseconds of all that were timed, one per round.
    reference : str
        Key of the callable that speed-ups are relative to.

    Returns
    -------
    Entry
    """
    if name not in times:
        return Entry(name, agreement, (), None, None)
    own = times[name]
    speedup = None
    if reference in times:
        speedup = Quartiles.of([theirs / mine for theirs, mine in zip(times[reference], own, strict=True)])
    return Entry(name, agreement, tuple(own), Quartiles.of(own), speedup)


def _tolerances(callables: Mapping[str, Runnable], tolerance: float | Mapping[str, float]) -> Mapping[str, float]:
    if not isinstance(tolerance, Mapping):
        return dict.fromkeys(callables, tolerance)
    if set(tolerance) != set(callables):
        odd = sorted(set(tolerance) ^ set(callables))
        raise FmtpropError(f"interleave: tolerance must have the same keys as callables; they differ in {odd}")
    return tolerance


def _check_arguments(callables: Mapping[str, Runnable], reference: str, rounds: int, repeats: int, warmup: int) -> None:
    if reference not in callables:
        raise FmtpropError(f"interleave: reference {reference!r} is not one of the callables: {', '.join(callables)}")
    for name, value, least in (("rounds", rounds, 1), ("repeats", repeats, 1), ("warmup", warmup, 0)):
        if value < least:
            raise FmtpropError(f"interleave: {name} is {value}, must be at least {least}")
