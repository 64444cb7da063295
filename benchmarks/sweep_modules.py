"""Architectures that neither pytorchcv nor transformers has, as plain modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["MODULES"]


def _conv(
    ic: int, oc: int, kernel: int = 3, stride: int = 1, act: nn.Module | None = None, **more: int
) -> nn.Sequential:
    pad = more.get("dilation", 1) * (kernel // 2)
    conv = nn.Conv2d(ic, oc, kernel, stride, pad, bias=False, **more)
    return nn.Sequential(conv, nn.BatchNorm2d(oc), nn.ReLU() if act is None else act)


class CrossStage(nn.Module):
    """A stage of YOLOv5: half of the channels pass residual blocks, both halves meet in a concat."""

    def __init__(self, ic: int, oc: int, depth: int) -> None:
        super().__init__()
        half = oc // 2
        self.left, self.right = _conv(ic, half, 1, act=nn.SiLU()), _conv(ic, half, 1, act=nn.SiLU())
        self.blocks = nn.ModuleList(
            nn.Sequential(_conv(half, half, 1, act=nn.SiLU()), _conv(half, half, act=nn.SiLU())) for _ in range(depth)
        )
        self.out = _conv(oc, oc, 1, act=nn.SiLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.left(x)
        for block in self.blocks:
            y = y + block(y)
        return self.out(torch.cat([y, self.right(x)], 1))


class Yolo(nn.Module):
    """A detector with a pyramid of three scales and the decoding of its boxes."""

    def __init__(self, width: int = 32, classes: int = 20) -> None:
        super().__init__()
        self.stem = _conv(3, width, 6 - 1, 2, act=nn.SiLU())
        widths = [width * 2**i for i in range(5)]
        self.stages = nn.ModuleList(
            nn.Sequential(_conv(a, b, 3, 2, act=nn.SiLU()), CrossStage(b, b, d))
            for a, b, d in zip(widths, widths[1:], (1, 2, 3, 1), strict=False)
        )
        self.reduce = _conv(widths[4], widths[3] // 2, 1, act=nn.SiLU())
        self.pools = nn.ModuleList(nn.MaxPool2d(5, 1, 2) for _ in range(3))
        self.gather = _conv(widths[3] * 2, widths[4], 1, act=nn.SiLU())
        self.laterals = nn.ModuleList(
            _conv(b, a, 1, act=nn.SiLU()) for a, b in ((widths[3], widths[4]), (widths[2], widths[3]))
        )
        self.merges = nn.ModuleList(CrossStage(2 * c, c, 1) for c in (widths[3], widths[2]))
        self.heads = nn.ModuleList(nn.Conv2d(c, 3 * (classes + 5), 1) for c in (widths[2], widths[3], widths[4]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        scales = []
        for stage in self.stages:
            x = stage(x)
            scales.append(x)
        y = self.reduce(scales[3])
        pooled = [y]
        for pool in self.pools:
            pooled.append(pool(pooled[-1]))
        tops = [self.gather(torch.cat(pooled, 1))]
        for lateral, merge, scale in zip(self.laterals, self.merges, (scales[2], scales[1]), strict=True):
            up = F.interpolate(lateral(tops[0]), scale_factor=2.0, mode="nearest")
            tops.insert(0, merge(torch.cat([up, scale], 1)))
        found = []
        for head, top in zip(self.heads, tops, strict=True):
            y = head(top)
            n, _, h, w = y.shape
            y = y.view(n, 3, -1, h, w).permute(0, 1, 3, 4, 2).sigmoid()
            grid = torch.stack(torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")[::-1], -1).to(y)
            xy, wh, rest = y.split([2, 2, y.shape[-1] - 4], -1)
            found.append(torch.cat([xy * 2 - 0.5 + grid, (wh * 2) ** 2, rest], -1).flatten(1, 3))
        return torch.cat(found, 1)


class ConvMixer(nn.Module):
    """Patches, depthwise convolutions with residual sums, GELU before normalization."""

    def __init__(self, width: int = 192, depth: int = 6) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 7, 7), nn.GELU(), nn.BatchNorm2d(width))
        self.mixers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 9, padding=4, groups=width), nn.GELU(), nn.BatchNorm2d(width))
            for _ in range(depth)
        )
        self.pointwise = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 1), nn.GELU(), nn.BatchNorm2d(width)) for _ in range(depth)
        )
        self.head = nn.Linear(width, 100)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for mixer, pointwise in zip(self.mixers, self.pointwise, strict=True):
            x = pointwise(mixer(x) + x)
        return self.head(x.mean((2, 3)))


class Mixer(nn.Module):
    """MLP-Mixer: linear layers over tokens and over channels in turn."""

    def __init__(self, width: int = 192, tokens: int = 196, depth: int = 6) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * depth))
        self.over_tokens = nn.ModuleList(self._mlp(tokens, 96) for _ in range(depth))
        self.over_channels = nn.ModuleList(self._mlp(width, 768) for _ in range(depth))
        self.head = nn.Linear(width, 100)

    @staticmethod
    def _mlp(width: int, hidden: int) -> nn.Sequential:
        return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        for i, (tokens, channels) in enumerate(zip(self.over_tokens, self.over_channels, strict=True)):
            x = x + tokens(self.norms[2 * i](x).transpose(1, 2)).transpose(1, 2)
            x = x + channels(self.norms[2 * i + 1](x))
        return self.head(x.mean(1))


class Gated(nn.Module):
    """NAFNet's blocks: layer normalization over channels, a simple gate, channel attention, a scaled residual sum."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(1, width), nn.GroupNorm(1, width)
        self.expand = nn.Conv2d(width, 2 * width, 1)
        self.mix = nn.Conv2d(2 * width, 2 * width, 3, 1, 1, groups=2 * width)
        self.attend, self.project = nn.Conv2d(width, width, 1), nn.Conv2d(width, width, 1)
        self.up, self.down = nn.Conv2d(width, 2 * width, 1), nn.Conv2d(width, width, 1)
        self.beta = nn.Parameter(torch.full((1, width, 1, 1), 0.5))
        self.gamma = nn.Parameter(torch.full((1, width, 1, 1), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.mix(self.expand(self.norm1(x))).chunk(2, 1)
        y = a * b
        y = x + self.project(y * self.attend(F.adaptive_avg_pool2d(y, 1))) * self.beta
        a, b = self.up(self.norm2(y)).chunk(2, 1)
        return y + self.down(a * b) * self.gamma


class Restorer(nn.Module):
    """NAFNet: a U of gated blocks, pixel shuffles up."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.intro, self.ending = nn.Conv2d(3, width, 3, 1, 1), nn.Conv2d(width, 3, 3, 1, 1)
        widths = [width, 2 * width, 4 * width]
        self.encoders = nn.ModuleList(Gated(w) for w in widths)
        self.downs = nn.ModuleList(nn.Conv2d(w, 2 * w, 2, 2) for w in widths)
        self.middle = Gated(8 * width)
        self.ups = nn.ModuleList(
            nn.Sequential(nn.Conv2d(2 * w, 4 * w, 1, bias=False), nn.PixelShuffle(2)) for w in reversed(widths)
        )
        self.decoders = nn.ModuleList(Gated(w) for w in reversed(widths))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.intro(image)
        kept = []
        for encoder, down in zip(self.encoders, self.downs, strict=True):
            x = encoder(x)
            kept.append(x)
            x = down(x)
        x = self.middle(x)
        for up, decoder, skip in zip(self.ups, self.decoders, reversed(kept), strict=True):
            x = decoder(up(x) + skip)
        return self.ending(x) + image


class SuperResolution(nn.Module):
    """EDSR: residual blocks without normalization, scaled, and a pixel shuffle."""

    def __init__(self, width: int = 64, depth: int = 8) -> None:
        super().__init__()
        self.head = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1))
            for _ in range(depth)
        )
        self.tail = nn.Sequential(
            nn.Conv2d(width, 4 * width, 3, padding=1), nn.PixelShuffle(2), nn.Conv2d(width, 3, 3, padding=1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x = self.head(x)
        for block in self.blocks:
            y = y + 0.1 * block(y)
        return self.tail(x + y)


class DenseResidual(nn.Module):
    """ESRGAN's dense blocks: convolutions over growing concats, leaky ReLUs, scaled sums."""

    def __init__(self, width: int = 32, growth: int = 16, blocks: int = 3) -> None:
        super().__init__()
        self.head, self.tail = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.ModuleList(nn.Conv2d(width + i * growth, growth if i < 4 else width, 3, padding=1) for i in range(5))
            for _ in range(blocks)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.head(x)
        for block in self.blocks:
            grown = [x]
            for conv in block[:-1]:
                grown.append(F.leaky_relu(conv(torch.cat(grown, 1)), 0.2))
            x = x + 0.2 * block[-1](torch.cat(grown, 1))
        return self.tail(F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False))


class StyleGenerator(nn.Module):
    """CycleGAN's generator: reflected padding, instance normalization, transposed convolutions, tanh."""

    def __init__(self, width: int = 32, depth: int = 4) -> None:
        super().__init__()
        wide = 4 * width
        self.encoder = nn.Sequential(
            nn.ReflectionPad2d(3), nn.Conv2d(3, width, 7), nn.InstanceNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, 2, 1), nn.InstanceNorm2d(2 * width), nn.ReLU(),
            nn.Conv2d(2 * width, wide, 3, 2, 1), nn.InstanceNorm2d(wide), nn.ReLU(),
        )  # fmt: skip
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.ReflectionPad2d(1), nn.Conv2d(wide, wide, 3), nn.InstanceNorm2d(wide, affine=True), nn.ReLU(),
                nn.ReflectionPad2d(1), nn.Conv2d(wide, wide, 3), nn.InstanceNorm2d(wide, affine=True),
            )
            for _ in range(depth)
        )  # fmt: skip
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(wide, 2 * width, 3, 2, 1, 1), nn.InstanceNorm2d(2 * width), nn.ReLU(),
            nn.ConvTranspose2d(2 * width, width, 3, 2, 1, 1), nn.InstanceNorm2d(width), nn.ReLU(),
            nn.ReflectionPad2d(3), nn.Conv2d(width, 3, 7), nn.Tanh(),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.encoder(x)
        for block in self.blocks:
            x = x + block(x)
        return self.decoder(x)


