from __future__ import annotations

import json

import pytest
import torch

import fmtprop as fp
from fmtprop import MemoryDesc
from fmtprop.report.ledger import touched_nbytes


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
    assert report.fallback_share > 0.05
    (warning,) = report.warnings
    assert "% of the run is in 1 steps without optimized code (aten)" in warning
    assert f"warning: {warning[:40]}" in report.to_text()
    assert json.loads(report.to_json())["warnings"] == [warning]
    assert 0 < net.certificate.fallback <= net.certificate.objective
    assert "of it in PyTorch's operators" in str(net.certificate)
    plain = fp.compile(torch.nn.ReLU(), torch.randn(64, 512))
    assert plain.report(repeats=2).warnings == () and plain.certificate.fallback == 0.0
