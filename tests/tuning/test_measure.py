"""Timing: on memory that was written, with weights that move on, and nothing left behind."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import isfinite
from time import perf_counter

import pytest
import torch

from fmtprop import dnnl
from fmtprop.ir.node import Node, PostOp
from fmtprop.ir.types import TensorType
from fmtprop.layout import MemoryDesc
from fmtprop.ops.convolution import Conv
from fmtprop.ops.sum import Sum
from fmtprop.passes.target import Candidate
from fmtprop.targets import OneDnnTarget
from fmtprop.targets.bound import Bound, OwnStream, Place
from fmtprop.targets.executable import Executable, Implementation
from fmtprop.targets.memory import renew
from fmtprop.tuning.identity import is_timed
from fmtprop.tuning.measure import Bench, Job, job_of, job_of_reorder

FAR = 1e9


def ways(channels: int, size: int, residual: bool = False) -> tuple[Node, list[Candidate]]:
    dims, weights = (1, channels, size, size), (channels, channels, 3, 3)
    tail = (PostOp("sum", Sum((1.0,)), "post_op_0"),) if residual else ()
    type_ = TensorType(dims, MemoryDesc(dims, "f32").dtype)
    node = Node("conv", "convolution", Conv((1, 1), (0, 0), (1, 1), (1, 1), 1), (type_,), tail)
    request = {
        "src": MemoryDesc(dims, "f32", tag="acdb"),
        "weights": MemoryDesc.any(weights, "f32"),
        "bias": MemoryDesc((channels,), "f32"),
        "dst": MemoryDesc(dims, "f32", tag="acdb"),
    }
    if residual:
        request["post_op_0"] = request["dst"]
    return node, [candidate for candidate in OneDnnTarget().candidates(node, request) if not candidate.is_ref]


def jobs_of(channels: int, size: int, residual: bool = False) -> list[Job]:
    node, candidates = ways(channels, size, residual)
    return [job_of((channels, candidate.impl), node, candidate) for candidate in candidates]


@pytest.mark.parametrize("residual", [False, True])
def test_every_way_gets_a_figure(residual: bool) -> None:
    jobs = jobs_of(16, 14, residual)
    found = Bench(jobs, 1 << 20).seconds([jobs], perf_counter() + FAR)
    assert found.keys() == {job.key for job in jobs} and len(found) > 1
    assert all(isfinite(seconds) and seconds > 0 for seconds in found.values())


def test_a_thousand_times_the_work_takes_longer() -> None:
    small, large = jobs_of(8, 7)[:1], jobs_of(64, 56)[:1]
    bench = Bench(small + large, 1 << 20)
    tries = [[*bench.seconds([jobs], perf_counter() + FAR).values()] for jobs in (small, large) for _ in range(5)]
    assert min(tries[:5]) < min(tries[5:])  # the least of five: a busy machine lengthens a time, and shortens none


def test_a_residual_lies_in_dst() -> None:
    plain, residual = jobs_of(16, 14)[0], jobs_of(16, 14, residual=True)[0]
    assert [operand.name for operand in plain.operands] == [operand.name for operand in residual.operands]
    assert [operand.kind for operand in plain.operands] == ["activation", "parameter", "parameter", "result"]


def test_when_time_is_up_there_are_no_figures_rather_than_bad_ones() -> None:
    jobs = jobs_of(16, 14)
    assert Bench(jobs, 1 << 20).seconds([jobs, jobs_of(8, 7)], perf_counter() - 1) == {}


class Timed(Implementation):
    """An implementation that takes the seconds that it is told to take, by a clock of the test."""

    takes_any_numbers = True
    repro = ""

    def __init__(self, run: Callable[[Mapping[str, Place]], None], has_residual: bool = False) -> None:
        self.run, self.has_residual = run, has_residual

    def residual(self, node: Node) -> str | None:
        return "post_op_0" if self.has_residual else None

    def target(self) -> OneDnnTarget:
        return OneDnnTarget()

    def build(self, threads: int) -> TimedExecutable:
        return TimedExecutable(self.run)


class TimedExecutable(Executable):
    def __init__(self, run: Callable[[Mapping[str, Place]], None]) -> None:
        self.run = run

    def bind(self, node: Node, places: Mapping[str, Place], stream: OwnStream) -> Bound:
        return Bound(python=(node, [lambda: self.run(places)]))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The present time, by which executions are timed; none of them waits."""
    now = [0.0]
    monkeypatch.setattr("fmtprop.tuning.measure.Waiting", Idle)
    monkeypatch.setattr("fmtprop.targets.bound.perf_counter", lambda: now[0])
    return now


