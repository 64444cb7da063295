"""The small pattern rewrites: padding, channel shuffle, deconvolutions of one pixel."""

from __future__ import annotations

import json
import math

import pytest
import torch

from fmtprop.capture import from_torch
from fmtprop.ops import Permute, Reshape
from fmtprop.ops.convolution import Conv
from fmtprop.ops.deconvolution import Deconv
from fmtprop.ops.host_call import HostCall
from fmtprop.ops.pad import Pad
from fmtprop.ops.pooling import Pooling
from fmtprop.ops.shuffle import Shuffle
from fmtprop.passes.rewrites.channel_shuffle import RecogniseShuffle
from fmtprop.passes.rewrites.deconvolve_pixels import DeconvolvePixels
from fmtprop.passes.rewrites.delay_reshapes import DelayReshapes
from fmtprop.passes.rewrites.fold_padding import FoldPadding
from fmtprop.passes.rewrites.fuse_post_ops import FusePostOps
from tests.passes.rewriting import Builder, rewrite, summary

# ---------------------------------------------------------------- padding


def pad(build: Builder, src, pads, value=0.0):
    """Pad as `torch.nn.functional.pad` is called: pairs, the last axis first."""
    flat = [*pads, *[0] * (8 - len(pads))]
    return build.op("pad", Pad(tuple(flat[-2::-2]), tuple(flat[::-2]), value), "pad", src=src)


def test_zeros_fold_into_a_convolution():
    build = Builder()
    conv = build.conv(pad(build, build.input(1, 3, 8, 9), [1, 2, 0, 3]), 4, "conv", kernel=3, pad_l=1)
    folded = rewrite(build.output(conv), FoldPadding())
    assert summary(folded) == ["conv"]
    assert folded.node("conv").attrs == Conv((1, 1), (0, 0), (1, 2), (4, 3))


def test_padding_of_the_last_axis_alone_folds():
    build = Builder()
    folded = rewrite(build.output(build.conv(pad(build, build.input(1, 3, 8, 9), [1, 1]), 4, "conv", kernel=3)),
                     FoldPadding())  # fmt: skip
    assert folded.node("conv").attrs == Conv((1, 1), (0, 0), (0, 1), (0, 1))


@pytest.mark.parametrize(
    ("alg", "value", "became"),
    [
        ("max", -math.inf, "max"),
        ("avg_include_padding", 0.0, "avg_include_padding"),
        ("avg_exclude_padding", 0.0, "avg_include_padding"),
    ],
)
def test_padding_folds_into_a_pooling_that_means_the_same(alg, value, became):
    build = Builder()
    source = pad(build, build.input(1, 3, 8, 9), [1, 2, 0, 1], value)
    folded = rewrite(build.output(build.op("pooling", Pooling.make(alg, (3, 3), 2), "pool", src=source)), FoldPadding())
    assert summary(folded) == ["pool"]
    assert folded.node("pool").attrs == Pooling(became, (3, 3), (2, 2), (0, 0), (0, 1), (1, 2))


@pytest.mark.parametrize(
    ("alg", "pads", "value", "inside"),
    [
        ("max", [1, 1, 1, 1], 0.0, 0),
        ("avg_include_padding", [1, 1, 1, 1], 1.0, 0),
        ("avg_exclude_padding", [1, 1, 1, 1], 0.0, 1),
        ("avg_include_padding", [3, 3, 0, 0], 0.0, 0),
        ("avg_include_padding", [0, 0, 0, 0, 0, 0, 1, 0], 0.0, 0),
        ("avg_include_padding", [0, 0, 0, 0, 1, 0], 0.0, 0),
    ],
)
def test_padding_that_means_something_else_stays(alg, pads, value, inside):
    build = Builder()
    attrs = Pooling.make(alg, (3, 3), pad_l=inside)
    graph = build.output(build.op("pooling", attrs, "pool", src=pad(build, build.input(1, 3, 8, 9), pads, value)))
    assert summary(rewrite(graph, FoldPadding())) == ["pad", "pool"]


def test_ones_and_reflections_stay_before_a_convolution():
    build = Builder()
    x = build.input(1, 3, 8, 9)
    arguments = {"self": {"tensor": "src_0"}, "pad": [1, 1, 1, 1], "mode": "reflect"}
    mirrored = build.op("aten", HostCall("aten.pad.default", json.dumps(arguments)), "mirror", src_0=x)
    graph = build.output(build.conv(pad(build, x, [1, 1], 1.0), 4, "a"), build.conv(mirrored, 4, "b"))
    assert summary(rewrite(graph, FoldPadding())) == summary(graph)


def test_a_padding_with_another_reader_stays_for_that_one():
    build = Builder()
    padded = pad(build, build.input(1, 3, 8, 9), [1, 1, 1, 1])
    folded = rewrite(build.output(build.conv(padded, 4, "conv", kernel=3), padded), FoldPadding())
    assert summary(folded) == ["pad", "conv"]
    assert folded.inputs("conv")["src"].node == "x"


