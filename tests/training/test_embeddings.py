"""Tables in training: bags of their rows in every form that PyTorch has, and gradients that no graph holds."""

from __future__ import annotations

import copy
from importlib import import_module

import pytest
import torch
from torch import nn

import fmtprop as fp
from fmtprop.errors import ImportModelError


@pytest.fixture(autouse=True)
def plans_run(monkeypatch):
    """Let plans run, however short the step is."""
    monkeypatch.setattr(import_module("fmtprop.dynamo.backend"), "compare", lambda ours, theirs: (True, (0.0, 1.0)))


def compiled(module, inputs, door):
    if door == "fp.compile":
        return fp.compile(module, inputs, training=True, tune="model", confirm=False)
    return torch.compile(module, backend="fmtprop", options={"tune": "model", "confirm": False})


@pytest.mark.parametrize("door", ["fp.compile", "torch.compile"])
@pytest.mark.parametrize(
    ("mode", "factors", "has_last", "padding"),
    [("sum", True, False, None), ("sum", False, True, 3), ("mean", False, True, 3), ("max", False, False, None)],
)
def test_bags(mode, factors, has_last, padding, door):
    """The tensors that PyTorch's call saves for the gradient have other shapes than it declares."""
    torch.manual_seed(0)
    module = nn.EmbeddingBag(30, 8, mode=mode, padding_idx=padding, include_last_offset=has_last)
    theirs = copy.deepcopy(module)
    indices, offsets = torch.randint(30, (12,)), torch.tensor([0, 3, 3, 4, 9, 12][: 5 + has_last])
    inputs = (indices, offsets, torch.rand(12)) if factors else (indices, offsets)
    net = compiled(module, inputs, door)
    for run in (net, theirs):
        run(*inputs).square().sum().backward()
    torch.testing.assert_close(module.weight.grad, theirs.weight.grad)
    torch.testing.assert_close(net(*inputs), theirs(*inputs))


def test_bags_of_equal_length_and_their_factors():
    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag, self.factors = nn.EmbeddingBag(30, 8, mode="sum"), nn.Parameter(torch.rand(4, 3))

        def forward(self, indices: torch.Tensor) -> torch.Tensor:
            return self.bag(indices, per_sample_weights=self.factors)

    module, indices = Bags(), torch.randint(30, (4, 3))
    theirs = copy.deepcopy(module)
    for run in (compiled(module, (indices,), "fp.compile"), theirs):
        run(indices).square().sum().backward()
    torch.testing.assert_close(module.factors.grad, theirs.factors.grad)
    torch.testing.assert_close(module.bag.weight.grad, theirs.bag.weight.grad)


@pytest.mark.parametrize("make", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_stay_in_pytorch(make):
    table, indices = make(30, 8, sparse=True), torch.randint(30, (4, 3))
    with pytest.raises(ImportModelError, match=r"a graph holds dense tensors, .*sparse_coo.*: use sparse=False"):
        compiled(table, (indices,), "fp.compile")
    compiled(table, (indices,), "torch.compile")(indices).sum().backward()
    assert table.weight.grad.is_sparse
