"""Plans that can be timed before their weights are packed."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import nn

import fmtprop as fp
from fmtprop import dnnl
from fmtprop.compiling.race import race
from fmtprop.compiling.stages import normalise
from fmtprop.ir.deferred import Deferred
from fmtprop.ir.graph import Graph
from fmtprop.ir.node import Node
from fmtprop.passes.assignment.assign import AssignFormats
from fmtprop.passes.target import Candidate, Request, Setting
from fmtprop.passes.variants.winograd import Winograd
from fmtprop.runtime import Plan, build_plan
from fmtprop.runtime.build import Draft
from fmtprop.runtime.constants import ConstantStore
from fmtprop.runtime.dummy_weights import runs_on_any_numbers, with_dummy_weights
from fmtprop.runtime.executor import Executor
from fmtprop.runtime.selfcheck import check_steps
from fmtprop.store import Store
from fmtprop.targets import OneDnnTarget, ReferenceTarget
from tests.compiling.other_plans import unlike_any_other

X = torch.randn(1, 3, 20, 20)
#: bytes at the start of packed weights that have their sizes; bytes 6 and 7, and many behind these, are never written
_WRITTEN = [*range(6), *range(8, 40)]


def formatted(module: nn.Module, x: torch.Tensor, policy: str = "propagate") -> Graph:
    normal, _ = normalise(fp.from_torch(module.eval(), x))
    return AssignFormats(policy, Setting(OneDnnTarget(), ReferenceTarget())).run(normal)


def dummies(graphs: list[Graph], target: OneDnnTarget) -> list[Plan]:
    drafts = {str(number): Draft(graph, target) for number, graph in enumerate(graphs)}
    return [make() for make in with_dummy_weights(drafts).values()]


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 24, 3), nn.ReLU(), nn.Conv2d(24, 24, 3))


def test_a_rehearsal_does_the_steps_of_the_plan_on_other_numbers() -> None:
    graph, target = formatted(convolutions(), X), OneDnnTarget()
    real, (stand_in,) = build_plan(graph, target), dummies([graph], target)
    assert [step.node for step in stand_in.steps] == [step.node for step in real.steps]
    assert stand_in.constant_nbytes == real.constant_nbytes
    assert stand_in.arena_nbytes == real.arena_nbytes
    (wrong,), (right,) = (Executor(plan).run([X]) for plan in (stand_in, real))
    assert wrong.shape == right.shape and not torch.allclose(wrong, right)


def test_an_outline_tells_all_that_would_run_and_holds_no_weights() -> None:
    graph, target = formatted(convolutions(), X), OneDnnTarget()
    draft = Draft(graph, target)
    unpacked, (real, again) = draft.plan, [draft.pack(ConstantStore()) for _ in range(2)]
    assert [step.node for step in unpacked.steps] == [step.node for step in real.steps]
    assert [step.packing.keys() for step in unpacked.steps] == [step.packing.keys() for step in real.steps]
    assert unpacked.packed == real.packed
    assert not unpacked.constants and not unpacked.constant_nbytes
    assert all(map(torch.equal, real.constants, again.constants))
    assert not check_steps(unpacked.steps, Store(), unpacked.packed)


def test_the_weights_of_all_entrants_share_memory() -> None:
    module, target = convolutions(), OneDnnTarget()
    graphs = [formatted(module, X, policy) for policy in ("propagate", "naive")]
    plans = dummies(graphs, target)
    storages = [{constant.untyped_storage().data_ptr() for constant in plan.constants} for plan in plans]
    assert storages[0] == storages[1]
    assert race(dict(zip("ab", plans, strict=True)), [X], budget=0.01).rounds >= 1


def refuse() -> torch.Tensor:
    pytest.fail("a rehearsal needs no weights")


@pytest.mark.parametrize("policy", ["propagate", "naive"])
def test_nobody_makes_the_weights_of_a_rehearsal(policy: str) -> None:
    graph = formatted(nn.Sequential(nn.Conv2d(3, 16, 3), nn.Flatten(), nn.Linear(16 * 18 * 18, 8)), X, policy)
    graph.constants = {
        name: Deferred(graph.node(name).results[0], data.stride(), refuse) for name, data in graph.constants.items()
    }
    Draft(graph, OneDnnTarget())
    for plan in dummies([graph], OneDnnTarget()):
        assert plan.constant_nbytes > 16 * 18 * 18 * 8 * 4


class Gated(nn.Module):
    """A recurrent layer in both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(32, 24, bidirectional=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[0]


@pytest.mark.skipif(not dnnl.supports("bf16"), reason="oneDNN has no bf16 on this CPU")
def test_weights_with_sizes_and_positions_among_their_bytes_are_the_real_ones() -> None:
    x, target = torch.randn(17, 2, 32), OneDnnTarget()
    normal, _ = normalise(fp.from_torch(Gated().eval(), x), dtype="bf16")
    graph = AssignFormats("propagate", Setting(target, ReferenceTarget())).run(normal)
    real, (stand_in,) = build_plan(graph, target), dummies([graph], target)
    expected, given = structured(real), structured(stand_in)
    assert len(expected) == (2 if dnnl.lib().version == (3, 2, 0) else len(given))
    assert all(torch.equal(a[_WRITTEN], b[_WRITTEN]) for a, b in zip(expected, given, strict=True))
    Executor(stand_in).run([x])  # with other bytes, oneDNN's packed products read addresses that do not exist


def structured(plan: Plan) -> list[torch.Tensor]:
    """Return the constants with sizes and positions among their bytes."""
    accesses = [access for step in plan.steps for access in step.operands.values()]
    return [plan.constants[plan.buffers[a.buffer].index] for a in accesses if not a.desc.takes_any_bytes]


def test_nobody_makes_weights_of_which_a_rehearsal_computes_products_of_views() -> None:
    normal, _ = normalise(fp.from_torch(nn.Conv2d(16, 16, 3).eval(), torch.randn(1, 16, 20, 20)))
    (convolution,) = (node.name for node in normal.nodes() if node.op == "convolution")
    weights = normal.inputs(convolution)["weights"].node
    normal.constants[weights] = Deferred(normal.node(weights).results[0], (144, 9, 3, 1), refuse)
    filtered = Winograd().run(normal)
    assert filtered.count("convolution") > 1
    graph = AssignFormats("propagate", Setting(OneDnnTarget(), ReferenceTarget())).run(filtered)
    assert dummies([graph], OneDnnTarget())[0].constant_nbytes > 16 * 16 * 9 * 4


class Multiplied(nn.Module):
    """Both factors are results of a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        return y[:, :2] * y[:, 2:]


class WithoutBinary(OneDnnTarget):
    """Leaves arithmetic of two operands to PyTorch."""

    def candidates(self, node: Node, request: Request) -> Iterable[Candidate]:
        return () if node.op == "binary" else super().candidates(node, request)


class WithoutPooling(OneDnnTarget):
    """Leaves pooling to PyTorch."""

    def candidates(self, node: Node, request: Request) -> Iterable[Candidate]:
        return () if node.op == "pooling" else super().candidates(node, request)


def test_arithmetic_of_pytorch_runs_on_any_numbers() -> None:
    normal, _ = normalise(fp.from_torch(Multiplied(), X))
    graph = AssignFormats("propagate", Setting(WithoutBinary(), ReferenceTarget())).run(normal)
    assert [node.op for node in graph.nodes() if node.choice and node.choice.impl == "torch"] == ["binary"]
    assert runs_on_any_numbers(graph)


def test_padding_and_pooling_by_pytorch_run_on_any_numbers() -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ZeroPad2d((0, 1, 0, 1)), nn.MaxPool2d(2), nn.Conv2d(4, 4, 1))
    normal, _ = normalise(fp.from_torch(module, X))
    graph = AssignFormats("propagate", Setting(WithoutPooling(), ReferenceTarget())).run(normal)
    assert [node.op for node in graph.nodes() if node.choice and node.choice.impl == "torch"] == ["pad", "pooling"]
    assert runs_on_any_numbers(graph)


class Indexed(nn.Module):
    """What an operator of PyTorch reads as an index comes from a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.register_buffer("table", torch.arange(4.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table[self.conv(x).mean((2, 3)).argmax(1)]


class Looked(nn.Module):
    """What an operator of PyTorch reads as an index is the input."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(10, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.table(x)).relu()


@pytest.mark.parametrize(
    ("module", "x", "possible"),
    [(convolutions(), X, True), (Looked(), torch.tensor([[1, 2]]), True), (Indexed(), X, False)],
    ids=["convolutions", "looked-up", "indexed"],
)
def test_operators_of_pytorch_see_no_stand_ins(
    module: nn.Module, x: torch.Tensor, possible: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert runs_on_any_numbers(formatted(module, x)) is possible
    # both ways to a verdict end in a plan of the model's own weights
    unlike_any_other(monkeypatch)
    net = fp.compile(module, x, tune="remeasure", tune_budget=0.1)
    torch.testing.assert_close(net(x), module(x), rtol=1e-4, atol=1e-4)
