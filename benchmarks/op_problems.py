"""Problems that networks really have, as PyTorch writes them: name -> (function, shapes of its operands).

Each is a small network of one op (or of an op and what usually stands beside it), in sizes that are neither tiny nor
powers of two only. :mod:`benchmarks.bench_ops` asks which implementations they get, and times them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

Problem = tuple[Callable[..., object], tuple[tuple[int, ...], ...]]

IMAGE = (2, 64, 28, 28)
TOKENS = (2, 196, 192)
SCORES = (2, 6, 49, 49)
SIGNAL = (2, 64, 200)
VIDEO = (1, 32, 8, 28, 28)


def problems() -> dict[str, Problem]:
    """Return all problems by name."""
    return {
        **_eltwise(),
        **_prelu(),
        **_reductions(),
        **_binaries(),
        **_pooling(),
        **_normalizations(),
        **_softmax(),
        **_resampling(),
        **_moves(),
        **_products(),
    }


def _eltwise() -> dict[str, Problem]:
    functions = (
        *("relu", "relu6", "leaky_relu", "elu", "selu", "celu", "gelu", "silu", "mish", "softplus", "softsign"),
        *("hardswish", "hardsigmoid", "hardtanh", "hardshrink", "softshrink", "tanhshrink", "logsigmoid", "threshold"),
    )
    options: dict[str, tuple[float, ...]] = {"threshold": (0.1, 20.0)}
    found: dict[str, Problem] = {name: (_named(F, name, *options.get(name, ())), (IMAGE,)) for name in functions}
    plain = ("exp", "log", "sqrt", "rsqrt", "abs", "neg", "square", "reciprocal", "sin", "cos", "erf", "floor", "sign")
    found |= {name: (_named(torch, name), (IMAGE,)) for name in plain}
    found["gelu tanh"] = (lambda x: F.gelu(x, approximate="tanh"), (TOKENS,))
    found["clamp"] = (lambda x: x.clamp(-1, 1), (IMAGE,))
    found["pow 3"] = (lambda x: x**3, (IMAGE,))
    found["quick gelu"] = (lambda x: x * torch.sigmoid(1.702 * x), (TOKENS,))
    found["glu"] = (lambda x: F.glu(x, 1), (SIGNAL,))
    found["conv, gelu"] = (_after_conv(F.gelu), (IMAGE,))
    found["conv, selu"] = (_after_conv(F.selu), (IMAGE,))
    return found


def _named(module: object, name: str, *options: float) -> Callable[[torch.Tensor], object]:
    function = getattr(module, name)
    return lambda x: function(x, *options)


def _after_conv(function: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(64, 64, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return function(self.conv(x))

    return Net()


def _prelu() -> dict[str, Problem]:
    def slopes(count: int) -> nn.PReLU:
        module = nn.PReLU(count)
        nn.init.uniform_(module.weight, -0.1, 0.5)
        return module

    return {
        "prelu, one slope": (slopes(1), (IMAGE,)),
        "prelu, of each channel": (slopes(64), (IMAGE,)),
        "prelu, of each channel, 1-D": (slopes(64), (SIGNAL,)),
        "conv, prelu, one slope": (nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), slopes(1)), (IMAGE,)),
        "conv, prelu, of each channel": (nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), slopes(64)), (IMAGE,)),
        "prelu, slopes computed": (lambda x, w: F.prelu(x, w), (IMAGE, (64,))),
    }


def _reductions() -> dict[str, Problem]:
    axes = {"channels": (1,), "space": (2, 3), "width": (3,), "height": (2,), "all but batch": (1, 2, 3), "batch": (0,)}
    axes |= {"all": (0, 1, 2, 3)}
    functions = {
        "mean": lambda x, a: x.mean(a, keepdim=True),
        "sum": lambda x, a: x.sum(a),
        "amax": lambda x, a: x.amax(a, keepdim=True),
        "amin": lambda x, a: x.amin(a),
        "norm": lambda x, a: torch.linalg.vector_norm(x, dim=a, keepdim=True),
        "var": lambda x, a: x.var(a, keepdim=True),
        "logsumexp": lambda x, a: x.logsumexp(a),
    }
    found: dict[str, Problem] = {
        f"{name} over {which}": (lambda x, f=function, a=some: f(x, a), (IMAGE,))
        for name, function in functions.items()
        for which, some in axes.items()
    }
    tokens = {"tokens": 1, "features": 2}
    found |= {
        f"{name} over {which} of rows": (lambda x, f=function, a=axis: f(x, (a,)), (TOKENS,))
        for name, function in functions.items()
        for which, axis in tokens.items()
    }
    found["max with indices"] = (lambda x: x.max(1), (IMAGE,))
    found["argmax"] = (lambda x: x.argmax(1), (IMAGE,))
    found["normalize"] = (lambda x: F.normalize(x, dim=1), (IMAGE,))
    found["split attention's sum"] = (lambda x: x.view(2, 2, 32, 28, 28).sum(1), (IMAGE,))
    found["mean over space of a video"] = (lambda x: x.mean((2, 3, 4)), (VIDEO,))
    found["mean over time of a video"] = (lambda x: x.mean(2), (VIDEO,))
    found["prod over channels"] = (lambda x: x.prod(1), (IMAGE,))
    found["statistics, 1-D"] = (lambda x: torch.cat([x.mean(2), x.std(2)], 1), (SIGNAL,))
    return found


def _binaries() -> dict[str, Problem]:
    n, c, h, w = IMAGE
    patterns = {
        "each channel of each image": (n, c, 1, 1),
        "each channel": (c, 1, 1),
        "each place of each image": (n, 1, h, w),
        "each place": (h, w),
        "each channel and place": (c, h, w),
        "each image": (n, 1, 1, 1),
        "each row": (h, 1),
        "each column": (w,),
        "one number": (1,),
    }
    functions = {"add": torch.add, "mul": torch.mul, "sub": torch.sub, "div": torch.div, "maximum": torch.maximum}
    found: dict[str, Problem] = {
        f"{name}, {which}": (lambda x, y, f=function: f(x, y), (IMAGE, dims))
        for name, function in functions.items()
        for which, dims in patterns.items()
    }
    found |= {
        "add, scores and mask [1, 1, L, L]": (torch.add, (SCORES, (1, 1, 49, 49))),
        "add, scores and mask [L, L]": (torch.add, (SCORES, (49, 49))),
        "add, scores and mask [B, 1, 1, L]": (torch.add, (SCORES, (2, 1, 1, 49))),
        "add, scores and mask [B, 1, L, L]": (torch.add, (SCORES, (2, 1, 49, 49))),
        "add, scores and position bias [1, H, L, L]": (torch.add, (SCORES, (1, 6, 49, 49))),
        "add, scores and mask [H, 1, 1]": (torch.add, (SCORES, (6, 1, 1))),
        "mul, scores [N, H, L, 1]": (torch.mul, (SCORES, (2, 6, 49, 1))),
        "windows' mask": (
            lambda x, m: (x.view(2, 4, 6, 49, 49) + m.view(1, 4, 1, 49, 49)).view(8, 6, 49, 49),
            ((8, 6, 49, 49), (4, 49, 49)),
        ),
        "add, tokens and positions": (torch.add, (TOKENS, TOKENS[1:])),
        "mul, tokens and features": (torch.mul, (TOKENS, TOKENS[2:])),
        "mul, tokens [N, L, 1]": (torch.mul, (TOKENS, (2, 196, 1))),
        "add, tokens [N, 1, C]": (torch.add, (TOKENS, (2, 1, 192))),
        "mul, signal [N, C, 1]": (torch.mul, (SIGNAL, (2, 64, 1))),
        "mul, signal [C, 1]": (torch.mul, (SIGNAL, (64, 1))),
        "mul, signal [N, 1, L]": (torch.mul, (SIGNAL, (2, 1, 200))),
        "mul, video, each channel": (torch.mul, (VIDEO, (1, 32, 1, 1, 1))),
        "mul, video, each place": (torch.mul, (VIDEO, (1, 1, 8, 28, 28))),
        "outer product": (torch.mul, ((2, 64, 28, 1), (2, 64, 1, 28))),
        "outer product of channels and places": (torch.mul, ((2, 64, 1, 1), (2, 1, 28, 28))),
        "where mask": (lambda x, m: torch.where(m > 0, x, torch.full_like(x, -1e4)), (SCORES, (1, 1, 49, 49))),
        "masked_fill": (lambda x, m: x.masked_fill(m > 0, -1e4), (SCORES, (49, 49))),
        "sigmoid gate, each place": (lambda x, y: x * torch.sigmoid(y), (IMAGE, (2, 1, 28, 28))),
        "lerp": (lambda x, y: x * y + x * (1 - y), (IMAGE, (2, 64, 1, 1))),
        "one minus": (lambda x: 1 - x, (IMAGE,)),
        "sum of four": (lambda *x: x[0] + x[1] + x[2] + x[3], (IMAGE,) * 4),
        "mean of four": (lambda *x: torch.stack(x).mean(0), (IMAGE,) * 4),
        "conv, add one, mul": (_after_conv(lambda x: (x + 1) * x), (IMAGE,)),
    }
    return found


def _pooling() -> dict[str, Problem]:
    odd = (2, 64, 29, 27)
    return {
        "max_pool2d 3/2": (lambda x: F.max_pool2d(x, 3, 2, 1), (IMAGE,)),
        "max_pool2d ceil": (lambda x: F.max_pool2d(x, 3, 2, ceil_mode=True), (IMAGE,)),
        "max_pool2d 5/1 (pyramid)": (lambda x: F.max_pool2d(x, 5, 1, 2), (IMAGE,)),
        "max_pool2d 13/1 (pyramid)": (lambda x: F.max_pool2d(x, 13, 1, 6), (IMAGE,)),
        "max_pool2d dilated": (lambda x: F.max_pool2d(x, 3, 1, 1, dilation=2), (IMAGE,)),
        "max_pool2d global": (lambda x: F.max_pool2d(x, (28, 28)), (IMAGE,)),
        "max_pool2d with indices": (lambda x: F.max_pool2d(x, 2, return_indices=True), (IMAGE,)),
        "max_pool1d": (lambda x: F.max_pool1d(x, 2), (SIGNAL,)),
        "max_pool3d": (lambda x: F.max_pool3d(x, (1, 3, 3), (1, 2, 2), (0, 1, 1)), (VIDEO,)),
        "avg_pool2d": (lambda x: F.avg_pool2d(x, 3, 2, 1), (IMAGE,)),
        "avg_pool2d without padding": (lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False), (IMAGE,)),
        "avg_pool2d ceil": (lambda x: F.avg_pool2d(x, 2, 2, ceil_mode=True), (odd,)),
        "avg_pool2d ceil, padded": (lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True), (IMAGE,)),
        "avg_pool2d divisor": (lambda x: F.avg_pool2d(x, 2, divisor_override=1), (IMAGE,)),
        "avg_pool1d": (lambda x: F.avg_pool1d(x, 4, 2, 1), (SIGNAL,)),
        "avg_pool3d": (lambda x: F.avg_pool3d(x, 2), (VIDEO,)),
        "adaptive_avg_pool2d to 1": (lambda x: F.adaptive_avg_pool2d(x, 1), (IMAGE,)),
        "adaptive_avg_pool2d to 7": (lambda x: F.adaptive_avg_pool2d(x, 7), (IMAGE,)),
        "adaptive_avg_pool2d to 6": (lambda x: F.adaptive_avg_pool2d(x, 6), (IMAGE,)),
        "adaptive_avg_pool2d to 3": (lambda x: F.adaptive_avg_pool2d(x, 3), (IMAGE,)),
        "adaptive_avg_pool2d, a row": (lambda x: F.adaptive_avg_pool2d(x, (1, None)), (IMAGE,)),
        "adaptive_avg_pool2d enlarging": (lambda x: F.adaptive_avg_pool2d(x, 40), (IMAGE,)),
        "adaptive_max_pool2d to 1": (lambda x: F.adaptive_max_pool2d(x, 1), (IMAGE,)),
        "adaptive_max_pool2d to 6": (lambda x: F.adaptive_max_pool2d(x, 6), (IMAGE,)),
        "adaptive_avg_pool1d to 1": (lambda x: F.adaptive_avg_pool1d(x, 1), (SIGNAL,)),
        "adaptive_avg_pool3d to 1": (lambda x: F.adaptive_avg_pool3d(x, 1), (VIDEO,)),
        "adaptive_max_pool1d to 1": (lambda x: F.adaptive_max_pool1d(x, 1), (SIGNAL,)),
        "lp_pool2d": (lambda x: F.lp_pool2d(x, 2.0, 2), (IMAGE,)),
        "max_unpool2d": (lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2), (IMAGE,)),
        "avg_pool2d, relu": (lambda x: F.relu(F.avg_pool2d(x, 2)), (IMAGE,)),
        "max_pool2d, add": (lambda x, y: F.max_pool2d(x, 2) + y, (IMAGE, (2, 64, 14, 14))),
    }


class _ChannelsNorm(nn.Module):
    """Layer normalization over the channels of [N, C, …], as ConvNeXt's stem and speech models write it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x.movedim(1, -1)).movedim(-1, 1)


