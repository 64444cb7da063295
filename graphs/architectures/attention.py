"""What transformers share: multi-head self-attention over (N, tokens, width) and a two-layer perceptron."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class SelfAttention(nn.Module):
    """Scaled dot-product attention of a sequence with itself, all heads at once, no mask.

    `width`: features of a token, in and out. `heads`: each sees ``width / heads`` features. `fused`: whether one linear
    layer makes queries, keys and values, or three do. The sums are the same; published models differ in it.
    """

    def __init__(self, width: int, heads: int, fused: bool) -> None:
        super().__init__()
        self.heads = heads
        if fused:
            self.qkv = nn.Linear(width, 3 * width)
        else:
            self.query = nn.Linear(width, width)
            self.key = nn.Linear(width, width)
            self.value = nn.Linear(width, width)
        self.fused = fused
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Keep the shape (N, tokens, width)."""
        parts = self.qkv(x).chunk(3, -1) if self.fused else (self.query(x), self.key(x), self.value(x))
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(query, key, value)
        return self.out(y.transpose(1, 2).flatten(2))


class Perceptron(nn.Sequential):
    """Widen four times, exact GELU, narrow again."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.expand = nn.Linear(width, 4 * width)
        self.act = nn.GELU()
        self.reduce = nn.Linear(4 * width, width)
