"""Sums of very many numbers, and of none: as exact as PyTorch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fmtprop as fp
from tests.modules import Function

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.mark.parametrize(
    ("function", "dims"),
    [
        (lambda x: x.mean((2, 3)), (1, 3, 256, 256)),
        (lambda x: F.avg_pool2d(x, 200), (1, 2, 400, 200)),
        (lambda x: F.adaptive_avg_pool1d(x, 1), (1, 8, 40000)),
        (lambda x: x.sum(0), (40000, 16)),
        (lambda x: x.norm(dim=1), (4, 40000)),
    ],
)
def test_a_sum_of_many_equal_numbers_keeps_its_digits(function, dims):
    # each partial sum is rounded in the same direction: one after the other they would be off by 1e-3
    model, x = Function(function), torch.full(dims, 0.7)
    expected = model(x.double())
    torch.testing.assert_close(fp.compile(model, x, tune="model")(x).double(), expected, rtol=2e-6, atol=0.0)


def test_a_window_as_in_the_built_in_networks_is_not_summed_by_pytorch():
    model, x = Function(lambda x: x.mean((2, 3))), torch.rand(1, 8, 112, 112)
    net = fp.compile(model, x, tune="model")
    assert {step.node.choice.target for step in net.plan.steps} <= {"onednn", "jit"}
    torch.testing.assert_close(net(x), model(x), rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("policy", ["optimal", "propagate", "plain"])
@pytest.mark.parametrize(
    ("function", "dims"),
    [
        (lambda a, b: (a @ b + 1).relu(), [(3, 0), (0, 4)]),
        (torch.bmm, [(2, 3, 0), (2, 0, 4)]),
        (F.scaled_dot_product_attention, [(1, 2, 3, 4), (1, 2, 0, 4), (1, 2, 0, 4)]),
    ],
)
def test_sums_of_nothing_are_zero(function, dims, policy):
    model, tensors = Function(function), [torch.randn(size) for size in dims]
    net = fp.compile(model, tuple(tensors), policy=policy, verify="off")
    torch.testing.assert_close(net(*tensors), model(*tensors))


def test_the_mean_of_nothing_is_nan():
    x = torch.randn(1, 2, 0, 3)
    assert fp.compile(Function(lambda x: x.mean((2, 3))), x)(x).isnan().all()


def test_a_window_that_reaches_far_beyond_its_source_is_summed_by_onednn():
    """As the last pooling of EfficientNet in `transformers`: 640x640 over 3x3."""
    model, x = nn.AvgPool2d(640, ceil_mode=True), torch.randn(2, 8, 3, 3)
    net = fp.compile(model, x, tune="model")
    assert [step.target for step in net.plan.steps] == ["onednn"]
    torch.testing.assert_close(net(x), model(x))