class _ManualNorm(nn.Module):
    """The same, written with means."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(channels)), nn.Parameter(torch.rand(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean(1, keepdim=True)
        variance = (x - mean).pow(2).mean(1, keepdim=True)
        y = (x - mean) / torch.sqrt(variance + 1e-6)
        return self.weight[:, None, None] * y + self.bias[:, None, None]


class _RmsNorm(nn.Module):
    """Root-mean-square normalization as language models write it."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def _normalizations() -> dict[str, Problem]:
    return {
        "layer_norm": (nn.LayerNorm(192), (TOKENS,)),
        "layer_norm without affine": (nn.LayerNorm(192, elementwise_affine=False), (TOKENS,)),
        "layer_norm over three axes": (nn.LayerNorm((64, 28, 28)), (IMAGE,)),
        "layer_norm over two axes": (nn.LayerNorm((28, 28)), (IMAGE,)),
        "layer_norm over channels": (_ChannelsNorm(64), (IMAGE,)),
        "layer_norm over channels, 1-D": (_ChannelsNorm(64), (SIGNAL,)),
        "layer_norm over channels, by means": (_ManualNorm(64), (IMAGE,)),
        "rms_norm": (_RmsNorm(192), (TOKENS,)),
        "torch's rms_norm": (nn.RMSNorm(192), (TOKENS,)),
        "group_norm 8": (nn.GroupNorm(8, 64), (IMAGE,)),
        "group_norm 1": (nn.GroupNorm(1, 64), (IMAGE,)),
        "group_norm, silu": (nn.Sequential(nn.GroupNorm(8, 64), nn.SiLU()), (IMAGE,)),
        "group_norm 8, 1-D": (nn.GroupNorm(8, 64), (SIGNAL,)),
        "instance_norm": (nn.InstanceNorm2d(64, affine=True), (IMAGE,)),
        "instance_norm without affine": (nn.InstanceNorm2d(64), (IMAGE,)),
        "instance_norm, 1-D": (nn.InstanceNorm1d(64, affine=True), (SIGNAL,)),
        "batch_norm": (nn.BatchNorm2d(64).eval(), (IMAGE,)),
        "batch_norm, 1-D": (nn.BatchNorm1d(64).eval(), (SIGNAL,)),
        "batch_norm of rows": (nn.BatchNorm1d(64).eval(), ((32, 64),)),
        "batch_norm, 3-D": (nn.BatchNorm3d(32).eval(), (VIDEO,)),
        "local_response_norm": (nn.LocalResponseNorm(5), (IMAGE,)),
    }


