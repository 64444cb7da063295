"""ResNet-50 v1.5: bottleneck blocks whose stride sits in the 3x3 convolution."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from graphs.architectures.blocks import Classifier, ConvBn


class Bottleneck(nn.Module):
    """1x1 reduce, 3x3, 1x1 expand, added to the shortcut."""

    def __init__(self, src: int, width: int, stride: int) -> None:
        super().__init__()
        dst = 4 * width
        self.reduce = ConvBn(src, width)
        self.conv = ConvBn(width, width, 3, stride)
        self.expand = ConvBn(width, dst, act=None)
        changes = stride != 1 or src != dst
        self.shortcut = ConvBn(src, dst, 1, stride, act=None) if changes else nn.Identity()
        self.relu = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (N, src, H, W) to (N, 4 * width, H / stride, W / stride)."""
        return self.relu(self.expand(self.conv(self.reduce(x))) + self.shortcut(x))


class ResNet50(nn.Sequential):
    """Stem, four stages of 3, 4, 6 and 3 bottlenecks, classifier."""

    # Small residual branches keep the sum over blocks in range.
    init_scales: ClassVar = {"*.expand.bn.weight": 0.3, "*.shortcut.bn.weight": 0.7}

    def __init__(self) -> None:
        super().__init__()
        self.stem = ConvBn(3, 64, 7, 2)
        self.pool = nn.MaxPool2d(3, 2, 1)
        src = 64
        for index, depth in enumerate((3, 4, 6, 3)):
            width, blocks = 64 << index, []
            for position in range(depth):
                stride = 2 if index > 0 and position == 0 else 1
                blocks.append(Bottleneck(src, width, stride))
                src = 4 * width
            self.add_module(f"stage{index + 1}", nn.Sequential(*blocks))
        self.head = Classifier(src)
