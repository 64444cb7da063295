"""Which plan is kept, what is remembered of it, and what becomes of the weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fmtprop as fp
from fmtprop import planner
from fmtprop.errors import UnsupportedOpError
from fmtprop.ops.evaluate import evaluate
from fmtprop.passes.merge_siblings import MergeSiblings
from fmtprop.runtime.contest import Contest, _winner
from fmtprop.stages import normalise


@pytest.fixture
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3), torch.nn.ReLU(), torch.nn.MaxPool2d(2), torch.nn.Conv2d(16, 24, 3)
    ).eval()


@pytest.mark.parametrize("winner", [0, 1])
def test_the_faster_plan_is_kept_and_remembered(
    model: torch.nn.Module, winner: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FMTPROP_CACHE_DIR", str(tmp_path))
    seen: list[int] = []

    def decide(plans, inputs, budget):
        seen.append(len(plans))
        return Contest(tuple(1.0 + (i != winner) for i in range(len(plans))), 3, winner)

    monkeypatch.setattr(planner, "contest", decide)
    # a policy whose reorders nobody would pay for, so that there are two plans
    greedy = planner.AssignFormats("naive", planner.OneDnnTarget(), planner.ReferenceTarget())
    monkeypatch.setattr(planner._Planner, "_greedy", lambda self, policy: greedy.run(self.normal))
    x = torch.randn(1, 3, 20, 20)
    first, again = fp.compile(model, x), fp.compile(model, x)
    assert seen == [2], "the second compilation knows the verdict"
    assert first.contest is not None and first.contest.winner == winner and again.contest is None
    impls = [[step.node.choice.impl for step in net.plan.steps] for net in (first, again)]
    assert impls[0] == impls[1]
    for net in (first, again):
        assert net.certificate is not None and net.certificate.gap < 1e-6
        torch.testing.assert_close(net(x), model(x), rtol=1e-4, atol=1e-4)


def test_a_plan_must_be_faster_in_most_rounds_to_win() -> None:
    assert _winner([[1.0] * 6, [0.9] * 6]) == 1
    assert _winner([[1.0] * 6, [0.1, 2.0, 2.0, 2.0, 2.0, 2.0]]) == 0
    assert _winner([[1.0] * 6, [1.0] * 6]) == 0


def test_released_weights_are_gone_and_the_plan_has_its_own(model: torch.nn.Module) -> None:
    x = torch.randn(1, 3, 20, 20)
    expected = model(x)
    net = fp.compile(model, x, release_weights=True)
    assert all(parameter.numel() == 0 for parameter in model.parameters())
    torch.testing.assert_close(net(x), expected, rtol=1e-4, atol=1e-4)


def test_siblings_that_share_a_source_become_one() -> None:
    class Heads(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = torch.nn.Linear(8, 6), torch.nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.q(x), self.k(x)

    normal, _ = normalise(fp.from_torch(Heads().eval(), torch.randn(5, 8)))
    merged = MergeSiblings().run(normal)
    assert sum(node.op in ("inner_product", "matmul") for node in merged.nodes()) == 1
    x = {normal.input_nodes[0].name: torch.randn(5, 8)}
    for got, want in zip(evaluate(merged, x), evaluate(normal, x), strict=True):
        torch.testing.assert_close(got, want)
    assert MergeSiblings().run(merged) is merged, "nothing is left to be merged"


@pytest.mark.parametrize("name", ["confirm", "winograd"])
def test_a_switch_is_on_or_off(model: torch.nn.Module, name: str) -> None:
    with pytest.raises(UnsupportedOpError, match=f"The '{name}' parameter of compile must be True or False. Got 'no'"):
        fp.compile(model, torch.randn(1, 3, 20, 20), **{name: "no"})
