"""Results that are parts of an argument or of another result share its memory, as in eager PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fmtprop as fp

PARTS = {
    "split": lambda x: x.split(2),
    "chunk of a part": lambda x: x[1:].chunk(3, -1),
    "unbind": lambda x: x.mT.unbind(0),
    "part of a chunk": lambda x: (x.chunk(2)[1][:, 1:], x.unsqueeze(0).unbind(1)[0].mT),
}


class Parted(nn.Module):
    def __init__(self, parted) -> None:
        super().__init__()
        self.layer, self.parted = nn.Linear(6, 6), parted

    def forward(self, x):
        first, second = self.parted(x)[:2]
        return first, self.layer(x), second


@pytest.mark.parametrize("parted", PARTS.values(), ids=PARTS)
def test_parts_of_an_argument(parted):
    torch._dynamo.reset()
    module, x = Parted(parted), torch.randn(4, 6, requires_grad=True)
    call = fp.compile(module, x, training=True, tune="model", confirm=False)
    gradients = []
    for run in (module, call):
        given = x.detach().clone().requires_grad_()
        results = run(given)
        torch.stack([(i + 2) * one.square().sum() for i, one in enumerate(results)]).sum().backward()
        gradients.append(given.grad)
        with torch.no_grad():
            given.fill_(7.0)
        assert [bool((one == 7).all()) for one in results] == [True, False, True]
    assert call.nets
    torch.testing.assert_close(*gradients)
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        call(x)[0].add_(1)


class Overlapping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        y = self.layer(x)
        return y[1:], y, y.unbind(0)[0], x.mT


@pytest.mark.parametrize("enabled", [True, False], ids=["training", "evaluation"])
def test_parts_of_a_result(enabled):
    torch._dynamo.reset()
    module, x = Overlapping(), torch.randn(4, 6)
    call = fp.compile(module, x, training=True, tune="model", confirm=False)
    with torch.set_grad_enabled(enabled):
        expected, found = module(x), call(x)
    torch.testing.assert_close(found, expected)
    with torch.no_grad():
        found[1].fill_(7.0)
        x.fill_(8.0)
    assert [float(one.detach().mean()) for one in found] == [7.0, 7.0, 7.0, 8.0]
