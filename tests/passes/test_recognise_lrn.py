"""PyTorch's local response normalization becomes one op again."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fmtprop as fp
from fmtprop.ops.lrn import Lrn
from fmtprop.passes.rewrites.recognise_lrn import RecogniseLrn
from fmtprop.passes.rewrites.remove_identities import RemoveIdentities
from fmtprop.runtime.agreement import relative_error


@pytest.mark.parametrize("dims", [(2, 16, 7), (2, 16, 7, 5), (1, 9, 3, 4, 5)])
def test_lrn_is_recognised_and_right(dims):
    module, x = nn.LocalResponseNorm(5, alpha=0.2, beta=0.6, k=1.5), torch.randn(dims)
    graph = RecogniseLrn().run(RemoveIdentities().run(fp.from_torch(module, x)))
    (node,) = [node for node in graph.nodes() if not node.is_boundary]
    assert node.op == "lrn"
    assert node.attrs == Lrn("across_channels", 5, pytest.approx(0.2), 0.6, 1.5)
    net = fp.compile(module, x)
    assert [step.node.op for step in net.plan.steps if step.node.op != "reorder"] == ["lrn"]
    assert relative_error(net(x), module(x)) < 1e-5


class Even(nn.Module):
    def forward(self, x):
        return nn.functional.local_response_norm(x, 4)


class Read(nn.Module):
    """The squares have another reader; the quotient is of another tensor."""

    def __init__(self, other: bool) -> None:
        super().__init__()
        self.other = other

    def forward(self, x):
        squares = (x * x).unsqueeze(1)
        mean = nn.functional.avg_pool3d(nn.functional.pad(squares, (0, 0, 0, 0, 2, 2)), (5, 1, 1), stride=1).squeeze(1)
        divisor = (mean * 0.1 + 1.0).pow(0.75)
        return (x + 1) / divisor if self.other else (x / divisor, squares)


@pytest.mark.parametrize("module", [Even(), Read(other=True), Read(other=False)], ids=["even", "other", "read"])
def test_what_is_not_quite_lrn_stays_as_it_is(module):
    x = torch.randn(2, 12, 6, 5)
    graph = RecogniseLrn().run(RemoveIdentities().run(fp.from_torch(module, x)))
    assert "lrn" not in {node.op for node in graph.nodes()}
    got, want = fp.compile(module, x)(x), module(x)
    pairs = zip(got, want, strict=True) if isinstance(want, tuple) else [(got, want)]
    assert all(relative_error(a, b) < 1e-5 for a, b in pairs)
