"""Sums of the gradients of a tensor's parts become one concat."""

from __future__ import annotations

import pytest
import torch

from fmtprop.capture.torch_export import from_torch
from fmtprop.ops.evaluate import evaluate
from fmtprop.passes.rewrites.remove_identities import RemoveIdentities
from fmtprop.passes.training.join_gradients import JoinGradients

SELECT, SLICE = torch.ops.aten.select_backward.default, torch.ops.aten.slice_backward.default
X = torch.randn(3, 2, 4)
DIMS = [3, 2, 4]


def selected(x):
    a, b, c = (SELECT(x[i] * (i + 2), DIMS, 0, i) for i in range(3))
    return a + b + c


def sliced(x):
    return SLICE(x[..., 1:] * 2, DIMS, -1, 1, 9223372036854775807, 1) + SLICE(x[..., :1] * 3, DIMS, 2, 0, 1, 1)


def mixed(x):
    return SLICE(x[1:] * 2, DIMS, 0, 1, 3, 1) + (SELECT(x[0] * 3, DIMS, 0, -3) + x.cos())


def twice(x):
    halves = [SLICE(x[..., a : a + 2] * k, DIMS, 2, a, a + 2, 1) for k in (2, 3) for a in (0, 2)]
    return halves[0] + halves[1] + halves[2] + halves[3]


def along_two_axes(x):
    first = SELECT(x[:, 0] * 2, DIMS, 1, 0) + SLICE(x[0:2] * 2, DIMS, 0, 0, 2, 1)
    return first + SELECT(x[:, 1] * 2, DIMS, 1, 1) + SELECT(x[2] * 5, DIMS, 0, 2)


def overlapping(x):
    return SLICE(x[..., :3] * 2, DIMS, 2, 0, 3, 1) + SLICE(x[..., 2:] * 3, DIMS, 2, 2, 4, 1)


def with_a_gap(x):
    return SLICE(x[..., :1] * 2, DIMS, 2, 0, 1, 1) + SLICE(x[..., 2:] * 3, DIMS, 2, 2, 4, 1)


def with_a_step(x):
    return SLICE(x[..., ::2] * 2, DIMS, 2, 0, 4, 2) + SLICE(x[..., 1::2] * 3, DIMS, 2, 1, 4, 2)


def read_twice(x):
    part = SLICE(x[..., :2] * 2, DIMS, 2, 0, 2, 1)
    return (part + SLICE(x[..., 2:] * 3, DIMS, 2, 2, 4, 1)) * part


def whole(x):
    return SLICE(x * 2, DIMS, 2, 0, 4, 1) + x


#: sum -> gradients of parts that are left, concats
SUMS = {
    selected: (0, 1),
    sliced: (0, 1),
    mixed: (0, 1),
    twice: (0, 2),
    along_two_axes: (0, 2),
    overlapping: (2, 0),
    with_a_gap: (2, 0),
    with_a_step: (2, 0),
    read_twice: (2, 0),
    whole: (1, 0),
}


class Sum(torch.nn.Module):
    """A module of a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x) + 1


def _counts(graph):
    left = sum("backward" in getattr(node.attrs, "target", "") for node in graph.nodes())
    return left, sum(node.op == "concat" for node in graph.nodes())


@pytest.mark.parametrize("function", SUMS, ids=lambda function: function.__name__)
def test_gradients_of_all_parts_are_joined(function):
    graph = RemoveIdentities().run(from_torch(Sum(function), (X,)))
    joined = JoinGradients().run(graph)
    assert _counts(joined) == SUMS[function]
    (got,), (expected,) = evaluate(joined, {"x": X}), evaluate(graph, {"x": X})
    assert torch.allclose(got, expected, atol=1e-6)


def test_whole_numbers_and_a_graph_without_such_sums_stay():
    graph = RemoveIdentities().run(from_torch(Sum(selected), (torch.ones(3, 2, 4, dtype=torch.int64),)))
    assert _counts(JoinGradients().run(graph)) == (3, 0)
