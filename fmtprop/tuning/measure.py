"""Timing of reorders and of ways to run a node, under the conditions of a plan.

Conditions of a true figure (without any one of these, figures were wrong by tens of percent):

- MovableMemory has been written before: all unwritten pages are one shared page of zeros, which is always in cache.
- One block of huge pages holds all activations, like a plan's arena, and all jobs use the same block.
- Weights are taken from a buffer as large as all weights of the network, each time from the next position. So they
  come from the same level of memory as in the network, not from the cache of the last execution. If all weights fit in
  the last-level cache, they are loaded into it before.
- Activations are written right before, by all threads, as their producer would do. This time is not counted.
- Real post-ops and biases, a real residual in dst.
- Numbers that are normal in all types (:func:`~fmtprop.targets.memory.renew`): what a job leaves is what others read,
  and after a few jobs that was denormal numbers. On an Intel core, f32 kernels of 0.7 ms took 25 ms on them.

Robustness:

- The ways to run one node take turns, so a slow moment slows all of them.
- Every round visits all nodes, so the times of one node are spread over the whole measurement, and a slow second has a
  small effect on every figure instead of a large one on a few. (On a shared machine the load changes within seconds:
  lower quartiles of twelve consecutive executions differed by factors of 1.2 to 1.8, those of twelve executions spread
  over the whole time by 1.04 to 1.1.)
- An execution during which a thread waited for a processor does not count (:mod:`fmtprop.system.waiting`): beside two
  busy programs on two processors, half of them.
- The figure is the lower quartile of the others. The fastest time is no figure: two threads on one core's two virtual
  processors are nearly twice as fast for moments.
- If times disagree, there are more rounds. A way that is clearly worse after some rounds is dropped, but never after a
  single execution.
- A figure is doubtful if all executions waited, or if they differ by more than rounds can mend.

Must not know the cache or the use of the figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from fmtprop.ir import Node, TensorType, opdef, result_names
from fmtprop.ir.tensors import torch_dtype
from fmtprop.layout import MemoryDesc
from fmtprop.passes.target import Candidate, Target
from fmtprop.system.machine import last_level_cache_nbytes
from fmtprop.system.waiting import Waiting
from fmtprop.targets.bound import SCRATCHPAD, MovableMemory, OwnStream, Place
from fmtprop.targets.executable import implementation, threads_here
from fmtprop.targets.memory import align, numbers, renew
from fmtprop.tuning.identity import parameters, regime

#: rounds after which a way may be dropped, and its time over the best one's from which it is
_TRIAL_ROUNDS, _HOPELESS_RATIO = 3, 1.5

#: least and most rounds; a group may end before if all quartiles are within this factor of the fastest time
_LEAST_ROUNDS, _MOST_ROUNDS, _SETTLED_RATIO = 16, 40, 1.03

#: the same after a first glance, for ways that are absurd: slower by this factor, and by more than a trifle in seconds
_GLANCE_ROUNDS, _ABSURD_RATIO, _TRIFLE_SECONDS = 2, 8.0, 1e-3

#: part of an execution that a thread may have waited for a processor
_WAITED_SHARE = 0.02

#: a figure is doubtful if its quartile over the fastest time is above this
_SPREAD_RATIO = 2.0

#: seconds after which a group of ways ends if it has had the least rounds, and after which it ends in any case
_GROUP_SECONDS, _GROUP_MOST_SECONDS = 0.5, 3.0

#: share of the time limit for compiling primitives; ways that are not compiled by then are left out
_COMPILING_SHARE = 0.5

#: called with the index of a finished group, and its seconds by key
Done = Callable[[int, Mapping[Any, float]], None]

#: called with (done, total)
Progress = Callable[[int, int], None]

_PAGE_NBYTES = 4096

#: bytes of a word in which numbers are renewed
_WORD_NBYTES = 4

#: share of the last-level cache that a network's weights can occupy; activations and other users need the rest
_RESIDENT_SHARE = 0.25


@dataclass(frozen=True)
class TimedOperand:
    """An operand or result of a job."""

    name: str
    desc: MemoryDesc
    #: it decides the memory of the operand and the state of the cache
    kind: str


@dataclass(frozen=True)
class Job:
    """One way to run a node, to be timed."""

    key: Any
    node: Node
    #: all operands and results, without the scratchpad and without a residual, which lies in the result
    operands: tuple[TimedOperand, ...]

    @property
    def activations_nbytes(self) -> int:
        """Bytes of all operands and results in the block of activations."""
        sizes = [align(o.desc.nbytes) for o in self.operands if o.kind != "parameter"]
        return sum(sizes) + align(implementation(self.node).scratchpad_nbytes)

    @property
    def parameters_nbytes(self) -> int:
        """Bytes of weights, bias and other parameters."""
        return sum(align(o.desc.nbytes) for o in self.operands if o.kind == "parameter")


def job_of(key: Any, node: Node, candidate: Candidate) -> Job:
    """Return the job that times a way to run a node."""
    formatted = node.with_(choice=candidate.choice("to be timed"), descs=candidate.results)
    learned, residual = parameters(node.op, candidate.operands), implementation(formatted).residual(formatted)
    read = [
        TimedOperand(name, desc.at_start(), "parameter" if name in learned else "activation")
        for name, desc in candidate.operands.items()
        if name != residual
    ]
    written = zip(result_names(node), candidate.results, strict=True)
    return Job(key, formatted, (*read, *(TimedOperand(name, desc.at_start(), "result") for name, desc in written)))


def job_of_reorder(key: Any, src: MemoryDesc, dst: MemoryDesc, target: Target) -> Job | None:
    """Return the job that times a reorder, or None if the target has no such reorder."""
    node = Node("reorder", "reorder", opdef("reorder").attrs(), (TensorType(dst.dims, dst.dtype),))
    request = {"src": src.at_start(), "dst": dst.at_start()}
    candidate = next(iter(target.candidates(node, request)), None)
    return None if candidate is None or dst.has_broadcast else job_of(key, node, candidate)


class Bench:
    """The memory for timing, which all jobs share."""

    def __init__(self, jobs: Iterable[Job], weights_nbytes: int) -> None:
        torch.get_num_threads()  # the first call in a thread adopts the process's number of threads
        activations = parameter_bytes = 1
        for job in jobs:
            activations = max(activations, job.activations_nbytes)
            parameter_bytes = max(parameter_bytes, job.parameters_nbytes)
        self._activations = numbers(activations)
        self._footprint = max(regime(weights_nbytes), parameter_bytes)
        self._weights = numbers(self._footprint)
        self._resident = self._footprint <= _RESIDENT_SHARE * last_level_cache_nbytes()
        self._next = 0
        #: keys of the last figures that are doubtful
        self.doubtful: set[Any] = set()

    def seconds(
        self,
        groups: Sequence[Sequence[Job]],
        deadline: float,
        done: Done | None = None,
        progress: Progress | None = None,
    ) -> dict[Any, float]:
        """Time the ways to run several nodes, those of one node against each other.

        `deadline`: end of the measurement, by ``perf_counter``; jobs that are not compiled by half-time get no figure.
        `progress`: called with (done, total) in steps of about equal duration.
        """
        races: list[_Race] = []
        self.doubtful, waiting = set(), Waiting()
        total = len(groups) * (1 + _LEAST_ROUNDS)

        def tell(count: int) -> None:
            if progress is not None:
                progress(min(count, total), total)

        try:
            now = perf_counter()
            tell(0)
            for index, jobs in enumerate(groups):
                races.append(self._compiled(index, jobs, now + (deadline - now) * _COMPILING_SHARE))
                tell(index + 1)
            running, rounds = races, 0
            while running:
                for race in running:
                    in_time = perf_counter() <= deadline
                    if in_time:
                        race.round(self._place, waiting)
                        rounds += 1
                        tell(len(groups) + rounds)
                    if race.over or not in_time:
                        self.doubtful |= race.doubtful
                        if done is not None:
                            done(race.index, race.figures)
                running = [race for race in running if not race.over] if in_time else []
            tell(total)
            return {key: seconds for race in races for key, seconds in race.figures.items()}
        finally:
            waiting.close()
            for race in races:
                race.close()

    def _compiled(self, index: int, jobs: Sequence[Job], deadline: float) -> _Race:
        """Return the race of the ways that can be compiled before the deadline."""
        race = _Race(index)
        for job in jobs:
            if perf_counter() > deadline:
                break
            run = _TimedJob(job, self._activations)
            race.runs.append(run)
            run.warm_up(self._place(job))
        return race

    def _place(self, job: Job) -> torch.Tensor:
        """Return the memory for the parameters of the next execution: after the last one's."""
        size = job.parameters_nbytes
        if self._next + size > self._footprint:
            self._next = 0
        start = self._next
        self._next += (
            -(-size // _PAGE_NBYTES) * _PAGE_NBYTES
        )  # equal weights start at equal offsets in a page, as in a plan
        if self._resident and size:
            renew(self._weights[start : start + size].view(torch.int32))
        return self._weights[start:]


class _Race:
    """The ways to run one node, which are timed against each other."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.runs: list[_TimedJob] = []
        self._rounds = 0
        self._seconds = 0.0
        self._dropped: set[int] = set()

    @property
    def figures(self) -> dict[Any, float]:
        """Seconds by key, for the ways that had a turn."""
        return {run.job.key: run.figure for run in self.runs if run.counted}

    @property
    def doubtful(self) -> set[Any]:
        """Keys of ways whose executions were disturbed."""
        return {run.job.key for run in self.runs if run.is_doubtful}

    @property
    def over(self) -> bool:
        """Whether more rounds would be useless, or would take too long."""
        live = self._live()
        if not live or self._rounds >= _MOST_ROUNDS or self._seconds > _GROUP_MOST_SECONDS:
            return True
        if self._rounds < _LEAST_ROUNDS:
            return False
        return self._seconds > _GROUP_SECONDS or all(run.figure <= _SETTLED_RATIO * run.fastest for run in live)

    def round(self, place: Callable[[Job], torch.Tensor], waiting: Waiting) -> None:
        """Time every way once that is not dropped."""
        start = perf_counter()
        for run in self._live():
            run.time(place(run.job), waiting)
        self._rounds += 1
        self._drop()
        self._seconds += perf_counter() - start

    def close(self) -> None:
        """Release all primitives."""
        for run in self.runs:
            run.close()

    def _live(self) -> list[_TimedJob]:
        return [run for index, run in enumerate(self.runs) if index not in self._dropped]

    def _drop(self) -> None:
        live = self._live()
        if not live or self._rounds < _GLANCE_ROUNDS:
            return
        best = min(run.fastest for run in live)
        limit = _HOPELESS_RATIO * best if self._rounds >= _TRIAL_ROUNDS else max(_ABSURD_RATIO * best, _TRIFLE_SECONDS)
        self._dropped |= {index for index, run in enumerate(self.runs) if run.fastest > limit}


class _TimedJob:
    """A job that is being timed."""

    def __init__(self, job: Job, activations: torch.Tensor) -> None:
        self.job = job
        #: seconds of executions, and of those during which a thread waited
        self.times: list[float] = []
        self.disturbed: list[float] = []
        #: words of each activation, and whether its numbers must be positive
        self._warm: list[tuple[torch.Tensor, bool]] = []
        #: memory of each parameter, its offset from the first one in bytes, and the words that must be positive
        self._parameters: list[tuple[MovableMemory, int, int]] = []
        self._stream = OwnStream()
        way, offset, parameter_offset = implementation(job.node), 0, 0
        self._executable = way.build(threads_here())
        places: dict[str, Place] = {}
        residual, positive = way.residual(job.node), opdef(job.node.op).numbers.positive(job.node.attrs)
        for operand in job.operands:
            nbytes, is_positive = operand.desc.nbytes, operand.name in positive
            if way.makes_results and operand.kind == "result":
                memory = MovableMemory()
            elif way.makes_results and operand.desc.kind != "blocked":
                memory = MovableMemory(self._executable.lay_out(job.node, operand.name, _random(operand.desc)))
            elif operand.kind == "parameter":
                memory = MovableMemory()
                self._parameters.append((memory, parameter_offset, nbytes // _WORD_NBYTES * is_positive))
                parameter_offset += align(nbytes)
            else:
                memory = MovableMemory(activations[offset : offset + nbytes])
                if operand.kind == "activation" or residual is not None:
                    self._warm.append((_words(activations[offset : offset + align(nbytes)]), is_positive))
                offset += align(nbytes)
            places[operand.name] = Place(memory, operand.desc)
        if residual is not None:
            places[residual] = places[job.operands[-1].name]
        if way.scratchpad_nbytes:
            room = activations[offset : offset + way.scratchpad_nbytes]
            renew(_words(room))
            places[SCRATCHPAD] = Place(MovableMemory(room), MemoryDesc((way.scratchpad_nbytes,), "u8"))
        self._bound = self._executable.bind(job.node, places, self._stream)

    @property
    def counted(self) -> list[float]:
        return self.times or self.disturbed

    @property
    def fastest(self) -> float:
        return min(self.counted)

    @property
    def figure(self) -> float:
        return sorted(self.counted)[len(self.counted) // 4]

    @property
    def is_doubtful(self) -> bool:
        return not self.times or self.figure > _SPREAD_RATIO * self.fastest

    def warm_up(self, weights: torch.Tensor) -> None:
        """Execute once, to load code and pages."""
        self._prepare(weights)
        self._bound.seconds(self._stream)

    def time(self, weights: torch.Tensor, waiting: Waiting) -> None:
        self._prepare(weights)
        waiting.lap()
        seconds = self._bound.seconds(self._stream)
        (self.times if waiting.lap() <= _WAITED_SHARE * seconds else self.disturbed).append(seconds)

    def _prepare(self, weights: torch.Tensor) -> None:
        """Take the next weights, and write the activations, which are then as warm as their producer leaves them."""
        for memory, offset, words in self._parameters:
            memory.put(weights[offset:])
            if words:
                renew(_words(weights[offset:])[:words], positive=True)
        for tensor, is_positive in self._warm:
            renew(tensor, positive=is_positive)

    def close(self) -> None:
        self._bound.close()
        self._executable.close()
        self._stream.close()


def _words(memory: torch.Tensor) -> torch.Tensor:
    """Return the whole words of flat bytes."""
    return memory[: memory.numel() // _WORD_NBYTES * _WORD_NBYTES].view(torch.int32)


def _random(desc: MemoryDesc) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(0)
    return torch.rand(desc.dims, generator=generator, device="cpu").to(torch_dtype(desc.dtype))
