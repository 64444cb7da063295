"""Weights that a graph describes by a seed take part in every trial of a plan."""

from __future__ import annotations

import pytest
import torch

import fmtprop
from fmtprop import dnnl
from fmtprop.ir import Graph, TensorType
from fmtprop.ir.initialiser import Initialiser
from fmtprop.ops import Conv, emit


def seeded(groups: int) -> Graph:
    """Return a convolution of 64 channels, which filtering, merged groups or others may replace."""
    graph, ones = Graph("seeded"), (1, 1)
    src = graph.input("src", TensorType((1, 64, 28, 28)))
    dims = (64, 64, 3, 3) if groups == 1 else (groups, 64 // groups, 64 // groups, 3, 3)
    weights = graph.constant("weights", TensorType(dims), Initialiser.normal(1, 0.0, 0.05))
    bias = graph.constant("bias", TensorType((64,)), Initialiser.uniform(2, -1.0, 1.0))
    inputs = {"src": src, "weights": weights, "bias": bias}
    graph.output(emit(graph, "convolution", inputs, Conv(ones, (0, 0), ones, ones, groups)), "dst")
    return graph


@pytest.mark.parametrize("groups", [1, 16, 64])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_expansions_take_seeded_weights(groups, dtype):
    if dtype == "bf16" and not dnnl.supports("bf16"):
        pytest.skip("this CPU has no bf16")
    net = fmtprop.compile(seeded(groups), dtype=dtype)
    src = torch.randn(1, 64, 28, 28)
    expected = fmtprop.compile(seeded(groups), policy="plain")(src)
    assert (net(src) - expected).abs().max() <= (1e-5 if dtype == "f32" else 3e-2) * expected.abs().max()
