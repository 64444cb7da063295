"""After a rewrite, sums that may no longer overwrite their operand read it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fmtprop as fp
from fmtprop.errors import VerifyError
from fmtprop.ir import Graph
from fmtprop.ir.verify import Stage, verify
from fmtprop.ops import Binary, emit
from fmtprop.passes.base import Pipeline
from fmtprop.passes.pipeline import NORMALISE
from fmtprop.passes.rewrites.release_sums import ReleaseSums
from fmtprop.passes.variants.scale_weights import ScaleWeights
from tests.compiling.test_bytes import Network
from tests.passes.rewriting import Builder, rewrite, summary


def scaled() -> Graph:
    """A sum into a tensor whose product with factors the convolution reads."""
    b = Builder()
    x = b.act(b.conv(b.input(1, 8, 6, 6), 8, "first"))
    product = b.binary("mul", x, b.input(1, 8, 1, 1, name="factors"), "product")
    return b.output(b.binary("add", b.conv(product, 8, "conv"), x, "add"))


def test_a_sum_that_may_not_overwrite_any_more_becomes_a_binary():
    normal = Pipeline(NORMALISE, Stage.NORMAL).run(scaled())
    assert sum(post_op.op == "sum" for node in normal.nodes() for post_op in node.post_ops) == 1
    spoilt = ScaleWeights().run(normal)
    with pytest.raises(VerifyError, match="V9"):
        verify(spoilt, Stage.NORMAL)
    released = rewrite(normal, ScaleWeights(), ReleaseSums())
    verify(released, Stage.NORMAL)
    assert not any(post_op.op == "sum" for node in released.nodes() for post_op in node.post_ops)
    assert len(summary(released)) == len(summary(spoilt))


def test_a_sum_that_may_overwrite_stays():
    b = Builder()
    one = b.conv(b.input(1, 8, 6, 6), 8, "one")
    normal = Pipeline(NORMALISE, Stage.NORMAL).run(b.output(b.binary("add", b.conv(b.act(one), 8, "two"), one)))
    assert any(post_op.op == "sum" for node in normal.nodes() for post_op in node.post_ops)
    assert ReleaseSums().run(normal) is normal


class Nested(nn.Module):
    """A sum into ``[a, b]``, and ``[a, b, c]`` that needs the sum's result."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(8, 4, 1), nn.Conv2d(8, 4, 1), nn.Conv2d(8, 4, 1)
        self.conv = nn.Conv2d(8, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.a(x).tanh(), self.b(x).tanh()
        return torch.cat([a, b, self.c(self.conv(x) + torch.cat([a, b], 1))], 1)


def test_a_network_with_such_a_sum_compiles():
    torch.manual_seed(0)
    module, x = Nested().eval(), torch.randn(1, 8, 6, 6)
    net = fp.compile(module, x, tune="model")
    torch.testing.assert_close(net(x), module(x), rtol=1e-5, atol=1e-5)


def test_a_sum_of_products_of_bytes_may_be_of_another_type():
    net = Network((1, 8, 6, 6), signed=False)
    x, add = net.rounded(net.value, 100), Binary("add")
    total = emit(net.graph, "binary", {"src_0": net.convolution(x, 8, 3), "src_1": net.convolution(x, 8, 1)}, add)
    net.graph.output(net.rounded(total, 100))
    normal = Pipeline(NORMALISE, Stage.NORMAL).run(net.graph)
    assert [p.op for node in normal.nodes() for p in node.post_ops] == ["binary", "fake_quantize"]
