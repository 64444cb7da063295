"""Random networks of real sizes: what small tensors never lead to is chosen here.

Convolutions of 16 to 96 channels at 14 to 56 pixels, residual sums, concats, squeeze and excitation, batches of 1 and
2: for these, filtering, sums in place, fused depthwise convolutions, concats in place, slices of a batch, factors in
weights and kernels of our own cost less than what small tensors take. See :mod:`tests.models.fuzz`.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F

from tests.models.fuzz import Draw, Program, Unfit

#: most elements of a tensor
_SIZE = 1_500_000
_WIDTHS = (16, 24, 32, 40, 48, 64, 96)
_PIXELS = (14, 14, 20, 28, 28, 56)

_ACTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": F.relu,
    "relu6": F.relu6,
    "silu": F.silu,
    "gelu": F.gelu,
    "hardswish": F.hardswish,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.1),
    "sigmoid": torch.sigmoid,
    "none": lambda x: x * 1.0,
}


def draw_blocks(seed: int, blocks: int = 5) -> Program:
    """Draw a network of about so many blocks, of others where none of the first fits."""
    name = f"blocks {seed}"
    while True:
        try:
            return _draw(random.Random(name), blocks)
        except Unfit:
            name += " again"


def _draw(rng: random.Random, blocks: int) -> Program:
    d = Draw(rng, largest=_SIZE)
    pixels = rng.choice(_PIXELS)
    shape = [rng.choice([1, 1, 2]), rng.choice([3, *_WIDTHS]), pixels, rng.choice([pixels, pixels, pixels + 3])]
    x = d.input(d.normal(shape))
    act = rng.choice([*_ACTS, "relu", "silu"])  # a network has one, mostly
    for _ in range(blocks):
        kept = (dict(d.values), list(d.inputs), list(d.parameters), list(d.steps))
        try:
            x = rng.choice(_BLOCKS)(d, x, act if rng.random() < 0.8 else rng.choice(list(_ACTS)))
        except Unfit:
            d.values, d.inputs, d.parameters, d.steps = kept
    if rng.random() < 0.5:
        pooled = d.call("mean((2, 3))", lambda x: x.mean((2, 3)), [x])
        d.call("linear", F.linear, [pooled, d.weight(10, d.values[pooled].shape[1]), d.weight(10)])
    return d.program()


# ---------------------------------------------------------------- blocks: a tensor in, a tensor out


def _conv(d: Draw, x: str, oc: int, kernel: tuple[int, int], act: str, stride: int = 1, groups: int = 1) -> str:
    """Add a convolution with what follows it: a bias or a batch normalization, and an activation."""
    ic = d.values[x].shape[1]
    dilation = d.rng.choice([1, 1, 1, 1, 2]) if max(kernel) > 1 else 1
    padding = tuple(dilation * (k // 2) for k in kernel)
    args = [x, d.weight(oc, ic // groups, *kernel), *([d.weight(oc)] if d.rng.random() < 0.5 else [])]
    y = d.call(
        f"conv2d({stride=}, {padding=}, {dilation=}, {groups=})",
        lambda x, w, b=None: F.conv2d(x, w, b, stride, padding, dilation, groups), args,
    )  # fmt: skip
    if d.rng.random() < 0.5:
        y = _norm(d, y)
    return y if act == "none" else d.call(act, _ACTS[act], [y])


def _norm(d: Draw, x: str) -> str:
    c = d.values[x].shape[1]
    args = [x, d.weight(c), d.weight(c, positive=True), d.weight(c, positive=True), d.weight(c)]
    return d.call("batch_norm", lambda x, m, v, w, b: F.batch_norm(x, m, v, w, b), args)


def _width(d: Draw) -> int:
    return d.rng.choice(_WIDTHS)


def _window(d: Draw) -> tuple[int, int]:
    return d.rng.choice([(3, 3), (3, 3), (3, 3), (5, 5), (1, 1), (1, 7), (7, 1)])


def _plain(d: Draw, x: str, act: str) -> str:
    return _conv(d, x, _width(d), _window(d), act, d.rng.choice([1, 1, 1, 2]))


def _residual(d: Draw, x: str, act: str) -> str:
    """Add two or three convolutions beside a shortcut; the sum before or after the activation, or scaled."""
    width = _width(d)
    y = _conv(d, x, width, _window(d), act)
    y = _conv(d, y, width, _window(d), "none")
    shortcut = x if d.values[x].shape[1] == width else _conv(d, x, width, (1, 1), "none")
    scale = d.rng.choice([1.0, 1.0, 0.2])
    pair = [shortcut, y] if d.rng.random() < 0.5 else [y, shortcut]
    total = d.call(f"x + y * {scale}", lambda x, y: x + y * scale if scale != 1.0 else x + y, pair)
    if d.rng.random() < 0.3:
        total = d.call("x + y", torch.add, [total, _conv(d, x, width, (3, 3), "none")])
    return total if d.rng.random() < 0.3 else d.call(act, _ACTS[act], [total])


def _branches(d: Draw, x: str, act: str) -> str:
    """Add an inception module: branches of several windows, and a pooling, in a concat."""
    names = [_conv(d, x, _width(d), _window(d), act) for _ in range(d.rng.choice([2, 2, 3]))]
    if d.rng.random() < 0.5:
        pool = d.rng.choice([F.max_pool2d, F.avg_pool2d])
        names.append(d.call(f"{pool.__name__}(3, 1, 1)", lambda x: pool(x, 3, 1, 1), [x]))
    if d.rng.random() < 0.2:
        names.append(x)
    d.rng.shuffle(names)
    return d.call("cat(1)", lambda *x: torch.cat(x, 1), names)


def _dense(d: Draw, x: str, act: str) -> str:
    """Add a dense block: each convolution reads the concat of all before."""
    growth = d.rng.choice([8, 16, 24, 32])
    for _ in range(d.rng.choice([2, 3])):
        normal = d.call(act, _ACTS[act], [_norm(d, x)]) if d.rng.random() < 0.6 else x
        x = d.call("cat(1)", lambda *x: torch.cat(x, 1), [x, _conv(d, normal, growth, (3, 3), "none")])
    return x


def _excitation(d: Draw, x: str, act: str) -> str:
    """Add squeeze and excitation, with a pointwise convolution behind it, mostly."""
    c = d.values[x].shape[1]
    y = d.call("mean((2, 3), True)", lambda x: x.mean((2, 3), True), [x])
    y = _conv(d, _conv(d, y, max(c // 4, 8), (1, 1), act), c, (1, 1), "none")
    gate = d.rng.choice(["sigmoid", "hardsigmoid"])
    y = d.call(gate, torch.sigmoid if gate == "sigmoid" else F.hardsigmoid, [y])
    x = d.call("x * y", torch.mul, [x, y] if d.rng.random() < 0.7 else [y, x])
    return _conv(d, x, _width(d), (1, 1), "none") if d.rng.random() < 0.7 else x


def _inverted(d: Draw, x: str, act: str) -> str:
    """Add an inverted residual: wider, depthwise, squeezed, narrower."""
    c = d.values[x].shape[1]
    wide = c * d.rng.choice([1, 2, 3])
    stride = d.rng.choice([1, 1, 2])
    y = _conv(d, _conv(d, x, wide, (1, 1), act), wide, d.rng.choice([(3, 3), (5, 5)]), act, stride, wide)
    if d.rng.random() < 0.5:
        y = _excitation(d, y, act)
    y = _conv(d, y, c, (1, 1), "none")
    return d.call("x + y", torch.add, [x, y]) if stride == 1 else y


def _separable(d: Draw, x: str, act: str) -> str:
    y = _conv(d, x, d.values[x].shape[1], (3, 3), "none", d.rng.choice([1, 2]), d.values[x].shape[1])
    return _conv(d, y, _width(d), (1, 1), act)


def _grouped(d: Draw, x: str, act: str) -> str:
    """Add ResNeXt's grouped convolution, or ShuffleNet's, whose channels are mixed."""
    c, width = d.values[x].shape[1], _width(d)
    groups = d.rng.choice([g for g in (2, 4, 8, 16) if c % g == 0 and width % g == 0] or [1])
    y = _conv(d, x, width, (3, 3), act, groups=groups)
    if d.rng.random() < 0.5:
        return y

    def shuffled(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(1, (groups, -1)).transpose(1, 2).flatten(1, 2)

    return d.call(f"shuffle({groups})", shuffled, [y])


def _halves(d: Draw, x: str, act: str) -> str:
    """Split the channels, work on one half, join them."""
    c = d.values[x].shape[1]
    if c % 2:
        raise Unfit
    d.call("chunk(2, 1)", lambda x: x.chunk(2, 1), [x])
    left, right = d.steps[-1].results
    right = _conv(d, _conv(d, right, c // 2, (1, 1), act), c // 2, (3, 3), act)
    return d.call("cat(1)", lambda *x: torch.cat(x, 1), [left, right])


def _pooled(d: Draw, x: str, act: str) -> str:
    if min(d.values[x].shape[2:]) < 6:
        raise Unfit
    pool = d.rng.choice([F.max_pool2d, F.avg_pool2d])
    return d.call(f"{pool.__name__}(2)", lambda x: pool(x, 2), [x])


def _ladder(d: Draw, x: str, act: str) -> str:
    """Add a step of a U: down, a convolution, up again, joined with what was there."""
    h, w = d.values[x].shape[2:]
    y = _conv(d, _pooled(d, x, act), _width(d), (3, 3), act)
    mode = d.rng.choice(["nearest", "bilinear"])
    y = d.call(f"interpolate({mode})", lambda y: F.interpolate(y, (h, w), mode=mode), [y])
    if d.rng.random() < 0.5:
        return d.call("cat(1)", lambda *x: torch.cat(x, 1), [y, x])
    return d.call("x + y", torch.add, [_conv(d, x, d.values[y].shape[1], (1, 1), "none"), y])


_BLOCKS: tuple[Callable[[Draw, str, str], str], ...] = (
    *(_plain, _residual, _residual, _residual, _branches, _branches, _dense, _excitation, _inverted, _separable),
    *(_grouped, _halves, _pooled, _ladder),
)
