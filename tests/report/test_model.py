from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

import fmtprop as fp
from fmtprop import MemoryDesc
from fmtprop.report.ledger import touched_nbytes
from fmtprop.report.model import whole_run
from fmtprop.system.timing import Stopwatch


class Heads(torch.nn.Module):
    """The second third of each row, in four heads: a strided view, which the output wants dense."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sigmoid()[..., 64:128].unflatten(-1, (4, 16)).transpose(1, 2)


def test_a_reorder_moves_what_it_reads_and_writes_without_the_gaps():
    report = fp.compile(Heads(), torch.randn(1, 50, 192), policy="plain").report(repeats=1)
    (row,) = report.reorders
    assert row.dims == (1, 4, 50, 16)
    assert row.nbytes == 2 * 4 * 50 * 16 * 4
    assert " 25.0 KiB " in report.to_text()


@pytest.mark.parametrize(
    ("desc", "elements"),
    [
        (MemoryDesc((2, 17, 5, 7), tag="nchw"), 2 * 17 * 5 * 7),
        (MemoryDesc((2, 17, 5, 7), tag="nChw16c"), 2 * 32 * 5 * 7),
        (MemoryDesc((2, 32, 5, 7), tag="nChw16c").submemory((2, 16, 5, 7), (0, 16, 0, 0)), 2 * 16 * 5 * 7),
        (MemoryDesc((8, 6)).slice((0, 1), (4, 2), (2, 3)), 8),
        (MemoryDesc((1, 16)).broadcast_to((50, 16)), 16),
        (MemoryDesc(()), 1),
        (MemoryDesc((0, 4)), 0),
        (MemoryDesc((0, 4), strides=(0, 1)), 0),
        (MemoryDesc.opaque((3, 5), "f32", 128, "theirs"), 32),
    ],
    ids=str,
)
def test_touched_bytes(desc, elements):
    assert touched_nbytes(desc) == elements * 4


def conv(target: str) -> fp.CompiledModel:
    torch.manual_seed(0)
    return fp.compile(torch.nn.Conv2d(64, 64, 3).eval(), torch.randn(1, 64, 12, 12), target=target, policy="propagate")


@pytest.mark.parametrize("target", ["onednn", "mkldnn"])
def test_constants_are_bytes(target):
    report = conv(target).report(repeats=1)
    ((_, _, packed),) = report.packed
    assert report.memory["constants"] == packed + 64 * 4, "the weights and the bias"


def test_a_plan_without_an_arena_says_so():
    report = conv("mkldnn").report(repeats=1)
    assert report.memory["arena"] == 0 < report.memory["peak"]
    assert "memory: constants 144.2 KiB, no arena, at most " in report.to_text()
    assert ", arena " in conv("onednn").report(repeats=1).to_text()


class Sums(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(torch.cumsum(x, 1))


def test_a_report_warns_of_what_has_no_optimized_code():
    net = fp.compile(Sums(), torch.randn(64, 512))
    report = net.report(repeats=2)
    # as long as each other: a step that another program interrupts has nearly all of the time
    report = replace(report, steps=tuple(replace(step, seconds=1e-4) for step in report.steps))
    assert report.fallback_share == 0.5
    (warning,) = report.warnings
    assert "% of the run is in 1 step without optimized code (aten.cumsum): it takes as long as in PyTorch" in warning
    step = report.steps[0]
    (other,) = replace(report, policy="naive", steps=(step, step)).warnings
    assert "2 steps" in other and "they take" in other
    assert other.endswith("as in PyTorch"), "no format has code for such a call"
    exact = replace(step, reason="onednn loses NaN or infinities: PyTorch runs it")
    (other,) = replace(report, policy="naive", steps=(step, exact)).warnings
    assert other.endswith("as in PyTorch"), "nor for NaN that must be kept"
    loop = replace(step, reason="onednn has only a reference implementation: PyTorch runs it")
    (other,) = replace(report, policy="naive", steps=(step, loop)).warnings
    assert other.endswith("; policy='optimal' may find formats that have such code")
    assert f"warning: {warning[:40]}" in report.to_text()
    assert json.loads(report.to_json())["warnings"] == [warning]
    assert 0 < net.certificate.fallback <= net.certificate.objective
    assert "of it in PyTorch's operators" in str(net.certificate)
    plain = fp.compile(torch.nn.ReLU(), torch.randn(64, 512))
    assert plain.report(repeats=2).warnings == () and plain.certificate.fallback == 0.0


def test_titles_tell_whose_costs_a_reason_has_and_how_many_steps_there_are():
    report = fp.compile(Sums(), torch.randn(64, 512), tune="model").report(repeats=1)
    text = report.to_text()
    assert "why, costs modelled" in text and "all steps, the slowest first" in text
    many = replace(report, policy="plain", certificate=None, steps=report.steps * 11).to_text()
    assert "the 10 slowest steps" in many and "why, costs" not in many


def test_a_run_is_without_the_time_of_other_programs(monkeypatch):
    clock = [0.0]

    class Busy:
        """Other programs have the processor three quarters of the time."""

        def lap(self):
            waited, self.since = 0.75 * (clock[0] - self.since), clock[0]
            return waited

        since = 0.0

        def close(self):
            pass

    class Net:
        def random_inputs(self):
            return []

        def run_flat(self, inputs):
            clock[0] += 4.0

    watch = Stopwatch(now=lambda: clock[0], waiting=Busy())
    monkeypatch.setattr("fmtprop.report.model.Stopwatch", lambda: watch)
    assert whole_run(Net(), 3) == 1.0


def test_a_step_of_one_thread_is_without_the_time_of_other_programs(monkeypatch):
    seconds = [0.0]

    def an_hour_later():
        seconds[0] += 3600.0
        return seconds[0]

    net = conv("onednn")
    monkeypatch.setattr("fmtprop.runtime.context.perf_counter", an_hour_later)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert 0 < sum(net.profile(repeats=1)) < 3600.0
    finally:
        torch.set_num_threads(before)
