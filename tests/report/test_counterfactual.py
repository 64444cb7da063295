"""A counterfactual is true: the plan without the reorder is made, costs what was predicted, and runs so."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

import fmtprop as fp
from fmtprop.compiling.race import race
from fmtprop.ir import Graph
from fmtprop.passes.assignment.assign import AssignFormats
from fmtprop.passes.optimal import price
from fmtprop.passes.optimal.realise import realise
from fmtprop.report.counterfactual import UNCERTAIN, Counterfactual, Rivals, is_reorder
from fmtprop.runtime import build_plan
from fmtprop.store import Store
from fmtprop.targets.registry import provider, setting_for
from fmtprop.tuning.costs import MODELLED
from fmtprop.tuning.paces import Paces
from fmtprop.tuning.peaks import keys_of_peaks

SECONDS = 30.0


@dataclass
class Without:
    """A plan without a reorder: what was predicted of it, and its formatted graph."""

    counterfactual: Counterfactual
    graph: Graph


def rivals_of(net):
    """Return a model's rivals with its weights, its present plan, and the plans without its three slowest reorders."""
    now = net.compilation.with_constants()
    rivals = Rivals(net)
    rivals.normal.constants.update(now.constants)
    target = provider(net.options.target)()
    spec = AssignFormats("propagate", setting_for(target, net.options.boundary))
    baseline = spec.run(rivals.normal)
    found = {}
    for row in sorted(net.report(repeats=1).reorders, key=lambda row: -row.seconds)[:3]:
        if row.counterfactual.extra_seconds is None:  # forced, or no time was left
            continue
        tensor = net.graph.inputs(row.name)["src"]
        while tensor.node not in rivals.normal:
            tensor = net.graph.inputs(tensor.node)["src"]
        same, problem, solution = rivals.cheapest(tensor)
        graph = realise(rivals.normal, problem, solution, spec, baseline)
        assert not any(is_reorder(node) and graph.inputs(node.name)["src"] in same for node in graph.nodes())
        found[row.name] = Without(row.counterfactual, graph)
    return rivals, {"now": build_plan(now, target)}, found, target


def test_the_plan_without_a_reorder_costs_what_was_predicted():
    rivals, _, found, _ = rivals_of(fp.compile("residual", policy="naive", deterministic=True))
    assert found
    for without in found.values():
        cost = price(without.graph, rivals.costs)
        assert cost - rivals.plan_seconds == pytest.approx(without.counterfactual.extra_seconds, rel=1e-6, abs=1e-12)


def test_a_plan_that_only_runs_decided_for_is_not_called_the_cheapest():
    optimal = fp.compile("residual", tune="model", confirm=False).report(repeats=1)
    assert "proved" in optimal.verdict[-1]
    kept = replace(optimal.certificate, objective=0.4, bound=0.3, gap=0.25, plan="propagate", is_usual=True)
    told = replace(optimal, certificate=kept).verdict
    assert "a plan could take at most 25.0% less (100.000 ms)" in told[-1] and "proved" not in " ".join(told)
    assert told[-2] == "It is the plan of policy propagate."


