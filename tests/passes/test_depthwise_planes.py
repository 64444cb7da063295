"""Depthwise convolutions over rows and volumes as depthwise convolutions over images."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fmtprop as fp
from fmtprop import dnnl
from fmtprop.errors import GraphError
from fmtprop.ir.verify import Stage
from fmtprop.passes.base import Pipeline
from fmtprop.passes.pipeline import NORMALISE
from fmtprop.passes.variants.depthwise_planes import DepthwisePlanes
from tests.passes.rewriting import Builder, rewrite


def _graph(b: Builder, dims: tuple[int, ...], bias: bool = True, **window: int):
    """Return a depthwise convolution, with a residual, a function and a factor per channel behind it."""
    x = b.input(*dims)
    y = b.conv(x, dims[1], "conv", groups=dims[1], bias=bias, **window)
    size = b.graph.type_of(y).dims
    total = b.binary("add", y, b.input(*size, name="residual"))
    factors = b.constant(b.random(1, dims[1], *(1,) * (len(dims) - 2)))
    graph = b.output(b.binary("mul", b.act(total), factors))
    return Pipeline(NORMALISE, Stage.NORMAL).run(graph)


def _planes(graph):
    return [node for node in graph.nodes() if node.op == "convolution"]


@pytest.mark.parametrize("upright", [False, True])
@pytest.mark.parametrize(
    "window",
    [
        {"kernel": 3, "pad_l": 5, "pad_r": 5},
        {"kernel": 3, "pad_l": 8, "dilates": 3},
        {"kernel": 11, "pad_r": 5, "strides": 2},
    ],
)
def test_a_row_is_an_image_of_one_row_or_one_column(window, upright):
    graph = _graph(Builder(), (2, 17, 23), **window)
    result = rewrite(graph, DepthwisePlanes(upright=upright))
    (plane,) = _planes(result)
    assert plane.results[0].dims[3 if upright else 2] == 1
    assert [post_op.op for post_op in plane.post_ops] == ["binary", "eltwise", "binary"]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("window", "planes"),
    [
        ({"kernel": 3, "pad_l": 1, "pad_r": 1}, 3),
        ({"kernel": 3, "pad_l": 1, "pad_r": 1, "strides": 2}, 3),
        ({"kernel": 2, "pad_l": 1, "dilates": 1}, 2),
        ({"kernel": 5, "pad_r": 3}, 5),
        ({"kernel": 1}, 1),
    ],
)
def test_a_volume_is_a_sum_of_convolutions_of_its_planes(window, planes, bias):
    graph = _graph(Builder(), (1, 17, 8, 7, 6), bias=bias, **window)
    result = rewrite(graph, DepthwisePlanes())
    found = _planes(result)
    assert len(found) == planes
    assert {len(node.attrs.strides) for node in found} == {2}
    assert [post_op.op for post_op in found[-1].post_ops][-3:] == ["binary", "eltwise", "binary"]


@pytest.mark.parametrize(
    ("dims", "groups", "upright"),
    [
        ((1, 16, 9), 8, False),  # two channels a group
        ((1, 16, 9, 9), 16, False),  # an image
        ((2, 16, 5, 5, 5), 16, False),  # two volumes: their planes do not follow each other behind the padding
        ((1, 16, 9), 16, True),  # narrow padding: all kernels take the row
        ((1, 16, 5, 5, 5), 16, True),
    ],
)
def test_other_convolutions_stay(dims, groups, upright):
    b = Builder()
    graph = b.output(b.conv(b.input(*dims), 16, "conv", kernel=3, pad_l=1, pad_r=1, groups=groups))
    assert DepthwisePlanes(upright=upright).run(graph) is graph
    with pytest.raises(GraphError, match="nobody"):
        DepthwisePlanes(["nobody"]).run(graph)


@pytest.mark.parametrize(
    ("layer", "dims"),
    [
        (nn.Conv1d(48, 48, 3, padding=2, dilation=2, groups=48), (48, 300)),
        (nn.Conv1d(48, 48, 31, padding=15, groups=48), (48, 300)),
        (nn.Conv3d(48, 48, 3, padding=1, groups=48), (48, 10, 11, 12)),
    ],
    ids=["row", "wide", "volume"],
)
def test_a_model_runs_on_kernels_for_depthwise_images(layer, dims):
    torch.manual_seed(0)
    point = nn.Conv1d if len(dims) == 2 else nn.Conv3d
    module = nn.Sequential(point(8, 48, 1), layer, nn.ReLU(), point(48, 8, 1)).eval()
    x = torch.randn(1, 8, *dims[1:])
    net = fp.compile(module, x, tune="model", confirm=False, verify="full")
    depthwise = [step.node.choice.impl for step in net.plan.steps if getattr(step.node.attrs, "groups", 1) == 48]
    assert depthwise
    assert all(impl.startswith(("jit_dw", "brdgmm_dw", "depthwise")) for impl in depthwise), depthwise
    torch.testing.assert_close(net(x), module(x).detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not dnnl.supports("bf16"), reason="no bf16 on this CPU")
@pytest.mark.parametrize("channels", [16, 64], ids=["small", "deferred"])  # large weights are made on request
def test_a_volume_in_bf16_has_converted_weights(channels):
    torch.manual_seed(0)
    layer = nn.Conv3d(channels, channels, (3, 9, 9), padding=(1, 4, 4), groups=channels)
    module = nn.Sequential(nn.Conv3d(8, channels, 1), layer, nn.ReLU(), nn.Conv3d(channels, 8, 1)).eval()
    x = torch.randn(1, 8, 10, 11, 12)
    net = fp.compile(module, x, dtype="bf16", tune="model", confirm=False, verify="full")
    assert [step.node.name for step in net.plan.steps if "plane_" in step.node.name]
    torch.testing.assert_close(net(x), module(x).detach(), rtol=3e-2, atol=3e-2)
