"""A target of another kind, made here: from candidates to a plan, a run, measured costs, a check and a report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

import fmtprop as fp
from fmtprop.ir.graph import Graph
from fmtprop.ir.node import Node
from fmtprop.ir.types import TensorType
from fmtprop.layout import DataType, MemoryDesc
from fmtprop.ops import emit
from fmtprop.ops.binary import Binary
from fmtprop.ops.eltwise import Eltwise
from fmtprop.passes.assignment.assign import AssignFormats
from fmtprop.passes.assignment.formats import plain
from fmtprop.passes.optimal import OptimalFormats
from fmtprop.passes.target import Candidate, Request, Setting
from fmtprop.runtime import Executor, Plan, build_plan
from fmtprop.runtime.selfcheck import check_steps
from fmtprop.store import Store
from fmtprop.targets import ReferenceTarget, registry
from fmtprop.targets.bound import Bound, OwnStream, Place
from fmtprop.targets.executable import Executable, Implementation, Provider
from fmtprop.tuning import costs_for

Function = Callable[..., None]

#: what numpy computes, and what it is called
FUNCTIONS: dict[tuple[str, str], tuple[str, Function]] = {
    ("eltwise", "relu"): ("maximum", lambda src, out: np.maximum(src, 0.0, out=out)),
    ("eltwise", "tanh"): ("tanh", lambda src, out: np.tanh(src, out=out)),
    ("binary", "add"): ("add", lambda a, b, out: np.add(a, b, out=out)),
}
DIMS = (3, 5, 7)


@dataclass(frozen=True)
class Ufunc(Implementation):
    """A numpy function on row-major arrays."""

    name: str
    function: Function

    takes_any_numbers = True
    overwrites = True

    @property
    def repro(self) -> str:
        return f"numpy.{self.name}"

    def target(self) -> Provider:
        return SmallTarget()

    def build(self, threads: int) -> Executable:
        return Built(self.function)


class Built(Executable):
    """What is left to be called."""

    def __init__(self, function: Function) -> None:
        self._function = function

    def bind(self, node: Node, places: Mapping[str, Place], stream: OwnStream) -> Bound:
        read, written = [places[name] for name in node.choice.operands], places["dst"]

        def run() -> None:
            self._function(*(place.tensor().numpy() for place in read), out=written.tensor().numpy())

        return Bound(python=(node, [run]))


class SmallTarget(Provider):
    """A few element-wise ops."""

    name = "small"

    def __init__(self) -> None:
        self.rejected: list[str] = []

    def candidates(self, node: Node, request: Request) -> Iterable[Candidate]:
        name, function = FUNCTIONS.get((node.op, getattr(node.attrs, "alg", "")), ("", None))
        formats = {operand: plain(desc) for operand, desc in request.items()}
        served = all(desc.kind == "any" or desc == formats[operand] for operand, desc in request.items())
        if function is None or not served or node.post_ops or name in self.rejected:
            return
        dst = formats.pop("dst")
        if {desc.dims for desc in formats.values()} == {dst.dims}:
            yield Candidate(self.name, name, formats, (dst,), handle=Ufunc(name, function))

    def reorder_cost(self, src: MemoryDesc, dst: MemoryDesc) -> float | None:
        return 0.0 if src == dst else None

    def formats(self, dims: tuple[int, ...], dtype: DataType) -> Sequence[MemoryDesc]:
        return [MemoryDesc(dims, dtype)]

    def reject(self, node: Node) -> None:
        if node.choice is not None and node.choice.target == self.name:
            self.rejected.append(node.choice.impl)


@pytest.fixture
def graph() -> Graph:
    """``tanh(relu(x) + exp(y))``: all but the exponential is what the target has."""
    made = Graph("small")
    x, y = (made.input(name, TensorType(DIMS)) for name in "xy")
    a, b = (emit(made, "eltwise", {"src": v}, Eltwise(alg)) for v, alg in ((x, "relu"), (y, "exp")))
    total = emit(made, "binary", {"src_0": a, "src_1": b}, Binary("add"))
    made.output(emit(made, "eltwise", {"src": total}, Eltwise("tanh")))
    return made


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store.sqlite")


def expected(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.tanh(torch.relu(x) + torch.exp(y))


def planned(graph: Graph) -> tuple[Graph, Plan]:
    formatted = AssignFormats("propagate", Setting(SmallTarget(), ReferenceTarget())).run(graph)
    return formatted, build_plan(formatted, SmallTarget())


def test_its_steps_run_beside_those_of_the_fallback(graph: Graph) -> None:
    _, plan = planned(graph)
    assert [step.target for step in plan.steps].count("small") == 3
    assert {step.target for step in plan.steps} == {"small", "reference"}
    x, y = torch.randn(DIMS), torch.randn(DIMS)
    executor = Executor(plan)
    (got,) = executor.run([x, y])
    torch.testing.assert_close(got, expected(x, y))
    results, seconds = executor.profile([x, y])
    torch.testing.assert_close(results[0], got)
    assert len(seconds) == len(plan.steps)
    executor.prepare(2)
    torch.testing.assert_close(executor.run([x, y], threads=2)[0], got)


def test_its_candidates_are_timed_and_solved_over(graph: Graph, store: Store) -> None:
    target = SmallTarget()
    costs = costs_for("measure", weights_nbytes=1, store=store, target=target)
    formatted, certificate = OptimalFormats(Setting(target, ReferenceTarget()), costs).solve(graph)
    assert costs.tuning.measured >= 3, "one figure for each numpy function"
    assert certificate.objective > 0
    x, y = torch.randn(DIMS), torch.randn(DIMS)
    (got,) = Executor(build_plan(formatted, target)).run([x, y])
    torch.testing.assert_close(got, expected(x, y))


def test_its_steps_are_checked_and_the_verdict_is_kept(graph: Graph, store: Store) -> None:
    _, plan = planned(graph)
    assert check_steps(plan.steps, store, plan.packed) == []
    passed = len(store)
    assert passed >= 3
    assert check_steps(plan.steps, store, plan.packed) == []
    assert len(store) == passed


def test_a_wrong_one_is_found_and_can_be_rejected(graph: Graph, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FUNCTIONS, ("eltwise", "tanh"), ("tanh", lambda src, out: np.tan(src, out=out)))
    _, plan = planned(graph)
    (mismatch,) = check_steps(plan.steps, store, plan.packed)
    assert "numpy.tanh" in str(mismatch) and "is off by" in str(mismatch)
    target = SmallTarget()
    target.reject(mismatch.node)
    formatted = AssignFormats("propagate", Setting(target, ReferenceTarget())).run(graph)
    again = build_plan(formatted, target)
    assert check_steps(again.steps, store, again.packed) == []
    assert [step.target for step in again.steps].count("small") == 2


def test_an_error_of_its_own_names_the_node(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, out: object) -> None:
        raise ValueError("no such array")

    monkeypatch.setitem(FUNCTIONS, ("binary", "add"), ("add", refuse))
    _, plan = planned(graph)
    with pytest.raises(Exception, match=r"node binary_\d \(binary\) failed on the small target: no such array"):
        Executor(plan).run([torch.zeros(DIMS)] * 2)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    """Know the target, and nothing of how long its steps took in other tests: that would decide who runs them."""
    monkeypatch.setattr(registry, "_TARGETS", dict(registry._TARGETS))
    registry.register(SmallTarget)


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("policy", ["optimal", "propagate", "plain"])
def test_a_model_is_compiled_for_it_run_and_reported(graph: Graph, policy: str) -> None:
    net = fp.compile(graph, target="small", policy=policy, verify="full", tune="model", confirm=False)
    x, y = torch.randn(DIMS), torch.randn(DIMS)
    torch.testing.assert_close(net(x, y), expected(x, y))
    report = net.report(repeats=1)
    assert {row.target for row in report.steps} == {"small", "reference"}
    assert "maximum" in report.to_text()


@pytest.mark.usefixtures("registered")
def test_its_costs_are_tuned_and_a_wrong_step_is_planned_around(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    net = fp.compile(graph, target="small", tune="remeasure")
    assert net.tuning is not None and net.tuning.measured >= 3
    monkeypatch.setitem(FUNCTIONS, ("eltwise", "tanh"), ("wrong tanh", lambda src, out: np.tan(src, out=out)))
    with pytest.warns(RuntimeWarning, match=r"is off by .*numpy.wrong tanh.*; planning around it"):
        net = fp.compile(graph, target="small", policy="propagate")
    x, y = torch.randn(DIMS), torch.randn(DIMS)
    torch.testing.assert_close(net(x, y), expected(x, y))


@pytest.mark.usefixtures("registered")
def test_names_of_targets_are_unique_and_known(graph: Graph) -> None:
    with pytest.raises(fp.UnsupportedOpError, match="there is a target 'small' already"):
        registry.register(type("Another", (SmallTarget,), {}))
    with pytest.raises(fp.UnsupportedOpError, match=r"one of 'onednn', 'mkldnn', 'small'. Got 'tiny'"):
        fp.compile(graph, target="tiny")
