"""Batch normalization as a depthwise convolution: the same numbers, and only where it means the same."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fmtprop as fp
from fmtprop.ir import TensorType, Value
from fmtprop.ir.node import PostOp
from fmtprop.ir.verify import Stage
from fmtprop.ops import BatchNorm, Eltwise
from fmtprop.ops.sum import Sum
from fmtprop.passes.base import Pipeline
from fmtprop.passes.pipeline import NORMALISE
from fmtprop.passes.variants.norm_as_convolution import NormAsConvolution
from tests.passes.only_filtered import only_filtered
from tests.passes.rewriting import Builder, rewrite


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("dims", [(2, 5, 9), (1, 8, 6, 7), (3, 12, 4, 1, 5)])
def test_it_means_the_same(dims, affine):
    b = Builder()
    graph = b.output(b.act(b.norm(b.input(*dims), "norm", affine)))
    normal = Pipeline(NORMALISE, Stage.NORMAL).run(graph)
    assert [post_op.attrs for post_op in normal.node("norm").post_ops] == [Eltwise("relu")]
    node = rewrite(normal, NormAsConvolution()).node("norm")
    assert node.op == "convolution" and node.attrs.groups == dims[1]
    assert node.post_ops == normal.node("norm").post_ops


def test_a_mean_far_from_zero_costs_no_more_than_in_pytorch():
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(16).eval()
    norm.running_mean.normal_(1000.0, 10.0)
    norm.running_var.uniform_(1e-2, 1.0)
    x = norm.running_mean[None, :, None, None] + torch.randn(1, 16, 8, 8)
    with torch.no_grad():
        exact = norm.double()(x.double())
        error = (norm.float()(x).double() - exact).abs().max()
    net = fp.compile(norm.float(), x, confirm=False)
    assert (net(x).double() - exact).abs().max() <= 2 * error
    normal = Pipeline(NORMALISE, Stage.NORMAL).run(fp.from_torch(norm, x))
    assert "convolution" not in {node.op for node in rewrite(normal, NormAsConvolution()).nodes()}


def test_what_is_something_else_stays():
    b = Builder()
    x, one = b.input(2, 4, 5, 5), b.input(2, 1, 5, 5, name="one")
    b.norm(x, "of_rows")
    b.norm(one, "of_one_channel")
    b.norm(b.input(2, 4, name="flat"), "of_vectors")
    b.norm(b.constant(torch.ones(2, 4, 5, 5)), "of_constants")
    zeros, ones = b.constant(torch.zeros(4)), b.constant(torch.ones(4))
    b.op("batch_normalization", BatchNorm(0.0), "of_none", src=x, mean=ones, variance=zeros)
    b.op("batch_normalization", BatchNorm(), "computed", src=x, mean=b.input(4, name="mean"), variance=ones)
    names = ["of_one_channel", "of_vectors", "of_constants", "of_none", "computed"]
    graph = b.output(*(Value(name) for name in ["of_rows", *names]))
    assert [node.name for node in NormAsConvolution().eligible(graph)] == ["of_rows"]
    assert NormAsConvolution(names).run(graph) is graph


def test_a_sum_after_it_stays():
    b = Builder()
    x = b.input(2, 4, 5, 5)
    graph = b.output(b.norm(x, "norm"))
    other = b.graph.input("other", TensorType((2, 4, 5, 5)))
    node = graph.node("norm").with_(post_ops=(PostOp("sum", Sum((1.0,)), "post_op_0"),))
    graph.replace(node)
    graph.set_inputs("norm", {**graph.inputs("norm"), "post_op_0": other})
    assert NormAsConvolution().eligible(graph) == []


class PreActivation(nn.Module):
    """Two layers of a dense block."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.BatchNorm2d(16), nn.BatchNorm2d(24), nn.BatchNorm2d(32)])
        self.layers = nn.ModuleList([nn.Conv2d(16, 8, 1), nn.Conv2d(24, 8, 3, padding=1)])
        for norm in self.norms:
            nn.init.normal_(norm.running_mean)
            nn.init.uniform_(norm.running_var, 0.5, 2.0)
            nn.init.normal_(norm.weight)
            nn.init.normal_(norm.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=False):
            x = torch.cat((x, layer(F.relu(norm(x)))), 1)
        return self.norms[2](x)


@pytest.mark.parametrize("winograd", [True, False])
@pytest.mark.parametrize("size", [(1, 16, 14, 14), (3, 16, 9, 7)])
def test_a_model_runs_so(size, winograd, monkeypatch, own_cache):
    # what other tests' runs taught may make PyTorch's way the cheapest
    only_filtered(monkeypatch)
    torch.manual_seed(0)
    module, x = PreActivation().eval(), torch.randn(size)
    net = fp.compile(module, x, confirm=False, verify="full", winograd=winograd)
    assert not any(step.node.op == "batch_normalization" for step in net.plan.steps)
    assert {step.target for step in net.plan.steps} <= {"onednn", "jit"}
    assert not any(step.node.choice.impl.startswith("ref") for step in net.plan.steps)
    torch.testing.assert_close(net(x), module(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("policy", ["plain", "naive", "propagate"])
def test_other_policies_normalise(policy):
    module, x = PreActivation().eval(), torch.randn(1, 16, 8, 8)
    net = fp.compile(module, x, policy=policy)
    assert sum(step.node.op == "batch_normalization" for step in net.plan.steps) == 3
