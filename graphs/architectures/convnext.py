"""ConvNeXt-T: 7x7 depthwise convolutions, channels-last layer norm and linear layers, layer scale."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

WIDTHS = (96, 192, 384, 768)
DEPTHS = (3, 3, 9, 3)


class ChannelNorm(nn.LayerNorm):
    """Layer normalization over the channels of an (N, C, H, W) tensor."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, eps=1e-6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Keep the shape (N, channels, H, W)."""
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Block(nn.Module):
    """Depthwise 7x7, then norm and a two-layer perceptron in channels-last, scaled and added to the input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.expand = nn.Linear(channels, 4 * channels)
        self.act = nn.GELU()
        self.reduce = nn.Linear(4 * channels, channels)
        self.layer_scale = nn.Parameter(torch.ones(channels, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Keep the shape (N, channels, H, W)."""
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.reduce(self.act(self.expand(y))).permute(0, 3, 1, 2)
        return x + self.layer_scale * y


class ConvNeXtT(nn.Sequential):
    """Patchify stem, four stages with 2x2 strided convolutions between them."""

    init_scales: ClassVar = {"*.layer_scale": 0.3}

    def __init__(self) -> None:
        super().__init__()
        src = 3
        for index, (width, depth) in enumerate(zip(WIDTHS, DEPTHS, strict=True)):
            if index == 0:
                self.stem = nn.Sequential(nn.Conv2d(src, width, 4, 4), ChannelNorm(width))
            else:
                down = nn.Sequential(ChannelNorm(src), nn.Conv2d(src, width, 2, 2))
                self.add_module(f"down{index}", down)
            self.add_module(f"stage{index}", nn.Sequential(*(Block(width) for _ in range(depth))))
            src = width
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.norm = ChannelNorm(src)
        self.flatten = nn.Flatten(1)
        self.fc = nn.Linear(src, 1000)
