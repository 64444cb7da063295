"""No alternative can take a compilation down: what fails is dropped, with one warning, and the next best is taken."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fmtprop as fp
from fmtprop.compiling import entrants, selection
from fmtprop.errors import DnnlError, PassError, PlanError
from fmtprop.ir.graph import Graph
from fmtprop.ir.node import Node
from fmtprop.passes.optimal import assign
from fmtprop.runtime.build import Draft
from fmtprop.runtime.executor import Executor
from tests.compiling.other_plans import unlike_any_other
from tests.passes.only_filtered import only_filtered
from tests.runtime.checks import give_wrong_results

pytestmark = pytest.mark.usefixtures("own_cache")

X = torch.randn(1, 16, 20, 13, generator=torch.Generator().manual_seed(0))


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 24, 3)
    return nn.Sequential(*layers).eval()


def right_with_one_warning(told: str, **options: object) -> fp.CompiledModel:
    """Compile; refuse a wrong result, and anything but one warning."""
    module = model()
    with pytest.warns(RuntimeWarning, match=told) as caught:
        net = fp.compile(module, X, **options)
    assert len(caught) == 1
    torch.testing.assert_close(net(X), module(X), rtol=1e-4, atol=1e-4)
    return net


def fails(*_: object, **__: object) -> object:
    raise PassError("planted")


def test_a_realisation_that_breaks_a_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = assign.realise

    def broken(graph: Graph, problem, *rest) -> Graph:
        formatted = usual(graph, problem, *rest)
        if not any(one.payload.is_composed for one in problem.alternatives):
            return formatted
        last = [node for node in formatted.nodes() if node.op == "convolution"][-1]
        return formatted.map_nodes(lambda node: node.with_(descs=()) if node == last else node)

    monkeypatch.setattr(assign, "realise", broken)
    told = r"runs by 'optimal, no node run as several', .*: optimal \(VerifyError: V11: "
    net = right_with_one_warning(told, confirm=False)
    assert list(net.dropped) == ["optimal"]
    assert "left out, since it failed: optimal (VerifyError: V11" in net.report(repeats=1).to_text()


def test_a_solver_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assign, "solve", fails)
    net = right_with_one_warning(
        r"model Sequential runs by 'propagate', .*PassError: planted.*report it with the model"
    )
    assert {"optimal", "nodes run as several"} <= net.dropped.keys()
    assert net.certificate is None


def test_nodes_that_cannot_be_run_as_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entrants, "expansions", fails)
    net = right_with_one_warning(r"runs by .*: nodes run as several \(PassError: planted\)", deterministic=True)
    assert net.certificate is not None and net.certificate.optimal


@pytest.mark.parametrize("policy", ["optimal", "propagate", "plain"])
def test_every_choice_of_formats_fails_but_that_of_pytorchs_operators(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = entrants.greedy
    monkeypatch.setattr(assign, "solve", fails)
    monkeypatch.setattr(entrants, "greedy", lambda p, n, s: fails() if s.target.name == "onednn" else usual(p, n, s))
    net = right_with_one_warning('runs by "PyTorch\'s operators", ', policy=policy)
    assert {step.target for step in net.plan.steps} == {"reference"}


def test_a_kernel_that_gives_wrong_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    spoilt = set[object]()

    def is_wrong(node: Node) -> bool:
        if node.op == "convolution" and not spoilt:
            spoilt.add((node.attrs, node.choice.impl, node.descs))
        return (node.attrs, node.choice.impl, node.descs) in spoilt

    give_wrong_results(monkeypatch, is_wrong)
    net = right_with_one_warning("is off by .*; planning around it", tune="model", confirm=False)
    assert not spoilt & {(s.node.attrs, s.node.choice.impl, s.node.descs) for s in net.plan.steps}


def test_primitives_that_keep_giving_wrong_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    give_wrong_results(monkeypatch, lambda node: node.choice.target == "onednn")
    module = model()
    with pytest.warns(RuntimeWarning) as caught:
        net = fp.compile(module, X)
    # by which policy depends on the formats that a CPU's primitives had
    assert "Sequential runs by" in str(caught[-1].message)
    assert all(step.target == "reference" for step in net.plan.steps)
    torch.testing.assert_close(net(X), module(X), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("where", ["made", "run"])
def test_a_plan_that_cannot_be_made_or_run(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    unlike_any_other(monkeypatch)
    if where == "made":
        usual = selection.with_dummy_weights
        monkeypatch.setattr(selection, "with_dummy_weights", lambda drafts: {**usual(drafts), "optimal": fails})
    else:
        usual, ran = Executor.profile, []

        def run(executor, *rest):
            ran.append(executor)
            if len(ran) == 1:
                raise DnnlError("dnnl_primitive_execute", "runtime error")
            return usual(executor, *rest)

        monkeypatch.setattr(Executor, "profile", run)
    net = right_with_one_warning(r"runs by '.*', without what failed: optimal \(")
    assert list(net.dropped) == ["optimal"]


def test_a_plan_that_cannot_be_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    usual, made = Draft.pack, []

    def build(*args, **kwargs):
        made.append(args)
        if len(made) == 1:
            raise PlanError("planted")
        return usual(*args, **kwargs)

    monkeypatch.setattr(Draft, "pack", build)
    only_filtered(monkeypatch)
    net = right_with_one_warning(r"without what failed: optimal \(PlanError: planted\)", confirm=False)
    assert list(net.dropped) == ["optimal"]


def test_numbers_that_suit_no_plan_tell_nothing_about_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model may refuse the numbers that a race runs on."""
    unlike_any_other(monkeypatch)

    class Looked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.table = nn.Linear(8, 8), nn.Embedding(1, 8)

        def forward(self, i: torch.Tensor) -> torch.Tensor:
            return self.linear(self.table(i))

    module, i = Looked().eval(), torch.zeros(64, dtype=torch.int64)
    net = fp.compile(module, i, tune="model")
    torch.testing.assert_close(net(i), module(i))
    assert net.dropped == {} and net.race is None


def test_what_nobody_can_do_is_the_first_choices_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assign, "solve", fails)
    with pytest.raises(PassError, match="planted"):
        fp.compile(model(), X, pin={"conv_2.dst": "acdb"})


def test_a_entrant_that_costs_far_more_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    unlike_any_other(monkeypatch)
    monkeypatch.setattr(selection, "FAR_RATIO", 1.0)
    net = fp.compile(model(), X, tune="model")
    assert net.race is None


class Residual(nn.Module):
    """The second convolution adds to the first one's source: both can be filtered."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(32, 32, 3, padding=1), nn.Conv2d(32, 32, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.second(torch.relu(self.first(x))) + x)


@pytest.mark.filterwarnings("ignore:the times of:RuntimeWarning")  # beside other tests, times are disturbed
def test_nothing_is_dropped_where_the_costs_of_residual_sums_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    composed = []
    usual = assign.realise

    def noted(graph: Graph, problem, *rest) -> Graph:
        composed.append(any(one.payload.is_composed for one in problem.alternatives))
        return usual(graph, problem, *rest)

    monkeypatch.setattr(assign, "realise", noted)
    torch.manual_seed(0)
    module, x = Residual().eval(), torch.randn(1, 32, 14, 14)
    net = fp.compile(module, x, tune="measure", tune_budget=2)
    assert net.dropped == {}
    assert any(composed), "nodes run as several were among the alternatives"
    torch.testing.assert_close(net(x), module(x), rtol=1e-3, atol=1e-3)
