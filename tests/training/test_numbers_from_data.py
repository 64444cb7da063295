"""Python numbers and sizes that data choose end a captured graph, and changes between the two halves are seen."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fmtprop as fp
from fmtprop.errors import ImportModelError

OPTIONS = {"tune": "model", "confirm": False, "verify": "off"}


class Queue(nn.Module):
    """Logits against a queue of keys; its place in the queue is a Python number (momentum contrast)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
        self.register_buffer("queue", torch.randn(4, 16))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        keys = F.normalize(self.encoder(x), dim=1)
        logits = keys @ self.queue.clone()
        with torch.no_grad():
            place = int(self.place)
            self.queue[:, place : place + len(x)] = keys.T
            self.place[0] = (place + len(x)) % self.queue.shape[1]
        return logits


class Rows(nn.Module):
    """A mean of rows, of which data choose the number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[x[:, 0] > 0].mean(0)


class Routed(nn.Module):
    """A layer for the rows that data choose, of another number in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.expert = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (rows,) = torch.where(x[:, 0] > 0)
        return x.index_add(0, rows, self.expert(x[rows]))


class Copied(nn.Module):
    """A product with a copy of a tensor that the caller changes before the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 8)

    def forward(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * weights.clone()


def assert_same_steps(call, module: nn.Module, eager: nn.Module, steps: int = 5) -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        x = torch.randn(4, 6, generator=generator)
        for net in (call, eager):
            net(x).square().sum().backward()
        for ours, theirs in zip(module.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)
        for ours, theirs in zip(module.buffers(), eager.buffers(), strict=True):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # PyTorch asks for it itself
@pytest.mark.parametrize("make", [Queue, Rows, Routed])
@pytest.mark.parametrize("door", ["fp.compile", "torch.compile"])
def test_numbers_that_data_choose(make: type[nn.Module], door: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    module, x = make(), torch.randn(4, 6)
    eager = copy.deepcopy(module)
    if door == "fp.compile":
        with pytest.warns(RuntimeWarning, match=r"as one graph, so it runs in pieces.* multiply by the mask"):
            call = fp.compile(module, x, training=True, **OPTIONS)
    else:
        call = torch.compile(module, backend="fmtprop", options=OPTIONS)
    assert_same_steps(call, module, eager)


@pytest.mark.parametrize("door", ["fp.compile", "torch.compile"])
def test_a_copy_is_not_changed_with_its_source(door: str) -> None:
    torch._dynamo.reset()
    module, x, weights = Copied(), torch.randn(4, 6), torch.randn(4, 8)
    eager = copy.deepcopy(module)
    if door == "fp.compile":
        call = fp.compile(module, (x, weights), training=True, **OPTIONS)
    else:
        call = torch.compile(module, backend="fmtprop", options=OPTIONS)
    for net in (call, eager):
        given = weights.clone()
        results = net(x, given)
        given.zero_()
        results.sum().backward()
    torch.testing.assert_close(module.layer.weight.grad, eager.layer.weight.grad)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_more_sizes_than_plans() -> None:
    module = Routed()
    eager = copy.deepcopy(module)
    with pytest.warns(RuntimeWarning, match="in pieces"):
        call = fp.compile(module, torch.randn(24, 6), training=True, **OPTIONS)
    before = len(call.steps)
    for count in range(1, 24):
        x = torch.ones(24, 6)
        x[count:, 0] = -1
        for net in (call, eager):
            net(x).sum().backward()
    assert len(call.steps) - before < 20  # PyTorch runs the others
    torch.testing.assert_close(module.expert.weight.grad, eager.expert.weight.grad)


def test_pieces_that_help_nothing_are_not_taken() -> None:
    class Drawn(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.bernoulli(super().forward(x).sigmoid())

    with warnings.catch_warnings(), pytest.raises(ImportModelError, match="draws random numbers"):
        warnings.simplefilter("error")
        fp.compile(Drawn(6, 8), torch.randn(4, 6), training=True, **OPTIONS)


def test_a_generator_of_the_module_draws_as_without_a_compilation() -> None:
    class Noisy(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + torch.rand(8, generator=self.generator)

    module, x = Noisy(6, 8), torch.randn(4, 6)
    module.generator = torch.Generator().manual_seed(1)
    with pytest.warns(RuntimeWarning, match="in pieces"):
        call = fp.compile(module, x, training=True, **OPTIONS)
    expected = nn.functional.linear(x, module.weight, module.bias)
    again = torch.Generator().manual_seed(1)
    for _ in range(2):
        torch.testing.assert_close(call(x), expected + torch.rand(8, generator=again))
