"""Timing: on memory that was written, with weights that move on, and nothing left behind."""

from __future__ import annotations

import gc
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
from fmtprop.tuning.measure import _SIGNS, Bench, Job, _Run, job_of, job_of_reorder

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


def test_rounds_go_through_all_nodes_and_no_single_execution_drops_a_way(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = [jobs_of(16, 14), jobs_of(8, 7)]
    order: list[object] = []
    slow_once = groups[0][-1].key

    def time(self: _Run, weights: torch.Tensor) -> None:
        order.append(self.job.key)
        hiccup = self.job.key == slow_once and order.count(slow_once) == 1
        self.times.append(1.0 if hiccup else 1e-5)

    monkeypatch.setattr(_Run, "time", time)
    done: list[int] = []
    found = Bench([job for jobs in groups for job in jobs], 1 << 20).seconds(
        groups, perf_counter() + FAR, lambda index, figures: done.append(index)
    )
    each = [job.key for jobs in groups for job in jobs]
    assert order[: 2 * len(each)] == each * 2
    assert found == {key: pytest.approx(1e-5) for key in each}
    assert sorted(done) == [0, 1]


def test_a_hopeless_way_is_dropped_and_keeps_its_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = jobs_of(16, 14)
    slow, count = jobs[-1].key, 0

    def time(self: _Run, weights: torch.Tensor) -> None:
        nonlocal count
        count += self.job.key == slow
        self.times.append(1.0 if self.job.key == slow else 1e-5)

    monkeypatch.setattr(_Run, "time", time)
    assert Bench(jobs, 1 << 20).seconds([jobs], perf_counter() + FAR)[slow] == 1.0
    assert count == 2


def test_weights_move_on_through_all_of_their_buffer() -> None:
    (job, *_) = jobs_of(64, 7)
    bench = Bench([job], 3 << 20)
    places = [bench._place(job) for _ in range(100)]
    places = [place.data_ptr() for place in places]
    start, end = bench._weights.data_ptr(), bench._weights.data_ptr() + bench._weights.numel()
    assert all(start <= place and place + job.parameters_nbytes <= end for place in places)
    rounds = len(set(places))
    assert rounds * job.parameters_nbytes > 0.9 * (4 << 20), "a network of 3 MiB is of the class of 4"
    assert places[:rounds] == places[rounds : 2 * rounds], "and again from the start"


def test_memory_holds_numbers_in_every_type() -> None:
    bench = Bench(jobs_of(8, 7), 1 << 20)
    memory = bench._weights[: 1 << 16]
    for _ in range(2):
        for dtype in (torch.float32, torch.bfloat16):
            numbers = memory.view(dtype).float()
            assert numbers.isfinite().all() and numbers.abs().max() <= 1.01
            assert (numbers[numbers != 0].abs() > 1e-8).all(), "no denormals"
        halves = memory.view(torch.float16).float()
        assert halves.isfinite().all()
        memory.view(torch.int32).bitwise_xor_(_SIGNS)


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
    assert dnnl.live_handles() == before
