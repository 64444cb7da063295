"""Inception v3 in its inference form: no auxiliary classifier."""

from __future__ import annotations

from functools import partial

from torch import nn

from graphs.architectures.blocks import Classifier, Concat, ConvBn

Conv = partial(ConvBn, eps=1e-3)


def _chain(src: int, *layers: tuple[int, int | tuple[int, int]]) -> nn.Sequential:
    """Stack "same" convolutions given as (channels, kernel)."""
    convs = []
    for dst, kernel in layers:
        convs.append(Conv(src, dst, kernel))
        src = dst
    return nn.Sequential(*convs)


def _pooled(src: int, dst: int) -> nn.Sequential:
    return nn.Sequential(nn.AvgPool2d(3, 1, 1), Conv(src, dst))


def block_35(src: int, pool: int) -> Concat:
    """Make the module for 35x35 images (factorised 5x5)."""
    return Concat(
        one=Conv(src, 64),
        five=_chain(src, (48, 1), (64, 5)),
        three=_chain(src, (64, 1), (96, 3), (96, 3)),
        pool=_pooled(src, pool),
    )


def reduction_35_to_17(src: int) -> Concat:
    """Halve the image from 35x35 to 17x17."""
    return Concat(
        three=Conv(src, 384, 3, 2, padding=0),
        deep=nn.Sequential(Conv(src, 64), Conv(64, 96, 3), Conv(96, 96, 3, 2, padding=0)),
        pool=nn.MaxPool2d(3, 2),
    )


def block_17(src: int, mid: int) -> Concat:
    """Make the module for 17x17 images: 7x7 convolutions factorised into 1x7 and 7x1."""
    wide, tall = (1, 7), (7, 1)
    return Concat(
        one=Conv(src, 192),
        seven=_chain(src, (mid, 1), (mid, wide), (192, tall)),
        deep=_chain(src, (mid, 1), (mid, tall), (mid, wide), (mid, tall), (192, wide)),
        pool=_pooled(src, 192),
    )


def reduction_17_to_8(src: int) -> Concat:
    """Halve the image from 17x17 to 8x8."""
    return Concat(
        three=nn.Sequential(Conv(src, 192), Conv(192, 320, 3, 2, padding=0)),
        seven=nn.Sequential(_chain(src, (192, 1), (192, (1, 7)), (192, (7, 1))), Conv(192, 192, 3, 2, padding=0)),
        pool=nn.MaxPool2d(3, 2),
    )


def _split(src: int) -> Concat:
    """Return a 3x3 convolution factorised into parallel 1x3 and 3x1."""
    return Concat(wide=Conv(src, 384, (1, 3)), tall=Conv(src, 384, (3, 1)))


def block_8(src: int) -> Concat:
    """Make the module for 8x8 images: the last layers fan out instead of stacking."""
    return Concat(
        one=Conv(src, 320),
        three=nn.Sequential(Conv(src, 384), _split(384)),
        deep=nn.Sequential(Conv(src, 448), Conv(448, 384, 3), _split(384)),
        pool=_pooled(src, 192),
    )


class InceptionV3(nn.Sequential):
    """Stem, eleven mixed modules, classifier; expects 299x299 images."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            Conv(3, 32, 3, 2, padding=0),
            Conv(32, 32, 3, padding=0),
            Conv(32, 64, 3),
            nn.MaxPool2d(3, 2),
            Conv(64, 80),
            Conv(80, 192, 3, padding=0),
            nn.MaxPool2d(3, 2),
        )
        self.stage35 = nn.Sequential(block_35(192, 32), block_35(256, 64), block_35(288, 64), reduction_35_to_17(288))
        self.stage17 = nn.Sequential(*(block_17(768, mid) for mid in (128, 160, 160, 192)), reduction_17_to_8(768))
        self.stage8 = nn.Sequential(block_8(1280), block_8(2048))
        self.head = Classifier(2048, dropout=0.5)