class Idle:
    """A machine on which no thread waits, or one waits so long at each time."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds

    def lap(self) -> float:
        return self.seconds

    def close(self) -> None:
        pass


def timed(key: object, run: Callable[[Mapping[str, Place]], None], channels: int = 16) -> Job:
    node, (candidate, *_) = ways(channels, 14)
    return job_of(key, node, replace(candidate, handle=Timed(run)))


def test_rounds_go_through_all_nodes_and_no_single_execution_drops_a_way(clock: list[float]) -> None:
    order: list[str] = []

    def taking(key: str) -> Callable[[object], None]:
        def run(places: object) -> None:
            order.append(key)
            hiccup = key == "a2" and order.count(key) == 2  # its first round, after the execution that loads its code
            clock[0] += 1.0 if hiccup else 1e-5

        return run

    groups = [[timed(key, taking(key)) for key in keys] for keys in (("a1", "a2"), ("b1", "b2"))]
    done: list[int] = []
    found = Bench([job for jobs in groups for job in jobs], 1 << 20).seconds(
        groups, perf_counter() + FAR, lambda index, figures: done.append(index)
    )
    each = ["a1", "a2", "b1", "b2"]
    assert order[: 3 * len(each)] == each * 3
    assert found == {key: pytest.approx(1e-5) for key in each}
    assert sorted(done) == [0, 1]


def test_a_hopeless_way_is_dropped_and_keeps_its_figure(clock: list[float]) -> None:
    slow: list[int] = []

    def quickly(places: object) -> None:
        clock[0] += 1e-5

    def slowly(places: object) -> None:
        slow.append(1)
        clock[0] += 1.0

    jobs = [timed("quick", quickly), timed("slow", slowly)]
    assert Bench(jobs, 1 << 20).seconds([jobs], perf_counter() + FAR)["slow"] == 1.0
    assert len(slow) == 3, "once to load its code, and two rounds"


def test_executions_that_waited_do_not_count(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside busy programs, half of the executions wait, for several times as long as they work."""
    waits: list[float] = []

    class Busy(Idle):
        def lap(self) -> float:
            waited, self.seconds = self.seconds, 0.0
            return waited

    busy = Busy()
    monkeypatch.setattr("fmtprop.tuning.measure.Waiting", lambda: busy)

    def run(places: object) -> None:
        busy.seconds = 4e-3 if len(waits) % 4 else 0.0
        waits.append(busy.seconds)
        clock[0] += 1e-3 + busy.seconds

    bench = Bench([job := timed("disturbed", run)], 1 << 20)
    assert bench.seconds([[job]], perf_counter() + FAR) == {"disturbed": pytest.approx(1e-3)}
    assert not bench.doubtful


