"""BERT-base: token, position and segment embeddings, then twelve encoder layers with the norm after each residual."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from graphs.architectures.attention import Perceptron, SelfAttention

VOCABULARY = 30522
POSITIONS = 512
SEGMENTS = 2
WIDTH = 768
HEADS = 12
DEPTH = 12
EPS = 1e-12


class Embeddings(nn.Module):
    """Sum of three embeddings, normalized. All tokens belong to the first segment."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(POSITIONS, WIDTH)
        self.segment = nn.Embedding(SEGMENTS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH, eps=EPS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map (N, tokens) integers to (N, tokens, width)."""
        fixed = self.position.weight[: tokens.shape[1]] + self.segment.weight[0]
        return self.norm(self.token(tokens) + fixed)


class Layer(nn.Module):
    """Attention and perceptron, each added to its input and then normalized."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = SelfAttention(WIDTH, HEADS, fused=False)
        self.attention_norm = nn.LayerNorm(WIDTH, eps=EPS)
        self.perceptron = Perceptron(WIDTH)
        self.norm = nn.LayerNorm(WIDTH, eps=EPS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Keep the shape (N, tokens, width)."""
        x = self.attention_norm(x + self.attention(x))
        return self.norm(x + self.perceptron(x))


class BertBase(nn.Sequential):
    """The encoder; its output is the last hidden state. The pooler, one small layer on one token, is left out."""

    init_scales: ClassVar = {"*.reduce.weight": 0.5}

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = Embeddings()
        self.layers = nn.Sequential(*(Layer() for _ in range(DEPTH)))
