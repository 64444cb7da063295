"""Timing ways to run a node, and reorders, as they will run in a plan.

What makes a figure true (each was wrong by tens of percent without):

- Memory was written before: pages that never were are one shared page of zeros, which is always in cache.
- One block of huge pages holds all activations, as a plan's arena does, and every job uses the same one.
- Weights are taken from a buffer as large as all weights of the network, each time from a place farther on: they come
  from as far away as they do in a network, not from the cache in which the last execution left them. Where all weights
  fit in the last-level cache, they are brought there before: so far away are they then, and no farther.
- Activations are written right before, by all threads: as warm as their producer leaves them. This is not counted.
- Real post-ops and biases, a real residual in dst.

What makes it robust: the ways to run one node take turns, so that a slow second slows them all; the figure is the lower
quartile, since whoever else uses the machine only ever adds to a time, and little more than the fastest time where the
machine is so busy that not even the quartile was spared; there are more rounds where times disagree; a way that is
clearly worse after some rounds gets no more.

Must not know the cache, nor what the figures are for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from fmtprop import dnnl
from fmtprop.errors import DnnlError
from fmtprop.ir.node import Node
from fmtprop.layout import MemoryDesc
from fmtprop.passes.target import Candidate
from fmtprop.targets.arguments import arguments
from fmtprop.targets.memory import ALIGNMENT, huge_bytes
from fmtprop.tuning.calls import Argument, TimedCall
from fmtprop.tuning.machine import last_level_cache_nbytes
from fmtprop.tuning.problem import parameters, regime

#: rounds after which a way that takes so many times the best one's time is dropped
_TRIAL, _HOPELESS = 3, 1.5

#: rounds at least and at most; enough when the best way's quartile is so close to its fastest
_FEWEST, _MOST, _SETTLED = 6, 24, 1.03

#: not even tried again: so many times slower than the best when all were executed for the first time, and no trifle
_ABSURD, _TRIFLE = 8.0, 1e-3

#: seconds after which one group of ways ends if it has had the fewest rounds, and in any case
_GROUP_SECONDS, _GROUP_MOST = 0.5, 3.0

_PAGE = 4096

#: share of the last-level cache that the weights of a network can have, beside its activations and other users
_SHARE = 0.25


@dataclass(frozen=True)
class Operand:
    """An argument of a job.

    Parameters
    ----------
    number : int
        The primitive's argument.
    md : NativeDesc
        Its descriptor.
    kind : {"activation", "parameter", "result"}
        Where it lies and how it is kept warm.
    """

    number: int
    md: dnnl.NativeDesc
    kind: str


@dataclass(frozen=True)
class Job:
    """One primitive to be timed.

    Parameters
    ----------
    key : object
        The caller's name for it.
    operands : tuple of Operand
        All arguments but the scratchpad.
    pd : PrimitiveDesc
        What to run.
    """

    key: Any
    operands: tuple[Operand, ...]
    pd: dnnl.PrimitiveDesc

    @property
    def activations_nbytes(self) -> int:
        """Bytes of everything that lies in the block of activations."""
        sizes = [_room(o.md.nbytes) for o in self.operands if o.kind != "parameter"]
        return sum(sizes) + _room(self.pd.scratchpad_nbytes)

    @property
    def parameters_nbytes(self) -> int:
        """Bytes of the weights, the bias and the like."""
        return sum(_room(o.md.nbytes) for o in self.operands if o.kind == "parameter")


def job_of(key: Any, node: Node, candidate: Candidate) -> Job:
    """Return the job that times a way to run a node.

    Parameters
    ----------
    key : object
        The caller's name for it.
    node : Node
        The node.
    candidate : Candidate
        With a primitive descriptor as its handle.
    """
    formatted = node.with_(choice=candidate.choice("to be timed"), descs=candidate.results)
    learned = parameters(node.op, candidate.operands)
    residual = {post_op.operand for post_op in node.post_ops if post_op.op == "sum"}
    operands = []
    for name, number, md in arguments(formatted, candidate.handle):
        kind = "parameter" if name in learned else "activation" if name in candidate.operands else "result"
        if name not in residual:  # it lies in dst
            operands.append(Operand(number, md, kind))
    return Job(key, tuple(operands), candidate.handle)


def job_of_reorder(key: Any, src: MemoryDesc, dst: MemoryDesc) -> Job | None:
    """Return the job that times a reorder, or None where oneDNN has none, or one that would not work.

    Raises
    ------
    DnnlError
        oneDNN failed, which is not to decline.
    """
    if dst.has_broadcast:
        return None
    source, target = (dnnl.NativeDesc.from_desc(desc.at_start()) for desc in (src, dst))
    try:
        pd = dnnl.reorder(source, target)
    except DnnlError as error:
        if error.status not in ("unimplemented", "invalid_arguments"):
            raise
        return None
    operands = (Operand(int(dnnl.Arg.SRC), source, "activation"), Operand(int(dnnl.Arg.DST), target, "result"))
    return Job(key, operands, pd)


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
        self._activations = _written(activations)
        self._footprint = max(regime(weights_nbytes), parameter_bytes)
        self._weights = _written(self._footprint)
        self._resident = self._footprint <= _SHARE * last_level_cache_nbytes()
        self._next = 0

    def seconds(self, jobs: Sequence[Job], deadline: float) -> dict[Any, float]:
        """Time the ways to run one node against each other.

        Parameters
        ----------
        jobs : sequence of Job
            The most promising first.
        deadline : float
            When to end, by ``perf_counter``; what has not been compiled by then has no figure.

        Returns
        -------
        dict
            Seconds by key.
        """
        runs: list[_Run] = []
        try:
            for job in jobs:
                if runs and perf_counter() > deadline:
                    break
                run = _Run(job, self._activations)
                runs.append(run)
                run.warm_up(self._place(job))
            self._rounds(runs, deadline)
            return {run.job.key: run.figure for run in runs}
        finally:
            for run in runs:
                run.close()

    def _rounds(self, runs: Sequence[_Run], deadline: float) -> None:
        start = perf_counter()
        absurd = max(_ABSURD * min(run.first for run in runs), _TRIFLE)
        live = [run for run in runs if run.first <= absurd]
        for number in range(1, _MOST + 1):
            for run in live:
                run.time(self._place(run.job))
            now = perf_counter()
            if now > deadline or now - start > _GROUP_MOST:
                return
            if number >= _TRIAL:
                best = min(run.figure for run in live)
                live = [run for run in live if run.fastest <= _HOPELESS * best]
            settled = all(run.quartile <= _SETTLED * run.fastest for run in live)
            if number >= _FEWEST and (settled or now - start > _GROUP_SECONDS):
                return

    def _place(self, job: Job) -> int:
        """Return where the parameters of the next execution start: behind those of the last one."""
        size = job.parameters_nbytes
        if self._next + size > self._footprint:
            self._next = 0
        start = self._next
        self._next += -(-size // _PAGE) * _PAGE  # equal weights start in equal places of a page, as in a plan
        if self._resident and size:
            self._weights[start : start + size].view(torch.int32).bitwise_xor_(_SIGNS)
        return self._weights.data_ptr() + start


class _Run:
    """A job that is being timed."""

    def __init__(self, job: Job, activations: torch.Tensor) -> None:
        self.job = job
        self.times: list[float] = []
        #: seconds of the first execution, which touches code and pages
        self.first = 0.0
        self._warm: list[torch.Tensor] = []
        self._parameters: list[tuple[int, int]] = []
        offset = parameter_offset = 0
        bound = []
        for operand in job.operands:
            nbytes = operand.md.nbytes
            if operand.kind == "parameter":
                bound.append(Argument(operand.number, operand.md, activations.data_ptr()))
                self._parameters.append((operand.number, parameter_offset))
                parameter_offset += _room(nbytes)
                continue
            bound.append(Argument(operand.number, operand.md, activations.data_ptr() + offset))
            if operand.kind == "activation":
                self._warm.append(activations[offset : offset + nbytes // 4 * 4].view(torch.int32))
            offset += _room(nbytes)
        self._call = TimedCall(job.pd, bound, activations.data_ptr() + offset)

    @property
    def fastest(self) -> float:
        return min(self.times)

    @property
    def quartile(self) -> float:
        return sorted(self.times)[len(self.times) // 4]

    @property
    def figure(self) -> float:
        if not self.times:
            return self.first
        return min(self.quartile, _SETTLED * self.fastest)

    def warm_up(self, weights: int) -> None:
        self._point(weights)
        self.first = self._call.seconds()

    def time(self, weights: int) -> None:
        self._point(weights)
        for tensor in self._warm:
            tensor.bitwise_xor_(_SIGNS)  # rewritten, and as good a number as before
        self.times.append(self._call.seconds())

    def close(self) -> None:
        self._call.close()

    def _point(self, weights: int) -> None:
        self._call.point({number: weights + offset for number, offset in self._parameters})


#: the signs of two bf16 numbers, or of an f32 number and a bit of its mantissa
_SIGNS = -0x7FFF8000


def _room(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _written(nbytes: int) -> torch.Tensor:
    """Return memory full of numbers between -1 and 1 that are no denormals, whatever type they are read in."""
    memory = huge_bytes(_room(nbytes))
    generator = torch.Generator().manual_seed(0)
    pattern = (torch.rand(1 << 16, generator=generator) * 2 - 1).bfloat16().view(torch.uint8)
    for start in range(0, memory.numel(), pattern.numel()):
        part = memory[start : start + pattern.numel()]
        part.copy_(pattern[: part.numel()])
    return memory
