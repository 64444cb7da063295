"""The first call of a step compares its plan with PyTorch's own step; nothing else of the caller's changes."""

from __future__ import annotations

import copy
import gc
import weakref
from importlib import import_module

import pytest
import torch
from torch import nn

import fmtprop as fp
from fmtprop import dnnl
from fmtprop.api import Options, Tune
from fmtprop.targets import memory
from fmtprop.training import rival
from fmtprop.training.plain import PlainCalls

pytestmark = pytest.mark.usefixtures("fresh")

DOORS = ("fp.compile", "torch.compile")


@pytest.fixture
def fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


@pytest.fixture
def decided(monkeypatch):
    """Make either side win, after both ran twice."""

    def decide(ours: bool) -> None:
        def compare(plan, pytorch, rest):
            for run in (plan, pytorch) * 2:
                run()
            return ours, (1.0, 2.0)

        monkeypatch.setattr(rival, "compare", compare)
        monkeypatch.setattr(import_module("fmtprop.dynamo.backend"), "compare", compare)

    return decide


def network() -> nn.Module:
    body = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Flatten()
    return nn.Sequential(*body, nn.Linear(8 * 36, 4))


def compiled(door: str, module: nn.Module, x: torch.Tensor, **options):
    """Return the module by a door, with the function that returns its steps."""
    if door == "fp.compile":
        net = fp.compile(module, x, training=True, **options)
        return net, lambda: net.steps
    steps: list = []
    backend = import_module("fmtprop.dynamo.backend")
    return torch.compile(module, backend=backend.regions_by(Options(**options), steps.append)), lambda: steps


def step(call, module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Return loss, gradients and buffers of one step, and torch's random numbers after it."""
    module.zero_grad()
    torch.manual_seed(3)
    result = call(x)
    result.square().sum().backward()
    gradients = [parameter.grad for parameter in module.parameters()]
    return [result.detach(), *gradients, *(b.clone() for b in module.buffers()), torch.rand(2)]


@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("door", DOORS)
def test_a_comparison_changes_no_number(decided, door, ours):
    decided(ours)
    module, x = network(), torch.randn(4, 3, 8, 8)
    eager = copy.deepcopy(module)
    calls = []
    next(module.parameters()).register_hook(calls.append)
    run, steps = compiled(door, module, x)
    assert not calls
    for seen in range(1, 4):
        torch.testing.assert_close(step(run, module, x), step(eager, eager, x), rtol=1e-4, atol=1e-4)
        assert len(calls) == seen
    assert (steps()[0].net is not None, steps()[0].reason == "") == (ours, ours)


@pytest.mark.parametrize("ours", [True, False])
def test_compiling_leaves_buffers_and_random_numbers(decided, ours):
    decided(ours)
    module, x = network(), torch.randn(4, 3, 8, 8)
    state, random = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    fp.compile(module, x, training=True)
    assert torch.equal(random, torch.get_rng_state())
    torch.testing.assert_close(module.state_dict(), state, rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in module.parameters())


@pytest.mark.parametrize("door", DOORS)
def test_an_input_that_the_step_changes_is_changed_once(decided, door):
    decided(ours=True)

    class Counting(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result = super().forward(2 * x)  # the gradient reads the product
            x.add_(1.0)
            return result

    module, x = Counting(4, 4), torch.zeros(2, 4)
    run, _ = compiled(door, module, x.clone())
    run(x).sum().backward()
    assert torch.equal(x, torch.ones(2, 4))


def test_pytorch_runs_the_graph_as_it_was_captured(decided):
    """The functional form of an LSTM would run its forward pass again for the gradients."""
    decided(ours=False)
    layer, x = nn.LSTM(8, 8), torch.randn(3, 2, 8)
    run, steps = compiled(DOORS[0], layer, x)
    result, _ = run(x)
    assert "PyTorch is as fast" in steps()[0].reason
    expected, _ = layer(x)
    assert torch.equal(result, expected)
    names, todo = set(), [result.grad_fn]
    while todo:
        node = todo.pop()
        names.add(node.name())
        todo += [one for one, _ in node.next_functions if one is not None]
    assert not any("recurrent" in name.lower() or "Compiled" in name for name in names)


@pytest.mark.skipif(not dnnl.supports("bf16"), reason="oneDNN has no bf16 on this CPU")
def test_of_a_step_in_bf16_the_rival_is_pytorch_under_autocast(decided):
    decided(ours=False)
    module, x = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)), torch.randn(4, 8)
    net = fp.compile(module, x, training=True, dtype="bf16")
    found = net(x)
    found.sum().backward()
    gradients = [parameter.grad.clone() for parameter in module.parameters()]
    module.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        expected = module(x)
    expected.sum().backward()
    assert found.dtype is torch.float32 and torch.equal(found, expected.float())
    torch.testing.assert_close(gradients, [parameter.grad for parameter in module.parameters()])