def _softmax() -> dict[str, Problem]:
    return {
        "softmax over the last axis": (lambda x: x.softmax(-1), (SCORES,)),
        "softmax over channels": (lambda x: x.softmax(1), (IMAGE,)),
        "softmax over height": (lambda x: x.softmax(2), (IMAGE,)),
        "softmax over space": (lambda x: x.flatten(2).softmax(2).view_as(x), (IMAGE,)),
        "softmax of scores and mask": (lambda x, m: (x + m).softmax(-1), (SCORES, (2, 1, 1, 49))),
        "softmax over heads": (lambda x: x.view(2, 2, 32).softmax(1), ((2, 64),)),
        "log_softmax": (lambda x: x.log_softmax(1), ((8, 1000),)),
        "attention": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v), ((2, 6, 49, 32),) * 3),
        "attention with mask": (
            lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m),
            (*((2, 6, 49, 32),) * 3, (2, 1, 1, 49)),
        ),
        "attention, causal": (
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
            ((2, 6, 49, 32),) * 3,
        ),
    }


def _resampling() -> dict[str, Problem]:
    def resized(**options: object) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: F.interpolate(x, **options)

    return {
        "nearest x2": (resized(scale_factor=2.0), (IMAGE,)),
        "nearest to 41": (resized(size=(41, 41)), (IMAGE,)),
        "bilinear x2": (resized(scale_factor=2.0, mode="bilinear"), (IMAGE,)),
        "bilinear x2, corners": (resized(scale_factor=2.0, mode="bilinear", align_corners=True), (IMAGE,)),
        "bilinear to 41": (resized(size=(41, 41), mode="bilinear"), (IMAGE,)),
        "bilinear from 1": (resized(size=(28, 28), mode="bilinear", align_corners=True), ((2, 64, 1, 1),)),
        "bicubic x2": (resized(scale_factor=2.0, mode="bicubic"), (IMAGE,)),
        "area": (resized(size=(14, 14), mode="area"), (IMAGE,)),
        "nearest x2, 1-D": (resized(scale_factor=2.0), (SIGNAL,)),
        "linear x2, 1-D": (resized(scale_factor=2.0, mode="linear"), (SIGNAL,)),
        "trilinear x2": (resized(scale_factor=2.0, mode="trilinear"), (VIDEO,)),
        "nearest x2, add": (lambda x, y: F.interpolate(x, scale_factor=2.0) + y, (IMAGE, (2, 64, 56, 56))),
        "bilinear x2, add": (
            lambda x, y: F.interpolate(x, scale_factor=2.0, mode="bilinear") + y,
            (IMAGE, (2, 64, 56, 56)),
        ),
    }


