"""EfficientNet-B0: inverted residuals with SiLU and squeeze-and-excitation."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from graphs.architectures.blocks import Classifier, ConvBn

# expansion, kernel, stride of the first, channels out, repeats
STAGES = (
    (1, 3, 1, 16, 1),
    (6, 3, 2, 24, 2),
    (6, 5, 2, 40, 2),
    (6, 3, 2, 80, 3),
    (6, 5, 1, 112, 3),
    (6, 5, 2, 192, 4),
    (6, 3, 1, 320, 1),
)


class SqueezeExcitation(nn.Module):
    """Scales each channel by a gate computed from all channels' means."""

    def __init__(self, channels: int, squeezed: int) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.squeeze = nn.Conv2d(channels, squeezed, 1)
        self.act = nn.SiLU()
        self.excite = nn.Conv2d(squeezed, channels, 1)
        self.gate = nn.Sigmoid()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Keep the shape (N, channels, H, W)."""
        return x * self.gate(self.excite(self.act(self.squeeze(self.pool(x)))))


class MBConv(nn.Module):
    """1x1 expansion, depthwise convolution, squeeze-and-excitation, linear projection, shortcut."""

    def __init__(self, src: int, dst: int, expansion: int, kernel: int, stride: int) -> None:
        super().__init__()
        hidden = src * expansion
        self.keeps_shape = stride == 1 and src == dst
        self.expand = ConvBn(src, hidden, act=nn.SiLU) if expansion != 1 else nn.Identity()
        self.depthwise = ConvBn(hidden, hidden, kernel, stride, groups=hidden, act=nn.SiLU)
        # The squeezed width follows the block's input, not the expanded width.
        self.se = SqueezeExcitation(hidden, max(1, src // 4))
        self.project = ConvBn(hidden, dst, act=None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (N, src, H, W) to (N, dst, H / stride, W / stride)."""
        y = self.project(self.se(self.depthwise(self.expand(x))))
        return x + y if self.keeps_shape else y


class EfficientNetB0(nn.Sequential):
    """Stochastic depth is the identity at inference and is left out."""

    # SiLU is not homogeneous: amplitudes below 1 decay and those above grow from block to block. Three times unit
    # variance inside the blocks puts it where it is nearly a ReLU; the projections scale back.
    init_scales: ClassVar = {
        "*.expand.conv.weight": 0.7,  # reads a linear output, needs no gain
        "*.expand.bn.weight": 3.0,
        "blocks.0.depthwise.bn.weight": 3.0,
        "*.se.squeeze.weight": 0.3,  # undoes the factor of 3
        "*.se.excite.weight": 0.5,  # gates around 1/2, not saturated
        "*.project.conv.weight": 0.53,
        "last.conv.weight": 0.7,
        "last.bn.weight": 3.0,
        "head.fc.weight": 0.33,
    }

    def __init__(self) -> None:
        super().__init__()
        self.stem = ConvBn(3, 32, 3, 2, act=nn.SiLU)
        src, blocks = 32, []
        for expansion, kernel, stride, dst, repeats in STAGES:
            for position in range(repeats):
                blocks.append(MBConv(src, dst, expansion, kernel, stride if position == 0 else 1))
                src = dst
        self.blocks = nn.Sequential(*blocks)
        self.last = ConvBn(src, 1280, act=nn.SiLU)
        self.head = Classifier(1280, dropout=0.2)
