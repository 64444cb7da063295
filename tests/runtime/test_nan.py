"""NaN goes through as in PyTorch, except in the ops that docs/numerics.md lists."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fmtprop as fp
from tests.modules import Function

FAITHFUL = {
    "convolution": nn.Conv2d(8, 8, 1),
    "linear": nn.Linear(8, 8),
    "batch_norm": nn.BatchNorm2d(8).eval(),
    "layer_norm": nn.LayerNorm(8),
    "avg_pool": nn.AvgPool2d(2),
    "upsample": nn.Upsample(scale_factor=2, mode="bilinear"),
    "leaky_relu": nn.LeakyReLU(0.1),
    "elu": nn.ELU(),
    "gelu": nn.GELU(),
    "silu": nn.SiLU(),
    "mish": nn.Mish(),
    "hardswish": nn.Hardswish(),
    "softplus": nn.Softplus(),
    "tanh": nn.Tanh(),
    "sigmoid": nn.Sigmoid(),
    "prelu": nn.PReLU(8),
    "add": Function(lambda x: x + x),
    "sum": Function(lambda x: x.sum(1)),
    "mean": Function(lambda x: x.mean((2, 3))),
    "cat": Function(lambda x: torch.cat([x, x], 1)),
}

#: op -> what stands at the place of the NaN
EXCEPTIONS = {
    "relu": (nn.ReLU(), 0.0),
    "clamp": (nn.Hardtanh(), -1.0),
    "hardsigmoid": (nn.Hardsigmoid(), 1.0),
    "exp": (Function(torch.exp), torch.inf),
}


def poisoned() -> torch.Tensor:
    x = torch.randn(1, 8, 4, 8, generator=torch.Generator().manual_seed(0))
    x[0, 0, 0, 0] = torch.nan
    return x


@pytest.mark.parametrize("name", FAITHFUL)
def test_nan_goes_through_as_in_pytorch(name):
    module, x = FAITHFUL[name], poisoned()
    with torch.no_grad():
        want = module(x)
    assert torch.isnan(want).any()
    assert torch.equal(torch.isnan(fp.compile(module, x)(x)), torch.isnan(want))


@pytest.mark.parametrize("name", EXCEPTIONS)
def test_documented_exceptions_are_as_documented(name):
    module, value = EXCEPTIONS[name]
    x = poisoned()
    got = fp.compile(module, x)(x)
    assert got[0, 0, 0, 0].item() == value
    assert not torch.isnan(got).any()


@pytest.mark.parametrize("policy", ["optimal", "propagate"])
def test_a_fused_relu_gives_zero_or_nan(policy):
    module, x = nn.Sequential(nn.Conv2d(8, 8, 1), nn.ReLU()), poisoned()
    net = fp.compile(module, x, policy=policy)
    assert [step.node.op for step in net.plan.steps if step.node.op == "eltwise"] == [], "it is fused"
    got = net(x)
    at = got[0, :, 0, 0]
    assert (torch.isnan(at) | (at == 0)).all()
    with torch.no_grad():
        want = module(x)
    assert torch.allclose(got[0, :, 1:], want[0, :, 1:], atol=1e-5), "elsewhere nothing happens"


def behind_weights(module: nn.Module) -> nn.Module:
    """Return a module behind a layer with weights that changes nothing: its maxima are oneDNN's."""
    same = nn.Conv2d(8, 8, 1, groups=8, bias=False)
    nn.init.ones_(same.weight)
    return nn.Sequential(same, module)


def test_maxima_ignore_nan():
    module, x = behind_weights(nn.MaxPool2d(2)), poisoned()
    got = fp.compile(module, x)(x)
    with torch.no_grad():
        want = module(x.nan_to_num(-100.0))
    assert torch.equal(got, want)


def test_behind_weights_the_maximum_of_infinities_is_the_lowest_number():
    module, x = behind_weights(nn.MaxPool2d(2)), torch.full((1, 8, 4, 8), -torch.inf)
    got = fp.compile(module, x)(x)
    assert (got == torch.finfo(torch.float32).min).all()


def test_softmax_confines_nan_to_its_row():
    x = poisoned()
    got = fp.compile(nn.Softmax(-1), x)(x)
    assert torch.isnan(got[0, 0, 0]).any()
    assert not torch.isnan(got[0, 0, 1:]).any()
