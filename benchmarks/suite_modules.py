"""Networks of PyTorch's torchbench list that no package builds: their layers and sizes, with seeded weights.

What torchbench adds around a network (data, post-processing, an optimiser) is left out.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["MODULES"]

_MODELS = "torchvision.models"


def _numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def _tokens(largest: int, *shape: int) -> torch.Tensor:
    return torch.randint(1, largest, shape, generator=torch.Generator().manual_seed(1))


def _conv(source: int, result: int, kernel: int = 3, stride: int = 1, slope: float = 0.0) -> nn.Sequential:
    """Return a convolution, batch normalization and (leaky) ReLU."""
    convolution = nn.Conv2d(source, result, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(result), nn.LeakyReLU(slope) if slope else nn.ReLU())


def _stack(act: Callable[[], nn.Module], *widths: int) -> nn.Sequential:
    """Return products with an activation after each."""
    return nn.Sequential(*(part for size in pairwise(widths) for part in (nn.Linear(*size), act())))


class Translator(nn.Module):
    """Transformer of six layers on both sides: of words (attention_is_all_you_need), or of frames (speech)."""

    def __init__(self, words: int, frames: int = 0) -> None:
        super().__init__()
        self.source: nn.Module = nn.Linear(frames, 512) if frames else nn.Embedding(words, 512)
        self.target = nn.Embedding(words, 512)
        self.body = nn.Transformer(512, 8, 6, 6, 2048, batch_first=True)
        self.head = nn.Linear(512, words, bias=False)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        return self.head(self.body(self.source(source), self.target(target), tgt_mask=mask, tgt_is_causal=True))


class Encoder(nn.Module):
    """BERT_pytorch: twelve layers, with tanh's approximation of GELU, and embeddings of words, places and segments."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.segments = nn.Embedding(20_000, 768), nn.Embedding(3, 768)
        self.places = nn.Parameter(torch.randn(1, 128, 768))
        layer = partial(nn.TransformerEncoderLayer, 768, 12, 3072, batch_first=True)
        gelu = partial(F.gelu, approximate="tanh")
        self.layers = nn.ModuleList(layer(activation=gelu) for _ in range(12))
        self.next, self.masked = nn.Linear(768, 2), nn.Linear(768, 20_000)

    def forward(self, words: torch.Tensor, segments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return whether the sentence follows, and the masked words."""
        x = self.words(words) + self.places + self.segments(segments)
        for layer in self.layers:
            x = layer(x)
        return self.next(x[:, 0]).log_softmax(-1), self.masked(x).log_softmax(-1)


def discriminator() -> nn.Module:
    """Return dcgan's discriminator."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 4, 2, 1, bias=False), nn.LeakyReLU(0.2)]
    for width in (64, 128, 256):
        layers += [nn.Conv2d(width, 2 * width, 4, 2, 1, bias=False), nn.BatchNorm2d(2 * width), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers, nn.Conv2d(512, 1, 4, bias=False), nn.Sigmoid())


class Clicks(nn.Module):
    """dlrm: eight tables of embeddings, the dot products of all pairs, and two stacks of products."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(1000, 64, mode="sum") for _ in range(8))
        self.bottom = _stack(nn.ReLU, 512, 512, 64)
        self.top = nn.Sequential(_stack(nn.ReLU, 100, 1024, 1024, 1024), nn.Linear(1024, 1), nn.Sigmoid())

    def forward(self, dense: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """Return a probability for each row; `indices` is rows × tables × lookups."""
        x = self.bottom(dense)
        rows = torch.stack([x, *(table(indices[:, i]) for i, table in enumerate(self.tables))], 1)
        products = rows @ rows.mT
        i, j = torch.tril_indices(9, 9, -1)
        return self.top(torch.cat([x, products[:, i, j]], 1))


def painter() -> nn.Module:
    """Return LearningToPaint's actor: a ResNet-18 of nine channels."""
    net = importlib.import_module(_MODELS).resnet18(weights=None, num_classes=65)
    net.conv1 = nn.Conv2d(9, 64, 3, 2, 1, bias=False)
    return nn.Sequential(net, nn.Sigmoid())


def private() -> nn.Module:
    """Return functorch_dp_cifar10: a ResNet-18 with group normalization."""
    return importlib.import_module(_MODELS).resnet18(
        weights=None, num_classes=10, norm_layer=lambda channels: nn.GroupNorm(min(32, channels), channels)
    )


def potential() -> nn.Module:
    """Return lennard_jones: products of 16 numbers and tanh."""
    return nn.Sequential(_stack(nn.Tanh, 1, 16, 16, 16, 16), nn.Linear(16, 1))


def recommender() -> nn.Module:
    """Return nvidia_deeprecommender: an autoencoder of 197 951 ratings."""
    return _stack(nn.SELU, 197_951, 512, 512, 1024, 512, 512, 197_951)


class Dense(nn.Module):
    """A layer of phlippe_densenet: its result follows its source."""

    def __init__(self, source: int, growth: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *(nn.BatchNorm2d(source), nn.ReLU(), nn.Conv2d(source, 2 * growth, 1, bias=False)),
            *(nn.BatchNorm2d(2 * growth), nn.ReLU(), nn.Conv2d(2 * growth, growth, 3, padding=1, bias=False)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the result before the source."""
        return torch.cat([self.net(x), x], 1)


def densenet() -> nn.Module:
    """Return phlippe_densenet: four blocks of six layers."""
    width, layers = 32, list[nn.Module]([nn.Conv2d(3, 32, 3, padding=1)])
    for block in range(4):
        for _ in range(6):
            layers.append(Dense(width, 16))
            width += 16
        if block < 3:
            layers += [nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width // 2, 1, bias=False), nn.AvgPool2d(2)]
            width //= 2
    return nn.Sequential(
        *layers, nn.BatchNorm2d(width), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)
    )


class Residual(nn.Module):
    """Two convolutions around a shortcut: a block of phlippe_resnet, or of yolov3 with a first kernel of 1."""

    def __init__(
        self, source: int, middle: int, result: int, stride: int = 1, first: int = 3, slope: float = 0.0
    ) -> None:
        super().__init__()
        self.first = _conv(source, middle, first, stride, slope)
        self.second = nn.Sequential(nn.Conv2d(middle, result, 3, padding=1, bias=False), nn.BatchNorm2d(result))
        self.short = nn.Identity() if stride == 1 else nn.Conv2d(source, result, 1, stride)
        self.act = nn.LeakyReLU(slope) if slope else nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum."""
        return self.act(self.second(self.first(x)) + self.short(x))


def resnet() -> nn.Module:
    """Return phlippe_resnet: three groups of three blocks."""
    layers: list[nn.Module] = [_conv(3, 16)]
    for index, width in enumerate((16, 32, 64)):
        source = width if index == 0 else width // 2
        layers += [Residual(source, width, width, 1 if index == 0 else 2)]
        layers += [Residual(width, width, width) for _ in range(2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


class UNet(nn.Module):
    """Halves the image four or five times, doubles it again, and joins both ways."""

    def __init__(
        self, source: int, result: int, widths: tuple[int, ...], double: Callable[[int, int], nn.Module]
    ) -> None:
        super().__init__()
        self.down = nn.ModuleList(double(a, b) for a, b in zip((source, *widths), widths, strict=False))
        ups = list(reversed(widths))
        self.up = nn.ModuleList(double(a + b, b) for a, b in pairwise(ups))
        self.last = nn.Conv2d(widths[0], result, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return an image of the source's size."""
        seen = []
        for layer in self.down:
            x = layer(F.max_pool2d(x, 2) if seen else x)
            seen.append(x)
        for layer, other in zip(self.up, reversed(seen[:-1]), strict=True):
            x = F.interpolate(x, size=other.shape[-2:], mode="bilinear", align_corners=True)
            x = layer(torch.cat([other, x], 1))
        return self.last(x)


def _double(source: int, result: int) -> nn.Module:
    return nn.Sequential(_conv(source, result), _conv(result, result))


def _leaky(source: int, result: int) -> nn.Module:
    first, second = nn.Conv2d(source, result, 3, padding=1), nn.Conv2d(result, result, 3, padding=1)
    return nn.Sequential(first, nn.LeakyReLU(0.1), second, nn.LeakyReLU(0.1))


class SlowMotion(nn.Module):
    """Super_SloMo: flows between two images, both images moved along them, and the flows corrected."""

    def __init__(self) -> None:
        super().__init__()
        widths = (32, 64, 128, 256, 512, 512)
        self.flow, self.correct = UNet(6, 4, widths, _leaky), UNet(20, 5, widths, _leaky)

    def forward(self, first: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        """Return the image half-way between."""
        flow = self.flow(torch.cat([first, last], 1))
        to_last, to_first = flow[:, :2], flow[:, 2:]
        to_0, to_1 = 0.25 * (to_first - to_last), 0.25 * (to_last - to_first)
        moved = torch.cat([first, last, to_last, to_first, to_1, to_0, _moved(last, to_1), _moved(first, to_0)], 1)
        more = self.correct(moved)
        seen = torch.sigmoid(more[:, 4:5])
        g0, g1 = _moved(first, to_0 + more[:, :2]), _moved(last, to_1 + more[:, 2:4])
        return seen * g0 + (1 - seen) * g1


def _moved(image: torch.Tensor, flow: torch.Tensor) -> torch.Tensor:
    """Return an image read along a flow."""
    height, width = image.shape[-2:]
    x = torch.arange(width).view(1, 1, -1) + flow[:, 0]
    y = torch.arange(height).view(1, -1, 1) + flow[:, 1]
    grid = torch.stack([2 * x / (width - 1) - 1, 2 * y / (height - 1) - 1], -1)
    return F.grid_sample(image, grid, align_corners=True)


class Speaker(nn.Module):
    """tts_angular: three LSTMs with a projection, the last frame's direction."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (40, 256, 256)
        self.cells = nn.ModuleList(nn.LSTM(size, 768, batch_first=True) for size in sizes)
        self.narrow = nn.ModuleList(nn.Linear(768, 256, bias=False) for _ in sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return 256 numbers of length 1 for each utterance."""
        for cell, narrow in zip(self.cells, self.narrow, strict=True):
            x = narrow(cell(x)[0])
        return F.normalize(x[:, -1])


class Yolo3(nn.Module):
    """yolov3: Darknet-53 and three heads, each from a coarser image than the next."""

    def __init__(self) -> None:
        super().__init__()
        stages, width = [], 32
        for blocks in (1, 2, 8, 8, 4):
            stage = [_conv(width, 2 * width, 3, 2, 0.1)]
            stage += [Residual(2 * width, width, 2 * width, 1, 1, 0.1) for _ in range(blocks)]
            stages.append(nn.Sequential(*stage))
            width *= 2
        self.first, self.stages = _conv(3, 32, slope=0.1), nn.ModuleList(stages)
        self.necks = nn.ModuleList(self._neck(a, b) for a, b in ((1024, 512), (768, 256), (384, 128)))
        self.ups = nn.ModuleList(_conv(a, a // 2, 1, slope=0.1) for a in (512, 256))
        heads = (nn.Sequential(_conv(a, 2 * a, slope=0.1), nn.Conv2d(2 * a, 255, 1)) for a in (512, 256, 128))
        self.heads = nn.ModuleList(heads)

    @staticmethod
    def _neck(source: int, width: int) -> nn.Module:
        parts = [_conv(source, width, 1, slope=0.1)]
        for _ in range(2):
            parts += [_conv(width, 2 * width, slope=0.1), _conv(2 * width, width, 1, slope=0.1)]
        return nn.Sequential(*parts)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return the boxes of three sizes."""
        x, seen, found = self.first(x), [], []
        for stage in self.stages:
            x = stage(x)
            seen.append(x)
        for index, (neck, head) in enumerate(zip(self.necks, self.heads, strict=True)):
            if index:
                x = torch.cat([F.interpolate(self.ups[index - 1](x), scale_factor=2.0), seen[-1 - index]], 1)
            x = neck(x)
            found.append(head(x))
        return found


#: what makes a module, and its inputs for a batch
MODULES: Mapping[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Any, ...]]]] = {
    "attention_is_all_you_need_pytorch": (
        partial(Translator, 9521), lambda n: (_tokens(9521, n, 33), _tokens(9521, n, 31)),
    ),
    "speech_transformer": (partial(Translator, 4233, 320), lambda n: (_numbers(n, 204, 320), _tokens(4233, n, 22))),
    "BERT_pytorch": (Encoder, lambda n: (_tokens(20_000, n, 128), _tokens(3, n, 128))),
    "dcgan": (discriminator, lambda n: (_numbers(n, 3, 64, 64),)),
    "dlrm": (Clicks, lambda n: (_numbers(n, 512), _tokens(1000, n, 8, 100))),
    "functorch_dp_cifar10": (private, lambda n: (_numbers(n, 3, 32, 32),)),
    "LearningToPaint": (painter, lambda n: (_numbers(n, 9, 128, 128),)),
    "lennard_jones": (potential, lambda n: (_numbers(n, 1),)),
    "nvidia_deeprecommender": (recommender, lambda n: (_numbers(n, 197_951),)),
    "phlippe_densenet": (densenet, lambda n: (_numbers(n, 3, 32, 32),)),
    "phlippe_resnet": (resnet, lambda n: (_numbers(n, 3, 32, 32),)),
    "pytorch_unet": (
        partial(UNet, 3, 2, (64, 128, 256, 512, 512), _double), lambda n: (_numbers(n, 3, 640, 959),),
    ),
    "Super_SloMo": (SlowMotion, lambda n: (_numbers(n, 3, 352, 352), _numbers(n, 3, 352, 352).flip(0))),
    "tts_angular": (Speaker, lambda n: (_numbers(n, 50, 40),)),
    "yolov3": (Yolo3, lambda n: (_numbers(n, 3, 384, 512),)),
}  # fmt: skip
