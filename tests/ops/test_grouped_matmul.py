"""Products of groups of rows: the layers of a mixture of experts."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.nn.functional as F

import fmtprop as fp
from fmtprop import dnnl
from fmtprop.errors import ShapeError
from fmtprop.ir.types import TensorType
from fmtprop.layout import DataType
from fmtprop.ops.grouped_matmul import GroupedMatmul, infer, reference
from fmtprop.runtime.agreement import relative_error


def grouped_mm(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """As transformers calls it: PyTorch's own function takes no f32 while a program is recorded."""
    if rows.dtype == torch.bfloat16:
        return F.grouped_mm(rows, weights, offs=ends)
    return torch.ops.transformers.grouped_mm_fallback(rows, weights, ends)


if "transformers" not in sys.modules:

    @torch.library.custom_op("transformers::grouped_mm_fallback", mutates_args=())
    def _fallback(input: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        starts = [0, *offs.tolist()]
        return torch.cat([input[a:b] @ one for a, b, one in zip(starts, starts[1:], weight, strict=False)])

    @_fallback.register_fake
    def _(input: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        return input.new_empty(input.shape[0], weight.shape[2])


class Experts(torch.nn.Module):
    """A layer of a mixture of experts as transformers writes it: rows sorted by expert, one grouped product."""

    def __init__(self, experts: int = 4, features: int = 16, hidden: int = 24) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = experts
        self.router = torch.nn.Linear(features, experts)
        self.up = torch.nn.Parameter(torch.randn(experts, hidden, features))
        self.down = torch.nn.Parameter(torch.randn(experts, features, hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = self.router(x).argmax(-1)
        of_row, order = torch.sort(chosen)
        counts = torch.histc(of_row.float(), bins=self.experts, min=0, max=self.experts - 1)
        ends = torch.cumsum(counts, 0, dtype=torch.int32)
        hidden = F.silu(grouped_mm(x[order], self.up.transpose(1, 2), ends))
        rows = grouped_mm(hidden, self.down.transpose(1, 2), ends)
        return torch.empty_like(rows).index_copy(0, order, rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mixture_of_experts(dtype, tmp_path):
    module = Experts().eval().to(dtype)
    x = torch.randn(9, 16, dtype=dtype)
    net = fp.compile(module, (x,))
    assert net.graph.count("grouped_matmul") == 2
    net.save(tmp_path / "experts.fmtplan")
    again = fp.load_plan(tmp_path / "experts.fmtplan", on_mismatch="error")
    for rows in (x, torch.randn(9, 16).to(dtype), x[:1].expand(9, 16)):  # the last: one expert has all rows
        assert torch.equal(again(rows), net(rows))
        assert relative_error(net(rows), module(rows)) < (1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.skipif(not dnnl.supports("bf16"), reason="the CPU has no instructions for bf16")
def test_experts_are_lowered_with_their_weights():
    module = Experts().eval()
    x = torch.randn(9, 16)
    net = fp.compile(module, (x,), dtype="bf16")
    experts = [node for node in net.graph.nodes() if node.op == "grouped_matmul"]
    assert {net.graph.type_of(net.graph.inputs(node.name)["weights"]).dtype for node in experts} == {DataType.BF16}
    assert relative_error(net(x), module(x)) < 3e-2


def test_rows_behind_the_last_end_are_zeros():
    src, weights = torch.randn(5, 3), torch.randn(2, 3, 4)
    (dst,) = reference(GroupedMatmul(), {"src": src, "weights": weights, "ends": torch.tensor([0, 2])})
    assert torch.equal(dst, torch.cat([src[:2] @ weights[1], torch.zeros(3, 4)]))


@pytest.mark.parametrize("ends", [[2, 1], [-1, 2], [2, 6]])
def test_wrong_ends(ends):
    tensors = {"src": torch.randn(5, 3), "weights": torch.randn(2, 3, 4), "ends": torch.tensor(ends)}
    with pytest.raises(RuntimeError, match="ends must not decrease, and there are 5 rows"):
        reference(GroupedMatmul(), tensors)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"src": TensorType((7, 21))}, r"products of groups take \(rows, K\) and \(G, K, N\)"),
        ({"weights": TensorType((20, 17))}, r"products of groups take \(rows, K\) and \(G, K, N\)"),
        ({"weights": TensorType((3, 20, 17), "bf16")}, "they must be of one type"),
        ({"ends": TensorType((2,), "s64")}, "each of 3 groups has one, of s32 or s64"),
        ({"ends": TensorType((3,))}, "each of 3 groups has one, of s32 or s64"),
    ],
)
def test_wrong_types(changed, message):
    types = {"src": TensorType((7, 20)), "weights": TensorType((3, 20, 17)), "ends": TensorType((3,), "s64")}
    with pytest.raises(ShapeError, match=message):
        infer(GroupedMatmul(), {**types, **changed})
