"""Roundings with a scale for each channel."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fmtprop as fp


class Rounded(nn.Module):
    """A depthwise convolution, and maybe a sum, of a 1x1 convolution rounded channel by channel, as NNCF writes it."""

    def __init__(self, zeros: list[int], *, multiplier: int = 1, added: bool = False) -> None:
        super().__init__()
        drawn = torch.Generator().manual_seed(1)
        self.channels, self.added = len(zeros), added
        self.scales = 0.01 + 0.05 * torch.rand(self.channels, generator=drawn)
        self.zeros = torch.tensor(zeros, dtype=torch.int32)
        self.first = nn.Conv2d(8, self.channels, 1)
        self.second = nn.Conv2d(self.channels, multiplier * self.channels, 3, padding=1, groups=self.channels)
        with torch.no_grad():
            for layer in (self.first, self.second):
                layer.weight.copy_(torch.randint(-127, 128, layer.weight.shape, generator=drawn) * 2.0**-7)

    def numbers(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu6(self.first(torch.fake_quantize_per_tensor_affine(x, 2.0**-5, 100, 0, 255)))

    def behind(self, steps: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        y = F.conv2d(steps, weights, self.second.bias.to(steps), padding=1, groups=self.channels)
        return y + steps if self.added else y

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        steps = torch.fake_quantize_per_channel_affine(self.numbers(x), self.scales, self.zeros, 1, 0, 255)
        weight = self.second.weight
        scales, zeros = torch.full((weight.shape[0],), 2.0**-7), torch.zeros(weight.shape[0], dtype=torch.int32)
        return self.behind(steps, torch.fake_quantize_per_channel_affine(weight, scales, zeros, 0, -127, 127))


@pytest.mark.parametrize("multiplier, added", [(1, False), (2, False), (1, True)])
def test_one_scale_and_factors(multiplier: int, added: bool) -> None:
    module, x = Rounded([0] * 17, multiplier=multiplier, added=added).eval(), torch.randn(2, 8, 9, 7)
    net = fp.compile(module, x, deterministic=True)
    names = [node.op for node in net.compilation.normal.nodes()]
    assert "quantize" not in names and "dequantize" not in names
    with torch.no_grad():
        expected = module(x)
    got = net(x)
    # a number in the middle between two steps may go to either
    step = module.scales.max() * module.second.weight.abs().max()
    off = (got - expected).abs()
    assert off.max() <= 1.01 * step * (1 + added / module.second.weight.abs().max())
    assert (off > 1e-4).float().mean() < 0.01


def test_the_convolution_may_read_bytes() -> None:
    module, x = Rounded([0] * 32).eval(), torch.randn(1, 8, 16, 16)
    graph = fp.compile(module, x, deterministic=True).compilation.normal
    (node,) = (node for node in graph.nodes() if node.op == "convolution" and node.attrs.groups > 1)
    assert {"src", "weights"} <= node.grids.keys()
    assert node.grids["src"].scales == (2.0**-5,)
    assert torch.tensor(node.grids["weights"].scales).allclose(module.scales * 2.0**-2)


def test_zero_points_that_differ_stay_as_they_are() -> None:
    module, x = Rounded([*range(17)]).eval(), torch.randn(2, 8, 9, 7)
    net = fp.compile(module, x, deterministic=True)
    assert "quantize" in [node.op for node in net.compilation.normal.nodes()]
    with torch.no_grad():
        assert (net(x) - module(x)).abs().max() < 0.06
