"""Small networks to train."""

from __future__ import annotations

import torch
from torch import nn


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 5))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 16, 3, padding=1, groups=4),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 5),
    )


class Residual(nn.Module):
    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.norm = nn.BatchNorm2d(outer)
        self.second = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.other = nn.BatchNorm2d(outer)
        self.shortcut = nn.Conv2d(inner, outer, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.other(self.second(torch.relu(self.norm(self.first(x)))))
        return torch.relu(y + self.shortcut(x))


class Attention(nn.Module):
    """A block of a transformer, on tokens."""

    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.other = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, t, c = x.shape
        q, k, v = self.qkv(self.norm(x)).view(n, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, t, c)
        x = x + self.out(mixed)
        return x + self.down(nn.functional.gelu(self.up(self.other(x))))


class Transformer(nn.Module):
    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, 4)
        self.places = nn.Parameter(torch.randn(1, 4, 16) * 0.02)
        self.blocks = nn.Sequential(Attention(), Attention())
        self.head = nn.Linear(16, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.places
        return self.head(self.blocks(tokens).mean(1))


def resnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 1, 1), Residual(8, 16, 2), Residual(16, 16, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(16, 5),
    )  # fmt: skip