@pytest.mark.parametrize(("waited", "steps"), [(1.0, (1e-3,)), (0.0, (1e-3, 5e-3, 5e-3, 5e-3, 5e-3, 5e-3))])
def test_a_figure_is_doubtful_if_all_waited_or_times_differ(
    waited: float, steps: tuple[float, ...], clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fmtprop.tuning.measure.Waiting", lambda: Idle(waited))
    turns: list[int] = []

    def run(places: object) -> None:
        turns.append(1)
        clock[0] += steps[len(turns) % len(steps)]

    bench = Bench([job := timed("doubtful", run)], 1 << 20)
    assert bench.seconds([[job]], perf_counter() + FAR).keys() == {"doubtful"} == bench.doubtful


def test_weights_move_on_through_all_of_their_buffer(clock: list[float]) -> None:
    seen: list[int] = []

    def note(places: Mapping[str, Place]) -> None:
        seen.append(places["weights"].memory.tensor.data_ptr())
        clock[0] += 1e-5

    job = timed("noted", note, channels=160)
    Bench([job], 3 << 20).seconds([[job]], perf_counter() + FAR)
    places = len(set(seen))
    assert places * job.parameters_nbytes > 0.8 * (4 << 20), "a network of 3 MiB is of the class of 4"
    assert max(seen) - min(seen) + job.parameters_nbytes <= 4 << 20
    assert len(seen) > 2 * places and seen[:places] == seen[places : 2 * places], "and again from the start"


def is_normal(memory: torch.Tensor, dtype: torch.dtype) -> bool:
    numbers = memory.view(dtype)
    smallest = torch.finfo(dtype).smallest_normal
    return bool(numbers.isfinite().all() and ((numbers == 0) | (numbers.abs() >= smallest)).all())


NARROW = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("residual", [False, True])
def test_jobs_read_normal_numbers_whatever_others_leave(clock: list[float], residual: bool) -> None:
    seen: list[str] = []

    def look_and_spoil(places: Mapping[str, Place]) -> None:
        clock[0] += 1e-5
        for name in ("src", "weights", "dst") if residual else ("src", "weights"):
            memory = places[name].memory.tensor[: 1 << 12]
            assert all(is_normal(memory, dtype) for dtype in NARROW), name
            seen.append(name)
        for name, bits in (("dst", 0x00010001), ("src", 0x7F807F80)):  # denormals, infinities
            places[name].memory.tensor.view(torch.int32).fill_(bits)

    node, (candidate, *_) = ways(8, 14, residual)
    jobs = [
        replace(job_of(key, node, candidate), node=node.with_(descs=candidate.results, choice=replaced))
        for key in ("one", "other")
        for replaced in [replace(candidate, handle=Timed(look_and_spoil, residual)).choice("test")]
    ]
    assert Bench(jobs, 1 << 20).seconds([jobs], perf_counter() + FAR).keys() == {"one", "other"}
    assert set(seen) == {"src", "weights", "dst"} - ({"dst"} if not residual else set())


def test_results_are_normal_after_each_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum whose result is its own operand does not grow, however often it runs."""
    tensors: list[torch.Tensor] = []
    honest = Bound.seconds

    def spied(bound: Bound, stream: OwnStream) -> float:
        seconds = honest(bound, stream)
        assert all(is_normal(memory, torch.float32) for memory in tensors)
        return seconds

    monkeypatch.setattr(Bound, "seconds", spied)
    jobs = [job for residual in (False, True) for job in jobs_of(16, 14, residual)]
    bench = Bench(jobs, 1 << 20)
    used = max(job.activations_nbytes for job in jobs)
    bench._activations.view(torch.int32).fill_(0x00010001)
    tensors.append(bench._activations[: used - used % 4])
    for job in jobs:
        start = sum(operand.desc.nbytes for operand in job.operands if operand.kind != "parameter")
        tensors[:] = [bench._activations[: start - start % 64]]
        assert bench.seconds([[job]], perf_counter() + FAR)


def test_operands_that_must_be_positive_are() -> None:
    words = torch.tensor([-2.0, 1e-40, float("nan"), 3.0]).view(torch.int32)
    renew(words, positive=True)
    assert (words.view(torch.float32) > 0).all() and is_normal(words.view(torch.uint8), torch.bfloat16)


def test_ways_that_read_packed_weights_are_not_timed_on_random_bytes() -> None:
    _, (candidate, *_) = ways(16, 14)
    packed = MemoryDesc.opaque(candidate.operands["weights"].dims, "f32", 1 << 16, "the library's")
    assert is_timed(candidate)
    assert not is_timed(replace(candidate, operands={**candidate.operands, "weights": packed}))


def test_a_reorder_is_timed_and_an_absent_one_has_no_job() -> None:
    dims = (1, 16, 14, 14)
    last, blocked = (MemoryDesc(dims, "f32", tag=tag) for tag in ("acdb", "aBcd8b"))
    job = job_of_reorder("r", last, blocked, OneDnnTarget())
    assert job is not None
    assert Bench([job], 0).seconds([[job]], perf_counter() + FAR)["r"] > 0
    assert job_of_reorder("r", last, MemoryDesc(dims, "f32", strides=(0, 0, 0, 0)), OneDnnTarget()) is None


def test_nothing_native_is_left_behind() -> None:
    jobs = jobs_of(16, 14)
    bench = Bench(jobs, 1 << 20)
    bench.seconds([jobs], perf_counter() + FAR)
    gc.collect()  # what other tests left
    before = dnnl.live_handles()
    for _ in range(3):
        bench.seconds([jobs], perf_counter() + FAR)
    gc.collect()
    assert Counter(dnnl.live_handles()) <= Counter(before)  # what others left may need two passes to go
