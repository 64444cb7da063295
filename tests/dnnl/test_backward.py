"""Every backward constructor computes PyTorch's gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fmtprop import dnnl
from fmtprop.dnnl import NormFlags
from fmtprop.errors import DnnlError
from tests.dnnl.support import A, Array, any_of, plain, run, tagged
from tests.dnnl.test_forward import F, check, rand, t, torch

TRAIN = "forward_training"
WINDOW = (2, 1), (0, 0), (1, 0), (1, 0)


def leaf(array: Array) -> Any:
    return t(array).clone().requires_grad_(True)


def test_convolution() -> None:
    x, w, b = rand(2, 6, 8, 7), rand(4, 6, 3, 2, seed=1), rand(4, seed=2)
    tx, tw, tb = leaf(x), leaf(w), leaf(b)
    y = F.conv2d(tx, tw, tb, stride=(2, 1), padding=(1, 0))
    g = rand(*y.shape, seed=3)
    y.backward(t(g))
    descs = any_of(x.shape), any_of(w.shape), any_of((4,)), any_of(g.shape)
    alg = "convolution_direct"
    # The last row that the window would need is beyond the image: pad_r follows from the shapes.
    window = (2, 1), (0, 0), (1, 0), (0, 0)
    fwd = dnnl.convolution_forward(TRAIN, alg, *descs, *window)
    data = dnnl.convolution_backward_data(alg, descs[0], descs[1], descs[3], *window, fwd)
    (dx,), _ = run(data, {A.DIFF_DST: g, A.WEIGHTS: w}, (A.DIFF_SRC,))
    check(dx, tx.grad)
    weights = dnnl.convolution_backward_weights(alg, *descs, *window, fwd)
    (dw, db), _ = run(weights, {A.DIFF_DST: g, A.SRC: x}, (A.DIFF_WEIGHTS, A.DIFF_BIAS))
    check(dw, tw.grad)
    check(db, tb.grad)
    assert "--dir=BWD_WB" in weights.repro and "--dir=BWD_D" in data.repro


def test_deconvolution() -> None:
    x, w, b = rand(2, 6, 5, 4), rand(6, 8, 3, 2, seed=1), rand(8, seed=2)
    tx, tw, tb = leaf(x), leaf(w), leaf(b)
    y = F.conv_transpose2d(tx, tw, tb, stride=(2, 1), padding=(1, 0))
    g = rand(*y.shape, seed=3)
    y.backward(t(g))
    swapped = np.ascontiguousarray(w.swapaxes(0, 1))
    descs = any_of(x.shape), any_of(swapped.shape), any_of((8,)), any_of(g.shape)
    alg, window = "deconvolution_direct", ((2, 1), (0, 0), (1, 0), (1, 0))
    fwd = dnnl.deconvolution_forward(TRAIN, alg, *descs, *window)
    data = dnnl.deconvolution_backward_data(alg, descs[0], descs[1], descs[3], *window, fwd)
    (dx,), _ = run(data, {A.DIFF_DST: g, A.WEIGHTS: swapped}, (A.DIFF_SRC,))
    check(dx, tx.grad)
    weights = dnnl.deconvolution_backward_weights(alg, *descs, *window, fwd)
    (dw, db), _ = run(weights, {A.DIFF_DST: g, A.SRC: x}, (A.DIFF_WEIGHTS, A.DIFF_BIAS))
    check(dw.swapaxes(0, 1), tw.grad)
    check(db, tb.grad)


def test_inner_product() -> None:
    x, w, b, g = rand(3, 5), rand(7, 5, seed=1), rand(7, seed=2), rand(3, 7, seed=3)
    tx, tw, tb = leaf(x), leaf(w), leaf(b)
    F.linear(tx, tw, tb).backward(t(g))
    descs = any_of(x.shape), any_of(w.shape), any_of((7,)), any_of(g.shape)
    fwd = dnnl.inner_product_forward(TRAIN, *descs)
    data = dnnl.inner_product_backward_data(descs[0], descs[1], descs[3], fwd)
    (dx,), _ = run(data, {A.DIFF_DST: g, A.WEIGHTS: w}, (A.DIFF_SRC,))
    check(dx, tx.grad)
    weights = dnnl.inner_product_backward_weights(*descs, fwd)
    (dw, db), _ = run(weights, {A.DIFF_DST: g, A.SRC: x}, (A.DIFF_WEIGHTS, A.DIFF_BIAS))
    check(dw, tw.grad)
    check(db, tb.grad)


@pytest.mark.parametrize("alg", ["pooling_max", "pooling_avg_exclude_padding"])
def test_pooling(alg: str) -> None:
    x = rand(2, 8, 7, 6)
    tx = leaf(x)
    kernel, stride, pad = (3, 2), (2, 2), (1, 0)
    if alg == "pooling_max":
        y = F.max_pool2d(tx, kernel, stride, pad)
    else:
        y = F.avg_pool2d(tx, kernel, stride, pad, count_include_pad=False)
    g = rand(*y.shape, seed=1)
    y.backward(t(g))
    window = stride, kernel, (0, 0), pad, pad
    fwd = dnnl.pooling_forward(TRAIN, alg, plain(x.shape), plain(g.shape), *window)
    _, raw = run(fwd, {A.SRC: x})
    bwd = dnnl.pooling_backward(alg, plain(x.shape), plain(g.shape), *window, fwd)
    workspace = {A.WORKSPACE: raw[A.WORKSPACE]} if A.WORKSPACE in raw else None
    assert (workspace is not None) == (alg == "pooling_max")
    (dx,), _ = run(bwd, {A.DIFF_DST: g}, (A.DIFF_SRC,), workspace)
    check(dx, tx.grad)


def test_wrong_hints_are_refused() -> None:
    """oneDNN itself crashes on these."""
    window = (2, 2), (3, 2), (0, 0), (1, 0), (1, 0)
    src, dst = plain((2, 8, 7, 6)), plain((2, 8, 4, 3))
    inference = dnnl.pooling_forward("forward_inference", "pooling_max", src, dst, *window)
    other = dnnl.eltwise_forward(TRAIN, "eltwise_relu", src, src)
    for hint, given in ((None, "None"), (inference, r".*\(forward_inference\)"), (other, r"PrimitiveDesc\(eltwise")):
        message = rf"hint_fwd_pd must be the forward_training descriptor of the same pooling, not {given}"
        with pytest.raises(DnnlError, match=message):
            dnnl.pooling_backward("pooling_max", src, dst, *window, hint)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("alg", "use_dst", "function"),
    [
        ("eltwise_gelu_erf", False, F.gelu),
        ("eltwise_tanh_use_dst_for_bwd", True, torch.tanh),
        ("eltwise_relu", False, torch.relu),
    ],
)
def test_eltwise(alg: str, use_dst: bool, function: Any) -> None:
    x, g = rand(2, 9), rand(2, 9, seed=1)
    tx = leaf(x)
    y = function(tx)
    y.backward(t(g))
    desc = plain(x.shape)
    fwd = dnnl.eltwise_forward(TRAIN, alg, desc, desc)
    bwd = dnnl.eltwise_backward(alg, desc, desc, desc, 0, 0, fwd)
    data = {A.DST: y.detach().numpy()} if use_dst else {A.SRC: x}
    (dx,), _ = run(bwd, {A.DIFF_DST: g, **data}, (A.DIFF_SRC,))
    check(dx, tx.grad)
    assert ("_dst " in bwd.repro) == use_dst


def test_prelu() -> None:
    x, w, g = rand(2, 8, 4, 3), rand(1, 8, 1, 1, seed=1), rand(2, 8, 4, 3, seed=2)
    tx, tw = leaf(x), leaf(w.ravel())
    F.prelu(tx, tw).backward(t(g))
    data, weights = plain(x.shape), any_of(w.shape)
    fwd = dnnl.prelu_forward(TRAIN, data, weights, data)
    bwd = dnnl.prelu_backward(data, weights, data, weights, data, fwd)
    (dx, dw), _ = run(bwd, {A.SRC: x, A.WEIGHTS: w, A.DIFF_DST: g}, (A.DIFF_SRC, A.DIFF_WEIGHTS))
    check(dx, tx.grad)
    check(dw.ravel(), tw.grad)


@pytest.mark.parametrize("alg", ["softmax_accurate", "softmax_log"])
def test_softmax(alg: str) -> None:
    x, g = rand(3, 9), rand(3, 9, seed=1)
    tx = leaf(x)
    y = (F.softmax if alg == "softmax_accurate" else F.log_softmax)(tx, 1)
    y.backward(t(g))
    desc = plain(x.shape)
    fwd = dnnl.softmax_forward(TRAIN, alg, desc, desc, 1)
    bwd = dnnl.softmax_backward(alg, desc, desc, desc, 1, fwd)
    (dx,), _ = run(bwd, {A.DST: y.detach().numpy(), A.DIFF_DST: g}, (A.DIFF_SRC,))
    check(dx, tx.grad)


@pytest.mark.parametrize("tag", ["abcd", "acdb"])
def test_batch_normalization(tag: str) -> None:
    x, g = rand(4, 8, 3, 3), rand(4, 8, 3, 3, seed=1)
    scale, shift = rand(8, seed=2), rand(8, seed=3)
    tx, ts, tb = leaf(x), leaf(scale), leaf(shift)
    F.batch_norm(tx, None, None, ts, tb, training=True, eps=1e-4).backward(t(g))
    flags = NormFlags.USE_SCALE | NormFlags.USE_SHIFT
    desc = tagged(x.shape, tag)
    fwd = dnnl.batch_normalization_forward(TRAIN, desc, desc, 1e-4, flags)
    outputs = (A.DST, A.MEAN, A.VARIANCE)
    (_, mean, variance), _ = run(fwd, {A.SRC: x, A.SCALE: scale, A.SHIFT: shift}, outputs)
    check(mean, x.mean((0, 2, 3)))
    bwd = dnnl.batch_normalization_backward("backward", desc, desc, desc, 1e-4, flags, fwd)
    inputs = {A.SRC: x, A.DIFF_DST: g, A.SCALE: scale, A.MEAN: mean, A.VARIANCE: variance}
    (dx, ds, db), _ = run(bwd, inputs, (A.DIFF_SRC, A.DIFF_SCALE, A.DIFF_SHIFT))
    check(dx, tx.grad)
    check(ds, ts.grad)
    check(db, tb.grad)


def test_layer_normalization() -> None:
    x, g = rand(3, 4, 20), rand(3, 4, 20, seed=1)
    scale, shift = rand(20, seed=2), rand(20, seed=3)
    tx, ts, tb = leaf(x), leaf(scale), leaf(shift)
    F.layer_norm(tx, (20,), ts, tb).backward(t(g))
    flags = NormFlags.USE_SCALE | NormFlags.USE_SHIFT
    desc, stat = plain(x.shape), plain((3, 4))
    fwd = dnnl.layer_normalization_forward(TRAIN, desc, desc, stat, 1e-5, flags)
    outputs = (A.DST, A.MEAN, A.VARIANCE)
    (_, mean, variance), _ = run(fwd, {A.SRC: x, A.SCALE: scale, A.SHIFT: shift}, outputs)
    bwd = dnnl.layer_normalization_backward("backward", desc, desc, desc, stat, 1e-5, flags, fwd)
    inputs: dict[int, Array] = {A.SRC: x, A.DIFF_DST: g, A.SCALE: scale, A.MEAN: mean, A.VARIANCE: variance}
    if bwd.arg_md(A.SHIFT) is not None:
        # Early versions want it, though it is not used.
        inputs[A.SHIFT] = shift
    (dx, ds, db), _ = run(bwd, inputs, (A.DIFF_SRC, A.DIFF_SCALE, A.DIFF_SHIFT))
    check(dx, tx.grad)
    check(ds, ts.grad)
    check(db, tb.grad)


def test_group_normalization() -> None:
    if not dnnl.lib().has("group_normalization_backward_primitive_desc_create"):
        pytest.skip("needs oneDNN v3.3")
    if dnnl.lib().version < (3, 7):
        pytest.skip("oneDNN 3.6.2 computes another gradient; 3.13.2 is right")
    x, g = rand(2, 8, 4, 3), rand(2, 8, 4, 3, seed=1)
    tx = leaf(x)
    F.group_norm(tx, 4).backward(t(g))
    desc = plain(x.shape)
    fwd = dnnl.group_normalization_forward(TRAIN, desc, desc, 4, 1e-5, 0)
    (_, mean, variance), _ = run(fwd, {A.SRC: x}, (A.DST, A.MEAN, A.VARIANCE))
    bwd = dnnl.group_normalization_backward("backward_data", desc, desc, desc, 4, 1e-5, 0, fwd)
    (dx,), _ = run(bwd, {A.SRC: x, A.DIFF_DST: g, A.MEAN: mean, A.VARIANCE: variance}, (A.DIFF_SRC,))
    check(dx, tx.grad)


def test_lrn() -> None:
    x, g = rand(2, 16, 4, 3), rand(2, 16, 4, 3, seed=1)
    tx = leaf(x)
    F.local_response_norm(tx, 5, 1e-2, 0.75, 1.0).backward(t(g))
    desc, args = plain(x.shape), (5, 1e-2, 0.75, 1.0)
    fwd = dnnl.lrn_forward(TRAIN, "lrn_across_channels", desc, desc, *args)
    _, raw = run(fwd, {A.SRC: x})
    bwd = dnnl.lrn_backward("lrn_across_channels", desc, desc, desc, *args, fwd)
    workspace = {A.WORKSPACE: raw[A.WORKSPACE]} if bwd.arg_md(A.WORKSPACE) is not None else None
    (dx,), _ = run(bwd, {A.SRC: x, A.DIFF_DST: g}, (A.DIFF_SRC,), workspace)
    check(dx, tx.grad)


def test_resampling() -> None:
    x, g = rand(2, 8, 4, 3), rand(2, 8, 8, 6, seed=1)
    tx = leaf(x)
    F.interpolate(tx, scale_factor=2, mode="bilinear").backward(t(g))
    alg = "resampling_linear"
    fwd = dnnl.resampling_forward(TRAIN, alg, None, plain(x.shape), plain(g.shape))
    bwd = dnnl.resampling_backward(alg, None, plain(x.shape), plain(g.shape), fwd)
    (dx,), _ = run(bwd, {A.DIFF_DST: g}, (A.DIFF_SRC,))
    check(dx, tx.grad)


def test_shuffle() -> None:
    x, g = rand(2, 12, 4), rand(2, 12, 4, seed=1)
    tx = leaf(x)
    tx.reshape(2, 3, 4, 4).transpose(1, 2).reshape(2, 12, 4).backward(t(g))
    desc = plain(x.shape)
    fwd = dnnl.shuffle_forward(TRAIN, desc, desc, 1, 4)
    (dx,), _ = run(dnnl.shuffle_backward(desc, desc, 1, 4, fwd), {A.DIFF_DST: g}, (A.DIFF_SRC,))
    check(dx, tx.grad)