def test_a_side_that_fails_keeps_the_plan(decided, monkeypatch):
    def compare(ours, theirs, rest):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(rival, "compare", compare)
    module, x = network(), torch.randn(4, 3, 8, 8)
    net = fp.compile(module, x, training=True)
    assert net.nets and not net.steps[0].reason


@pytest.mark.parametrize("ours", [True, False])
def test_memory_that_a_cycle_of_the_trial_holds_is_released(monkeypatch, ours):
    held = []

    def compare(plan, pytorch, rest):
        plan()
        ring = [torch.empty(1)]
        ring.append(ring)
        held.append(weakref.ref(ring[0]))
        return ours, (1.0, 2.0)

    monkeypatch.setattr(rival, "compare", compare)
    gc.disable()
    try:
        fp.compile(network(), torch.randn(4, 3, 8, 8), training=True)
        assert held[0]() is None
    finally:
        gc.enable()


def test_without_room_for_both_the_plan_is_kept(decided, monkeypatch):
    decided(ours=False)
    monkeypatch.setattr(memory, "memory_nbytes", lambda: 0)
    assert not rival._has_room(1 << 20)
    monkeypatch.setattr(rival, "_has_room", lambda nbytes: False)
    net = fp.compile(network(), torch.randn(4, 3, 8, 8), training=True)
    assert net.nets and not net.steps[0].reason


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        (Options(), True),
        (Options(tune="model"), False),
        (Options(tune=Tune("model", effort="patient")), True),
        (Options(confirm=False), False),
        (Options(policy="propagate"), False),
        (Options(memory="recompute"), False),
    ],
)
def test_the_options_that_ask_for_a_comparison(options, asked):
    assert (rival.rival_of(options) is not None) is asked


def test_calls_that_pytorch_runs_need_no_capture(decided, monkeypatch):
    decided(False)
    module, x = network(), torch.randn(4, 3, 8, 8)
    eager = copy.deepcopy(module)
    net = fp.compile(module, x, training=True)
    captured = []
    run = net._run
    monkeypatch.setitem(net.__dict__, "_run", lambda *call: (captured.append(1), run(*call))[1])
    for _ in range(2):
        torch.testing.assert_close(step(net, module, x), step(eager, eager, x), rtol=1e-4, atol=1e-4)
    assert not captured
    for change in (
        lambda one: one[1].eval(),
        lambda one: one[0].weight.requires_grad_(False),
        lambda one: one.append(nn.ReLU()),
    ):
        for one in (module, eager):
            change(one)
        torch.testing.assert_close(step(net, module, x)[:1], step(eager, eager, x)[:1], rtol=1e-4, atol=1e-4)
    step(net, module, x[:2])
    assert (len(captured), len(net.steps)) == (4, 5)
    with torch.no_grad():
        net(x)
    assert len(net.evaluations) == 1


def test_few_situations_of_plain_calls_are_kept():
    """A number among the arguments may be another one in each call."""
    calls = PlainCalls(nn.Linear(2, 2))
    for step in range(1000):
        calls.tell()
        calls.learn((torch.ones(1, 2), step), {})
    assert len(calls.known) == 64 and calls.has((torch.ones(1, 2), 0), {})
