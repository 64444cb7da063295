"""U-Net for 256x256 images: four levels down, four up, skip connections by concatenation."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from graphs.architectures.blocks import ConvBn

WIDTH = 32
LEVELS = 4


def _double(src: int, dst: int) -> nn.Sequential:
    return nn.Sequential(ConvBn(src, dst, 3), ConvBn(dst, dst, 3))


class Up(nn.Module):
    """Transposed convolution that doubles the image, concat with the skip, two convolutions."""

    def __init__(self, src: int, dst: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(src, dst, 2, 2)
        self.convs = _double(2 * dst, dst)

    def forward(self, x: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        """Map (N, src, H, W) and (N, dst, 2H, 2W) to (N, dst, 2H, 2W)."""
        return self.convs(torch.cat((self.up(x), skip), dim=1))


class UNet(nn.Module):
    """Binary segmentation: one channel out, through a sigmoid."""

    #: Maximum pooling raises the energy, and nothing halves that of a transposed convolution. Uncorrected, activations
    #: grow from level to level until the sigmoid saturates, where its steep middle magnifies every rounding.
    init_scales: ClassVar = {
        "encoders.[123].0.conv.weight": 0.8,
        "bottom.0.conv.weight": 0.8,
        "decoders.*.convs.0.conv.weight": 0.8,
    }

    def __init__(self) -> None:
        super().__init__()
        widths = [WIDTH << level for level in range(LEVELS + 1)]
        self.encoders = nn.ModuleList(
            _double(src, dst) for src, dst in zip([3, *widths[:-2]], widths[:-1], strict=True)
        )
        self.pool = nn.MaxPool2d(2, 2)
        self.bottom = _double(widths[-2], widths[-1])
        self.decoders = nn.ModuleList(Up(2 * dst, dst) for dst in reversed(widths[:-1]))
        self.last = nn.Conv2d(WIDTH, 1, 1)
        self.sigmoid = nn.Sigmoid()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (N, 3, H, W) to (N, 1, H, W); H and W are multiples of 16."""
        skips = []
        for encoder in self.encoders:
            skips.append(encoder(x))
            x = self.pool(skips[-1])
        x = self.bottom(x)
        for decoder in self.decoders:
            x = decoder(x, skips.pop())
        return self.sigmoid(self.last(x))
