"""Spellings of element-wise functions are recognised, and what only looks like one is not."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fmtprop as fp
from fmtprop.compiling.stages import normalise
from fmtprop.ir.graph import Graph

ROOT = math.sqrt(2 / math.pi)

SPELLINGS = {
    "silu": (lambda x: x * torch.sigmoid(x), "swish"),
    "quick gelu": (lambda x: x * torch.sigmoid(1.702 * x), "swish"),
    "hard swish": (lambda x: x * F.relu6(x + 3) / 6, "hardswish"),
    "hard swish, divided before": (lambda x: x * (F.relu6(x + 3.0) / 6.0), "hardswish"),
    "hard swish of hard sigmoid": (lambda x: F.hardsigmoid(x) * x, "hardswish"),
    "mish": (lambda x: x * torch.tanh(F.softplus(x)), "mish"),
    "gelu": (lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))), "gelu_erf"),
    "gelu, halved at last": (lambda x: 0.5 * (x * (torch.erf(x * 0.7071067811865475) + 1)), "gelu_erf"),
    "gelu of transformers": (
        lambda x: 0.5 * x * (1.0 + torch.tanh(ROOT * (x + 0.044715 * torch.pow(x, 3.0)))),
        "gelu_tanh",
    ),
    "gelu of others": (
        lambda x: x * 0.5 * (1.0 + torch.tanh(0.7978845608 * x * (1.0 + 0.044715 * x * x))),
        "gelu_tanh",
    ),
}  # fmt: skip

OTHERS = {
    "product of two": lambda x: x * torch.sigmoid(x[:, :1]),
    "another factor": lambda x: (1.001 * x) * torch.sigmoid(x.abs()),
    "another constant": lambda x: x * torch.sigmoid(1.7 * x + 0.01),
    "half of hard swish": lambda x: x * F.relu6(x + 3) / 12,
    "square": lambda x: x * x,
    "chain": lambda x: torch.tanh(F.relu(x)),
}


class Written(nn.Module):
    """A function behind a convolution."""

    def __init__(self, function) -> None:
        super().__init__()
        self.conv, self.function = nn.Conv2d(3, 5, 1), function

    def forward(self, x):
        return self.function(self.conv(x))


def normal(model: nn.Module, x: torch.Tensor) -> Graph:
    return normalise(fp.from_torch(model.eval(), x))[0]


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_spelling_becomes_the_convolutions_post_op(name):
    function, alg = SPELLINGS[name]
    model, x = Written(function), torch.randn(2, 3, 5, 7)
    (conv,) = [node for node in normal(model, x).nodes() if node.op == "convolution"]
    assert [post_op.attrs.alg for post_op in conv.post_ops] == [alg]
    with torch.no_grad():
        torch.testing.assert_close(fp.compile(model, x)(x), model(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_another_function_stays(name):
    model, x = Written(OTHERS[name]), torch.randn(2, 3, 5, 7)
    graph = normal(model, x)
    algs = {getattr(p.attrs, "alg", "") for node in graph.nodes() for p in (node, *node.post_ops)}
    assert not algs & {"swish", "hardswish", "mish", "gelu_erf", "gelu_tanh"}


def test_a_step_that_somebody_else_reads_stays():
    def function(x):
        gate = torch.sigmoid(x)
        return x * gate, gate

    model, x = Written(function), torch.randn(2, 3, 5, 7)
    assert "binary" in {node.op for node in normal(model, x).nodes()}


def test_what_comes_before_is_no_part_of_it():
    def function(x):
        y = F.relu(x)
        return y * torch.sigmoid(y)

    model, x = Written(function), torch.randn(2, 3, 5, 7)
    (conv,) = [node for node in normal(model, x).nodes() if node.op == "convolution"]
    assert "swish" in [post_op.attrs.alg for post_op in conv.post_ops]
