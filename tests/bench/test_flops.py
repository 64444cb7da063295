"""Operations counted from shapes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.flops import count_flops
from fmtprop.capture import from_torch, load
from fmtprop.compiling.stages import normalise

BATCHED = torch.randn(2, 5, 7)


class Product(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ x.transpose(1, 2)


@pytest.mark.parametrize(
    ("module", "x", "expected"),
    [
        (nn.Conv2d(8, 6, 3, groups=2, padding=1), torch.ones(2, 8, 5, 4), 2 * (2 * 6 * 5 * 4) * (4 * 9)),
        (nn.Conv2d(8, 8, (1, 3), groups=8, stride=2), torch.ones(1, 8, 5, 7), 2 * (8 * 3 * 3) * 3),
        (nn.ConvTranspose2d(4, 6, 2, stride=2, groups=2), torch.ones(1, 4, 5, 3), 2 * (4 * 5 * 3) * (3 * 4)),
        (nn.Linear(7, 3), torch.ones(4, 7), 2 * 4 * 3 * 7),
        (nn.Linear(7, 3), BATCHED, 2 * 2 * 5 * 3 * 7),
        (Product(), BATCHED, 2 * 2 * 5 * 5 * 7),
        (nn.ReLU(), BATCHED, 0),
    ],
)
def test_layers(module: nn.Module, x: torch.Tensor, expected: int) -> None:
    assert count_flops(from_torch(module.eval(), x)) == expected


@pytest.mark.parametrize(("name", "billions"), [("resnet50", 8.18), ("mobilenet_v2", 0.60), ("shufflenet_v2", 0.29)])
def test_published_figures(name: str, billions: float) -> None:
    """Papers and torchvision count multiply-accumulates: half of it."""
    graph = load(name)
    assert count_flops(graph) == pytest.approx(billions * 1e9, rel=0.01)


def test_normal_form_asks_for_as_much() -> None:
    graph = load("residual")
    assert count_flops(normalise(graph)[0]) == count_flops(graph)
