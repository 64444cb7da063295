"""Random small networks in which every convolution that Winograd's filtering can compute is computed so."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fmtprop as fp
from fmtprop.passes.optimal import trial
from tests.passes.only_filtered import only_filtered

#: what may follow a convolution: fused, beside it, or in the way of its format
TAILS = {
    "none": lambda y: y,
    "relu": F.relu,
    "relu6": F.relu6,
    "silu": F.silu,
    "gelu": F.gelu,
    "scale": lambda y: (y + y.mean((2, 3), keepdim=True)).relu(),
    "concat": lambda y: torch.cat([y, y * 2], 1),
    "pool": lambda y: F.avg_pool2d(y, 3, 1, 1),
    "norm": lambda y: F.batch_norm(y, torch.full(y.shape[1:2], 0.1), torch.full(y.shape[1:2], 2.0)).relu(),
}

#: of these, the smooth ones: at a kink, the last digit of a number decides on its gradient
SMOOTH = ("none", "silu", "gelu", "concat", "pool")
SEEDS = [pytest.param(seed, marks=() if seed < 4 else pytest.mark.slow) for seed in range(200)]


class Network(nn.Module):
    """Convolutions of random windows, each of which reads an earlier result."""

    def __init__(self, draw: random.Random, tails: Sequence[str] = tuple(TAILS)) -> None:
        super().__init__()
        self.channels = draw.choice([1, 3, 8, 16, 20])
        self.layers = nn.ModuleList()
        self.wiring: list[tuple[int, str]] = []
        widths = [self.channels]
        for _ in range(draw.randint(2, 5)):
            source = draw.randrange(len(widths)) if draw.random() < 0.4 else len(widths) - 1
            kernel = draw.choice([(3, 3), (3, 1), (5, 5), (7, 1), (3, 5), (1, 1)])
            outputs, dilation = draw.choice([4, 8, 12, 16, 33]), draw.choice([1, 2])
            padding = (draw.randint(0, kernel[0] // 2 + 1), dilation * (kernel[1] - 1) // 2)
            stride, bias = (1, draw.choice([1, 1, 2])), draw.random() < 0.7
            layer = nn.Conv2d(widths[source], outputs, kernel, stride, padding, (1, dilation), bias=bias)
            self.layers.append(layer)
            self.wiring.append((source, draw.choice(tails)))
            widths.append(outputs * (2 if self.wiring[-1][1] == "concat" else 1))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values = [x]
        for layer, (source, tail) in zip(self.layers, self.wiring, strict=True):
            values.append(TAILS[tail](layer(values[source])))
        return values[-1], values[len(values) // 2]


@pytest.fixture
def draw(seed: int, monkeypatch: pytest.MonkeyPatch) -> random.Random:
    """Filter all or half of the convolutions, of any size."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    share = draw.choice([1.0, 0.5])
    only_filtered(monkeypatch, lambda: draw.random() < share)
    monkeypatch.setattr(trial, "CHANNELS", 1)
    monkeypatch.setattr(trial, "HEIGHT", 1)
    return draw


def image(draw: random.Random, channels: int) -> torch.Tensor:
    return torch.randn(draw.choice([1, 1, 2, 3]), channels, draw.randint(14, 24), draw.randint(14, 20))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_network_of_filtered_convolutions(draw: random.Random) -> None:
    module = Network(draw).eval()
    x = image(draw, module.channels)
    with torch.no_grad():
        expected = module(x)
        got = fp.compile(module, x, tune="model", confirm=False)(x)
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * theirs.abs().max().item())


@pytest.mark.parametrize("seed", SEEDS)
def test_gradients_of_filtered_convolutions(draw: random.Random) -> None:
    module = Network(draw, SMOOTH)
    x = image(draw, module.channels).requires_grad_()
    if draw.random() < 0.3:
        module.layers[0].requires_grad_(False)
    read = [x, *(one for one in module.parameters() if one.requires_grad)]
    expected = module(x)
    given = [torch.randn_like(one) for one in expected]
    found = fp.compile(module, x, training=True, tune="model", confirm=False)(x)
    results = [torch.autograd.grad(one, read, given, allow_unused=True) for one in (found, expected)]
    for ours, theirs in zip((*found, *results[0]), (*expected, *results[1]), strict=True):
        assert (ours is None) == (theirs is None)
        if theirs is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * theirs.abs().max().item())
