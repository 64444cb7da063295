"""Linear algebra in a step: checks end in PyTorch's error, and factors belong to their matrices."""

from __future__ import annotations

import copy
from importlib import import_module

import pytest
import torch
from torch import nn

import fmtprop as fp
from fmtprop.dynamo.backend import options_of, regions_by
from fmtprop.errors import ImportModelError, PlanError

OPTIONS = {"tune": "model", "confirm": False, "verify": "off"}


class Whitened(nn.Module):
    """Three checked calls, and a buffer that the forward pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)

    def forward(self, x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.layer(x))
        factor = torch.linalg.cholesky(hidden.T @ hidden + shift * torch.eye(6))
        weights = torch.linalg.inv(self.layer.weight @ self.layer.weight.T + torch.eye(6))
        return torch.linalg.solve(factor, hidden.T).T @ weights


@pytest.mark.parametrize("door", ["fp.compile", "torch.compile"])
def test_checked_calls(door, monkeypatch):
    monkeypatch.setattr(
        import_module("fmtprop.dynamo.backend"), "compare", lambda ours, theirs, _: (ours(), (True, (0.0, 1.0)))[1]
    )
    torch._dynamo.reset()
    torch.manual_seed(0)
    module, x, good = Whitened(), torch.randn(5, 6), torch.tensor(1.0)
    eager = copy.deepcopy(module)
    if door == "fp.compile":
        call = fp.compile(module, (x, good), training=True, **OPTIONS)
    else:
        call = torch.compile(module, backend="fmtprop", options=OPTIONS)

    def assert_same_step() -> None:
        for one, run in ((module, call), (eager, eager)):
            one.zero_grad()
            run(x, good).square().sum().backward()
        found, expected = ([*(p.grad for p in one.parameters()), *one.buffers()] for one in (module, eager))
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)

    assert_same_step()
    with pytest.raises(torch.linalg.LinAlgError, match=r"linalg.cholesky: .* not positive-definite"):
        call(x, torch.tensor(-9.0))
    eager.load_state_dict(module.state_dict())
    assert_same_step()
    with torch.no_grad():
        torch.testing.assert_close(call(x, good), eager(x, good), rtol=1e-3, atol=1e-4)
        with pytest.raises(torch.linalg.LinAlgError, match=r"linalg.cholesky: .* not positive-definite"):
            call(x, torch.tensor(-9.0))


def test_a_graph_with_checks_is_planned_without_gradients(monkeypatch):
    monkeypatch.setattr(import_module("fmtprop.dynamo.region"), "compare", lambda ours, theirs: (True, (0.0, 1.0)))
    torch._dynamo.reset()
    module, x, seen = Whitened().eval(), torch.randn(5, 6), []
    call = torch.compile(module, backend=regions_by(options_of(None, OPTIONS), seen.append))
    for shift in (1.0, 2.0):
        with torch.no_grad():
            module.layer.weight.mul_(shift)
            found, expected = (run(x, torch.tensor(shift)) for run in (call, module))
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    assert [outcome.net is not None for region in seen for outcome in region.outcomes] == [True]


class Factorized(nn.Module):
    """A function of a matrix that is row-major or column-major."""

    def __init__(self, function, by_columns: bool) -> None:
        super().__init__()
        weight = torch.randn(2, 4, 4) + 2 * torch.eye(4)
        self.weight = nn.Parameter(weight.mT.contiguous().mT if by_columns else weight)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.weight).sum() * x.sum()


@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize(
    "function",
    [
        torch.linalg.det,
        lambda matrix: torch.linalg.slogdet(matrix.mT)[1],
        lambda matrix: torch.linalg.solve(matrix, matrix.flip(-1)),
    ],
    ids=["det", "slogdet", "solve"],
)
def test_gradients_of_factorizations_for_any_strides(function, by_columns):
    torch._dynamo.reset()
    torch.manual_seed(0)
    module, x = Factorized(function, by_columns), torch.randn(3)
    eager = copy.deepcopy(module)
    call = fp.compile(module, x, training=True, **OPTIONS)
    for run in (call, eager):
        run(x).backward()
    torch.testing.assert_close(module.weight.grad, eager.weight.grad, rtol=1e-4, atol=1e-5)


class Following(nn.Module):
    """A target network that follows another one in each call, under ``no_grad``."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for followed, own in zip(self.online.parameters(), self.target.parameters(), strict=True):
                own.mul_(0.9).add_(followed, alpha=0.1)
            goal = self.target(x)
        return (self.online(x) - goal).square().mean()


def test_parameters_that_a_call_overwrites_have_no_gradient():
    module, x = Following(), torch.randn(3, 4)
    net = fp.compile(module, x, training=True, **OPTIONS)
    copied = copy.deepcopy(module)
    for run in (net, copied):
        run(x).backward()
    assert module.target.weight.grad is None and copied.target.weight.grad is None
    torch.testing.assert_close(module.target.weight, copied.target.weight)
    torch.testing.assert_close(module.online.weight.grad, copied.online.weight.grad)


class Assigning(nn.Module):
    """Assigns a parameter's numbers in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.layer.weight.data = self.layer.weight.data * 0.5
        return self.layer(x)


def test_an_assignment_to_data_is_refused_or_left_to_pytorch():
    module, x = Assigning(), torch.randn(3, 4)
    with pytest.raises(ImportModelError, match=r"cannot trace .* set_"):
        fp.compile(module, x, training=True, **OPTIONS)
    torch._dynamo.reset()
    copied = copy.deepcopy(module)
    torch.testing.assert_close(torch.compile(module, backend="fmtprop")(x), copied(x))


class Labelled(nn.Module):
    """Reads labels as rows of classes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return (self.layer(x) * nn.functional.one_hot(labels, 5)).sum()


def test_labels_beyond_the_classes_are_refused_in_each_step():
    module, x = Labelled(), torch.randn(3, 4)
    net = fp.compile(module, (x, torch.tensor([0, 4, 2])), training=True, **OPTIONS)  # a warning is an error
    labels = torch.tensor([1, 1, 3])
    torch.testing.assert_close(net(x, labels), module(x, labels))
    net(x, labels).backward()
    assert module.layer.weight.grad is not None
    for wrong, message in (([0, 5, 1], "smaller than num_classes"), ([0, -1, 1], "non-negative")):
        with pytest.raises((PlanError, RuntimeError), match=message):
            net(x, torch.tensor(wrong))
