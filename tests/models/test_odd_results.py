"""Calls whose kernels give other results than the exporter says, where nobody reads these."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fmtprop as fp
from fmtprop.errors import PlanError
from fmtprop.ir.node import Node
from fmtprop.ir.types import TensorType
from fmtprop.targets.pytorch import write_results


class Bag(nn.Module):
    """An embedding bag of indices that are given, or constant."""

    def __init__(self, mode: str, constant: bool) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(5, 6, mode=mode)
        self.register_buffer("indices", torch.tensor([[0, 1, 2, 4], [3, 3, 1, 0]]))
        self.constant = constant

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        bags: torch.Tensor = self.bag(self.indices if self.constant else indices)
        return bags * indices.sum()


@pytest.mark.parametrize("policy", ["optimal", "propagate", "plain"])
@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("mode", ["mean", "sum", "max"])
def test_embedding_bags(mode: str, constant: bool, policy: str) -> None:
    model, indices = Bag(mode, constant).eval(), torch.tensor([[1, 1, 0, 2], [4, 2, 2, 3]])
    net = fp.compile(model, indices, policy=policy, tune="model")
    torch.testing.assert_close(net(indices), model(indices))


def test_offsets_and_weights() -> None:
    model = nn.EmbeddingBag(5, 6, mode="sum", include_last_offset=True).eval()
    given = torch.tensor([0, 1, 2, 4]), torch.tensor([0, 2, 4]), torch.rand(4)
    torch.testing.assert_close(fp.compile(model, given, tune="model")(*given), model(*given))


def test_a_result_that_is_read_must_be_what_the_exporter_says() -> None:
    node = Node("call", "aten", None, (TensorType((2, 3)), TensorType((3,))))
    places = [torch.zeros(2, 3), torch.zeros(3)]
    write_results(node, [places[0], None], [torch.ones(2, 3), torch.ones(7)])
    assert places[0].sum() == 6
    with pytest.raises(PlanError, match=r"result 1 has shape \(1,\) on the reference target, .* exported with \(3,\)"):
        write_results(node, places, [torch.ones(2, 3), torch.ones(1)])


class Halved(nn.Module):
    """Ends in a copy of every other channel of a channels-last tensor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.permute(0, 3, 1, 2)[:, ::2].contiguous()


@pytest.mark.parametrize("tune", ["model", "measure"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_copies_that_onednn_cannot_describe_are_pytorchs(dtype: torch.dtype, tune: str) -> None:
    x = torch.arange(576).reshape(2, 6, 6, 8).remainder(3).to(dtype)
    net = fp.compile(Halved(), x, tune=tune)
    assert [step.target for step in net.plan.steps] == ["reference"]
    assert torch.equal(net(x), Halved()(x))
