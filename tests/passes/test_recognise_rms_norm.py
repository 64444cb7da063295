"""RMS normalization: every spelling becomes one step, other computations stay."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fmtprop
from fmtprop import dnnl

WIDTH = 64


def _mean(x):
    return x.pow(2).mean(-1, keepdim=True)


#: spelling of a normalization with its scale
SPELLINGS = {
    "llama": lambda x, w: w * (x.to(torch.float32) * torch.rsqrt(_mean(x.to(torch.float32)) + 1e-6)),
    "gemma": lambda x, w: (x * torch.rsqrt(_mean(x) + 1e-6)) * (1.0 + w),
    "division": lambda x, w: x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5) * w,
    "power": lambda x, w: x * (_mean(x) + 1e-5) ** -0.5 * w,
    "operator": lambda x, w: nn.functional.rms_norm(x, (WIDTH,), w),
    "no epsilon": lambda x, w: x * torch.rsqrt(x.square().mean(-1, keepdim=True)) * w,
    "no scale": lambda x, w: x * torch.rsqrt(_mean(x) + 1e-6),
}

#: computations that look like it
OTHERS = {
    "other axis": lambda x, w: x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6) * w,
    "mean has a reader": lambda x, w: (mean := _mean(x)) + x * torch.rsqrt(mean + 1e-6) * w,
    "other tensor": lambda x, w: x * torch.rsqrt(_mean(x + 1.0) + 1e-6) * w,
    "sum": lambda x, w: x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6) * w,
    "inverse": lambda x, w: torch.rsqrt(_mean(x) + 1e-6) / x * w,
    "third power": lambda x, w: x * torch.rsqrt(x.pow(4).mean(-1, keepdim=True) + 1e-6) * w,
}


class Normalized(nn.Module):
    """A linear layer and a computation on it."""

    def __init__(self, function) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function, self.layer = function, nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x):
        return self.function(self.layer(x), self.scale)


def compiled(function, **options):
    module, x = Normalized(function).eval(), torch.randn(2, 5, WIDTH)
    net = fmtprop.compile(module, (x,), **options)
    return net, net(x), module(x)


@pytest.mark.parametrize("name", SPELLINGS)
@pytest.mark.parametrize("policy", ["optimal", "propagate", "plain"])
def test_each_spelling_is_one_step(name, policy):
    net, got, expected = compiled(SPELLINGS[name], policy=policy)
    ops = [node.op for node in net.graph.nodes()]
    assert ops.count("rms_normalization") == 1 and not {"binary", "reduction", "eltwise"} & set(ops)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", OTHERS)
def test_another_computation_stays(name):
    net, got, expected = compiled(OTHERS[name])
    assert "rms_normalization" not in [node.op for node in net.graph.nodes()]
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_a_scale_that_is_computed_stays_a_product():
    class Gated(nn.Module):
        def forward(self, x, w):
            return x * torch.rsqrt(_mean(x) + 1e-6) * w

    x, w = torch.randn(3, WIDTH), torch.rand(WIDTH)
    net = fmtprop.compile(Gated().eval(), (x, w))
    assert {"rms_normalization", "binary"} <= {node.op for node in net.graph.nodes()}
    torch.testing.assert_close(net(x, w), Gated()(x, w))


@pytest.mark.skipif(not dnnl.supports("bf16"), reason="this CPU has no bf16")
def test_bf16_is_normalized_in_f32():
    net, got, expected = compiled(SPELLINGS["llama"], dtype="bf16")
    assert "rms_normalization" in [node.op for node in net.graph.nodes()]
    assert (got - expected).abs().max() <= 3e-2 * expected.abs().max()


def _normal(wide):
    return wide * torch.rsqrt(_mean(wide) + 1e-6)


#: spellings of a module in bf16, which normalize in f32
NARROW = {
    "llama": lambda x, w: w * _normal(x.float()).to(x.dtype),
    "gemma": lambda x, w: (_normal(x.float()) * (1.0 + w.float())).type_as(x),
    "no scale": lambda x, w: _normal(x.float()).to(x.dtype),
}


@pytest.mark.skipif(not dnnl.supports("bf16"), reason="this CPU has no bf16")
@pytest.mark.parametrize("name", NARROW)
def test_a_module_in_bf16_needs_no_conversions(name):
    module, x = Normalized(NARROW[name]).eval().bfloat16(), torch.randn(2, 5, WIDTH).bfloat16()
    net = fmtprop.compile(module, (x,), policy="plain")
    ops = [node.op for node in net.graph.nodes()]
    assert ops.count("rms_normalization") == 1
    assert not {"binary", "reorder"} & {step.node.op for step in net.plan.steps}
    exact = Normalized(NARROW[name]).eval().bfloat16().float()(x.float())
    errors = [(got.float() - exact).abs().max() / exact.abs().max() for got in (net(x), module(x))]
    assert errors[0] <= max(1.5 * errors[1], 1e-2)


@pytest.mark.skipif(not dnnl.supports("bf16"), reason="this CPU has no bf16")
def test_a_conversion_to_another_type_stays():
    module, x = (
        Normalized(lambda x, w: _normal(x.float()).half()).eval().bfloat16(),
        torch.randn(2, 5, WIDTH).bfloat16(),
    )
    net = fmtprop.compile(module, (x,))
    assert net(x).dtype is torch.float16
    torch.testing.assert_close(net(x).float(), module(x).float(), rtol=3e-2, atol=3e-2)
