"""ViT-B/16: an image as 196 patches and a class token, twelve encoder layers with the norm before each branch."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from graphs.architectures.attention import Perceptron, SelfAttention

IMAGE = 224
PATCH = 16
WIDTH = 768
HEADS = 12
DEPTH = 12
EPS = 1e-6


class Patches(nn.Module):
    """One strided convolution; the class token goes first, then every token gets its position."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.class_token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.position_embedding = nn.Parameter(torch.zeros(1, (IMAGE // PATCH) ** 2 + 1, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (N, 3, 224, 224) to (N, 197, width)."""
        patches = self.projection(x).flatten(2).transpose(1, 2)
        return torch.cat([self.class_token.expand(len(x), -1, -1), patches], 1) + self.position_embedding


class Layer(nn.Module):
    """Attention and perceptron, each on the normalized input and added to it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH, eps=EPS)
        self.attention = SelfAttention(WIDTH, HEADS, fused=True)
        self.norm = nn.LayerNorm(WIDTH, eps=EPS)
        self.perceptron = Perceptron(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Keep the shape (N, tokens, width)."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.perceptron(self.norm(x))


class ViTB16(nn.Module):
    """Logits of 1000 classes from the class token."""

    init_scales: ClassVar = {"*.reduce.weight": 0.5}

    def __init__(self) -> None:
        super().__init__()
        self.patches = Patches()
        self.layers = nn.Sequential(*(Layer() for _ in range(DEPTH)))
        self.norm = nn.LayerNorm(WIDTH, eps=EPS)
        self.head = nn.Linear(WIDTH, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (N, 3, 224, 224) to (N, 1000)."""
        return self.head(self.norm(self.layers(self.patches(x)))[:, 0])
