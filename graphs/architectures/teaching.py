"""Three graphs small enough to read: a chain, a residual block, a concat block."""

from __future__ import annotations

import torch
from torch import nn

from graphs.architectures.blocks import Concat, ConvBn


class Chain(nn.Sequential):
    """Convolution, ReLU, max pooling: the example of oneDNN's page on memory format propagation."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 32, 3, padding=1)
        self.relu = nn.ReLU()
        self.pool = nn.MaxPool2d(2, 2)


class Residual(nn.Module):
    """Two convolutions added to their input: the operands of the sum must agree on a format."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = ConvBn(3, 32, 3)
        self.first = ConvBn(32, 32, 3)
        self.second = ConvBn(32, 32, 3, act=None)
        self.relu = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (N, 3, H, W) to (N, 32, H, W)."""
        y = self.stem(x)
        return self.relu(self.second(self.first(y)) + y)


class ConcatBlock(nn.Sequential):
    """Three branches joined along the channels: one format must suit every producer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = ConvBn(3, 32, 3)
        # 20 channels fill neither an 8-wide nor a 16-wide block: padding lies between the branches.
        self.join = Concat(
            one=ConvBn(32, 16),
            three=ConvBn(32, 20, 3),
            pool=nn.Sequential(nn.MaxPool2d(3, 1, 1), ConvBn(32, 16)),
        )
        self.last = ConvBn(52, 32)
