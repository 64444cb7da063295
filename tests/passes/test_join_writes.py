"""Writes into parts of a tensor become one concat."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fmtprop as fp
from fmtprop.capture import from_torch
from fmtprop.ops.evaluate import evaluate
from fmtprop.passes.rewrites.join_writes import JoinWrites
from fmtprop.passes.rewrites.remove_identities import RemoveIdentities

X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))


class Written(nn.Module):
    def __init__(self, write):
        super().__init__()
        self.write = write

    def forward(self, x):
        out = x * 2.0
        returned = self.write(out, x)
        return out if returned is None else (out, returned)


def every_place(out, x):
    state = x[:, 0]
    for t in range(x.shape[1]):
        state = state.tanh() + x[:, t]
        out[:, t] = state


def last_place_from_behind(out, x):
    out[:, -1] = x[:, 0]


def one_over_another(out, x):
    out[:, 0:4] = x[:, 1:5]
    out[:, 2:3] = x[:, :1]
    out[:, 1:3] = x[:, 3:]


def all_of_it(out, x):
    out[:, :] = x.flip(1)


def one_number(out, x):
    out[:, 1] = x.mean()


def other_axis_between(out, x):
    out[:, 1] = x[:, 0]
    out[..., 2:4] = x[..., :2]
    out[:, 3] = x[:, 4]


def with_a_step(out, x):
    out[:, 1] = x[:, 0]
    out[:, ::2] = x[:, :3]


def read_between(out, x):
    out[:, 1] = x[:, 0]
    half = out[:, 1:3].clone()
    out[:, 2] = x[:, 4]
    return half


def itself(out, x):
    out[:, 0:2] = out[:, 3:5].clone()


def nothing(out, x):
    out[:, 2:2] = x[:, 0:0]


WRITES = {
    every_place: (0, 1),
    last_place_from_behind: (0, 1),
    one_over_another: (0, 1),
    one_number: (0, 1),
    other_axis_between: (0, 3),
    with_a_step: (1, 1),
    read_between: (0, 2),
    itself: (0, 1),
}


def counts(graph):
    scatters = [n for n in graph.nodes() if "scatter" in getattr(n.attrs, "target", "")]
    return len(scatters), sum(n.op == "concat" for n in graph.nodes())


@pytest.mark.parametrize("write", WRITES)
def test_what_is_there_in_the_end_is_joined(write):
    graph = RemoveIdentities().run(from_torch(Written(write), (X,)))
    joined = JoinWrites().run(graph)
    assert counts(graph)[0] >= 1
    assert counts(joined) == WRITES[write]
    for got, expected in zip(evaluate(joined, {"x": X}), evaluate(graph, {"x": X}), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("write", [*WRITES, all_of_it, nothing])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_results_are_pytorchs(write, dtype):
    if dtype is torch.int64 and write in (every_place, one_number):
        pytest.skip("not of integers")
    module, x = Written(write), (X * 100).to(dtype)
    got, expected = fp.compile(module, x)(x), module(x)
    for a, b in zip(*((r if isinstance(r, tuple) else (r,)) for r in (got, expected)), strict=True):
        torch.testing.assert_close(a, b)