@pytest.mark.parametrize("mode", ["constant", "reflect"])
def test_padding_folds_as_it_is_imported(mode):
    """The pass and the importer must mean the same op."""

    class Same(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = torch.nn.Conv2d(3, 4, 3, stride=2)

        def forward(self, x):
            return self.conv(torch.nn.functional.pad(x, (0, 1, 0, 1), mode))

    folded = rewrite(from_torch(Same().eval(), torch.randn(1, 3, 8, 8)), FoldPadding())
    (conv,) = (node for node in folded.nodes() if node.op == "convolution")
    if mode == "constant":
        assert {node.op for node in folded.nodes()} == {"input", "constant", "convolution", "output"}
        assert (conv.attrs.pad_l, conv.attrs.pad_r) == ((0, 0), (1, 1))
    else:
        assert conv.attrs.pad_r == (0, 0)


# ---------------------------------------------------------------- channel shuffle


def shuffled(build: Builder, x, split, order, dims):
    value = build.op("reshape", Reshape(split), "split", src=x)
    value = build.op("permute", Permute(order), "exchange", src=value)
    return build.op("reshape", Reshape(dims), "join", src=value)


@pytest.mark.parametrize(
    ("dims", "split", "order", "attrs"),
    [
        ((2, 12, 3, 5), (2, 3, 4, 3, 5), (0, 2, 1, 3, 4), Shuffle(1, 3)),
        ((2, 12), (2, 2, 6), (0, 2, 1), Shuffle(1, 2)),
        ((6, 5), (2, 3, 5), (1, 0, 2), Shuffle(0, 2)),
    ],
)
def test_a_channel_shuffle_is_recognised(dims, split, order, attrs):
    build = Builder()
    graph = build.output(shuffled(build, build.input(*dims), split, order, dims))
    found = rewrite(graph, RecogniseShuffle())
    assert [(node.op, node.attrs) for node in found.nodes() if not node.is_boundary] == [("shuffle", attrs)]


@pytest.mark.parametrize(
    ("dims", "split", "order", "joined"),
    [
        ((2, 12, 3), (2, 3, 4, 3), (0, 2, 1, 3), (2, 3, 12)),
        ((2, 12, 3), (2, 3, 4, 3), (0, 1, 3, 2), (2, 12, 3)),
        ((2, 12, 3), (4, 6, 3, 1), (1, 0, 2, 3), (2, 12, 3)),
    ],
)
def test_other_views_stay(dims, split, order, joined):
    build = Builder()
    graph = build.output(shuffled(build, build.input(*dims), split, order, joined))
    assert summary(rewrite(graph, RecogniseShuffle())) == ["split", "exchange", "join"]


def test_a_shuffle_whose_inside_is_read_stays():
    build = Builder()
    value = shuffled(build, build.input(2, 12, 3), (2, 3, 4, 3), (0, 2, 1, 3), (2, 12, 3))
    graph = build.output(value, *build.graph.inputs("join").values())
    assert summary(rewrite(graph, RecogniseShuffle())) == ["split", "exchange", "join"]


# ---------------------------------------------------------------- deconvolutions of one pixel


def deconvolved(build: Builder, sizes, weights, bias: bool, window: Deconv):
    operands = {"bias": build.constant(build.random(weights.shape[-len(sizes) - 2]))} if bias else {}
    operands["weights"] = build.constant(weights)
    return build.op("deconvolution", window, "deconv", src=build.input(2, 4, *sizes), **operands)


@pytest.mark.parametrize(("kernel", "bias"), [((4,), False), ((4, 3), True), ((1, 1), True), ((2, 3, 4), False)])
def test_a_deconvolution_of_one_pixel_is_a_product_that_absorbs_its_activation(kernel, bias):
    build, spatial = Builder(), len(kernel)
    stored = build.random(4, 3, *kernel)  # as in a module
    window = Deconv.make(spatial, strides=2)
    graph = build.output(build.act(deconvolved(build, (1,) * spatial, stored.transpose(0, 1), bias, window)))
    product = rewrite(graph, DeconvolvePixels(), DelayReshapes(), FusePostOps())
    assert summary(product) == ["reshape_1", "matmul_1+relu", "reshape_3"]
    shaped = product.constants[product.inputs("matmul_1")["weights"].node]
    assert shaped.shape == (4, 3 * math.prod(kernel)) and shaped.data_ptr() == stored.data_ptr()


@pytest.mark.parametrize(
    ("sizes", "kernel", "window"),
    [
        ((1, 2), (3, 4, 3, 3), {}),
        ((1, 1), (3, 4, 3, 3), {"pad_l": 1}),
        ((1, 1), (3, 4, 3, 3), {"strides": 2, "pad_r": -1}),
        ((1, 1), (3, 4, 3, 3), {"dilates": 1}),
        ((1, 1), (2, 3, 2, 3, 3), {"groups": 2}),
    ],
)
def test_other_deconvolutions_stay(sizes, kernel, window):
    build = Builder()
    value = deconvolved(build, sizes, build.random(*kernel), False, Deconv.make(2, **window))
    assert summary(rewrite(build.output(value), DeconvolvePixels())) == ["deconv"]
