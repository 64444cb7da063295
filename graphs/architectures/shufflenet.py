"""ShuffleNetV2 x1.0: channel split, depthwise branches, concat and channel shuffle."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from graphs.architectures.blocks import Classifier, ConvBn


def channel_shuffle(x: torch.Tensor, groups: int) -> torch.Tensor:
    """Interleave the channels of the groups, as PyTorch programs write it: view, transpose, view."""
    batch, channels, height, width = x.shape
    grouped = x.view(batch, groups, channels // groups, height, width)
    return grouped.transpose(1, 2).contiguous().view(batch, channels, height, width)


def _depthwise(channels: int, stride: int) -> ConvBn:
    return ConvBn(channels, channels, 3, stride, groups=channels, act=None)


class ShuffleUnit(nn.Module):
    """Keeps half of the channels, transforms the other half, shuffles both."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        half = channels // 2
        self.branch = nn.Sequential(ConvBn(half, half), _depthwise(half, 1), ConvBn(half, half))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Keep the shape (N, channels, H, W)."""
        kept, changed = x.chunk(2, dim=1)
        return channel_shuffle(torch.cat((kept, self.branch(changed)), dim=1), 2)


class DownUnit(nn.Module):
    """Halves the image: both branches read all channels."""

    def __init__(self, src: int, dst: int) -> None:
        super().__init__()
        half = dst // 2
        self.shortcut = nn.Sequential(_depthwise(src, 2), ConvBn(src, half))
        self.branch = nn.Sequential(ConvBn(src, half), _depthwise(half, 2), ConvBn(half, half))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (N, src, H, W) to (N, dst, H / 2, W / 2)."""
        return channel_shuffle(torch.cat((self.shortcut(x), self.branch(x)), dim=1), 2)


class ShuffleNetV2(nn.Sequential):
    """Stages of 116, 232 and 464 channels."""

    # The depthwise convolutions are linear: what reads them needs no gain.
    init_scales: ClassVar = {"*.shortcut.1.conv.weight": 0.7, "*.branch.2.conv.weight": 0.7}

    def __init__(self) -> None:
        super().__init__()
        self.stem = ConvBn(3, 24, 3, 2)
        self.pool = nn.MaxPool2d(3, 2, 1)
        src = 24
        for index, (depth, dst) in enumerate(((4, 116), (8, 232), (4, 464)), start=2):
            units = [DownUnit(src, dst), *(ShuffleUnit(dst) for _ in range(depth - 1))]
            self.add_module(f"stage{index}", nn.Sequential(*units))
            src = dst
        self.last = ConvBn(src, 1024)
        self.head = Classifier(1024)
