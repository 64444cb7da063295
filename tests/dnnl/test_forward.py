"""Every forward constructor computes what PyTorch computes, in several formats."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fmtprop import dnnl
from fmtprop.dnnl import NormFlags
from fmtprop.errors import LibraryError
from tests.dnnl.support import SAME, A, Array, any_of, plain, reorder, run, tagged

torch = pytest.importorskip("torch")
F = torch.nn.functional
FORMATS = ["abcd", "acdb", "aBcd8b"]


def rand(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def check(got: Array, want: Any, tolerance: float = 1e-4) -> None:
    np.testing.assert_allclose(got, np.asarray(want), rtol=tolerance, atol=tolerance)


def t(array: Array) -> Any:
    return torch.from_numpy(array)


@pytest.mark.parametrize(
    ("src", "weights", "stride", "dilation", "pad_l", "pad_r"),
    [
        ((2, 6, 9), (8, 6, 3), (2,), (0,), (1,), (0,)),
        ((2, 6, 9, 8), (8, 6, 3, 2), (1, 2), (1, 0), (2, 0), (1, 1)),
        ((1, 3, 4, 5, 6), (5, 3, 2, 3, 1), (1, 1, 2), (0, 0, 0), (0, 1, 0), (1, 1, 0)),
        ((2, 8, 7, 7), (4, 4, 2, 3, 3), (1, 1), (0, 0), (1, 1), (1, 1)),
    ],
)
@pytest.mark.parametrize("with_bias", [True, False])
def test_convolution(
    src: tuple[int, ...],
    weights: tuple[int, ...],
    stride: tuple[int, ...],
    dilation: tuple[int, ...],
    pad_l: tuple[int, ...],
    pad_r: tuple[int, ...],
    with_bias: bool,
) -> None:
    spatial = len(src) - 2
    grouped = len(weights) == len(src) + 1
    groups, out = (weights[0], weights[0] * weights[1]) if grouped else (1, weights[0])
    x, w, b = rand(*src), rand(*weights, seed=1), rand(out, seed=2)
    padded = F.pad(t(x), [p for pair in reversed(list(zip(pad_l, pad_r, strict=True))) for p in pair])
    flat = t(w.reshape(out, *w.shape[-spatial - 1 :]))
    function = (F.conv1d, F.conv2d, F.conv3d)[spatial - 1]
    want = function(
        padded, flat, t(b) if with_bias else None, stride, dilation=[d + 1 for d in dilation], groups=groups
    )
    problem = dnnl.Convolution(
        src=any_of(src),
        weights=any_of(weights),
        bias=any_of((out,)) if with_bias else None,
        dst=any_of(tuple(want.shape)),
        strides=stride,
        dilates=dilation,
        pad_l=pad_l,
        pad_r=pad_r,
    )
    first = dnnl.create(problem)
    assert first.kind == "convolution"
    seen = set()
    for pd in first.implementations():
        seen.add(pd.impl)
        inputs: dict[int, Array] = {A.SRC: x, A.WEIGHTS: w}
        if with_bias:
            inputs[A.BIAS] = b
        (y,), _ = run(pd, inputs)
        check(y, want)
    assert len(seen) >= 1


@pytest.mark.parametrize("groups", [1, 2])
def test_deconvolution(groups: int) -> None:
    x, w, b = rand(2, 6, 5, 4), rand(6, 8 // groups, 3, 2, seed=1), rand(8, seed=2)
    want = F.conv_transpose2d(t(x), t(w), t(b), stride=(2, 1), padding=(1, 0), groups=groups)
    shape = (groups, 6 // groups, 8 // groups, 3, 2) if groups > 1 else (6, 8, 3, 2)
    swapped = np.ascontiguousarray(np.swapaxes(w.reshape(shape), groups > 1, (groups > 1) + 1))
    problem = dnnl.Deconvolution(
        src=any_of(x.shape),
        weights=any_of(swapped.shape),
        bias=any_of((8,)),
        dst=any_of(tuple(want.shape)),
        strides=(2, 1),
        dilates=(0, 0),
        pad_l=(1, 0),
        pad_r=(1, 0),
    )
    pd = dnnl.create(problem)
    (y,), _ = run(pd, {A.SRC: x, A.WEIGHTS: swapped, A.BIAS: b})
    check(y, want)


def test_inner_product() -> None:
    x, w, b = rand(3, 5, 2, 2), rand(7, 5, 2, 2, seed=1), rand(7, seed=2)
    descs = {"src": any_of(x.shape), "weights": any_of(w.shape), "bias": any_of((7,)), "dst": any_of((3, 7))}
    pd = dnnl.create(dnnl.InnerProduct(**descs))
    (y,), _ = run(pd, {A.SRC: x, A.WEIGHTS: w, A.BIAS: b})
    check(y, F.linear(t(x).flatten(1), t(w).flatten(1), t(b)))


@pytest.mark.parametrize(
    ("src", "weights", "bias"),
    [
        ((4, 5), (5, 6), (1, 6)),
        ((3, 4, 5), (3, 5, 6), None),
        ((3, 4, 5), (1, 5, 6), (1, 1, 6)),
        ((2, 1, 4, 5), (1, 3, 5, 6), None),
    ],
)
def test_matmul(src: tuple[int, ...], weights: tuple[int, ...], bias: tuple[int, ...] | None) -> None:
    x, w = rand(*src), rand(*weights, seed=1)
    want = t(x) @ t(w)
    inputs: dict[int, Array] = {A.SRC: x, A.WEIGHTS: w}
    if bias is not None:
        inputs[A.BIAS] = rand(*bias, seed=2)
        want = want + t(inputs[A.BIAS])
    desc = None if bias is None else plain(bias)
    pd = dnnl.create(dnnl.Matmul(src=plain(src), weights=any_of(weights), bias=desc, dst=plain(tuple(want.shape))))
    (y,), _ = run(pd, inputs)
    check(y, want)


@pytest.mark.parametrize("tag", FORMATS)
@pytest.mark.parametrize("alg", ["pooling_max", "pooling_avg_include_padding", "pooling_avg_exclude_padding"])
def test_pooling(alg: str, tag: str) -> None:
    x = rand(2, 16, 9, 8)
    if alg == "pooling_max":
        want = F.max_pool2d(t(x), (3, 2), (2, 1), (1, 0))
    else:
        want = F.avg_pool2d(t(x), (3, 2), (2, 1), (1, 0), count_include_pad="include" in alg)
    dst = any_of(tuple(want.shape))
    window = {"kernel": (3, 2), "strides": (2, 1), "dilates": (0, 0), "pad_l": (1, 0), "pad_r": (1, 0)}
    pd = dnnl.create(dnnl.Pooling(src=tagged(x.shape, tag), dst=dst, alg=alg, **window))
    (y,), _ = run(pd, {A.SRC: x})
    check(y, want)


ELTWISE = {
    "eltwise_relu": (0.1, 0.0, lambda x: F.leaky_relu(x, 0.1)),
    "eltwise_tanh": (0.0, 0.0, torch.tanh),
    "eltwise_elu": (0.5, 0.0, lambda x: F.elu(x, 0.5)),
    "eltwise_square": (0.0, 0.0, torch.square),
    "eltwise_abs": (0.0, 0.0, torch.abs),
    "eltwise_linear": (2.0, 0.5, lambda x: 2 * x + 0.5),
    "eltwise_soft_relu": (1.0, 0.0, F.softplus),
    "eltwise_hardsigmoid": (1 / 6, 0.5, F.hardsigmoid),
    "eltwise_hardswish": (1 / 6, 0.5, F.hardswish),
    "eltwise_logistic": (0.0, 0.0, torch.sigmoid),
    "eltwise_mish": (0.0, 0.0, F.mish),
    "eltwise_gelu_tanh": (0.0, 0.0, lambda x: F.gelu(x, approximate="tanh")),
    "eltwise_gelu_erf": (0.0, 0.0, F.gelu),
    "eltwise_swish": (1.0, 0.0, F.silu),
    "eltwise_exp": (0.0, 0.0, torch.exp),
    "eltwise_clip": (-0.5, 0.7, lambda x: x.clip(-0.5, 0.7)),
    "eltwise_round": (0.0, 0.0, torch.round),
}


@pytest.mark.parametrize("tag", FORMATS)
@pytest.mark.parametrize("alg", ELTWISE)
def test_eltwise(alg: str, tag: str) -> None:
    alpha, beta, function = ELTWISE[alg]
    x = rand(2, 13, 4, 3)
    desc = tagged(x.shape, tag)
    (y,), _ = run(dnnl.create(dnnl.Eltwise(src=desc, dst=desc, alg=alg, alpha=alpha, beta=beta)), {A.SRC: x})
    check(y, function(t(x)))


@pytest.mark.parametrize("tag", FORMATS)
@pytest.mark.parametrize(
    ("alg", "function"),
    [
        ("binary_add", torch.add),
        ("binary_sub", torch.sub),
        ("binary_mul", torch.mul),
        ("binary_div", torch.div),
        ("binary_max", torch.maximum),
        ("binary_min", torch.minimum),
        ("binary_ge", torch.ge),
    ],
)
def test_binary(alg: str, function: Any, tag: str) -> None:
    x, z = rand(2, 8, 4, 3), rand(1, 8, 1, 1, seed=1)
    problem = dnnl.Binary(src_0=tagged(x.shape, tag), src_1=plain(z.shape), dst=any_of(x.shape), alg=alg)
    pd = dnnl.create(problem)
    (y,), _ = run(pd, {A.SRC: x, A.SRC_1: z})
    check(y, function(t(x), t(z)).float())


def test_post_ops() -> None:
    x, w, b, other, slopes = (
        rand(*shape, seed=i) for i, shape in enumerate([(1, 8, 6, 6), (8, 8, 3, 3), (8,), (1, 8, 6, 6), (1, 8, 1, 1)])
    )
    post_ops = dnnl.PostOps().append_eltwise("eltwise_relu").append_binary("binary_add", plain(other.shape))
    post_ops.append_prelu(2)
    attr = dnnl.PrimitiveAttr(post_ops)
    image = any_of(x.shape)
    pd = dnnl.create(dnnl.Convolution(src=image, weights=any_of(w.shape), bias=any_of((8,)), dst=image, **SAME), attr)
    post = A.ATTR_MULTIPLE_POST_OP
    inputs: dict[int, Array] = {A.SRC: x, A.WEIGHTS: w, A.BIAS: b, post(1) | A.SRC_1: other}
    inputs[post(2) | A.WEIGHTS] = slopes.ravel()
    (y,), _ = run(pd, inputs)
    want = F.prelu(F.conv2d(t(x), t(w), t(b), padding=1).relu() + t(other), t(slopes.ravel()))
    check(y, want)
    assert len(post_ops) == 3 and len(pd.recipe.attr.ops) == 3


def test_post_op_sum_reads_dst() -> None:
    x, w, old = rand(3, 4), rand(4, 5, seed=1), rand(3, 5, seed=2)
    attr = dnnl.PrimitiveAttr(dnnl.PostOps().append_sum(0.5))
    pd = dnnl.create(dnnl.Matmul(src=plain(x.shape), weights=plain(w.shape), dst=plain(old.shape)), attr)
    raw = {A.DST: old.copy().view(np.uint8).ravel()}
    run(pd, {A.SRC: x, A.WEIGHTS: w}, (), raw)
    check(raw[A.DST].view(np.float32).reshape(3, 5), t(x) @ t(w) + 0.5 * t(old))


def test_depthwise_post_op() -> None:
    x, w, dw, b = rand(1, 16, 8, 8), rand(16, 16, 1, 1, seed=1), rand(16, 1, 1, 3, 3, seed=2), rand(16, seed=3)
    attr = dnnl.PrimitiveAttr(dnnl.PostOps().append_dw("f32", "f32", "f32", 3, 1, 1))
    window = {**SAME, "pad_l": (0, 0), "pad_r": (0, 0)}
    image = any_of(x.shape)
    pd = dnnl.create(dnnl.Convolution(src=image, weights=any_of(w.shape), dst=image, **window), attr)
    base = A.ATTR_POST_OP_DW
    (y,), _ = run(pd, {A.SRC: x, A.WEIGHTS: w, base | A.WEIGHTS: dw, base | A.BIAS: b})
    want = F.conv2d(F.conv2d(t(x), t(w)), t(dw.reshape(16, 1, 3, 3)), t(b), padding=1, groups=16)
    check(y, want)


@pytest.mark.parametrize("tag", FORMATS)
def test_batch_normalization(tag: str) -> None:
    x, mean, scale, shift = rand(2, 16, 4, 3), rand(16, seed=1), rand(16, seed=2), rand(16, seed=3)
    variance = np.abs(rand(16, seed=4)) + np.float32(0.5)
    flags = NormFlags.USE_GLOBAL_STATS | NormFlags.USE_SCALE | NormFlags.USE_SHIFT
    desc = tagged(x.shape, tag)
    pd = dnnl.create(dnnl.BatchNormalization(src=desc, dst=desc, epsilon=1e-3, flags=flags))
    (y,), _ = run(pd, {A.SRC: x, A.MEAN: mean, A.VARIANCE: variance, A.SCALE: scale, A.SHIFT: shift})
    check(y, F.batch_norm(t(x), t(mean), t(variance), t(scale), t(shift), eps=1e-3))


def test_layer_normalization() -> None:
    x, scale, shift = rand(3, 4, 20), rand(20, seed=1), rand(20, seed=2)
    flags = NormFlags.USE_SCALE | NormFlags.USE_SHIFT
    desc = plain(x.shape)
    pd = dnnl.create(dnnl.LayerNormalization(src=desc, dst=desc, epsilon=1e-5, flags=flags))
    (y,), _ = run(pd, {A.SRC: x, A.SCALE: scale, A.SHIFT: shift})
    check(y, F.layer_norm(t(x), (20,), t(scale), t(shift)))


def test_group_normalization() -> None:
    x, scale, shift = rand(2, 8, 4, 3), rand(8, seed=1), rand(8, seed=2)
    flags = NormFlags.USE_SCALE | NormFlags.USE_SHIFT
    desc = plain(x.shape)
    problem = dnnl.GroupNormalization(src=desc, dst=desc, groups=4, epsilon=1e-5, flags=flags)
    if not dnnl.lib().has("group_normalization_forward_primitive_desc_create"):
        with pytest.raises(LibraryError, match=r"group_normalization_forward.* is not in oneDNN 3\.[0-2]"):
            dnnl.create(problem)
        return
    pd = dnnl.create(problem)
    (y,), _ = run(pd, {A.SRC: x, A.SCALE: scale, A.SHIFT: shift})
    check(y, F.group_norm(t(x), 4, t(scale), t(shift)))


@pytest.mark.parametrize("tag", FORMATS)
def test_lrn(tag: str) -> None:
    x = rand(2, 16, 4, 3)
    desc = tagged(x.shape, tag)
    problem = dnnl.Lrn(src=desc, dst=desc, alg="lrn_across_channels", local_size=5, alpha=1e-2, beta=0.75, k=1.0)
    pd = dnnl.create(problem)
    (y,), _ = run(pd, {A.SRC: x})
    check(y, F.local_response_norm(t(x), 5, 1e-2, 0.75, 1.0))


@pytest.mark.parametrize("tag", FORMATS)
def test_prelu(tag: str) -> None:
    x, w = rand(2, 8, 4, 3), rand(1, 8, 1, 1, seed=1)
    pd = dnnl.create(dnnl.Prelu(src=tagged(x.shape, tag), weights=any_of(w.shape), dst=tagged(x.shape, tag)))
    (y,), _ = run(pd, {A.SRC: x, A.WEIGHTS: w})
    check(y, F.prelu(t(x), t(w.ravel())))


@pytest.mark.parametrize("axis", [0, 1, 3])
@pytest.mark.parametrize("alg", ["softmax_accurate", "softmax_log"])
def test_softmax(alg: str, axis: int) -> None:
    x = rand(2, 8, 4, 3)
    pd = dnnl.create(dnnl.Softmax(src=plain(x.shape), dst=plain(x.shape), alg=alg, axis=axis))
    (y,), _ = run(pd, {A.SRC: x})
    check(y, (F.log_softmax if alg == "softmax_log" else F.softmax)(t(x), axis))


def test_sum_and_concat() -> None:
    arrays = [rand(2, 8, 4, 3, seed=i) for i in range(3)]
    inputs: dict[int, Array] = {A.MULTIPLE_SRC + i: x for i, x in enumerate(arrays)}
    descs = [tagged(x.shape, tag) for x, tag in zip(arrays, FORMATS, strict=True)]
    for dst in (None, tagged((2, 8, 4, 3), "acdb")):
        (y,), _ = run(dnnl.create(dnnl.Sum(srcs=descs, dst=dst, scales=[1.0, 0.5, -2.0])), inputs)
        check(y, arrays[0] + 0.5 * arrays[1] - 2 * arrays[2])
    for axis in range(4):
        (y,), _ = run(dnnl.create(dnnl.Concat(srcs=descs, axis=axis)), inputs)
        check(y, np.concatenate(arrays, axis))


@pytest.mark.parametrize(
    ("alg", "function"),
    [
        ("reduction_mean", lambda x: x.mean((2, 3), keepdim=True)),
        ("reduction_sum", lambda x: x.sum((2, 3), keepdim=True)),
        ("reduction_max", lambda x: x.amax((2, 3), keepdim=True)),
        ("reduction_min", lambda x: x.amin((2, 3), keepdim=True)),
        ("reduction_norm_lp_sum", lambda x: x.square().sum((2, 3), keepdim=True).sqrt()),
    ],
)
@pytest.mark.parametrize("tag", FORMATS)
def test_reduction(alg: str, function: Any, tag: str) -> None:
    x = rand(2, 8, 4, 3)
    pd = dnnl.create(dnnl.Reduction(src=tagged(x.shape, tag), dst=any_of((2, 8, 1, 1)), alg=alg, p=2.0))
    (y,), _ = run(pd, {A.SRC: x})
    check(y, function(t(x)))


@pytest.mark.parametrize("tag", FORMATS)
@pytest.mark.parametrize("factors", [(2.0, 3.0), None])
def test_resampling(tag: str, factors: tuple[float, ...] | None) -> None:
    x = rand(2, 8, 4, 3)
    for alg, mode in (("resampling_nearest", "nearest-exact"), ("resampling_linear", "bilinear")):
        dst = any_of((2, 8, 8, 9))
        pd = dnnl.create(dnnl.Resampling(src=tagged(x.shape, tag), dst=dst, alg=alg, factors=factors))
        (y,), _ = run(pd, {A.SRC: x})
        check(y, F.interpolate(t(x), scale_factor=(2, 3), mode=mode))


@pytest.mark.parametrize("tag", FORMATS)
def test_shuffle(tag: str) -> None:
    """PyTorch counts the groups, oneDNN the channels of one."""
    x = rand(2, 12, 4, 3)
    desc = tagged(x.shape, tag)
    (y,), _ = run(dnnl.create(dnnl.Shuffle(src=desc, dst=desc, axis=1, group_size=12 // 3)), {A.SRC: x})
    check(y, F.channel_shuffle(t(x), 3))


@pytest.mark.parametrize("src", FORMATS)
@pytest.mark.parametrize("dst", FORMATS)
def test_reorder(src: str, dst: str) -> None:
    x = rand(2, 13, 4, 3)
    (y,), _ = run(reorder(tagged(x.shape, src), tagged(x.shape, dst)), {A.SRC: x})
    np.testing.assert_array_equal(y, x)
