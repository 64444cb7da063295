"""The calls of random models: each draws its own shapes and attributes. See :mod:`tests.models.fuzz`."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from tests.models.fuzz import Draw, Unfit

#: name -> (what draws and adds the call, how often relative to the others)
CALLS: dict[str, tuple[Callable[[Draw], object], int]] = {}


def call(weight: int = 3) -> Callable[[Callable[[Draw], object]], Callable[[Draw], object]]:
    def register(function: Callable[[Draw], object]) -> Callable[[Draw], object]:
        CALLS[function.__name__] = (function, weight)
        return function

    return register


# ---------------------------------------------------------------- compute


def groups_of(d: Draw, *sizes: int) -> int:
    return d.rng.choice([g for g in (1, 1, 1, 2, 3, 4, 8, *sizes) if g and all(size % g == 0 for size in sizes)])


@call(10)
def conv(d: Draw) -> object:
    x = d.pick((3, 4, 4, 4, 5), lambda t: t.shape[1] > 0)
    shape, rng = d.values[x].shape, d.rng
    n, c = len(shape) - 2, shape[1]
    out = rng.choice([1, 2, 3, 4, 8, 16, 17, 24, 32, c])
    g = groups_of(d, c, out)
    w = d.weight(out, c // g, *(rng.choice([1, 1, 2, 3, 3, 5]) for _ in range(n)))
    kernel = d.values[w].shape[2:]
    dilation = tuple(rng.choice([1, 1, 1, 2]) for _ in range(n))
    stride = tuple(rng.choice([1, 1, 1, 2, 3]) for _ in range(n))
    padding: object = tuple(rng.choice([0, 1, k // 2, k]) for k in kernel)
    if rng.random() < 0.15:
        padding = rng.choice(["same", "valid"])
        stride = (1,) * n if padding == "same" else stride
    args = [x, w] + ([d.weight(out)] if rng.random() < 0.6 else [])
    if rng.random() < 0.1:
        mode = rng.choice(["reflect", "circular", "replicate", "constant"])
        pads = [rng.choice([0, 1, 1, 2]) for _ in range(2 * n)]
        args[0] = d.call(f"F.pad({pads}, {mode})", lambda x: F.pad(x, pads, mode), [x])
    function = (F.conv1d, F.conv2d, F.conv3d)[n - 1]
    text = f"conv{n}d(stride={stride}, padding={padding!r}, dilation={dilation}, groups={g})"
    return d.call(
        text, lambda x, w, b=None: function(x, w, b, stride, padding, dilation, g), args
    )  # fmt: skip


@call(5)
def conv_transpose(d: Draw) -> object:
    x = d.pick((3, 4, 4, 5), lambda t: t.shape[1] > 0)
    shape, rng = d.values[x].shape, d.rng
    n, c = len(shape) - 2, shape[1]
    g = groups_of(d, c)
    per = rng.choice([1, 2, 3, 8, 16])
    w = d.weight(c, per, *(rng.choice([1, 2, 3, 4]) for _ in range(n)))
    stride = tuple(rng.choice([1, 2, 3]) for _ in range(n))
    dilation = tuple(rng.choice([1, 1, 2]) for _ in range(n))
    extra = tuple(rng.randrange(max(a, b)) for a, b in zip(stride, dilation, strict=True))
    padding = tuple(rng.choice([0, 0, 1]) for _ in range(n))
    args = [x, w] + ([d.weight(per * g)] if rng.random() < 0.6 else [])
    function = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[n - 1]
    text = f"conv_transpose{n}d(stride={stride}, padding={padding}, output_padding={extra}, groups={g}, {dilation=})"
    made = d.call(text, lambda x, w, b=None: function(x, w, b, stride, padding, extra, g, dilation), args)
    if 0 in d.values[made].shape[2:]:
        raise Unfit  # PyTorch refuses that or not, as the kernel it picks; so does the import
    return made


@call(8)
def linear(d: Draw) -> object:
    x = d.pick(range(1, 6), lambda t: t.shape[-1] > 0)
    out = d.rng.choice([1, 3, 8, 16, 17, 32])
    w = d.weight(out, d.values[x].shape[-1])
    args = [x, w] + ([d.weight(out)] if d.rng.random() < 0.6 else [])
    return d.call("linear()", F.linear, args)


@call(3)
def flatten_linear(d: Draw) -> object:
    x = d.pick(range(2, 6))
    f = d.call("flatten(1)", lambda x: x.flatten(1), [x])
    return d.call("linear()", F.linear, [f, d.weight(8, d.values[f].shape[1]), d.weight(8)])


@call(6)
def matmul(d: Draw) -> object:
    x, rng = d.pick(range(1, 6), lambda t: t.shape[-1] > 0), d.rng
    a = d.values[x]
    kind = rng.randrange(6)
    if kind == 0 and a.ndim >= 2:
        return d.call("x @ x.mT", lambda x: x @ x.mT, [x])
    if kind == 1 and a.ndim >= 2:
        other = d.pick(range(2, 6), lambda t: t.shape[-2] == a.shape[-1])
        return d.call("x @ y", torch.matmul, [x, other])
    if kind == 2:
        return d.call("x @ v", torch.matmul, [x, d.weight(a.shape[-1])])
    if kind == 3 and a.ndim >= 2:
        lead = [s if rng.random() < 0.5 else 1 for s in a.shape[rng.randrange(a.ndim - 1) : -2]]
        y = d.weight(*lead, a.shape[-1], rng.choice([1, 4, 16, 17]))
        return d.call("x @ w", torch.matmul, [x, y])
    if kind == 4 and a.ndim >= 2:
        lead = [s if rng.random() < 0.5 else 1 for s in a.shape[:-2]]
        y = d.weight(*lead, rng.choice([1, 4, 16, 17]), a.shape[-2])
        return d.call("w @ x", lambda x, y: y @ x, [x, y])
    y = d.weight(rng.choice([1, 4, 16, 17]), a.shape[-1])
    return d.call("x @ w.T", lambda x, y: x @ y.T, [x, y])


@call(3)
def products(d: Draw) -> object:
    rng = d.rng
    x = d.pick((3,), lambda t: t.numel() > 0)
    b, m, k = d.values[x].shape
    n = rng.choice([1, 3, 16])
    kind = rng.randrange(6)
    if kind == 0:
        return d.call("bmm", torch.bmm, [x, d.weight(b, k, n)])
    if kind == 1:
        alpha, beta = rng.choice([1, 0.5, 2]), rng.choice([1, 0.5, 0])
        shape = [rng.choice([1, b]), rng.choice([1, m]), rng.choice([1, n])][rng.randrange(3) :]
        args = [d.weight(*shape), x, d.weight(b, k, n)]
        return d.call(
            f"baddbmm({alpha=}, {beta=})", lambda c, x, y: torch.baddbmm(c, x, y, alpha=alpha, beta=beta), args
        )
    if kind == 2:
        f = d.call("x[0]", lambda x: x[0], [x])
        alpha, beta = rng.choice([1, 0.5]), rng.choice([1, 0.5, 0])
        args = [d.weight(*[[n], [m, 1], [1, n], [m, n], []][rng.randrange(5)]), f, d.weight(k, n)]
        return d.call(f"addmm({alpha=}, {beta=})", lambda c, x, y: torch.addmm(c, x, y, alpha=alpha, beta=beta), args)
    equation = rng.choice(["bij,bkj->bik", "bij,bij->b", "bij,bkj->bkij", "bij,bij->ij", "bii->bi", "bij,cj->cbi"])
    if equation == "bii->bi":
        return d.call(f"einsum {equation}", lambda x: torch.einsum(equation, x), [x])
    y = d.weight(rng.choice([2, 8]), k) if "c" in equation else x
    return d.call(f"einsum {equation}", lambda x, y: torch.einsum(equation, x, y), [x, y])


@call(3)
def attention(d: Draw) -> object:
    rng = d.rng
    x = d.pick((3, 4), lambda t: t.numel() > 0 and t.shape[-2] <= 64)
    shape = d.values[x].shape
    kv = d.weight(*shape[:-2], rng.choice([1, 5, shape[-2]]), shape[-1])
    keys = d.values[kv].shape[-2]
    kind = rng.randrange(4)
    if kind == 0:
        return d.call("sdpa(x, x, x, causal)", lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True), [x])
    if kind == 1:
        mask = d.weight(*shape[:-2][rng.randrange(len(shape) - 1) :], rng.choice([1, shape[-2]]), keys)
        mask = d.call("m * 1", lambda m: m * 1, [mask]) if rng.random() < 0.5 else mask
        return d.call("sdpa(x, k, k, mask)", lambda x, k, m: F.scaled_dot_product_attention(x, k, k, m), [x, kv, mask])
    if kind == 2:
        mask = d.call("m > -0.5", lambda m: m > -0.5, [d.weight(shape[-2], keys)])
        function = lambda x, k, m: F.scaled_dot_product_attention(x, k, k, m, scale=0.3)  # noqa: E731
        return d.call("sdpa(x, k, k, bool mask, scale)", function, [x, kv, mask])
    return d.call("sdpa(x, k, k)", lambda x, k: F.scaled_dot_product_attention(x, k, k, dropout_p=0.0), [x, kv])


@call(1)
def module_with_state(d: Draw) -> object:
    rng = d.rng
    x = d.pick((3,), lambda t: 0 < t.shape[-1] <= 32 and t.numel() > 0)
    size = d.values[x].shape[-1]
    torch.manual_seed(rng.randrange(1000))
    made: nn.Module
    kind = rng.randrange(4)
    if kind == 0:
        made = nn.MultiheadAttention(size, groups_of(d, size), batch_first=rng.random() < 0.5).eval()
        return d.call("mha(x, x, x)[0]", lambda x: made(x, x, x, need_weights=False)[0], [x], made)
    if kind == 1:
        made = nn.TransformerEncoderLayer(size, groups_of(d, size), 16, norm_first=rng.random() < 0.5).eval()
        return d.call("encoder layer", made, [x], made)
    made = (nn.LSTM if kind == 2 else nn.GRU)(size, 5, bidirectional=rng.random() < 0.5).eval()
    return d.call(f"{type(made).__name__}", lambda x: made(x)[0], [x], made)


# ---------------------------------------------------------------- windows


@call(6)
def pooling(d: Draw) -> object:
    rng = d.rng
    x = d.pick((3, 4, 4, 5))
    n = d.values[x].ndim - 2
    k = tuple(rng.choice([1, 2, 2, 3]) for _ in range(n))
    s = tuple(rng.choice([1, 2, 2, 3]) for _ in range(n))
    p = tuple(rng.randrange(size // 2 + 1) for size in k)
    ceil, counting = rng.random() < 0.4, rng.random() < 0.5
    kind = rng.randrange(6)
    if kind < 2:
        dil = tuple(rng.choice([1, 1, 2]) for _ in range(n))
        function = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[n - 1]
        text = f"max_pool{n}d({k}, {s}, {p}, {dil}, {ceil=})"
        return d.call(text, lambda x: function(x, k, s, p, dil, ceil), [x])
    if kind < 4:
        average = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[n - 1]
        divisor = rng.choice([None, None, None, 3]) if n > 1 else None
        more = {"divisor_override": divisor} if n > 1 else {}
        text = f"avg_pool{n}d({k}, {s}, {p}, {ceil=}, count_include_pad={counting}, {divisor})"
        return d.call(text, lambda x: average(x, k, s, p, ceil, counting, **more), [x])
    shape = d.values[x].shape[2:]
    out = tuple(rng.choice([1, max(1, size // 2), size, 3]) for size in shape)
    adaptive = [(F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d),
                (F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d)][kind - 4][n - 1]  # fmt: skip
    size = out if n > 1 else out[0]
    return d.call(f"{adaptive.__name__}({out})", lambda x: adaptive(x, size), [x])


@call(1)
def max_pool_with_indices(d: Draw) -> object:
    x = d.pick((4,), lambda t: min(t.shape) > 1)
    return d.call("max_pool2d(2, return_indices)", lambda x: F.max_pool2d(x, 2, return_indices=True), [x])


@call(4)
def resampling(d: Draw) -> object:
    rng = d.rng
    # PyTorch's own shape function for `nearest` fails on empty batches
    x = d.pick((3, 4, 4, 5), lambda t: 0 < t.numel() < 4000)
    n = d.values[x].ndim - 2
    mode = rng.choice(["nearest", ("linear", "bilinear", "trilinear")[n - 1]])
    align = {"align_corners": rng.random() < 0.3} if mode != "nearest" else {}
    if rng.random() < 0.5:
        size = tuple(rng.choice([1, 5, 8, s, 2 * s]) for s in d.values[x].shape[2:])
        return d.call(
            f"interpolate({size}, {mode}, {align})", lambda x: F.interpolate(x, size, mode=mode, **align), [x]
        )
    f = rng.choice([2, 2, 0.5, 1.5, 3])
    return d.call(
        f"interpolate(scale={f}, {mode}, {align})", lambda x: F.interpolate(x, scale_factor=f, mode=mode, **align), [x]
    )


@call(2)
def pixels(d: Draw) -> object:
    rng = d.rng
    x = d.pick((4,), lambda t: t.shape[1] > 1)
    c = d.values[x].shape[1]
    kind = rng.randrange(4)
    if d.values[x].numel() == 0:
        kind = 3  # PyTorch's own kernels of the first two return the operand's shape, its exporter another one
    if kind == 0:
        return d.call("pixel_shuffle(2)", lambda x: F.pixel_shuffle(x, 2), [x])
    if kind == 1:
        return d.call("pixel_unshuffle(2)", lambda x: F.pixel_unshuffle(x, 2), [x])
    g = rng.choice([i for i in range(2, c + 1) if c % i == 0])
    if kind == 2:
        return d.call(f"channel_shuffle({g})", lambda x: F.channel_shuffle(x, g), [x])

    def shuffled(x: torch.Tensor) -> torch.Tensor:
        n, c, h, w = x.shape
        return x.view(n, g, c // g, h, w).transpose(1, 2).contiguous().view(n, c, h, w)

    return d.call(f"channel shuffle by views, {g}", shuffled, [x])


@call(2)
def unfold(d: Draw) -> object:
    x = d.pick((4,), lambda t: t.numel() < 3000)
    return d.call("unfold(2)", lambda x: F.unfold(x, 2, padding=1), [x])


@call(2)
def windows(d: Draw) -> object:
    x = d.pick(range(1, 5), lambda t: t.numel() > 0)
    axis = d.rng.randrange(d.values[x].ndim)
    size = d.rng.randint(1, d.values[x].shape[axis])
    step = d.rng.choice([size, size, 1, 2])
    return d.call(f"x.unfold({axis}, {size}, {step})", lambda x: x.unfold(axis, size, step), [x])


# ---------------------------------------------------------------- normalization


@call(5)
def batch_norm(d: Draw) -> object:
    x = d.pick(range(2, 6))
    c = d.values[x].shape[1]
    args = [x, d.weight(c), d.weight(c, positive=True)]
    kind = d.rng.randrange(4)
    if kind < 2:
        args += [d.weight(c), d.weight(c)]
        return d.call("batch_norm(x, m, v, w, b)", lambda x, m, v, w, b: F.batch_norm(x, m, v, w, b), args)
    if kind == 2:
        return d.call("batch_norm(x, m, v)", lambda x, m, v: F.batch_norm(x, m, v, eps=0.1), args)
    return d.call("batch_norm(x, m, v, w)", lambda x, m, v, w: F.batch_norm(x, m, v, w), [*args, d.weight(c)])


@call(4)
def other_norm(d: Draw) -> object:
    rng = d.rng
    kind, affine = rng.randrange(6), rng.random() < 0.6
    x = d.pick(range(2, 6), lambda t: t.numel() > 1)
    shape = d.values[x].shape
    c = shape[1]
    if kind < 2:
        axes = tuple(shape[-rng.randrange(1, len(shape)) :])
        args = [x, *([d.weight(*axes), d.weight(*axes)] if affine else [])]
        return d.call(f"layer_norm({axes})", lambda x, w=None, b=None: F.layer_norm(x, axes, w, b), args)
    if kind == 2:
        g = groups_of(d, c)
        args = [x, *([d.weight(c), d.weight(c)] if affine else [])]
        return d.call(f"group_norm({g})", lambda x, w=None, b=None: F.group_norm(x, g, w, b), args)
    if kind == 3:
        args = [x, *([d.weight(c), d.weight(c)] if affine else [])]
        return d.call("instance_norm", lambda x, w=None, b=None: F.instance_norm(x, None, None, w, b), args)
    if kind == 4:
        size = rng.choice([1, 3, 5, 4])
        return d.call(f"local_response_norm({size})", lambda x: F.local_response_norm(x, size, 0.01), [x])
    axis = rng.randrange(-len(shape), len(shape))
    if rng.random() < 0.5:
        return d.call(f"normalize({axis})", lambda x: F.normalize(x, dim=axis), [x])
    if rng.random() < 0.5 and shape[-1] % 2 == 0:
        return d.call("rotary", _rotary, [x, *(d.weight(*shape[-2:]) for _ in range(2))])
    return d.call(f"rms_norm({shape[-1]})", lambda x: F.rms_norm(x, (shape[-1],)), [x])


def _rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


@call(4)
def softmax(d: Draw) -> object:
    x = d.pick(range(1, 7))
    axis = d.rng.randrange(-d.values[x].ndim, d.values[x].ndim)
    function = d.rng.choice([F.softmax, F.softmax, F.log_softmax, F.softmin])
    return d.call(f"{function.__name__}({axis})", lambda x: function(x, dim=axis), [x])


# ---------------------------------------------------------------- element by element

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **{
        f.__name__: f
        for f in (
            F.relu,
            F.relu6,
            F.elu,
            F.selu,
            F.celu,
            F.gelu,
            F.silu,
            F.mish,
            F.softplus,
            F.softsign,
            F.hardswish,
            F.hardsigmoid,
            F.hardtanh,
            F.logsigmoid,
            F.tanhshrink,
            F.softshrink,
            F.hardshrink,
        )
    },
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "abs": torch.abs,
    "neg": torch.neg,
    "square": torch.square,
    "exp": lambda x: torch.exp(x.clamp(max=3.0)),
    "sin": torch.sin,
    "erf": torch.erf,
    "round": torch.round,
    "sqrt": lambda x: torch.sqrt(x.abs()),
    "log": lambda x: torch.log(x.abs() + 0.5),
    "floor": torch.floor,
    "rsqrt": lambda x: torch.rsqrt(x.abs() + 0.5),
    "reciprocal": lambda x: torch.reciprocal(x.abs() + 0.5),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "elu(0.5)": lambda x: F.elu(x, 0.5),
    "gelu(tanh)": lambda x: F.gelu(x, approximate="tanh"),
    "softplus(2)": lambda x: F.softplus(x, 2.0, 5.0),
    "hardtanh(-2, 0.5)": lambda x: F.hardtanh(x, -2, 0.5),
    "clamp(0.1)": lambda x: x.clamp(0.1),
    "clamp(max=0.3)": lambda x: x.clamp(max=0.3),
    "x * sigmoid(1.7x)": lambda x: x * torch.sigmoid(1.7 * x),
    "pow(2)": lambda x: x**2,
    "pow(3)": lambda x: x**3,
    "pow(0.5)": lambda x: x.abs() ** 0.5,
    "2 - x": lambda x: 2 - x,
    "1 / x": lambda x: 1 / (x.abs() + 0.5),
    "x * 0": lambda x: x * 0,
    "x + 0": lambda x: x + 0,
    "x * 1": lambda x: x * 1,
    "x / 3": lambda x: x / 3,
    "x - 0.5": lambda x: x - 0.5,
    "-2.5 * x": lambda x: -2.5 * x,
    "x // 1": lambda x: x // 1,
    "threshold": lambda x: F.threshold(x, 0.1, 20.0),
    "glu": lambda x: F.glu(x, 1),
    "rrelu": F.rrelu,
    "dropout": lambda x: F.dropout(x, 0.5, False),
    "clone": torch.clone,
    "logit": lambda x: torch.logit(x, 0.2),
    "add alpha": lambda x: torch.add(x, x, alpha=0.5),
    "rsub": lambda x: torch.rsub(x, x, alpha=2),
    "sign": torch.sign,
    "exp2": lambda x: torch.exp2(x.clamp(max=3.0)),
    "2 ** x": lambda x: 2 ** x.clamp(-3, 3),
    "swish2": lambda x: torch.sigmoid(x) * x,
    "log1p": lambda x: torch.log1p(x.abs()),
    "expm1": lambda x: torch.expm1(x.clamp(max=2.0)),
}


@call(10)
def activation(d: Draw) -> object:
    name = d.rng.choice(list(ACTIVATIONS))
    return d.call(name, ACTIVATIONS[name], [d.pick()])


@call(2)
def prelu(d: Draw) -> object:
    x = d.pick(range(2, 6))
    return d.call("prelu", F.prelu, [x, d.weight(d.rng.choice([1, d.values[x].shape[1]]))])


BINARY: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "x + y": lambda x, y: x + y,
    "x - y": lambda x, y: x - y,
    "x * y": lambda x, y: x * y,
    "y - x": lambda x, y: y - x,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "x / y": lambda x, y: x / (y.abs() + 0.5),
    "x > y": lambda x, y: (x > y).float(),
    "x >= y": lambda x, y: (x >= y) * x,
    "where": lambda x, y: torch.where(x > 0, x, y),
    "x + 2y": lambda x, y: torch.add(x, y, alpha=2),
    "lerp": lambda x, y: torch.lerp(x, y, 0.3),
    "y == x": lambda x, y: y == x,
    "addcmul": lambda x, y: torch.addcmul(x, x, y, value=0.5),
    "atan2": lambda x, y: torch.atan2(x, y.abs() + 0.5),
    "mse": lambda x, y: (x - y) ** 2,
    "x + y + x": lambda x, y: x + y + x,
    "x + relu(y)": lambda x, y: x + F.relu(y),
}


@call(12)
def binary(d: Draw) -> object:
    rng = d.rng
    x = d.pick()
    name = rng.choice([*BINARY, "x + y", "x + y", "x * y"])
    shape = list(d.values[x].shape)
    kind = rng.randrange(7)
    if kind < 3:
        y = d.pick(fits=lambda t: list(t.shape) == shape)
    elif kind == 3:
        y = x
    else:
        other = [1 if rng.random() < 0.4 else size for size in shape][rng.randrange(len(shape) + 1) :]
        if rng.random() < 0.1:
            other = [2, 1, *other] if len(other) == len(shape) < 5 else other
        y = d.weight(*other) if kind == 4 else d.pick([len(other)], lambda t: list(t.shape) == other)
    args = [x, y] if rng.random() < 0.6 else [y, x]
    return d.call(name, BINARY[name], args)


@call(4)
def residual(d: Draw) -> object:
    """Add a convolution or product of a tensor to a tensor that may be read again, a view or an input."""
    rng = d.rng
    x = d.pick((2, 3, 4, 4, 5), lambda t: t.shape[1] > 0)
    shape = d.values[x].shape
    c = shape[1]
    if len(shape) == 2:
        y = d.call("linear", F.linear, [x, d.weight(c, c), d.weight(c)])
    else:
        function = (F.conv1d, F.conv2d, F.conv3d)[len(shape) - 3]
        y = d.call(
            "conv(padding=1)", lambda x, w: function(x, w, padding=1), [x, d.weight(c, c, *[3] * (len(shape) - 2))]
        )
    if rng.random() < 0.3:
        y = d.call("relu", F.relu, [y])
    z = x if rng.random() < 0.6 else d.pick([len(shape)], lambda t: t.shape == shape)
    args = [y, z] if rng.random() < 0.5 else [z, y]
    s = d.call("x + y", torch.add, args)
    return d.call("relu", F.relu, [s]) if rng.random() < 0.5 else s


# ---------------------------------------------------------------- in place


@call(4)
def in_place(d: Draw) -> object:
    rng = d.rng
    kept = {d.values[n].untyped_storage().data_ptr() for n in [*d.inputs, *d.parameters]}
    x = d.pick(fits=lambda t: t.untyped_storage().data_ptr() not in kept)
    if x in d.inputs:
        raise Unfit
    t = d.values[x]
    kind = rng.randrange(7)
    if kind == 0:
        return d.call("relu_()", torch.relu_, [x])
    if kind == 1:
        return d.call("add_(0.5)", lambda x: x.add_(0.5), [x])
    if kind == 2:
        y = d.pick([t.ndim], lambda u: u.shape == t.shape)
        return d.call("x.mul_(y)", lambda x, y: x.mul_(y), [x, y])
    if not t.ndim or t.shape[-1] < 2:
        raise Unfit

    def half(x: torch.Tensor) -> torch.Tensor:
        x[..., 1:].mul_(0.5)
        return x

    def assigned(x: torch.Tensor) -> torch.Tensor:
        x[..., ::2] = 0.25
        return x

    def first(x: torch.Tensor) -> torch.Tensor:
        return x.select(-1, 0).add_(1.0)

    def filled(x: torch.Tensor) -> torch.Tensor:
        repeated = any(size > 1 and stride == 0 for size, stride in zip(x.shape, x.stride(), strict=True))
        x = x.clone() if repeated else x  # PyTorch warns of the others
        return x.masked_fill_(x > 0.5, -1.0)

    text = ("half_(x[..., 1:])", "assign_(x[..., ::2])", "select_(x, 0).add_", "masked_fill_(x)")
    return d.call(text[kind - 3], (half, assigned, first, filled)[kind - 3], [x])


# ---------------------------------------------------------------- shapes


@call(10)
def view(d: Draw) -> object:
    rng = d.rng
    x = d.pick(range(1, 7))
    t = d.values[x]
    n = t.ndim
    a, b = rng.randrange(n), rng.randrange(n)
    kind = rng.randrange(16)
    if kind < 2:
        order = rng.sample(range(n), n)
        return d.call(f"permute({order})", lambda x: x.permute(order), [x])
    if kind == 2:
        return d.call(f"transpose({a}, {b - n})", lambda x: x.transpose(a, b - n), [x])
    if kind == 3:
        return d.call(f"flatten({min(a, b)}, {max(a, b)})", lambda x: x.flatten(min(a, b), max(a, b)), [x])
    if kind == 4:
        lo, hi = sorted((a, b))
        shape = [*t.shape[:lo], -1, *t.shape[hi:]] if t.numel() else list(t.shape)
        return d.call(f"reshape({shape})", lambda x: x.reshape(shape), [x])
    if kind == 5 and t.shape[a] % 2 == 0 and n < 6:
        shape = [*t.shape[:a], 2, t.shape[a] // 2, *t.shape[a + 1 :]]
        return d.call(f"reshape({shape})", lambda x: x.reshape(shape), [x])
    if kind == 6 and n < 6:
        axis = rng.randrange(-n - 1, n + 1)
        return d.call(f"unsqueeze({axis})", lambda x: x.unsqueeze(axis), [x])
    if kind == 7:
        return d.call("squeeze()", lambda x: x.squeeze(), [x])
    if kind == 8 and n < 6:
        shape = [2, *(s if s != 1 or rng.random() < 0.5 else 3 for s in t.shape)][rng.randrange(2) :]
        return d.call(f"expand({shape})", lambda x: x.expand(shape), [x])
    if kind == 9:
        counts = [rng.choice([1, 1, 2]) for _ in range(n)]
        return d.call(f"repeat({counts})", lambda x: x.repeat(counts), [x])
    if kind == 10:
        return d.call(f"flip({a})", lambda x: x.flip(a), [x])
    if kind == 11:
        return d.call(f"roll({b + 1}, {a})", lambda x: x.roll(b + 1, a), [x])
    if kind == 12:
        return d.call("mT.contiguous()", lambda x: x.mT.contiguous(), [x])
    if kind == 13:
        return d.call(f"movedim({a}, {b})", lambda x: x.movedim(a, b), [x])
    if kind == 14:
        return d.call(f"repeat_interleave(2, {a})", lambda x: x.repeat_interleave(2, a), [x])
    return d.call(f"squeeze({a})", lambda x: x.squeeze(a), [x])


@call(9)
def piece(d: Draw) -> object:
    rng = d.rng
    x = d.pick(range(1, 6))
    t = d.values[x]
    axis = rng.randrange(t.ndim)
    size = t.shape[axis]
    if size < 1:
        raise Unfit
    kind = rng.randrange(11)
    if kind < 2:
        start, stop, step = (
            rng.randrange(-size, size),
            rng.choice([size, -1, size + 5, size // 2 + 1]),
            rng.choice([1, 1, 2, 3]),
        )
        cut = tuple([slice(None)] * axis + [slice(start, stop, step)])
        return d.call(f"x[{start}:{stop}:{step}] axis {axis}", lambda x: x[cut], [x])
    if kind == 2:
        start = rng.randrange(size)
        length = rng.randrange(size - start + 1)
        return d.call(f"narrow({axis}, {start}, {length})", lambda x: x.narrow(axis, start, length), [x])
    if kind < 5:
        return d.call(f"chunk(2, {axis})", lambda x: x.chunk(2, axis), [x])
    if kind == 5:
        sizes = [1, size - 1]
        return d.call(f"split({sizes}, {axis})", lambda x: x.split(sizes, axis), [x])
    if kind == 6 and size <= 4:
        return d.call(f"unbind({axis})", lambda x: x.unbind(axis), [x])
    if kind == 7:
        index = [rng.randrange(size) for _ in range(3)]
        return d.call(f"index_select({axis}, {index})", lambda x: x.index_select(axis, torch.tensor(index)), [x])
    if kind == 8:
        at = rng.randrange(-size, size)
        return d.call(f"select({axis}, {at})", lambda x: x.select(axis, at), [x])
    if kind == 9:
        return d.call("x[None, ..., None, 0:1]", lambda x: x[None, ..., 0:1][..., None], [x])
    index = [rng.randrange(size) for _ in range(2)]
    cut = tuple([slice(None)] * axis + [torch.tensor(index)])
    return d.call(f"x[{index}] axis {axis}", lambda x: x[cut], [x])


@call(7)
def joined(d: Draw) -> object:
    rng = d.rng
    x = d.pick(range(1, 6))
    t = d.values[x]
    axis = rng.randrange(-t.ndim, t.ndim)
    if rng.random() < 0.25:
        return d.call(f"cat([x, x], {axis})", lambda x: torch.cat([x, x], axis), [x])
    if rng.random() < 0.2 and t.ndim < 5:
        y = d.pick([t.ndim], lambda u: u.shape == t.shape)
        return d.call(f"stack({axis})", lambda *x: torch.stack(x, axis), [x, y, x])
    rest = list(t.shape)
    del rest[axis]

    def fits(u: torch.Tensor) -> bool:
        other = list(u.shape)
        del other[axis]
        return other == rest

    names = [x, *(d.pick([t.ndim], fits) for _ in range(rng.choice([1, 1, 2, 3])))]
    rng.shuffle(names)
    if rng.random() < 0.15:
        shape = list(t.shape)
        shape[axis] = rng.choice([1, 3, 8])
        names.append(d.parameter(d.normal(shape)))
    return d.call(f"cat(..., {axis})", lambda *x: torch.cat(x, axis), names)


@call(2)
def padded(d: Draw) -> object:
    rng = d.rng
    x = d.pick(range(1, 6))
    pads = [rng.choice([0, 1, 2, -1]) for _ in range(2 * rng.randrange(1, d.values[x].ndim + 1))]
    value = rng.choice([0.0, 0.0, 1.5, -2.0])
    return d.call(f"F.pad({pads}, value={value})", lambda x: F.pad(x, pads, value=value), [x])


# ---------------------------------------------------------------- reductions and the rest


@call(6)
def reduction(d: Draw) -> object:
    rng = d.rng
    x = d.pick(range(1, 7), lambda t: t.numel() > 0)
    n = d.values[x].ndim
    keep = rng.random() < 0.5
    name = rng.choice(
        [
            "sum",
            "mean",
            "amax",
            "amin",
            "norm",
            "var",
            "std",
            "prod",
            "logsumexp",
            "cumsum",
            "max",
            "min",
            "all",
            "norm1",
        ]
    )
    axis = rng.randrange(-n, n)
    one: dict[str, Callable[[torch.Tensor], object]] = {
        "prod": lambda x: torch.tanh(x).prod(axis, keepdim=keep),
        "cumsum": lambda x: x.cumsum(axis),
        "max": lambda x: x.max(axis, keepdim=keep).values,
        "min": lambda x: x.min(axis).values,
        "all": lambda x: x.sum(),
        "norm1": lambda x: torch.linalg.vector_norm(x, 1, axis, keep),
    }
    if name in one:
        return d.call(f"{name}({axis}, {keep=})", one[name], [x])
    axes = rng.sample(range(n), rng.randrange(1, n + 1))
    many: dict[str, Callable[[torch.Tensor], object]] = {
        "sum": lambda x: x.sum(axes, keep),
        "mean": lambda x: x.mean(axes, keep),
        "amax": lambda x: x.amax(axes, keep),
        "amin": lambda x: x.amin(axes, keep),
        "norm": lambda x: torch.linalg.vector_norm(x, 2, axes, keep),
        "var": lambda x: x.var(axes, correction=0, keepdim=keep),
        "std": lambda x: (x.var(axes, correction=0, keepdim=keep) + 0.1).sqrt(),
        "logsumexp": lambda x: x.logsumexp(axes, keep),
    }
    return d.call(f"{name}({axes}, {keep=})", many[name], [x])


@call(2)
def selected(d: Draw) -> object:
    rng = d.rng
    x = d.pick(range(1, 5), lambda t: t.shape[-1] > 1)
    kind = rng.randrange(5)
    if kind == 0:
        return d.call("topk(2)", lambda x: x.topk(2), [x])
    if kind == 1:
        return d.call("argmax(-1)", lambda x: x.argmax(-1), [x])
    if kind == 2:
        return d.call("sort", lambda x: x.sort(-1, stable=True), [x])
    if kind == 3:
        return d.call("max(-1)", lambda x: x.max(-1), [x])
    return d.call("gather", lambda x: x.gather(-1, torch.zeros(x.shape, dtype=torch.long)), [x])


@call(3)
def cast(d: Draw) -> object:
    rng = d.rng
    x = d.pick()
    dtype = rng.choice([torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.int8, torch.bool])
    y = d.call(f"to({dtype})", lambda x: x.clamp(-100, 100).to(dtype), [x])
    if dtype.is_floating_point and rng.random() < 0.7:
        y = d.call("relu(y) * 1.5", lambda y: torch.relu(y) * 1.5, [y])
        if rng.random() < 0.3 and d.values[y].ndim == 2:
            w = d.weight(8, d.values[y].shape[1])
            y = d.call(f"linear in {dtype}", lambda y, w: F.linear(y, w.to(y.dtype)), [y, w])
    if dtype.is_floating_point and rng.random() < 0.3:
        return d.call("x + y", lambda x, y: x + y, [x, y])
    return d.call("to(float32)", lambda y: y.to(torch.float32), [y]) if rng.random() < 0.8 else y


@call(1)
def embedding(d: Draw) -> object:
    rng = d.rng
    shape = rng.choice([(3,), (2, 5), (1, 4), (2, 3, 4)])
    index = d.input(torch.randint(0, 7, shape, generator=torch.Generator().manual_seed(rng.randrange(99))))
    return d.call("embedding", F.embedding, [index, d.weight(7, rng.choice([4, 8, 17]))])


@call(1)
def unused_input(d: Draw) -> object:
    return d.input(d.normal(d.shape(d.rng.randrange(5))))


@call(1)
def constant(d: Draw) -> object:
    x = d.pick()
    kind = d.rng.randrange(4)
    if kind == 0:
        return d.call("ones_like", torch.ones_like, [x])
    if kind == 1:
        return d.call("x + new tensor", lambda x: x + torch.full((1,), 0.25), [x])
    if kind == 2:
        return d.call("constant", lambda p: p * 2 + 1, [d.weight(*d.shape(3))])
    return d.call("x * x.new_zeros", lambda x: x * x.new_zeros(x.shape) + 1, [x])
