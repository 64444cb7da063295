"""Groups merged into wider ones by zeros between them: the same numbers, and only where groups are narrow."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fmtprop as fp
from fmtprop.errors import GraphError
from fmtprop.ir.verify import Stage
from fmtprop.passes.base import Pipeline
from fmtprop.passes.pipeline import NORMALISE
from fmtprop.passes.variants.merge_groups import MergeGroups
from tests.passes.only_filtered import only_filtered
from tests.passes.rewriting import Builder, rewrite


@pytest.mark.parametrize(
    ("channels", "outputs", "groups", "width", "left"),
    [
        (32, 32, 8, 8, 4),
        (32, 32, 8, 16, 2),
        (8, 24, 4, 8, 1),
        (12, 24, 2, 8, 1),
        (36, 36, 12, 8, 12),  # three channels: eight groups have 24 and do not divide the twelve
        (9, 15, 3, 16, 1),
        (16, 32, 16, 8, 2),
        (64, 64, 4, 16, 4),
        (16, 16, 16, 8, 16),
        (256, 256, 128, 16, 16),
    ],
)
def test_as_few_groups_are_merged_as_fill_a_width(channels, outputs, groups, width, left):
    b = Builder()
    x = b.input(2, channels, 6, 5)
    y = b.conv(x, outputs, "conv", kernel=3, pad_l=1, strides=2, groups=groups)
    graph = Pipeline(NORMALISE, Stage.NORMAL).run(b.output(b.act(y)))
    result = rewrite(graph, MergeGroups(width=width), tolerance=1e-4)
    assert result.node("conv").attrs.groups == left
    assert (result is graph) == (left == groups)
    assert result.node("conv").post_ops == graph.node("conv").post_ops


def test_what_follows_within_the_convolution_stays_there():
    b = Builder()
    x = b.input(1, 16, 7, 7)
    y = b.conv(x, 16, "conv", kernel=3, pad_l=1, groups=4)
    total = b.binary("add", y, b.act(x, "tanh"))
    scaled = b.binary("mul", b.act(total), b.constant(b.random(1, 16, 1, 1)))
    graph = Pipeline(NORMALISE, Stage.NORMAL).run(b.output(scaled))
    assert [post_op.op for post_op in graph.node("conv").post_ops] == ["sum", "eltwise", "binary"]
    result = rewrite(graph, MergeGroups(width=8), tolerance=1e-4)
    assert [post_op.op for post_op in result.node("conv").post_ops] == ["binary", "eltwise", "binary"]


def test_computed_weights_stay():
    b = Builder()
    conv = b.conv(b.input(1, 8, 5, 5), 8, "conv", groups=2)
    graph = b.output(conv)
    graph.set_input("conv", "weights", b.input(2, 4, 4, 1, 1, name="weights"))
    assert MergeGroups().run(graph) is graph
    with pytest.raises(GraphError, match="nobody"):
        MergeGroups(["nobody"]).run(graph)


def test_a_model_runs_so(monkeypatch):
    only_filtered(monkeypatch)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(16, 32, 3, padding=1, groups=4), nn.ReLU(), nn.Conv2d(32, 32, 3, groups=8)).eval()
    x = torch.randn(1, 16, 12, 11)
    net = fp.compile(module, x, confirm=False, verify="full")
    assert {step.node.attrs.groups for step in net.plan.steps if step.node.op == "convolution"} <= {1, 2, 4}
    assert not any(step.node.choice.impl.startswith("ref") for step in net.plan.steps)
    torch.testing.assert_close(net(x), module(x).detach(), rtol=1e-5, atol=1e-5)
