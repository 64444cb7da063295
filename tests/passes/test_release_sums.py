"""After a rewrite, sums that may no longer overwrite their operand read it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fmtprop as fp
from fmtprop.errors import VerifyError
from fmtprop.ir import Graph
from fmtprop.ir.verify import Stage, verify
from fmtprop.passes.base import Pipeline
from fmtprop.passes.nest_concats import NestConcats
from fmtprop.passes.pipeline import NORMALISE
from fmtprop.passes.release_sums import ReleaseSums
from tests.passes.rewriting import Builder, rewrite, summary
from tests.passes.test_nest_concats import joined


def nested() -> Graph:
    """A sum into ``[a, b]``, and ``[a, b, c]`` that needs the sum's result."""
    b = Builder()
    x = b.input(1, 8, 6, 6)
    parts = [b.act(b.conv(x, 4, f"conv_{name}"), name=name) for name in "ab"]
    both = joined(b, "both", *parts)
    summed = b.binary("add", b.conv(x, 8, "conv"), both, "add")
    return b.output(joined(b, "all", *parts, b.conv(summed, 4, "conv_c")))


def test_a_sum_that_may_not_overwrite_any_more_becomes_a_binary():
    normal = Pipeline(NORMALISE, Stage.NORMAL).run(nested())
    assert sum(post_op.op == "sum" for node in normal.nodes() for post_op in node.post_ops) == 1
    spoilt = NestConcats().run(normal)
    with pytest.raises(VerifyError, match="V9"):
        verify(spoilt, Stage.NORMAL)
    released = rewrite(normal, NestConcats(), ReleaseSums())
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
    """As :func:`nested`, of modules."""

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
