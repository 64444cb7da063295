"""MobileNetV2: inverted residuals around depthwise convolutions, linear bottlenecks."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from graphs.architectures.blocks import Classifier, ConvBn

# expansion, channels out, repeats, stride of the first
STAGES = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))


class InvertedResidual(nn.Module):
    """1x1 expansion, 3x3 depthwise, linear 1x1 projection; a shortcut where the shape is kept."""

    def __init__(self, src: int, dst: int, expansion: int, stride: int) -> None:
        super().__init__()
        hidden = src * expansion
        self.keeps_shape = stride == 1 and src == dst
        self.expand = ConvBn(src, hidden, act=nn.ReLU6) if expansion != 1 else nn.Identity()
        self.depthwise = ConvBn(hidden, hidden, 3, stride, groups=hidden, act=nn.ReLU6)
        self.project = ConvBn(hidden, dst, act=None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (N, src, H, W) to (N, dst, H / stride, W / stride)."""
        y = self.project(self.depthwise(self.expand(x)))
        return x + y if self.keeps_shape else y


class MobileNetV2(nn.Sequential):
    """Width 1.0."""

    # The projections are linear: what reads them needs no gain.
    init_scales: ClassVar = {"*.expand.conv.weight": 0.7, "blocks.*.project.bn.weight": 0.9, "last.conv.weight": 0.7}

    def __init__(self) -> None:
        super().__init__()
        self.stem = ConvBn(3, 32, 3, 2, act=nn.ReLU6)
        src, blocks = 32, []
        for expansion, dst, repeats, stride in STAGES:
            for position in range(repeats):
                blocks.append(InvertedResidual(src, dst, expansion, stride if position == 0 else 1))
                src = dst
        self.blocks = nn.Sequential(*blocks)
        self.last = ConvBn(src, 1280, act=nn.ReLU6)
        self.head = Classifier(1280, dropout=0.2)