def test_what_later_runs_teach_does_not_deny_a_proof(tmp_path, monkeypatch):
    """Processes share the store, and the next compilation may learn from its run before this one's report is made."""
    monkeypatch.setenv("FMTPROP_CACHE_DIR", str(tmp_path))
    figures = {name: 1e-6 if name == "call" else 1e11 if "flops" in name else 2e10 for name in keys_of_peaks()}
    Store().add_figures({key: figures[name] for name, key in keys_of_peaks().items()})
    net = fp.compile("residual", tune="model", confirm=False)
    least = net.certificate.objective
    assert net.certificate.gap == 0.0
    for op in {node.op for node in net.graph.nodes()}:
        Paces(Store()).learn([((MODELLED, "f32", op), 1.0, 20.0 if op == "reorder" else 0.1)])
    rows = net.report(repeats=1).reorders
    assert rows and {row.counterfactual.verdict for row in rows}.isdisjoint({"avoidable"})
    assert Rivals(net).plan_seconds == pytest.approx(least, rel=1e-2)
    net.basis = None  # as in a process that loaded the plan: present costs are all there is
    assert Rivals(net).plan_seconds != pytest.approx(least, rel=0.2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "policy"),
    [("residual", "naive"), ("shufflenet_v2", "naive"), ("efficientnet_b0", "naive"), ("mobilenet_v2", "propagate")],
)
def test_running_both_plans_agrees_in_sign(model, policy):
    net = fp.compile(model, policy=policy)
    rivals, plans, found, target = rivals_of(net)
    plans |= {name: build_plan(without.graph, target) for name, without in found.items()}
    inputs = [torch.randn(node.results[0].dims) for node in net.graph.input_nodes]
    result = race(plans, inputs, SECONDS)
    seconds = dict(zip(result.names, result.seconds, strict=True))
    for name, without in found.items():
        predicted = without.counterfactual.extra_seconds
        if without.counterfactual.verdict == UNCERTAIN or abs(predicted) < 0.05 * rivals.plan_seconds:
            continue  # the machine's own noise
        assert (seconds[name] - seconds["now"]) * predicted > 0, (name, predicted, seconds)


class Masked(torch.nn.Module):
    """Attention whose scores a constant mask changes, as in a window of Swin."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.project = torch.nn.Conv2d(3, 32, 3), torch.nn.Linear(32, 96)
        self.register_buffer("mask", torch.randn(1, 4, 9, 9))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.project(self.embed(x).flatten(2).transpose(1, 2))
        q, k, v = tokens.reshape(1, 9, 3, 4, 8).permute(2, 0, 3, 1, 4)
        return ((q @ k.transpose(-1, -2) + self.mask).softmax(-1) @ v).sum(1)


@pytest.mark.parametrize("policy", ["plain", "naive", "optimal"])
def test_no_answer_reads_constants_that_compiling_released(policy):
    net = fp.compile(Masked(), torch.ones(1, 3, 5, 5), policy=policy, tune="model")
    assert "mask" not in net.graph.constants
    net.report(repeats=1)


def test_a_forced_reorder_is_explained_in_words_of_the_graph():
    net = fp.compile(Shuffled(), torch.ones(1, 3, 8, 8), policy="plain", tune="model")
    (row,) = [row for row in net.report(repeats=1).reorders if row.cause == "view"]
    why = row.counterfactual.why
    assert row.counterfactual.verdict == "forced" and "can read f32:abcd" in why
    assert not {"pin", "alternative", "optimal:"} & set(why.split())
    assert row.producer_origin == row.origin and row.origin.startswith("test_counterfactual.py:")


def test_a_view_forces_its_own_reorder_and_no_other_one_of_the_tensor():
    net = fp.compile(Unshuffled(), torch.ones(1, 3, 32, 32), policy="naive", tune="model", deterministic=True)
    before, behind = (
        next(row for row in net.report(repeats=1).reorders if reader in row.readers)
        for reader in ("reshape_2.src", "conv_1.src")
    )
    assert (before.cause, before.counterfactual.verdict) == ("view", "forced")
    answer = behind.counterfactual
    assert answer.verdict != "forced" and behind.cause == "policy", "policy plain has no such reorder"
    plain = fp.compile(Unshuffled(), torch.ones(1, 3, 32, 32), policy="plain", tune="model")
    assert not any("conv_1.src" in row.readers for row in plain.report(repeats=1).reorders)
    rivals, _, found, _ = rivals_of(net)
    assert price(found[behind.name].graph, rivals.costs) - rivals.plan_seconds == pytest.approx(answer.extra_seconds)


class Unshuffled(torch.nn.Module):
    """A view that must copy, and a convolution behind it that wants another format."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(12, 32, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(torch.nn.functional.pixel_unshuffle(x, 2))


class Shuffled(torch.nn.Module):
    """A function that PyTorch calls without a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pixel_shuffle(self.conv(x), 2) * 2
