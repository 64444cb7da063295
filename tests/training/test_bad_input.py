"""What goes wrong in a step ends as in PyTorch, by either door, and the next step is right."""

from __future__ import annotations

import copy
from collections.abc import Callable
from importlib import import_module

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fmtprop as fp
from fmtprop.errors import InputError
from tests.training.networks import mlp

OPTIONS = {"tune": "model", "confirm": False, "verify": "off"}
X = torch.randn(6, 12, generator=torch.Generator().manual_seed(0))

#: takes a callable and its module
Misdeed = Callable[[Callable[..., torch.Tensor], nn.Module], object]


def no_scalar(call, module):
    call(X).backward()


def without_gradients(call, module):
    with torch.no_grad():
        loss = call(X).sum()
    loss.backward()


def second_derivatives(call, module):
    x = X.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(call(x).square().sum(), x, create_graph=True)
    gradient.square().sum().backward()


def a_hook_that_raises(call, module):
    def raising(gradient):
        raise KeyError("of the hook")

    hook = module[0].weight.register_hook(raising)
    try:
        call(X).sum().backward()
    finally:
        hook.remove()


def a_gradient_of_another_shape(call, module):
    call(X).backward(torch.ones(2, 2))


def a_changed_result(call, module):
    result = call(X).tanh()
    loss = result.square().sum()
    result.add_(1)
    loss.backward()


def missing_state(call, module):
    state = module.state_dict()
    del state["0.weight"]
    call.load_state_dict(state)


def compiled(door: str, module: nn.Module, *inputs: torch.Tensor) -> Callable[..., torch.Tensor]:
    if door == "fp.compile":
        return fp.compile(module, inputs, training=True, **OPTIONS)
    return torch.compile(module, backend="fmtprop", options=OPTIONS)


def ours_wins(ours: Callable[[], object], theirs: Callable[[], object]) -> tuple[bool, tuple[float, float]]:
    ours()
    return True, (0.0, 1.0)


@pytest.fixture(params=["fp.compile", "torch.compile"])
def door(request, monkeypatch):
    monkeypatch.setattr(import_module("fmtprop.dynamo.backend"), "compare", ours_wins)
    torch._dynamo.reset()
    torch.manual_seed(0)
    return request.param


@pytest.fixture
def trained(door):
    """The module by a door, the original, and an equal module that PyTorch runs."""
    module = mlp()
    return compiled(door, module, X), module, copy.deepcopy(module)


def assert_same_step(call, module, eager) -> None:
    for one, run in ((module, call), (eager, eager)):
        one.zero_grad()
        run(X).square().sum().backward()
    gradients = [[parameter.grad for parameter in one.parameters()] for one in (module, eager)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("misdeed", "error", "message"),
    [
        (no_scalar, RuntimeError, "grad can be implicitly created only for scalar outputs"),
        (without_gradients, RuntimeError, "does not require grad and does not have a grad_fn"),
        (second_derivatives, RuntimeError, "does not currently support double backward"),
        (a_hook_that_raises, KeyError, "of the hook"),
        (a_gradient_of_another_shape, RuntimeError, "Mismatch in shape"),
        (a_changed_result, RuntimeError, "modified by an inplace operation"),
        (missing_state, RuntimeError, "Missing key"),
    ],
)
def test_errors_are_those_of_pytorch(trained, misdeed: Misdeed, error, message):
    call, module, eager = trained
    with pytest.raises(error, match=message):
        misdeed(call, module)
    assert_same_step(call, module, eager)


def test_what_pytorch_allows(trained):
    call, module, eager = trained
    for one, run in ((module, call), (eager, eager)):
        loss = run(X).square().sum()
        one.eval()
        with torch.no_grad():
            loss.backward(retain_graph=True)
        one.train()
        loss.backward(retain_graph=True)
        loss.backward()
        run(X[:0]).sum().backward()
        run(X).backward(torch.full((6, 5), torch.nan), inputs=[one[0].bias])
    gradients = [[parameter.grad for parameter in one.parameters()] for one in (module, eager)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5, equal_nan=True)
    assert module[0].bias.grad.isnan().all()
    assert_same_step(call, module, eager)


class Classifier(nn.Module):
    """Tokens and labels; the loss is a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(7, 6), nn.Linear(6, 4)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.table(tokens)), labels)


def test_indices_that_do_not_exist(door):
    module = Classifier()
    tokens, labels = torch.tensor([0, 6, 2]), torch.tensor([0, 3, -100])
    call, eager = compiled(door, module, tokens, labels), copy.deepcopy(module)
    call(tokens, labels)
    with pytest.raises(InputError, match=r"Target 4 is out of bounds.* must exist along its axis: .* holds 0 to 4"):
        call(tokens, torch.tensor([0, 4, 1]))
    with pytest.raises(InputError, match=r"index out of range in self; its operands are f32.7, 6."):
        call(torch.tensor([0, 7, 1]), labels)
    for run in (call, eager):
        run(tokens, labels).backward()
    gradients = [[parameter.grad for parameter in one.parameters()] for one in (module, eager)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (3, TypeError, r"must be Tensor, not int"),
        ("text", TypeError, r"must be Tensor, not str"),
        ([X], TypeError, r"must be Tensor, not list"),
        (X.double(), RuntimeError, r"must have the same dtype, but got Double and Float"),
        (X[:, :3], RuntimeError, r"shapes cannot be multiplied \(6x3 and 12x"),
        (X.to("meta"), RuntimeError, r"device"),
    ],
    ids=["int", "str", "list", "double", "shape", "device"],
)
def test_wrong_arguments(trained, door, given, error, message):
    call, module, eager = trained
    assert_same_step(call, module, eager)
    # Dynamo's own errors come before the backend is asked
    with pytest.raises(error, match=message if door == "fp.compile" else None):
        call(given)
    assert_same_step(call, module, eager)
    # by torch.compile, Dynamo never captures a part again that it met with a wrong argument
    assert door == "torch.compile" or call(X).grad_fn.name() == "CompiledFunctionBackward"


def test_wrong_example_inputs():
    with pytest.raises(RuntimeError, match="must have the same dtype"):
        compiled("fp.compile", mlp(), X.double())
    assert compiled("fp.compile", mlp(), X)(X).grad_fn.name() == "CompiledFunctionBackward"
