"""Timing ways to run a node, and reorders, as they will run in a plan.

What makes a figure true (each was wrong by tens of percent without):

- Memory was written before: pages that never were are one shared page of zeros, which is always in cache.
- One block of huge pages holds all activations, as a plan's arena does, and every job uses the same one.
- Weights are taken from a buffer as large as all weights of the network, each time from a place farther on: they come
  from as far away as they do in a network, not from the cache in which the last execution left them. Where all weights
  fit in the last-level cache, they are brought there before: so far away are they then, and no farther.
- Activations are written right before, by all threads: as warm as their producer leaves them. This is not counted.
- Real post-ops and biases, a real residual in dst.

What makes it robust:

- The ways to run one node take turns, so that a slow moment slows them all.
- Every round goes through all nodes, so that the figures of one node come from moments all over the measurement, and a
  slow second is a little in every figure instead of wholly in a few. (Neighbours on a shared machine come and go in
  seconds: lower quartiles of twelve executions in a row differed by 1.2 to 1.8 times from one group to the next, of
  twelve that were spread over the whole time by 1.04 to 1.1.)
- The figure is the lower quartile, since whoever else uses the machine only ever adds to a time, and little more than
  the fastest time where the machine is so busy that not even the quartile was spared.
- There are more rounds where times disagree; a way that is clearly worse after some rounds gets no more, but no single
  execution decides that.

Must not know the cache, nor what the figures are for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from fmtprop.ir.node import Node
from fmtprop.ir.op import opdef
from fmtprop.ir.ports import result_names
from fmtprop.ir.types import TensorType
from fmtprop.layout import MemoryDesc
from fmtprop.passes.target import Candidate, Target
from fmtprop.system.machine import last_level_cache_nbytes
from fmtprop.targets.executable import SCRATCHPAD, Memory, Place, Stream, implementation, threads_here
from fmtprop.targets.memory import ALIGNMENT, numbers
from fmtprop.tuning.identity import parameters, regime

#: rounds after which a way that takes so many times the best one's time is dropped
_TRIAL, _HOPELESS = 3, 1.5

#: rounds at least and at most; enough when every way's quartile is so close to its fastest
_FEWEST, _MOST, _SETTLED = 16, 40, 1.03

#: dropped after fewer rounds: so many times slower than the best, and no trifle
_GLANCES, _ABSURD, _TRIFLE = 2, 8.0, 1e-3

#: seconds after which one group of ways ends if it has had the fewest rounds, and in any case
_GROUP_SECONDS, _GROUP_MOST = 0.5, 3.0

#: share of the time allowed in which primitives are compiled: what is not by then is left out
_COMPILING = 0.5

#: told a group that has its figures: its index, and seconds by key
Done = Callable[[int, Mapping[Any, float]], None]

#: told (done, total)
Progress = Callable[[int, int], None]

_PAGE = 4096

#: share of the last-level cache that the weights of a network can have, beside its activations and other users
_SHARE = 0.25


@dataclass(frozen=True)
class Operand:
    """What a job reads or writes.

    Parameters
    ----------
    name : str
        Of the operand or result.
    desc : MemoryDesc
        Its format.
    kind : {"activation", "parameter", "result"}
        Where it lies and how it is kept warm.
    """

    name: str
    desc: MemoryDesc
    kind: str


@dataclass(frozen=True)
class Job:
    """One way to run a node, to be timed.

    Parameters
    ----------
    key : object
        The caller's name for it.
    node : Node
        Formatted.
    operands : tuple of Operand
        All but the scratchpad, and what is added to: that lies in the result.
    """

    key: Any
    node: Node
    operands: tuple[Operand, ...]

    @property
    def activations_nbytes(self) -> int:
        """Bytes of everything that lies in the block of activations."""
        sizes = [_room(o.desc.nbytes) for o in self.operands if o.kind != "parameter"]
        return sum(sizes) + _room(implementation(self.node).scratchpad_nbytes)

    @property
    def parameters_nbytes(self) -> int:
        """Bytes of the weights, the bias and the like."""
        return sum(_room(o.desc.nbytes) for o in self.operands if o.kind == "parameter")


def job_of(key: Any, node: Node, candidate: Candidate) -> Job:
    """Return the job that times a way to run a node.

    Parameters
    ----------
    key : object
        The caller's name for it.
    node : Node
        The node.
    candidate : Candidate
        One that takes any numbers.
    """
    formatted = node.with_(choice=candidate.choice("to be timed"), descs=candidate.results)
    learned, residual = parameters(node.op, candidate.operands), implementation(formatted).residual(formatted)
    read = [
        Operand(name, desc.at_start(), "parameter" if name in learned else "activation")
        for name, desc in candidate.operands.items()
        if name != residual
    ]
    written = zip(result_names(node), candidate.results, strict=True)
    return Job(key, formatted, (*read, *(Operand(name, desc.at_start(), "result") for name, desc in written)))


def job_of_reorder(key: Any, src: MemoryDesc, dst: MemoryDesc, target: Target) -> Job | None:
    """Return the job that times a reorder, or None where the target has none."""
    node = Node("reorder", "reorder", opdef("reorder").attrs(), (TensorType(dst.dims, dst.dtype),))
    request = {"src": src.at_start(), "dst": dst.at_start()}
    candidate = next(iter(target.candidates(node, request)), None)
    return None if candidate is None or dst.has_broadcast else job_of(key, node, candidate)


class Bench:
    """Memory that jobs are timed on, shared by all of them.

    Parameters
    ----------
    jobs : iterable of Job
        Those that will come.
    weights_nbytes : int
        Bytes of all weights of the network.
    """

    def __init__(self, jobs: Iterable[Job], weights_nbytes: int) -> None:
        torch.get_num_threads()  # a thread that is new to torch takes over the number that was set for the process
        activations = parameter_bytes = 1
        for job in jobs:
            activations = max(activations, job.activations_nbytes)
            parameter_bytes = max(parameter_bytes, job.parameters_nbytes)
        self._activations = numbers(activations)
        self._footprint = max(regime(weights_nbytes), parameter_bytes)
        self._weights = numbers(self._footprint)
        self._resident = self._footprint <= _SHARE * last_level_cache_nbytes()
        self._next = 0

    def seconds(
        self,
        groups: Sequence[Sequence[Job]],
        deadline: float,
        done: Done | None = None,
        progress: Progress | None = None,
    ) -> dict[Any, float]:
        """Time the ways to run several nodes, those of one node against each other.

        Parameters
        ----------
        groups : sequence of sequence of Job
            The ways to run each node: the most important node first, and its most promising way first.
        deadline : float
            When to end, by ``perf_counter``; what is not compiled by half-time has no figure.
        done : callable, optional
            Told of each group that has its figures, as soon as it has them.
        progress : callable, optional
            Told (done, total) in steps of which all take about as long.

        Returns
        -------
        dict
            Seconds by key.
        """
        races: list[_Race] = []
        total = len(groups) * (1 + _FEWEST)

        def tell(count: int) -> None:
            if progress is not None:
                progress(min(count, total), total)

        try:
            now = perf_counter()
            tell(0)
            for index, jobs in enumerate(groups):
                races.append(self._compiled(index, jobs, now + (deadline - now) * _COMPILING))
                tell(index + 1)
            running, rounds = races, 0
            while running:
                for race in running:
                    in_time = perf_counter() <= deadline
                    if in_time:
                        race.round(self._place)
                        rounds += 1
                        tell(len(groups) + rounds)
                    if done is not None and (race.over or not in_time):
                        done(race.index, race.figures)
                running = [race for race in running if not race.over] if in_time else []
            tell(total)
            return {key: seconds for race in races for key, seconds in race.figures.items()}
        finally:
            for race in races:
                race.close()

    def _compiled(self, index: int, jobs: Sequence[Job], deadline: float) -> _Race:
        """Return the race of the ways that there is time to compile."""
        race = _Race(index)
        for job in jobs:
            if perf_counter() > deadline:
                break
            run = _Run(job, self._activations)
            race.runs.append(run)
            run.warm_up(self._place(job))
        return race

    def _place(self, job: Job) -> torch.Tensor:
        """Return where the parameters of the next execution start: behind those of the last one."""
        size = job.parameters_nbytes
        if self._next + size > self._footprint:
            self._next = 0
        start = self._next
        self._next += -(-size // _PAGE) * _PAGE  # equal weights start in equal places of a page, as in a plan
        if self._resident and size:
            self._weights[start : start + size].view(torch.int32).bitwise_xor_(_SIGNS)
        return self._weights[start:]


class _Race:
    """The ways to run one node, which are timed against each other."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.runs: list[_Run] = []
        self._rounds = 0
        self._seconds = 0.0
        self._dropped: set[int] = set()

    @property
    def figures(self) -> dict[Any, float]:
        """Seconds by key, of the ways that had a turn."""
        return {run.job.key: run.figure for run in self.runs if run.times}

    @property
    def over(self) -> bool:
        """Whether more rounds would tell nothing new, or cost too much."""
        live = self._live()
        if not live or self._rounds >= _MOST or self._seconds > _GROUP_MOST:
            return True
        if self._rounds < _FEWEST:
            return False
        return self._seconds > _GROUP_SECONDS or all(run.quartile <= _SETTLED * run.fastest for run in live)

    def round(self, place: Callable[[Job], torch.Tensor]) -> None:
        """Time every way that is not hopeless once."""
        start = perf_counter()
        for run in self._live():
            run.time(place(run.job))
        self._rounds += 1
        self._drop()
        self._seconds += perf_counter() - start

    def close(self) -> None:
        """Release all primitives."""
        for run in self.runs:
            run.close()

    def _live(self) -> list[_Run]:
        return [run for index, run in enumerate(self.runs) if index not in self._dropped]

    def _drop(self) -> None:
        live = self._live()
        if not live or self._rounds < _GLANCES:
            return
        best = min(run.fastest for run in live)
        limit = _HOPELESS * best if self._rounds >= _TRIAL else max(_ABSURD * best, _TRIFLE)
        self._dropped |= {index for index, run in enumerate(self.runs) if run.fastest > limit}


