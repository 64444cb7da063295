"""A small 3-D residual network for clips of 16 frames, in the manner of R3D."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

WIDTHS = (32, 64, 128, 256)


def _conv(src: int, dst: int, kernel: int, stride: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv3d(src, dst, kernel, stride, kernel // 2, bias=False), nn.BatchNorm3d(dst))


class Block3d(nn.Module):
    """Two 3x3x3 convolutions added to the shortcut."""

    def __init__(self, src: int, dst: int, stride: int) -> None:
        super().__init__()
        self.first = _conv(src, dst, 3, stride)
        self.second = _conv(dst, dst, 3, 1)
        self.shortcut = nn.Identity() if stride == 1 and src == dst else _conv(src, dst, 1, stride)
        self.relu = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (N, src, D, H, W) to (N, dst, D / stride, H / stride, W / stride)."""
        return self.relu(self.second(self.relu(self.first(x))) + self.shortcut(x))


class Conv3dNet(nn.Sequential):
    """Stem, max pooling, one residual block per width, classifier of 400 actions."""

    # Small residual branches keep the sum over blocks in range.
    init_scales: ClassVar = {"*.second.1.weight": 0.3, "*.shortcut.1.weight": 0.7}

    def __init__(self) -> None:
        super().__init__()
        src = WIDTHS[0]
        self.stem = nn.Sequential(
            nn.Conv3d(3, src, (3, 7, 7), (1, 2, 2), (1, 3, 3), bias=False),
            nn.BatchNorm3d(src),
            nn.ReLU(),
            nn.MaxPool3d((1, 3, 3), (1, 2, 2), (0, 1, 1)),
        )
        for index, dst in enumerate(WIDTHS, start=1):
            self.add_module(f"block{index}", Block3d(src, dst, 1 if index == 1 else 2))
            src = dst
        self.pool = nn.AdaptiveAvgPool3d(1)
        self.flatten = nn.Flatten(1)
        self.fc = nn.Linear(src, 400)
