"""Every kind in every direction has its benchdnn line."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fmtprop import dnnl
from fmtprop.dnnl import NormFlags
from fmtprop.dnnl.recipe import benchdnn_line
from tests.dnnl import test_recurrent
from tests.dnnl.support import SAME, any_of, plain, tagged

DATA = (1, 16, 8, 8)
image, nhwc, bias, rows = plain(DATA), tagged(DATA, "acdb"), plain((32,)), plain((3, 4, 20))
x, w, y = any_of(DATA), any_of((32, 16, 3, 3)), any_of((1, 32, 8, 8))
slopes, wide = any_of((1, 16, 1, 1)), plain((3, 1, 5, 6))
AFFINE = NormFlags.USE_SCALE | NormFlags.USE_SHIFT
FIXED = AFFINE | NormFlags.USE_GLOBAL_STATS
POOL: dict[str, Any] = {"kernel": (3, 3), "strides": (2, 2), "dilates": (0, 0), "pad_l": (1, 1), "pad_r": (1, 1)}
LRN: dict[str, Any] = {"alg": "lrn_across_channels", "local_size": 5, "alpha": 1e-4, "beta": 0.75, "k": 1.0}
POOLED = any_of((1, 16, 4, 4))
WINDOW = "ih8iw8oh8ow8kh3kw3sh1sw1ph1pw1dh0dw0"
SHRUNK = "mb1ic16ih8iw8oh4ow4kh3kw3sh2sw2ph1pw1dh0dw0"
COPIED = "--sdt=f32 --ddt=f32 --stag=abcd --dtag=abcd"
ANY = "--dt=f32:f32:f32 --stag=any --wtag=any --dtag=any"

LINES = {
    f"--conv --dir=FWD_I {ANY} --alg=direct | g2mb1ic16oc32{WINDOW}": dnnl.Convolution(
        src=x, weights=any_of((2, 16, 8, 3, 3)), dst=y, **SAME
    ),
    f"--conv --dir=FWD_B {ANY} --alg=auto | mb1ic16oc32{WINDOW}": dnnl.Convolution(
        prop="forward_training", src=x, weights=w, bias=bias, dst=y, alg="convolution_auto", **SAME
    ),
    f"--conv --dir=BWD_D {ANY} --alg=wino | mb1ic16oc32{WINDOW}": dnnl.Convolution(
        prop="backward_data", diff_src=x, weights=w, diff_dst=y, alg="convolution_winograd", **SAME
    ),
    f"--conv --dir=BWD_WB {ANY} --alg=direct | mb1ic16oc32{WINDOW}": dnnl.Convolution(
        prop="backward_weights", src=x, diff_weights=w, diff_bias=bias, diff_dst=y, **SAME
    ),
    f"--deconv --dir=FWD_I {ANY} --alg=direct | mb1ic16oc32{WINDOW}": dnnl.Deconvolution(
        src=x, weights=w, dst=y, **SAME
    ),
    f"--deconv --dir=BWD_W {ANY} --alg=direct | mb1ic16oc32{WINDOW}": dnnl.Deconvolution(
        prop="backward_weights", src=x, diff_weights=w, diff_dst=y, **SAME
    ),
    f"--ip --dir=FWD_B {ANY} | mb1ic16oc32ih8iw8": dnnl.InnerProduct(
        src=x, weights=any_of((32, 16, 8, 8)), bias=bias, dst=any_of((1, 32))
    ),
    f"--ip --dir=BWD_D {ANY} | mb3ic16oc32": dnnl.InnerProduct(
        prop="backward_data", diff_src=any_of((3, 16)), weights=any_of((32, 16)), diff_dst=any_of((3, 32))
    ),
    "--matmul --dt=f32:f32:f32 --stag=ab --wtag=any --dtag=ab --bia-dt=f32 --bia_mask=2 | 4x5:5x6": dnnl.Matmul(
        src=plain((4, 5)), weights=any_of((5, 6)), bias=plain((1, 6)), dst=plain((4, 6))
    ),
    f"--pool --dir=FWD_I --dt=f32:f32 --tag=acdb --alg=max | {SHRUNK}": dnnl.Pooling(
        src=nhwc, dst=POOLED, alg="pooling_max", **POOL
    ),
    f"--pool --dir=BWD_D --dt=f32:f32 --tag=acdb --alg=avg_np | {SHRUNK}": dnnl.Pooling(
        prop="backward_data", diff_src=nhwc, diff_dst=POOLED, alg="pooling_avg_exclude_padding", **POOL
    ),
    "--eltwise --dir=FWD_I --dt=f32 --tag=acdb --alg=clip --alpha=0 --beta=6 | 1x16x8x8": dnnl.Eltwise(
        src=nhwc, dst=nhwc, alg="eltwise_clip", beta=6
    ),
    "--eltwise --dir=BWD_D --dt=f32 --tag=acdb --alg=tanh_dst --alpha=0 --beta=0 | 1x16x8x8": dnnl.Eltwise(
        prop="backward_data", dst=nhwc, diff_src=x, diff_dst=x, alg="eltwise_tanh_use_dst_for_bwd"
    ),
    "--bnorm --dir=FWD_I --dt=f32 --tag=acdb --flags=GCH | mb1ic16ih8iw8eps0.001": dnnl.BatchNormalization(
        src=nhwc, dst=nhwc, epsilon=1e-3, flags=FIXED
    ),
    "--bnorm --dir=BWD_DW --dt=f32 --tag=abc --flags=CH | mb3ic4iw20eps0.001": dnnl.BatchNormalization(
        prop="backward", src=rows, diff_src=rows, diff_dst=rows, epsilon=1e-3, flags=AFFINE
    ),
    "--gnorm --dir=FWD_D --dt=f32 --tag=abcd | g4mb1ic16ih8iw8eps1e-05": dnnl.GroupNormalization(
        prop="forward_training", src=image, dst=image, groups=4, epsilon=1e-5
    ),
    "--lnorm --dir=FWD_D --dt=f32:f32 --tag=abc:abc --flags=CH --stat_tag=ab | 3x4x20": dnnl.LayerNormalization(
        prop="forward_training", src=rows, dst=rows, mean=plain((3, 4)), epsilon=1e-5, flags=AFFINE
    ),
    "--lnorm --dir=BWD_D --dt=f32:f32 --tag=abc:abc | 3x4x20": dnnl.LayerNormalization(
        prop="backward_data", src=rows, diff_src=rows, diff_dst=rows, epsilon=1e-5
    ),
    "--lrn --dir=FWD_I --dt=f32 --tag=abcd --alg=ACROSS | mb1ic16ih8iw8ls5alpha0.0001beta0.75k1": dnnl.Lrn(
        src=image, dst=image, **LRN
    ),
    f"--softmax --dir=FWD_I {COPIED} --alg=LOGSOFTMAX --axis=1 | 1x16x8x8": dnnl.Softmax(
        src=image, dst=image, alg="softmax_log", axis=1
    ),
    "--softmax --dir=BWD_D --sdt=f32 --ddt=f32 --stag=any --dtag=abcd --alg=SOFTMAX --axis=1 | 1x16x8x8": dnnl.Softmax(
        prop="backward_data", dst=image, diff_src=x, diff_dst=x, axis=1
    ),
    "--binary --sdt=f32:f32 --ddt=f32 --stag=abcd:abcd --dtag=any --alg=mul | 1x16x8x8:1x16x1x1": dnnl.Binary(
        src_0=image, src_1=plain((1, 16, 1, 1)), dst=x, alg="binary_mul"
    ),
    "--sum --sdt=f32:f32 --ddt=f32 --stag=abcd:acdb --dtag=any --scales=1:0.5 | 1x16x8x8": dnnl.Sum(
        srcs=[image, nhwc], scales=[1, 0.5]
    ),
    "--concat --sdt=f32:f32 --ddt=f32 --stag=abcd:acdb --dtag=any --axis=1 | 1x16x8x8:1x16x8x8": dnnl.Concat(
        srcs=[image, nhwc], axis=1
    ),
    "--reduction --sdt=f32 --ddt=f32 --stag=abcd --dtag=any --alg=norm_lp_sum --p=2 --eps=0.5 | 1x16x8x8:1x16x1x1": (
        dnnl.Reduction(src=image, dst=slopes, alg="reduction_norm_lp_sum", p=2, eps=0.5)
    ),
    "--resampling --dir=FWD_I --sdt=f32 --ddt=f32 --tag=abcd --alg=linear | mb1ic16ih8iw8oh16ow16": dnnl.Resampling(
        src=image, alg="resampling_linear", factors=(2, 2)
    ),
    "--resampling --dir=BWD_D --sdt=f32 --ddt=f32 --tag=abcd --alg=nearest | mb1ic16ih8iw8oh4ow4": dnnl.Resampling(
        prop="backward_data", diff_src=image, diff_dst=POOLED, alg="resampling_nearest"
    ),
    "--shuffle --dir=FWD_I --dt=f32 --tag=acdb --axis=1 --group=4 | 1x16x8x8": dnnl.Shuffle(
        src=nhwc, dst=nhwc, axis=1, group_size=4
    ),
    "--prelu --dir=FWD_I --sdt=f32:f32 --stag=abcd:any | 1x16x8x8:1x16x1x1": dnnl.Prelu(
        src=image, weights=slopes, dst=image
    ),
    "--prelu --dir=BWD_DW --sdt=f32:f32 --stag=abcd:any | 1x16x8x8:1x16x1x1": dnnl.Prelu(
        prop="backward", src=image, weights=slopes, diff_src=image, diff_weights=slopes, diff_dst=image
    ),
}


@pytest.mark.parametrize("line", LINES)
def test_lines(line: str) -> None:
    options, shape = line.split(" | ")
    got = benchdnn_line(LINES[line], dnnl.PrimitiveAttr())
    assert got == f"benchdnn {options} --attr-scratchpad=user {shape}"


def test_every_kind_has_a_line() -> None:
    tested = {problem.kind for problem in LINES.values()} | {"reorder"}
    tested |= {case.kind.kind for case in test_recurrent.CASES.values()}
    assert tested == {spec.kind for spec in dnnl.SPECS}


def test_attributes() -> None:
    post_ops = dnnl.PostOps().append_sum(0.5).append_binary("binary_add", plain((1, 32, 1, 1))).append_prelu(2)
    attr = dnnl.PrimitiveAttr(post_ops)
    pd = dnnl.create(dnnl.Convolution(src=x, weights=w, bias=bias, dst=y, **SAME), attr)
    assert pd.repro == (
        f"benchdnn --conv --dir=FWD_B {ANY} --alg=direct "
        f"--attr-post-ops=sum:0.5+add:f32:2:abcd+prelu:per_oc --attr-scratchpad=user mb1ic16oc32{WINDOW}"
    )


def test_a_layout_without_a_tag_is_named() -> None:
    src = tagged((3, 32, 5, 6), "acdb").submemory((3, 1, 5, 6), (0, 4, 0, 0))
    assert benchdnn_line(dnnl.Reorder(src=src, dst=wide), dnnl.PrimitiveAttr()) == (
        "benchdnn --reorder --sdt=f32 --ddt=f32 --stag=any --dtag=abcd --attr-scratchpad=user 3x1x5x6  "
        "# without a tag: src 960x1x192x32"
    )


@pytest.mark.parametrize("ndim", range(1, 8))
@pytest.mark.parametrize("line", LINES)
def test_a_line_can_be_made_of_every_rank(line: str, ndim: int) -> None:
    """A refusal shows the line: making it must not fail where oneDNN refuses the rank."""
    problem, desc = LINES[line], plain((2,) * ndim)
    changed = {name: desc for name, _ in problem.operands() if hasattr(problem, name)}
    assert benchdnn_line(replace(problem, **changed), dnnl.PrimitiveAttr()).startswith("benchdnn --")
