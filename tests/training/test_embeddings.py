"""Tables in training: bags of their rows in every form that PyTorch has, and gradients that no graph holds."""

from __future__ import annotations

import copy
from importlib import import_module

import pytest
import torch
from torch import nn

import fmtprop as fp
from fmtprop.errors import ImportModelError
from fmtprop.ir.node import Value
from fmtprop.ir.op import opdef
from fmtprop.ops.host_call import host_call


@pytest.fixture(autouse=True)
def plans_run(monkeypatch):
    """Let plans run, however short the step is."""
    monkeypatch.setattr(import_module("fmtprop.dynamo.backend"), "compare", lambda ours, theirs, _: (True, (0.0, 1.0)))


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


@pytest.mark.parametrize(("padding", "by_frequency"), [(None, False), (3, False), (None, True)])
def test_rows_are_added_to_the_gradient_of_a_table(padding, by_frequency):
    torch.manual_seed(0)
    module = nn.Embedding(12, 8, padding_idx=padding, scale_grad_by_freq=by_frequency)
    theirs, indices = copy.deepcopy(module), torch.randint(12, (4, 9))
    net = compiled(module, (indices,), "fp.compile")
    for _ in range(2):
        for run in (net, theirs):
            run.zero_grad()
            (run(indices) * torch.rand(8, generator=torch.Generator().manual_seed(1))).sum().backward()
        assert torch.equal(module.weight.grad, theirs.weight.grad)


def test_the_gradient_of_a_table_is_made_once():
    """PyTorch's operator would make it, and the plan copy it."""
    given = {"grad_output": Value("x"), "indices": Value("y"), "num_weights": 5}
    attrs, _ = host_call(
        "aten.embedding_dense_backward.default", {**given, "padding_idx": -1, "scale_grad_by_freq": False}
    )
    dst = torch.full((5, 4), torch.nan)
    opdef("aten").pytorch.operator(
        attrs, {"src_0": torch.ones(6, 4), "src_1": torch.tensor([0, 0, 1, 4, 4, 4])}, [dst]
    )()
    assert dst[:, 0].tolist() == [2, 1, 0, 0, 3]
