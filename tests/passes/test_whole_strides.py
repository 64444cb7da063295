"""Deconvolutions computed to a whole number of strides and cut: the same numbers, and only where strides are cut."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fmtprop as fp
from fmtprop.errors import GraphError
from fmtprop.ops.deconvolution import Deconv
from fmtprop.passes.variants.whole_strides import WholeStrides
from tests.passes.only_filtered import only_filtered
from tests.passes.rewriting import Builder, rewrite


def _graph(attrs, sizes, groups=1):
    b = Builder()
    spatial = len(sizes)
    weights = (groups, 8 // groups, 4 // groups) if groups > 1 else (8, 4)
    weights = b.constant(b.random(*weights, *(3,) * spatial))
    return b.output(b.op("deconvolution", attrs, "deconv", src=b.input(2, 4, *sizes), weights=weights))


@pytest.mark.parametrize(
    ("attrs", "sizes", "larger"),
    [
        (Deconv.make(2, 2, pad_l=1), (5, 6), (10, 12)),
        (Deconv.make(2, 2), (5, 6), (12, 14)),
        (Deconv((2, 3), (0, 0), (1, 0), (1, 0)), (5, 6), (10, 18)),
        (Deconv.make(1, 3, pad_l=2), (7,), (18,)),
        (Deconv.make(3, 2, pad_l=1), (3, 4, 5), (6, 8, 10)),
    ],
)
def test_a_result_is_computed_to_the_next_multiple_of_its_strides(attrs, sizes, larger):
    result = rewrite(_graph(attrs, sizes), WholeStrides(), tolerance=1e-5)
    assert result.node("deconv.larger").results[0].dims[2:] == larger
    assert result.node("deconv").op == "slice"


@pytest.mark.parametrize(
    ("attrs", "groups"),
    [
        (Deconv.make(2, 2, pad_l=1, pad_r=0), 1),  # a multiple already
        (Deconv.make(2), 1),
        (Deconv.make(2, 2, pad_l=1, groups=2), 2),
        (Deconv.make(2, 3, pad_l=0, pad_r=-1), 1),  # no window would reach the last elements
    ],
)
def test_others_stay(attrs, groups):
    graph = _graph(attrs, (5, 6), groups)
    assert WholeStrides().run(graph) is graph
    with pytest.raises(GraphError, match="not a deconvolution whose result"):
        WholeStrides().replace(graph, graph.copy(), graph.node("deconv"))


def test_a_model_runs_so(monkeypatch):
    only_filtered(monkeypatch)
    torch.manual_seed(0)
    module = nn.Sequential(nn.ConvTranspose2d(16, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 16, 1)).eval()
    x = torch.randn(1, 16, 7, 9)
    net = fp.compile(module, x, confirm=False, verify="full")
    assert [step.node.results[0].dims for step in net.plan.steps if step.node.op == "deconvolution"] == [
        (1, 32, 14, 18)
    ]
    torch.testing.assert_close(net(x), module(x).detach(), rtol=1e-5, atol=1e-5)
