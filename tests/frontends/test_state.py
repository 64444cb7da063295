"""Attributes that a forward pass changes: told where each call changes them, restored in any case."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fmtprop.frontends import from_torch


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 4), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.linear(x) * self.calls


class Collects(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.seen = Counts(), []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x.shape)
        return self.inner(x)


class Gradients(Counts):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return torch.func.grad(lambda y: self.linear(y).square().sum())(x) * self.calls


class MadeOnce(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.positions, self.size = None, (0,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.positions is None or self.size != x.shape:
            self.positions, self.size = [float(i) for i in range(x.shape[1])], x.shape
        return x + torch.tensor(self.positions)


@pytest.mark.parametrize(
    ("module", "names"),
    [(Counts(), "calls"), (Collects(), "inner.calls, seen"), (Gradients(), "calls")],
    ids=["number", "list", "derivatives"],
)
def test_state_is_told_and_restored(module, names):
    with pytest.warns(RuntimeWarning, match=rf"changes its attributes {names} at every call; a graph has no state"):
        from_torch(module.eval(), torch.randn(2, 4))
    assert getattr(module, "seen", []) == []
    assert getattr(module, "inner", module).calls == 0
    assert "forward" not in vars(module) and not module._forward_hooks


def test_what_is_made_once_is_no_state():
    module = MadeOnce().eval()
    from_torch(module, torch.randn(2, 4))
    assert module.positions is None and module.size == (0,)


def test_recurrent_layers_have_no_state():
    from_torch(nn.LSTM(4, 4, batch_first=True).eval(), torch.randn(1, 3, 4))
