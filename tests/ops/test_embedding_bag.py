"""Embedding bags: operands that do not fit, and calls that stay PyTorch's."""

from __future__ import annotations

import pytest
import torch

import fmtprop
from fmtprop.errors import ShapeError
from fmtprop.ir.types import TensorType
from fmtprop.ops import EmbeddingBag
from fmtprop.ops.embedding_bag import infer

TYPES = {"table": TensorType((9, 4)), "indices": TensorType((7,), "s64"), "offsets": TensorType((3,), "s64")}


@pytest.mark.parametrize(
    ("attrs", "types", "message"),
    [
        (EmbeddingBag("sum"), {"table": TensorType((9,))}, r"table has dims \(9,\)"),
        (EmbeddingBag("sum"), {"indices": TensorType((7, 1), "s64")}, "indices are .* are vectors"),
        (EmbeddingBag("sum"), {"offsets": TensorType((3,), "s32")}, "offsets are .* of s32 or of s64"),
        (EmbeddingBag("sum", has_last=True), {"offsets": TensorType((0,), "s64")}, "offsets are empty"),
        (EmbeddingBag("max"), {"factors": TensorType((7,))}, "in mode 'max', but sums alone have them"),
        (EmbeddingBag("sum"), {"factors": TensorType((6,))}, "for each of 7 indices"),
    ],
)
def test_each_error_names_the_operand(attrs, types, message):
    with pytest.raises(ShapeError, match=message):
        infer(attrs, {**TYPES, **types})


def test_a_mode_that_pytorch_lacks():
    with pytest.raises(ShapeError, match="mode is 'min'"):
        EmbeddingBag("min")


class Sizes(torch.nn.Module):
    """Reads the numbers of indices that PyTorch's call saves for its gradient."""

    def forward(self, table, indices, offsets):
        found = torch.embedding_bag(table, indices, offsets, False, 1)
        return found[0], found[2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_calls_of_which_more_is_read_and_other_types_are_pytorchs(dtype):
    given = torch.randn(9, 4, dtype=dtype), torch.tensor([1, 2, 3]), torch.tensor([0, 1])
    net = fmtprop.compile(Sizes(), given, tune="model")
    assert [step.node.op for step in net.plan.steps] == ["aten"]
    for got, wanted in zip(net(*given), Sizes()(*given), strict=True):
        torch.testing.assert_close(got, wanted)
