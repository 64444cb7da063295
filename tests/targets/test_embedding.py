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
    net = fmtprop.compile(module, xs, deterministic=True)
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


class Edges(nn.Module):
    """Numbers of the nodes at both ends of edges, as graph layers read them."""

    def forward(self, nodes, edges):
        return nodes[edges[0]] - nodes[edges[1]], nodes.index_select(0, edges[0])


@pytest.mark.parametrize("dims", [(40,), (40, 3), (40, 2, 5)])
def test_rows_by_indexing_are_copied_by_the_kernel(dims):
    nodes, edges = torch.randn(dims), torch.randint(0, 40, (2, 30))
    net = fmtprop.compile(Edges(), (nodes, edges), deterministic=True)
    ways = [step.node.choice.impl.partition(":")[0] for step in net.plan.steps if step.node.op == "aten"]
    assert ways == ["gather"] * 3
    edges[1] -= 40  # from the end
    for got, wanted in zip(net(nodes, edges), Edges()(nodes, edges), strict=True):
        torch.testing.assert_close(got, wanted)
    for outside in (40, -41):
        edges[1, 3] = outside
        with pytest.raises(IndexError, match="must exist along its axis"):
            net(nodes, edges)


def test_a_negative_index_of_a_selection_does_not_exist():
    nodes, edges = torch.randn(40, 3), torch.randint(0, 40, (2, 30))
    net = fmtprop.compile(Edges(), (nodes, edges), tune="model", confirm=False)
    edges[0, 2] = -1
    with pytest.raises(IndexError, match="must exist along its axis"):
        net(nodes, edges)


class Bags(nn.Module):
    """Bags of rows of a table, and a layer."""

    def __init__(self, **how) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bags, self.layer = nn.EmbeddingBag(50, 24, **how), nn.Linear(24, 5)

    def forward(self, *given):
        return self.layer(self.bags(*given))


def bag_ways(net):
    return [step.node.choice.impl.partition(":")[0] for step in net.plan.steps if step.node.op == "embedding_bag"]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("how", [{"mode": "mean"}, {"mode": "max"}, {"mode": "sum", "padding_idx": -2}])
def test_bags_have_the_kernel(how, dtype):
    module, offsets = Bags(**how).eval(), torch.tensor([0, 3, 3, 9], dtype=dtype)
    xs = torch.randint(0, 50, (12,)).to(dtype), offsets
    xs[0][:2] = 48
    net = fmtprop.compile(module, xs, tune="model")
    assert bag_ways(net) == ["embedding_bag"]
    torch.testing.assert_close(net(*xs), module(*xs), rtol=1e-5, atol=1e-5)
    plain = fmtprop.compile(module, xs, policy="propagate")
    assert bag_ways(plain) == ["torch"]
    torch.testing.assert_close(plain(*xs), module(*xs), rtol=1e-5, atol=1e-5)
    for one in (net, plain):
        with pytest.raises(InputError, match=r"index out of range in self.*An index must exist"):
            one(xs[0] + 2, offsets)
        with pytest.raises(RuntimeError, match="offsets must start with 0, must not decrease"):
            one(xs[0], offsets.flip(0))


def test_bags_of_equal_size_and_bags_with_factors():
    module, indices = Bags(mode="mean").eval(), torch.randint(0, 50, (4, 6))
    net = fmtprop.compile(module, indices, tune="model")
    assert bag_ways(net) == ["embedding_bag"]
    torch.testing.assert_close(net(indices), module(indices), rtol=1e-5, atol=1e-5)
    module, xs = Bags(mode="sum").eval(), (indices, None, torch.rand(4, 6))
    net = fmtprop.compile(module, xs, tune="model")
    assert bag_ways(net) == ["embedding_bag"]
    torch.testing.assert_close(net(*xs), module(*xs), rtol=1e-5, atol=1e-5)


def test_an_end_before_the_last_index_is_the_end_of_the_last_bag():
    module = Bags(mode="sum", include_last_offset=True, padding_idx=3).eval()
    indices, offsets = torch.tensor([1, 3, 2, 5, 99]), torch.tensor([0, 2, 4])
    wanted = module(indices[:4], offsets)
    for policy in ("optimal", "plain"):
        net = fmtprop.compile(module, (indices, offsets), policy=policy, tune="model")
        torch.testing.assert_close(net(indices, offsets), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("policy", ["optimal", "plain"])
def test_indices_without_a_bag(policy):
    module, xs = Bags(mode="sum", padding_idx=3).eval(), (torch.tensor([1, 2]), torch.zeros(0, dtype=torch.int64))
    net = fmtprop.compile(module, xs, policy=policy, tune="model")
    assert net(*xs).shape == (0, 5)
