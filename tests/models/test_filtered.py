"""Random small networks in which every convolution that Winograd's filtering can compute is computed so."""

from __future__ import annotations

import random

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


class Network(nn.Module):
    """Convolutions of random windows, each of which reads an earlier result."""

    def __init__(self, draw: random.Random) -> None:
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
            self.wiring.append((source, draw.choice(list(TAILS))))
            widths.append(outputs * (2 if self.wiring[-1][1] == "concat" else 1))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values = [x]
        for layer, (source, tail) in zip(self.layers, self.wiring, strict=True):
            values.append(TAILS[tail](layer(values[source])))
        return values[-1], values[len(values) // 2]


@pytest.mark.parametrize("seed", [pytest.param(n, marks=() if n < 8 else pytest.mark.slow) for n in range(200)])
def test_a_network_of_filtered_convolutions(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    share = draw.choice([1.0, 0.5])
    only_filtered(monkeypatch, lambda: draw.random() < share)
    monkeypatch.setattr(trial, "_CHANNELS", 1)
    monkeypatch.setattr(trial, "_HEIGHT", 1)
    module = Network(draw).eval()
    x = torch.randn(draw.choice([1, 1, 2, 3]), module.channels, draw.randint(14, 24), draw.randint(14, 20))
    with torch.no_grad():
        expected = module(x)
        got = fp.compile(module, x, tune="model", confirm=False)(x)
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * theirs.abs().max().item())
