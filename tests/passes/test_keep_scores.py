"""Scores stay f32 between a product in bf16 and its softmax, unless something else reads them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fmtprop
from fmtprop import dnnl
from fmtprop.ir.verify import Stage, verify
from fmtprop.passes.base import Pipeline
from fmtprop.passes.pipeline import NORMALISE
from fmtprop.passes.precision.keep_scores import KeepScores
from fmtprop.passes.precision.lower import LowerPrecision

NEEDS_BF16 = pytest.mark.skipif(not dnnl.supports("bf16"), reason="oneDNN has no bf16 on this CPU")

QUERIES, MASK = torch.zeros(2, 3, 17, 8), torch.zeros(1, 1, 17, 17)


class Attend(nn.Module):
    """Attention as a model writes it; the keys are the values."""

    def __init__(self, first: bool = False, second_reader: bool = False) -> None:
        super().__init__()
        self.first, self.second_reader = first, second_reader

    def forward(self, x: torch.Tensor, keys: torch.Tensor, *masks: torch.Tensor) -> torch.Tensor:
        scores = x @ keys.transpose(-2, -1) / 3
        for mask in masks:
            scores = mask + scores if self.first else scores + mask
        dst = scores.softmax(-1) @ keys
        return dst + scores.sum(-1, keepdim=True) if self.second_reader else dst


def types(module: nn.Module, *inputs: torch.Tensor, dtype: torch.dtype = torch.float32) -> dict[str, list[str]]:
    """Return the data types that a normal graph's nodes write."""
    given = tuple(tensor.to(dtype) for tensor in inputs)
    graph = Pipeline(NORMALISE, Stage.NORMAL).run(fmtprop.from_torch(module.eval(), given))
    if dtype is torch.float32:
        graph = KeepScores().run(LowerPrecision().run(graph))
        verify(graph, Stage.NORMAL)
    found: dict[str, list[str]] = {}
    for node in graph.nodes():
        found.setdefault(node.op, []).extend(result.dtype.value for result in node.results)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("masks", [(), (MASK,), (MASK, QUERIES[:, :1, :1, :1])])
def test_softmax_reads_the_accumulators_of_a_product_behind_factors_and_masks(dtype, first, masks):
    found = types(Attend(first), QUERIES, QUERIES, *masks, dtype=dtype)
    assert found["matmul"][0] == "f32"
    assert set(found.get("binary", ())) <= {"f32"}
    assert found["softmax"] == ["bf16"]


def test_scores_with_another_reader_and_softmax_of_an_input_stay():
    assert types(Attend(second_reader=True), QUERIES, QUERIES)["matmul"][0] == "bf16"
    assert types(nn.Softmax(-1), QUERIES, dtype=torch.bfloat16)["softmax"] == ["bf16"]


@NEEDS_BF16
@pytest.mark.parametrize("masks", [(), (MASK,)])
def test_large_scores_are_as_exact_in_bf16_as_their_operands(masks):
    torch.manual_seed(0)
    given = tuple(torch.randn(one.shape).mul(4).bfloat16() for one in (QUERIES, QUERIES, *masks))
    net = fmtprop.compile(Attend(), given, policy="propagate")
    assert [step.node.op for step in net.plan.steps].count("matmul") == 2
    want = Attend()(*(tensor.double() for tensor in given))
    # rounded to bf16, scores of 64 would be off by up to 0.25, and so would the result
    assert ((net(*given).double() - want).abs().max() / want.abs().max()).item() < 8e-3