class VolumeSegmenter(nn.Module):
    """A 3-D U-Net with PReLU and group normalization."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.down1, self.down2 = self._block(1, width), self._block(width, 2 * width)
        self.middle = self._block(2 * width, 4 * width)
        self.up2, self.up1 = nn.ConvTranspose3d(4 * width, 2 * width, 2, 2), nn.ConvTranspose3d(2 * width, width, 2, 2)
        self.join2, self.join1 = self._block(4 * width, 2 * width), self._block(2 * width, width)
        self.head = nn.Conv3d(width, 3, 1)

    @staticmethod
    def _block(ic: int, oc: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv3d(ic, oc, 3, padding=1),
            nn.GroupNorm(4, oc),
            nn.PReLU(),
            nn.Conv3d(oc, oc, 3, padding=1),
            nn.PReLU(),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.down1(x)
        b = self.down2(F.max_pool3d(a, 2))
        c = self.middle(F.max_pool3d(b, 2))
        b = self.join2(torch.cat([self.up2(c), b], 1))
        return self.head(self.join1(torch.cat([self.up1(b), a], 1))).softmax(1)


class VideoNet(nn.Module):
    """R(2+1)D: spatial and temporal convolutions in turn, residual sums."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.stem = self._pair(3, width, (1, 2, 2))
        self.blocks = nn.ModuleList(
            nn.Sequential(self._pair(c, d, (s, s, s)), self._pair(d, d, (1, 1, 1)))
            for c, d, s in ((width, width, 1), (width, 2 * width, 2))
        )
        self.shortcut = nn.Sequential(nn.Conv3d(width, 2 * width, 1, 2, bias=False), nn.BatchNorm3d(2 * width))
        self.head = nn.Linear(2 * width, 50)

    @staticmethod
    def _pair(ic: int, oc: int, stride: tuple[int, int, int]) -> nn.Sequential:
        t, h, w = stride
        return nn.Sequential(
            nn.Conv3d(ic, oc, (1, 3, 3), (1, h, w), (0, 1, 1), bias=False), nn.BatchNorm3d(oc), nn.ReLU(),
            nn.Conv3d(oc, oc, (3, 1, 1), (t, 1, 1), (1, 0, 0), bias=False), nn.BatchNorm3d(oc), nn.ReLU(),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = F.relu(x + self.blocks[0](x))
        x = F.relu(self.shortcut(x) + self.blocks[1](x))
        return self.head(x.mean((2, 3, 4)))


class Separator(nn.Module):
    """Conv-TasNet: dilated depthwise convolutions over time, PReLU, masks on an encoder's frames."""

    def __init__(self, width: int = 64, hidden: int = 128, depth: int = 6) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Conv1d(1, width, 16, 8), nn.ConvTranspose1d(width, 1, 16, 8)
        self.norm = nn.GroupNorm(1, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv1d(width, hidden, 1), nn.PReLU(), nn.GroupNorm(1, hidden),
                nn.Conv1d(hidden, hidden, 3, padding=2**i, dilation=2**i, groups=hidden), nn.PReLU(),
                nn.GroupNorm(1, hidden), nn.Conv1d(hidden, width, 1),
            )
            for i in range(depth)
        )  # fmt: skip
        self.mask = nn.Conv1d(width, 2 * width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        frames = self.encoder(x)
        y = self.norm(frames)
        for block in self.blocks:
            y = y + block(y)
        left, right = self.mask(y).sigmoid().chunk(2, 1)
        return torch.cat([self.decoder(frames * left), self.decoder(frames * right)], 1)


class WaveNet(nn.Module):
    """Dilated causal convolutions with gates and summed skips."""

    def __init__(self, width: int = 48, depth: int = 8) -> None:
        super().__init__()
        self.start = nn.Conv1d(1, width, 1)
        self.gates = nn.ModuleList(nn.Conv1d(width, 2 * width, 2, dilation=2**i) for i in range(depth))
        self.residual = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in range(depth))
        self.skip = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in range(depth))
        self.end = nn.Sequential(nn.ReLU(), nn.Conv1d(width, width, 1), nn.ReLU(), nn.Conv1d(width, 64, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.start(x)
        skips: torch.Tensor | float = 0.0
        for i, (gate, residual, skip) in enumerate(zip(self.gates, self.residual, self.skip, strict=True)):
            a, b = gate(F.pad(x, (2**i, 0))).chunk(2, 1)
            y = a.tanh() * b.sigmoid()
            skips = skips + skip(y)
            x = x + residual(y)
        return self.end(skips).log_softmax(1)


class PointNet(nn.Module):
    """Shared layers over points, a learned transform, a maximum over all points."""

    def __init__(self, classes: int = 40) -> None:
        super().__init__()
        self.look = nn.Sequential(self._layer(3, 64), self._layer(64, 128), self._layer(128, 256))
        self.turn = nn.Sequential(nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 9))
        self.first, self.second = self._layer(3, 64), nn.Sequential(self._layer(64, 128), self._layer(128, 512))
        self.head = nn.Sequential(nn.Linear(512, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, classes))

    @staticmethod
    def _layer(ic: int, oc: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv1d(ic, oc, 1), nn.BatchNorm1d(oc), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turn = self.turn(self.look(x).amax(2)).view(-1, 3, 3) + torch.eye(3)
        x = torch.bmm(x.transpose(1, 2), turn).transpose(1, 2)
        return self.head(self.second(self.first(x)).amax(2)).log_softmax(1)


class Detector(nn.Module):
    """DETR's shape: a small backbone, a transformer encoder and decoder, boxes of learned queries."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            _conv(3, 32, 7, 2), nn.MaxPool2d(3, 2, 1), _conv(32, 64, 3, 2), _conv(64, width, 3, 2)
        )
        self.transformer = nn.Transformer(width, 4, 2, 2, 256, batch_first=True)
        self.queries = nn.Parameter(torch.randn(1, 50, width))
        self.rows, self.columns = nn.Parameter(torch.randn(16, width // 2)), nn.Parameter(torch.randn(16, width // 2))
        self.classes, self.boxes = nn.Linear(width, 21), nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.backbone(x)
        h, w = x.shape[2:]
        rows = self.rows[:h, None].expand(h, w, -1)
        places = torch.cat([rows, self.columns[None, :w].expand(h, w, -1)], -1).flatten(0, 1)
        y = self.transformer(x.flatten(2).transpose(1, 2) + places, self.queries.expand(x.shape[0], -1, -1))
        return self.classes(y), self.boxes(y).sigmoid()


class Recurrent(nn.Module):
    """CRNN: convolutions, then a bidirectional LSTM over the columns of the image."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.features = nn.Sequential(
            _conv(1, width), nn.MaxPool2d(2), _conv(width, 2 * width), nn.MaxPool2d(2), _conv(2 * width, 4 * width),
            nn.MaxPool2d((2, 1)), _conv(4 * width, 4 * width), nn.MaxPool2d((2, 1)), nn.Conv2d(4 * width, 4 * width, 2),
        )  # fmt: skip
        self.lstm = nn.LSTM(4 * width, 64, bidirectional=True, batch_first=True)
        self.head = nn.Linear(128, 37)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, _ = self.lstm(self.features(x).squeeze(2).transpose(1, 2))
        return self.head(y).log_softmax(-1)


class Autoencoder(nn.Module):
    """The decoder and encoder of a latent diffusion model: group normalization, SiLU, attention in the middle."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.start = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList([self._block(width), nn.Conv2d(width, 2 * width, 3, 2, 1), self._block(2 * width)])
        self.norm, self.qkv = nn.GroupNorm(8, 2 * width), nn.Conv2d(2 * width, 6 * width, 1)
        self.proj = nn.Conv2d(2 * width, 2 * width, 1)
        self.up = nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(2 * width, width, 3, padding=1))
        self.end = nn.Sequential(nn.GroupNorm(8, width), nn.SiLU(), nn.Conv2d(width, 3, 3, padding=1))

    @staticmethod
    def _block(width: int) -> nn.Sequential:
        half = [nn.GroupNorm(8, width), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1)]
        return nn.Sequential(*half, nn.GroupNorm(8, width), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.start(x)
        x = x + self.down[0](x)
        x = self.down[1](x)
        x = x + self.down[2](x)
        n, c, h, w = x.shape
        q, k, v = self.qkv(self.norm(x)).view(n, 3, 1, c, h * w).transpose(3, 4).unbind(1)
        y = F.scaled_dot_product_attention(q, k, v).transpose(2, 3).reshape(n, c, h, w)
        return self.end(self.up(x + self.proj(y)))


class Recommender(nn.Module):
    """Cross layers and a deep part over dense features; no convolution at all."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.cross = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.deep = nn.Sequential(nn.Linear(width, 512), nn.ReLU(), nn.LayerNorm(512), nn.Linear(512, 128), nn.ReLU())
        self.head = nn.Linear(width + 128, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for layer in self.cross:
            y = x * layer(y) + y
        return self.head(torch.cat([y, self.deep(x)], 1)).sigmoid()


class OctaveLike(nn.Module):
    """FPN: lateral convolutions, sums with upsampled maps, heads shared by all scales."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            nn.Sequential(_conv(a, b, 3, 2), _conv(b, b)) for a, b in ((3, 32), (32, 64), (64, 128), (128, 256))
        )
        self.laterals = nn.ModuleList(nn.Conv2d(c, width, 1) for c in (64, 128, 256))
        self.smooth = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(3))
        self.tower = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1),
            nn.GroupNorm(8, width),
            nn.ReLU(),
            nn.Conv2d(width, 9 * 5, 3, padding=1),
        )

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        scales = []
        for stage in self.stages:
            x = stage(x)
            scales.append(x)
        tops = [self.laterals[2](scales[3])]
        for lateral, scale in ((self.laterals[1], scales[2]), (self.laterals[0], scales[1])):
            side = lateral(scale)
            tops.insert(0, side + F.interpolate(tops[0], size=side.shape[2:], mode="nearest"))
        return [self.tower(smooth(top)) for smooth, top in zip(self.smooth, tops, strict=True)]


class FourierOperator(nn.Module):
    """A Fourier neural operator: products with the lowest frequencies, and pointwise convolutions."""

    def __init__(self, width: int = 32, modes: int = 12, depth: int = 4) -> None:
        super().__init__()
        self.modes = modes
        self.lift, self.project = nn.Conv2d(3, width, 1), nn.Conv2d(width, 1, 1)
        shape = (depth, width, width, modes, modes, 2)
        self.weights = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(2)) / width)
        self.skips = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, low = self.lift(x), self.modes
        for weights, skip in zip(self.weights, self.skips, strict=True):
            seen = torch.fft.rfft2(x)
            kept = torch.zeros_like(seen)
            kept[:, :, :low, :low] = torch.einsum(
                "nihw,iohw->nohw", seen[:, :, :low, :low], torch.view_as_complex(weights)
            )
            x = F.gelu(torch.fft.irfft2(kept, s=x.shape[2:]) + skip(x))
        return self.project(x)


class RunningAttention(nn.Module):
    """Causal linear attention: sums of outer products of keys and values that run over the tokens."""

    def __init__(self, width: int = 128, heads: int = 4, depth: int = 3) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.inputs = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(depth))
        self.outputs = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, into, out in zip(self.norms, self.inputs, self.outputs, strict=True):
            q, k, v = into(norm(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
            q, k = q.softmax(-1), k.exp()
            seen = torch.einsum("nthk,nthv->nthkv", k, v).cumsum(1)
            scale = 1 / torch.einsum("nthk,nthk->nth", q, k.cumsum(1))
            x = x + out(torch.einsum("nthk,nthkv,nth->nthv", q, seen, scale).flatten(2))
        return x


#: what makes each, and the shape of its input
MODULES: Mapping[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "yolo": (Yolo, (1, 3, 256, 256)),
    "convmixer": (ConvMixer, (1, 3, 224, 224)),
    "mlp_mixer": (Mixer, (1, 3, 224, 224)),
    "nafnet": (Restorer, (1, 3, 128, 128)),
    "edsr": (SuperResolution, (1, 3, 96, 96)),
    "esrgan": (DenseResidual, (1, 3, 96, 96)),
    "cyclegan": (StyleGenerator, (1, 3, 128, 128)),
    "unet_3d": (VolumeSegmenter, (1, 1, 32, 48, 48)),
    "r2plus1d": (VideoNet, (1, 3, 8, 64, 64)),
    "conv_tasnet": (Separator, (1, 1, 8000)),
    "wavenet": (WaveNet, (1, 1, 4000)),
    "pointnet": (PointNet, (2, 3, 1024)),
    "detr": (Detector, (1, 3, 256, 256)),
    "crnn": (Recurrent, (1, 1, 32, 128)),
    "latent_autoencoder": (Autoencoder, (1, 3, 64, 64)),
    "deep_cross": (Recommender, (64, 256)),
    "fpn": (OctaveLike, (1, 3, 256, 256)),
    "fourier_operator": (FourierOperator, (1, 3, 64, 64)),
    "running_attention": (RunningAttention, (1, 128, 128)),
}
