"""Random small networks with random frozen parameters: one step's gradients and buffers are PyTorch's."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch import nn

from tests.training.test_module import compiled

#: networks that every run tries, and how many the long run does
FEW, MANY = 3, 500


class Drawn(nn.Module):
    """Layers in a row, with sums, products and concats of what came before."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.layers, self.joints = nn.ModuleList(), []
        channels = [draw.choice((3, 8, 12))]
        for _ in range(draw.randint(2, 7)):
            layer, made = _layer(draw, channels[-1])
            self.layers.append(layer)
            alike = [index for index, size in enumerate(channels) if size == made]
            joint = draw.choice(("none", "none", "add", "mul", "concat"))
            other = draw.choice(alike) if alike and joint in ("add", "mul") else draw.randrange(len(channels))
            if joint in ("add", "mul") and not alike:
                joint = "none"
            self.joints.append((joint, other))
            channels.append(made + channels[other] if joint == "concat" else made)
        self.inputs = channels[0]
        self.head = nn.Linear(channels[-1], 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = [x]
        for layer, (joint, other) in zip(self.layers, self.joints, strict=True):
            y = layer(found[-1])
            if joint != "none":
                z = nn.functional.adaptive_avg_pool2d(found[other], y.shape[2:])
                y = torch.cat([y, z], 1) if joint == "concat" else y + z if joint == "add" else y * z
            found.append(y)
        return self.head(found[-1].mean((2, 3)))


def _layer(draw: random.Random, channels: int) -> tuple[nn.Module, int]:
    """Return a layer for so many channels, and how many it makes."""
    made = draw.choice((4, 8, 12, 17))
    size, groups = draw.choice((1, 3)), draw.choice((1, 1, 1, channels))
    made = made if groups == 1 else channels
    convolution = nn.Conv2d(channels, made, size, 1, size // 2, groups=groups, bias=draw.random() < 0.5)
    activation = draw.choice((nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.Hardswish))()
    same = (
        nn.BatchNorm2d(channels),
        nn.GroupNorm(1, channels),
        nn.MaxPool2d(3, 1, 1),
        nn.AvgPool2d(3, 1, 1),
        nn.Dropout(0.2),
        activation,
    )
    if draw.random() < 0.5:
        return nn.Sequential(convolution, activation), made
    if draw.random() < 0.3:
        return nn.Sequential(convolution, nn.BatchNorm2d(made), activation), made
    return draw.choice(same), channels


def check(seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    module = Drawn(draw)
    for parameter in module.parameters():
        parameter.requires_grad_(draw.random() < 0.7)
    module.head.requires_grad_(True)
    x = torch.randn(draw.choice((2, 3)), module.inputs, 6, 6).requires_grad_(draw.random() < 0.5)
    ours, theirs = compiled(module, x, policy=draw.choice(("optimal", "propagate")))
    exact = copy.deepcopy(theirs).double()
    found, wanted, true = (step(module, x) for module, x in ((ours, x), (theirs, x), (exact, x.double())))
    largest = max(float(tensor.abs().max()) for tensor in true if tensor is not None)
    for name, (one, other, best) in enumerate(zip(found, wanted, true, strict=True)):
        assert (one is None) == (other is None), name
        if one is None:
            continue
        error, usual = (float((tensor.double() - best).abs().max()) for tensor in (one, other))
        # gradients that cancel out, as of what a normalization behind takes away, are noise on either side
        assert error <= max(1e-4 * float(best.abs().max()), 10 * usual, 5e-6 * largest), (name, error, usual)


def step(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor | None]:
    """Return the result, all gradients and all buffers of one step."""
    x = x.detach().clone().requires_grad_(x.requires_grad)
    torch.manual_seed(1)
    y = module(x)
    (y * torch.linspace(-1, 1, y.numel()).reshape(y.shape).to(y.dtype)).sum().backward()
    return [y.detach(), x.grad, *(parameter.grad for parameter in module.parameters()), *module.buffers()]


@pytest.mark.parametrize("seed", range(FEW))
def test_gradients(seed):
    check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(FEW, MANY))
def test_many_gradients(seed):
    check(seed)
