"""Hooks of modules have the same effect as in eager PyTorch, whenever they are registered."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fmtprop as fp
from tests.training.networks import mlp

OPTIONS = {"tune": "model", "confirm": False, "verify": "off"}
X = torch.randn(6, 12, generator=torch.Generator().manual_seed(0))


def doubled(module, args, result):
    return result * 2


def shifted(module, args):
    return tuple(x + 1 for x in args)


@pytest.fixture
def trained():
    """The module compiled for training, the original, and an equal module that PyTorch runs; a step was made."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = mlp()
    eager = copy.deepcopy(module)
    call = fp.compile(module, X, training=True, **OPTIONS)
    assert_same_step(call, module, eager)
    return call, module, eager


def assert_same_step(call, module, eager) -> None:
    results = []
    for one, run in ((module, call), (eager, eager)):
        one.zero_grad()
        results.append(run(X))
        results[-1].square().sum().backward()
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    gradients = [[parameter.grad for parameter in one.parameters()] for one in (module, eager)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


def parts(module: nn.Module) -> list[nn.Module]:
    return [module, module[1]]


@pytest.mark.parametrize("place", [0, 1], ids=["itself", "submodule"])
def test_forward_hooks_after_the_first_step(trained, place):
    call, module, eager = trained
    handles = [parts(one)[place].register_forward_hook(doubled) for one in (module, eager)]
    handles += [parts(one)[place].register_forward_pre_hook(shifted) for one in (module, eager)]
    assert_same_step(call, module, eager)
    for handle in handles:
        handle.remove()
    assert_same_step(call, module, eager)


def test_backward_hooks_after_the_first_step(trained, recwarn):
    call, module, _ = trained
    seen = []
    module[1].register_full_backward_hook(lambda *gradients: seen.append(1))
    call(X).sum().backward()
    assert seen == [1]


def test_other_hooks_cost_no_capture(trained):
    call, module, eager = trained
    torch._dynamo.utils.counters.clear()
    for parameter in module.parameters():
        parameter.register_hook(lambda gradient: gradient)
    nn.Linear(2, 2).register_forward_hook(doubled)
    assert_same_step(call, module, eager)
    assert not torch._dynamo.utils.counters["frames"]


def test_hooks_for_all_modules_are_called_for_the_modules_of_the_user():
    torch._dynamo.reset()
    module, calls = mlp(), []
    trained = fp.compile(module, X, training=True, **OPTIONS)
    for run in (module, trained, module):
        calls.append([])
        handle = nn.modules.module.register_module_forward_hook(lambda module, *_: calls[-1].append(module))
        run(X)
        handle.remove()
        run(X)
    assert calls[0] == calls[1] == calls[2]
    trained.register_forward_hook(doubled)
    torch.testing.assert_close(trained(X), module(X) * 2)