def _moves() -> dict[str, Problem]:
    def shuffled(x: torch.Tensor) -> torch.Tensor:
        n, c, h, w = x.shape
        return x.view(n, 4, c // 4, h, w).transpose(1, 2).reshape(n, c, h, w)

    def windows(x: torch.Tensor) -> torch.Tensor:
        return x.view(2, 4, 7, 4, 7, 64).permute(0, 1, 3, 2, 4, 5).reshape(-1, 49, 64)

    return {
        "channel shuffle": (shuffled, (IMAGE,)),
        "channel_shuffle": (lambda x: F.channel_shuffle(x, 4), (IMAGE,)),
        "pixel_shuffle": (lambda x: F.pixel_shuffle(x, 2), (IMAGE,)),
        "pixel_unshuffle": (lambda x: F.pixel_unshuffle(x, 2), (IMAGE,)),
        "space to depth": (
            lambda x: torch.cat([x[..., ::2, ::2], x[..., 1::2, ::2], x[..., ::2, 1::2], x[..., 1::2, 1::2]], 1),
            (IMAGE,),
        ),
        "windows": (windows, ((2, 28, 28, 64),)),
        "roll": (lambda x: torch.roll(x, (-3, -3), (1, 2)), ((2, 28, 28, 64),)),
        "pad reflect": (lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"), (IMAGE,)),
        "pad replicate": (lambda x: F.pad(x, (1, 1, 1, 1), mode="replicate"), (IMAGE,)),
        "pad zeros": (lambda x: F.relu(F.pad(x, (0, 0, 0, 0, 8, 8))), (IMAGE,)),
        "concat channels": (lambda x, y: torch.cat([x, y], 1), (IMAGE, (2, 17, 28, 28))),
        "concat width": (lambda x, y: torch.cat([x, y], 3), (IMAGE, (2, 64, 28, 3))),
        "concat class token": (lambda x, y: torch.cat([y, x], 1), (TOKENS, (2, 1, 192))),
        "stack": (lambda x, y: torch.stack([x, y], 1), (IMAGE, IMAGE)),
        "flip": (lambda x: x.flip(3), (IMAGE,)),
        "tile": (lambda x: x.repeat(1, 1, 2, 2), (IMAGE,)),
        "unfold": (lambda x: F.unfold(x, 3, padding=1), (IMAGE,)),
        "fold": (lambda x: F.fold(x, (28, 28), 2, stride=2), ((2, 256, 196),)),
        "cumsum": (lambda x: x.cumsum(2), (SIGNAL,)),
        "embedding": (lambda w: F.embedding(torch.arange(64).view(2, 32), w), ((1000, 192),)),
        "gather": (lambda x: x.gather(1, torch.zeros(2, 10, 192, dtype=torch.int64)), (TOKENS,)),
        "index_select": (lambda x: x.index_select(1, torch.arange(0, 64, 2)), (IMAGE,)),
        "grid_sample": (lambda x, g: F.grid_sample(x, g, align_corners=False), (IMAGE, (2, 14, 14, 2))),
    }


def _products() -> dict[str, Problem]:
    return {
        "deconv 2/2": (nn.ConvTranspose2d(64, 32, 2, 2), (IMAGE,)),
        "deconv 4/2": (nn.ConvTranspose2d(64, 32, 4, 2, 1), (IMAGE,)),
        "deconv, output padding": (nn.ConvTranspose2d(64, 32, 3, 2, 1, 1), (IMAGE,)),
        "deconv, groups": (nn.ConvTranspose2d(64, 32, 3, 2, 1, 1, groups=4), (IMAGE,)),
        "deconv, depthwise": (nn.ConvTranspose2d(64, 64, 4, 2, 1, groups=64), (IMAGE,)),
        "deconv, dilated": (nn.ConvTranspose2d(64, 32, 3, 1, 1, dilation=2), (IMAGE,)),
        "deconv, relu": (nn.Sequential(nn.ConvTranspose2d(64, 32, 4, 2, 1), nn.ReLU()), (IMAGE,)),
        "deconv, 1-D": (nn.ConvTranspose1d(64, 32, 4, 2, 1), (SIGNAL,)),
        "deconv, 3-D": (nn.ConvTranspose3d(32, 16, 2, 2), (VIDEO,)),
        "conv, 1-D": (nn.Conv1d(64, 64, 5, padding=2), (SIGNAL,)),
        "conv, 1-D, depthwise": (nn.Conv1d(64, 64, 31, padding=15, groups=64), (SIGNAL,)),
        "conv, 1-D, dilated": (nn.Conv1d(64, 64, 3, padding=4, dilation=4), (SIGNAL,)),
        "conv, 3-D": (nn.Conv3d(32, 32, (3, 3, 3), padding=1), (VIDEO,)),
        "conv, 3-D, (1, 3, 3)": (nn.Conv3d(32, 32, (1, 3, 3), padding=(0, 1, 1)), (VIDEO,)),
        "conv, 3-D, depthwise": (nn.Conv3d(32, 32, 3, padding=1, groups=32), (VIDEO,)),
        "conv, depthwise, 7x7": (nn.Conv2d(64, 64, 7, padding=3, groups=64), (IMAGE,)),
        "conv, depthwise, dilated": (nn.Conv2d(64, 64, 3, padding=4, dilation=4, groups=64), (IMAGE,)),
        "conv, asymmetric": (nn.Conv2d(64, 64, (5, 1), padding=(2, 0)), (IMAGE,)),
        "conv, dilated": (nn.Conv2d(64, 64, 3, padding=2, dilation=2), (IMAGE,)),
        "conv, odd groups": (nn.Conv2d(60, 60, 3, padding=1, groups=5), ((2, 60, 28, 28),)),
        "conv, multiplied depthwise": (nn.Conv2d(64, 128, 3, padding=1, groups=64), (IMAGE,)),
        "linear": (nn.Linear(192, 100), (TOKENS,)),
        "linear of one row": (nn.Linear(192, 100), ((1, 192),)),
        "bmm": (torch.matmul, ((12, 49, 32), (12, 32, 49))),
        "matmul, one row": (torch.matmul, ((12, 1, 32), (12, 32, 49))),
        "matmul, vector": (torch.matmul, ((64, 32), (32,))),
        "matmul, broadcast batch": (torch.matmul, ((2, 6, 49, 32), (1, 6, 32, 49))),
        "matmul, broadcast matrix": (torch.matmul, ((2, 6, 49, 32), (32, 16))),
        "matmul, first broadcasts": (torch.matmul, ((49, 32), (2, 32, 16))),
        "einsum nhwc,ck->nkhw": (lambda x, w: torch.einsum("nhwc,ck->nkhw", x, w), ((2, 28, 28, 64), (64, 32))),
        "einsum bhcl,bhc->bhl": (lambda x, w: torch.einsum("bhcl,bhc->bhl", x, w), ((2, 6, 32, 49), (2, 6, 32))),
        "bilinear": (nn.Bilinear(32, 32, 16), ((8, 32), (8, 32))),
        "gru": (nn.GRU(32, 32, batch_first=True), ((2, 20, 32),)),
        "lstm": (nn.LSTM(32, 32, batch_first=True), ((2, 20, 32),)),
    }
