"""Embeddings by a kernel: chosen in plans, and an index that does not exist is the caller's error."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fmtprop
from fmtprop.errors import InputError
from fmtprop.jit import unavailable

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable())


class Tokens(nn.Module):
    """The sum of two embeddings, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places, self.layer = nn.Embedding(50, 33), nn.Embedding(9, 33), nn.Linear(33, 20)

    def forward(self, tokens, places):
        return self.layer(self.words(tokens) + self.places(places))


def given(dims, dtype=torch.int64):
    return torch.randint(0, 50, dims).to(dtype), torch.randint(0, 9, dims).to(dtype)


@pytest.mark.parametrize("policy", ["optimal", "propagate", "plain"])
@pytest.mark.parametrize("dims", [(1,), (2, 7), (0, 3)])
def test_every_policy_is_right(policy, dims):
    module, xs = Tokens().eval(), given(dims)
    net = fmtprop.compile(module, xs, policy=policy, tune="model")
    torch.testing.assert_close(net(*xs), module(*xs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_plan_has_the_kernel(dtype):
    module, xs = Tokens().eval(), given((2, 3), dtype)
    net = fmtprop.compile(module, xs, tune="model", confirm=False)
    ways = [step.node.choice.impl.partition(":")[0] for step in net.plan.steps if step.node.op == "aten"]
    assert ways == ["gather", "gather"]
    for xs in (given((2, 3), dtype), given((2, 3), dtype)):
        torch.testing.assert_close(net(*xs), module(*xs), rtol=1e-5, atol=1e-5)


def test_indices_that_are_a_slice_of_the_callers():
    module, (tokens, places) = Tokens().eval(), given((3, 8))
    net = fmtprop.compile(module, (tokens[1:, 2:5], places[1:, 2:5]), tune="model", confirm=False)
    got = net(tokens[1:, 2:5], places[1:, 2:5])
    torch.testing.assert_close(got, module(tokens[1:, 2:5], places[1:, 2:5]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("outside", [-1, 50])
def test_an_index_that_does_not_exist_is_named(outside):
    module, (tokens, places) = Tokens().eval(), given((4,))
    net = fmtprop.compile(module, (tokens, places), tune="model", confirm=False)
    wrong = tokens.clone()
    wrong[2] = outside
    for _ in range(2):
        with pytest.raises(InputError, match=r"index out of range in self.*input tokens holds") as caught:
            net(wrong, places)
        assert isinstance(caught.value, IndexError)
        torch.testing.assert_close(net(tokens, places), module(tokens, places), rtol=1e-5, atol=1e-5)
