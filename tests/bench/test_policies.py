from __future__ import annotations

import pytest
import torch

from fmtprop.api import Options
from fmtprop.bench import policies
from fmtprop.bench.policies import compare_policies
from fmtprop.capture import from_torch, load
from fmtprop.errors import FmtpropError


def test_policies_in_order_with_errors_and_progress():
    told = []
    comparison = compare_policies(
        load("residual"),
        [Options(policy="naive"), Options(policy="plain")],
        repeats=1,
        progress=lambda what, done, total: None if ": " in what else told.append((what, done, total)),
    )
    assert [report.policy for report in comparison.reports] == ["naive", "plain"]
    assert all(0 <= error < 1e-4 for error in comparison.errors) and comparison.failures == ()
    assert told == [
        ("running in PyTorch", 0, 5),
        ("compiling under naive", 1, 5),
        ("measuring naive", 2, 5),
        ("compiling under plain", 3, 5),
        ("measuring plain", 4, 5),
        ("done", 5, 5),
    ]


def test_one_wrong_whole_number_is_infinitely_wrong(monkeypatch):
    graph = from_torch(_Sort().eval(), (torch.randn(1, 8),))
    assert compare_policies(graph, [Options()], repeats=1).errors == (0.0,)
    honest = policies.evaluate

    def off_by_one(*args: object) -> list[torch.Tensor]:
        return [out if out.is_floating_point() else out + 1 for out in honest(*args)]

    monkeypatch.setattr(policies, "evaluate", off_by_one)
    assert compare_policies(graph, [Options()], repeats=1).errors == (float("inf"),)


class _Sort(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, indices = x.sort()
        return values, indices


def test_nothing_to_compare():
    with pytest.raises(FmtpropError, match="options is empty; give at least one"):
        compare_policies(load("chain"), [])


def test_progress_names_the_stages_of_a_compilation():
    told = []
    compare_policies(load("chain"), [Options(tune="model")], repeats=1, progress=lambda what, *_: told.append(what))
    stages = [what.rpartition(": ")[2] for what in told if what.startswith("compiling under optimal: ")]
    assert stages[:2] == ["normalising", "choosing formats"]
    assert {"checking primitives", "packing weights", "checking the plan"} & set(stages[2:])
