"""Layers that several architectures share; knows no architecture."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


class ConvBn(nn.Sequential):
    """Convolution without bias, batch normalization and, if given, an activation.

    `kernel`: size of the kernel; "same" padding is derived from it for stride 1. `stride`: stride along both axes.
    `groups`: groups of the convolution; ``groups=src`` makes it depthwise. `act`: makes the activation module; ``None``
    for a linear output.
    """

    def __init__(
        self,
        src: int,
        dst: int,
        kernel: int | tuple[int, int] = 1,
        stride: int = 1,
        groups: int = 1,
        act: Callable[[], nn.Module] | None = nn.ReLU,
        padding: int | tuple[int, int] | None = None,
        eps: float = 1e-5,
    ) -> None:
        size = (kernel, kernel) if isinstance(kernel, int) else kernel
        same = (size[0] // 2, size[1] // 2)
        conv = nn.Conv2d(src, dst, size, stride, same if padding is None else padding, groups=groups, bias=False)
        super().__init__()
        self.conv = conv
        self.bn = nn.BatchNorm2d(dst, eps=eps)
        if act is not None:
            self.act = act()


class Classifier(nn.Sequential):
    """Global average pooling, dropout and one linear layer."""

    def __init__(self, channels: int, dropout: float = 0.0, classes: int = 1000) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten(1)
        if dropout:
            self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(channels, classes)


class Concat(nn.Module):
    """Runs branches on the same input and concatenates their channels."""

    def __init__(self, **branches: nn.Module) -> None:
        super().__init__()
        for name, branch in branches.items():
            self.add_module(name, branch)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the branches' outputs, in the order given, joined along axis 1."""
        return torch.cat([branch(x) for branch in self.children()], dim=1)