class _Run:
    """A job that is being timed."""

    def __init__(self, job: Job, activations: torch.Tensor) -> None:
        self.job = job
        self.times: list[float] = []
        self._warm: list[torch.Tensor] = []
        #: where each parameter lies, and how far behind the first
        self._parameters: list[tuple[Memory, int]] = []
        self._stream = Stream()
        way, offset, parameter_offset = implementation(job.node), 0, 0
        places: dict[str, Place] = {}
        for operand in job.operands:
            nbytes = operand.desc.nbytes
            if operand.kind == "parameter":
                memory = Memory()
                self._parameters.append((memory, parameter_offset))
                parameter_offset += _room(nbytes)
            else:
                memory = Memory(activations[offset : offset + nbytes])
                if operand.kind == "activation":
                    self._warm.append(activations[offset : offset + nbytes // 4 * 4].view(torch.int32))
                offset += _room(nbytes)
            places[operand.name] = Place(memory, operand.desc)
        residual = way.residual(job.node)
        if residual is not None:
            places[residual] = places[job.operands[-1].name]
        if way.scratchpad_nbytes:
            room = activations[offset : offset + way.scratchpad_nbytes]
            places[SCRATCHPAD] = Place(Memory(room), MemoryDesc((way.scratchpad_nbytes,), "u8"))
        self._executable = way.build(threads_here())
        self._bound = self._executable.bind(job.node, places, self._stream)

    @property
    def fastest(self) -> float:
        return min(self.times)

    @property
    def quartile(self) -> float:
        return sorted(self.times)[len(self.times) // 4]

    @property
    def figure(self) -> float:
        return min(self.quartile, _SETTLED * self.fastest)

    def warm_up(self, weights: torch.Tensor) -> None:
        """Execute it once, which touches code and pages."""
        self._point(weights)
        self._bound.seconds(self._stream)

    def time(self, weights: torch.Tensor) -> None:
        self._point(weights)
        for tensor in self._warm:
            tensor.bitwise_xor_(_SIGNS)  # rewritten, and as good a number as before
        self.times.append(self._bound.seconds(self._stream))

    def close(self) -> None:
        self._bound.close()
        self._executable.close()
        self._stream.close()

    def _point(self, weights: torch.Tensor) -> None:
        for memory, offset in self._parameters:
            memory.put(weights[offset:])


#: the signs of two bf16 numbers, or of an f32 number and a bit of its mantissa
_SIGNS = -0x7FFF8000


def _room(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
