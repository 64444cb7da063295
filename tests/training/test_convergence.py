"""200 steps of several networks: losses follow PyTorch's, and so do running statistics.

What begins with a rounding grows from step to step, between two formats of PyTorch's own too: statistics are compared
after a few steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.training.networks import Residual, Transformer
from tests.training.test_module import compiled

pytestmark = pytest.mark.slow

STEPS, FEW, BATCH = 200, 20, 8


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def resnet18() -> nn.Module:
    widths = (8, 8, 16, 16, 32, 32, 64, 64)
    blocks = [
        Residual(inner, outer, 1 if inner == outer else 2) for inner, outer in zip((8, *widths), widths, strict=False)
    ]
    stem = nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU()
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 5))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.inner = _twice(3, 8), _twice(8, 16)
        self.up, self.last, self.head = nn.ConvTranspose2d(16, 8, 2, 2), _twice(16, 8), nn.Conv2d(8, 5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = self.down(x)
        wide = self.up(self.inner(F.max_pool2d(kept, 2)))
        return self.head(self.last(torch.cat([kept, wide], 1))).mean((2, 3))


def _twice(inner: int, outer: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(inner, outer, 3, 1, 1), nn.BatchNorm2d(outer), nn.ReLU(), nn.Conv2d(outer, outer, 3, 1, 1), nn.ReLU()
    )


class Sequence(nn.Module):
    """A classifier of an image's rows, one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.LSTM(24, 16, num_layers=2, batch_first=True), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x.transpose(1, 2).flatten(2))[0][:, -1])


NETWORKS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "resnet18": (resnet18, 32),
    "transformer": (Transformer, 8),
    "unet": (UNet, 16),
    "lstm": (Sequence, 8),
}
OPTIMISERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.02, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 1e-3),
}


def batch(number: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images whose label is how their channels are tinted."""
    generator = torch.Generator().manual_seed(number)
    labels = torch.randint(0, 5, (BATCH,), generator=generator)
    tints = torch.linspace(-1, 1, 15).reshape(5, 3)[labels]
    return torch.randn(BATCH, 3, size, size, generator=generator) + 1.5 * tints[:, :, None, None], labels


@pytest.mark.parametrize("optimiser", OPTIMISERS)
@pytest.mark.parametrize("name", NETWORKS)
def test_losses_follow(name, optimiser):
    make, size = NETWORKS[name]
    torch.manual_seed(0)
    ours, theirs = compiled(make(), batch(0, size)[0])
    ends, statistics = [], []
    for module in (ours, theirs):
        steps, losses = OPTIMISERS[optimiser](module.parameters()), []
        for number in range(STEPS):
            images, labels = batch(number, size)
            steps.zero_grad()
            loss = F.cross_entropy(module(images), labels)
            loss.backward()
            steps.step()
            losses.append(loss.item())
            if number == FEW:
                statistics.append([buffer.clone() for buffer in module.buffers()])
        assert sum(losses[-20:]) < 0.95 * sum(losses[:20])  # it learns
        ends.append(sum(losses[-20:]) / 20)
    assert ends[0] == pytest.approx(ends[1], rel=0.02)
    torch.testing.assert_close(*statistics, rtol=1e-3, atol=1e-3)
