"""Two hundred steps on a task that can be learned: the loss falls as it does in PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.training.networks import Residual, Transformer
from tests.training.test_module import compiled

STEPS, LAST, BATCHES, CLASSES = 200, 20, 16, 5


def resnet18() -> nn.Module:
    """ResNet-18 for images of 32 by 32, of a quarter of its width."""
    widths, layers = (16, 16, 32, 64, 128), []
    for inner, outer in pairwise(widths):
        layers += [Residual(inner, outer, 1 if inner == outer else 2), Residual(outer, outer, 1)]
    stem = nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()
    return nn.Sequential(*stem, *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, CLASSES))


class Sequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x)[0][:, -1])


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle = self._block(3, 8), self._block(8, 16)
        self.up, self.last = nn.ConvTranspose2d(16, 8, 2, 2), self._block(16, 8)
        self.head = nn.Conv2d(8, CLASSES, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.down(x)
        inner = self.up(self.middle(F.max_pool2d(first, 2)))
        return self.head(self.last(torch.cat([first, inner], 1)))

    @staticmethod
    def _block(inner: int, outer: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(inner, outer, 3, 1, 1, bias=False), nn.BatchNorm2d(outer), nn.ReLU())


#: network, shape of one example, and axes of the result that have a label each
TASKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[int, ...]]] = {
    "resnet18": (resnet18, (3, 32, 32), ()),
    "transformer": (Transformer, (3, 8, 8), ()),
    "lstm": (Sequences, (6, 8), ()),
    "unet": (UNet, (3, 16, 16), (16, 16)),
}
OPTIMISERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.02, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 2e-3),
}


def batches(shape: torch.Size, places: tuple[int, ...]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return noise with a pattern for each class; or, where each place has a label, with a class's colour there."""
    generator = torch.Generator().manual_seed(0)
    patterns, found = torch.randn(CLASSES, shape[0] if places else shape.numel(), generator=generator), []
    for _ in range(BATCHES):
        labels = torch.randint(CLASSES, (8, *places), generator=generator)
        signal = patterns[labels].movedim(-1, 1).reshape(8, *shape)
        found.append((signal + torch.randn(8, *shape, generator=generator), labels))
    return found


def losses(module: nn.Module, optimiser: torch.optim.Optimizer, data: list[tuple[torch.Tensor, torch.Tensor]]) -> list:
    found = []
    for number in range(STEPS):
        x, labels = data[number % len(data)]
        optimiser.zero_grad()
        # smoothed labels keep the loss away from 0, where its relative error would be noise
        loss = F.cross_entropy(module(x), labels, label_smoothing=0.1)
        loss.backward()
        optimiser.step()
        found.append(loss.item())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("optimiser", OPTIMISERS)
@pytest.mark.parametrize("task", TASKS)
def test_the_final_loss_is_that_of_pytorch(task, optimiser):
    make, shape, places = TASKS[task]
    torch.manual_seed(0)
    data = batches(torch.Size(shape), places)
    ours, theirs = compiled(make(), data[0][0])
    one, other = (losses(module, OPTIMISERS[optimiser](module.parameters()), data) for module in (ours, theirs))
    final = sum(other[-LAST:]) / LAST
    assert final < 0.8 * other[0], "the task is learned"
    assert sum(one[-LAST:]) / LAST == pytest.approx(final, rel=0.02)
