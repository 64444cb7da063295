"""DenseNet-121: every layer reads the concatenation of all layers before it in its block."""

from __future__ import annotations

import torch
from torch import nn

from graphs.architectures.blocks import Classifier

GROWTH = 32


class BnReluConv(nn.Sequential):
    """Pre-activation convolution: batch normalization, ReLU, convolution."""

    def __init__(self, src: int, dst: int, kernel: int) -> None:
        super().__init__()
        self.bn = nn.BatchNorm2d(src)
        self.relu = nn.ReLU()
        self.conv = nn.Conv2d(src, dst, kernel, padding=kernel // 2, bias=False)


class DenseLayer(nn.Sequential):
    """1x1 bottleneck of 4 * GROWTH channels, then a 3x3 convolution that adds GROWTH channels."""

    def __init__(self, src: int) -> None:
        super().__init__()
        self.bottleneck = BnReluConv(src, 4 * GROWTH, 1)
        self.grow = BnReluConv(4 * GROWTH, GROWTH, 3)


class DenseBlock(nn.ModuleList):
    """Layers in sequence, each fed with everything made so far."""

    def __init__(self, src: int, depth: int) -> None:
        super().__init__(DenseLayer(src + GROWTH * index) for index in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (N, src, H, W) to (N, src + GROWTH * depth, H, W)."""
        features = [x]
        for layer in self:
            features.append(layer(torch.cat(features, dim=1)))
        return torch.cat(features, dim=1)


class DenseNet121(nn.Sequential):
    """Four dense blocks of 6, 12, 24 and 16 layers; transitions halve channels and image."""

    def __init__(self) -> None:
        super().__init__()
        channels = 64
        self.stem = nn.Sequential(
            nn.Conv2d(3, channels, 7, 2, 3, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
        )
        for index, depth in enumerate((6, 12, 24, 16), start=1):
            self.add_module(f"block{index}", DenseBlock(channels, depth))
            channels += depth * GROWTH
            if index < 4:
                transition = nn.Sequential(BnReluConv(channels, channels // 2, 1), nn.AvgPool2d(2, 2))
                self.add_module(f"transition{index}", transition)
                channels //= 2
        self.norm = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU()
        self.head = Classifier(channels)
