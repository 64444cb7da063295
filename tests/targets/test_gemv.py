"""Products of one token by a kernel: offered for one row, chosen in plans, right under every policy."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fmtprop
from fmtprop import dnnl
from fmtprop.compiling.entrants import Entrants
from fmtprop.jit import unavailable

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable())


class Block(nn.Module):
    """The feed-forward part of a decoder's layer, and a head with the embedding's weights."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(256), nn.Linear(256, 512), nn.Linear(512, 256)
        self.gate = nn.Linear(256, 512, bias=False)
        self.table = nn.Embedding(640, 256)

    def forward(self, tokens):
        x = self.table(tokens)
        y = self.norm(x)
        x = x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))
        return nn.functional.gelu(x, approximate="tanh") @ self.table.weight.T


def implementations(net):
    return [node.choice.impl for node in net.graph.nodes() if node.op in ("matmul", "inner_product")]


@pytest.fixture
def block(usual_peaks, monkeypatch):
    # the plan that is best by costs: a race of such short runs has any winner on a busy machine
    monkeypatch.setattr(Entrants, "field", lambda self, *, whole: [self.best])
    torch.manual_seed(0)
    return Block().eval()


@pytest.mark.parametrize("dims", [(1,), (1, 1)])
def test_a_token_is_multiplied_by_kernels(block, dims):
    tokens = torch.tensor([5]).reshape(dims)
    net = fmtprop.compile(block, (tokens,), tune="model")
    assert {impl.partition(":")[0] for impl in implementations(net)} == {"gemv"}, net.certificate
    torch.testing.assert_close(net(tokens), block(tokens), rtol=1e-5, atol=1e-4)


def test_the_heads_weights_are_the_table_without_a_copy(block):
    net = fmtprop.compile(block, (torch.tensor([5]),), tune="model")
    assert not net.plan.packed


@pytest.mark.parametrize("policy", ["optimal", "propagate", "plain", "naive"])
@pytest.mark.parametrize("tokens", [1, 2, 7])
def test_every_policy_is_right(block, policy, tokens):
    given = torch.arange(tokens)[None]
    net = fmtprop.compile(block, (given,), policy=policy)
    torch.testing.assert_close(net(given), block(given), rtol=1e-5, atol=1e-4)
    assert tokens == 1 or not any(impl.startswith("gemv") for impl in implementations(net))


@pytest.mark.skipif(not dnnl.supports("bf16"), reason="this CPU has no bf16")
def test_bf16(block):
    given = torch.tensor([[5]])
    net = fmtprop.compile(block, (given,), dtype="bf16", tune="model")
    assert any(impl.startswith("gemv") for impl in implementations(net))
    expected = block(given)
    assert (net(given) - expected).abs().max() <= 2e-2 * expected.abs().max()


def test_a_batch_of_matrices_is_none(block):
    src, weights = torch.randn(3, 1, 64), torch.randn(3, 64, 32)
    net = fmtprop.compile(_Product().eval(), (src, weights))
    assert not any(impl.startswith("gemv") for impl in implementations(net))
    torch.testing.assert_close(net(src, weights), src @ weights)


class _Product(nn.Module):
    def forward(self, src, weights):
        return src @ weights
