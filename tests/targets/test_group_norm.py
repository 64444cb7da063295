"""Group normalization in networks: by a kernel of ours on channels-last tensors, in the data type of its neighbours."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fmtprop as fp
from fmtprop import dnnl
from fmtprop.jit import unavailable

KERNELS = pytest.mark.skipif(bool(unavailable()), reason=unavailable())


def model(channels: int = 48, groups: int = 6, *, affine: bool = True) -> nn.Module:
    torch.manual_seed(0)
    layers = [
        *(nn.Conv2d(8, channels, 3, padding=1), nn.GroupNorm(groups, channels, affine=affine), nn.SiLU()),
        *(nn.Conv2d(channels, channels, 3, padding=1), nn.InstanceNorm2d(channels), nn.Conv2d(channels, 8, 1)),
    ]
    return nn.Sequential(*layers).eval()


X = torch.randn(2, 8, 24, 17, generator=torch.Generator().manual_seed(0))


def impls(net: fp.CompiledModel) -> list[str]:
    return [step.node.choice.impl for step in net.plan.steps if step.node.op == "group_normalization"]


@KERNELS
@pytest.mark.parametrize("policy", ["optimal", "propagate"])
@pytest.mark.parametrize("affine", [True, False])
def test_a_network_of_convolutions_stays_in_one_format(policy: str, affine: bool) -> None:
    module = model(affine=affine)
    net = fp.compile(module, X, policy=policy, tune="model")
    torch.testing.assert_close(net(X), module(X), rtol=1e-4, atol=1e-4)
    if policy == "optimal":
        assert [impl.partition(":")[0] for impl in impls(net)] == ["group_norm", "group_norm"]


@KERNELS
@pytest.mark.skipif(not dnnl.supports("bf16"), reason="this CPU has no bf16")
def test_bf16_is_not_converted_around_it() -> None:
    module = model()
    net = fp.compile(module, X, dtype="bf16", tune="model")
    assert (net(X) - module(X)).abs().max() <= 3e-2 * module(X).abs().max()
    normalizations = [step.node for step in net.plan.steps if step.node.op == "group_normalization"]
    assert {node.results[0].dtype.value for node in normalizations} == {"bf16"}
    conversions = [step.node for step in net.plan.steps if step.node.op == "reorder"]
    assert len(conversions) <= 2, "only the input and the output are converted"


def test_channels_that_are_no_whole_vectors_are_pytorchs() -> None:
    module = model(15, 3)
    net = fp.compile(module, X)
    assert not any(impl.startswith("group_norm") for impl in impls(net))
    torch.testing.assert_close(net(X), module(X), rtol=1e-4, atol=1e-4)
