"""Products of a few tokens by a kernel: offered for few rows, chosen in plans, right under every policy."""

from __future__ import annotations

from math import prod

import pytest
import torch
from torch import nn

import fmtprop
from fmtprop.ir.node import PostOp
from fmtprop.ir.types import TensorType
from fmtprop.jit import unavailable
from fmtprop.jit.gemv import MOST_ROWS
from fmtprop.jit.kernel import takes
from fmtprop.layout import DataType, MemoryDesc
from fmtprop.ops import Binary
from fmtprop.ops.eltwise import Eltwise
from fmtprop.ops.inner_product import InnerProduct
from fmtprop.ops.matmul import MatMul
from fmtprop.runtime import selfcheck
from fmtprop.targets import OneDnnTarget
from tests.targets.nodes import node_of, request

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable())
WITH_BF16 = pytest.mark.skipif(not takes(DataType.BF16), reason="this CPU has no bf16")


class Block(nn.Module):
    """The feed-forward part of a decoder's layer, and a head with the embedding's weights."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(256), nn.Linear(256, 512), nn.Linear(512, 256)
        self.gate = nn.Linear(256, 512, bias=False)
        self.table = nn.Embedding(640, 256)

    def forward(self, tokens):
        x = self.table(tokens)
        y = self.norm(x)
        x = x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))
        return nn.functional.gelu(x, approximate="tanh") @ self.table.weight.T


def implementations(net):
    return [node.choice.impl for node in net.graph.nodes() if node.op in ("matmul", "inner_product")]


@pytest.fixture
def block():
    torch.manual_seed(0)
    return Block().eval()


@pytest.mark.parametrize("dims", [(1,), (1, 1), (2,), (1, 2), (2, 1), (4,), (2, 2)])
def test_few_tokens_are_multiplied_by_kernels(block, dims):
    tokens = torch.arange(prod(dims)).reshape(dims)
    net = fmtprop.compile(block, (tokens,), deterministic=True)
    assert {impl.partition(":")[0] for impl in implementations(net)} == {"gemv"}, net.certificate
    torch.testing.assert_close(net(tokens), block(tokens), rtol=1e-5, atol=1e-4)


def test_the_heads_weights_are_the_table_without_a_copy(block):
    net = fmtprop.compile(block, (torch.tensor([5]),), deterministic=True)
    assert not net.plan.packed


@pytest.mark.parametrize(
    ("policy", "dims"),
    [
        *(("optimal", dims) for dims in ((1, 1), (1, 2), (3, 1), (5,), (4, 2), (9,), (3, 3))),
        *(("propagate", (1, 2)), ("plain", (3, 1)), ("naive", (4, 2))),
    ],
)
def test_every_policy_is_right(block, policy, dims):
    given = torch.arange(prod(dims)).reshape(dims)
    net = fmtprop.compile(block, (given,), policy=policy)
    torch.testing.assert_close(net(given), block(given), rtol=1e-5, atol=1e-4)
    assert prod(dims) <= MOST_ROWS or not any(impl.startswith("gemv") for impl in implementations(net))


@WITH_BF16
@pytest.mark.parametrize("tokens", [1, 2, 4])
def test_bf16(block, tokens):
    given = torch.arange(tokens)[None]
    net = fmtprop.compile(block, (given,), dtype="bf16", deterministic=True)
    assert any(impl.startswith("gemv") for impl in implementations(net))
    expected = block(given)
    assert (net(given) - expected).abs().max() <= 2e-2 * expected.abs().max()


#: dims of queries, keys and mask
SCORES = [
    pytest.param((1, 12, 1, 64), (1, 12, 40, 64), (1, 1, 1, 40), True, id="heads"),
    pytest.param((2, 3, 1, 64), (2, 3, 40, 64), (1, 1, 1, 40), True, id="batch"),
    pytest.param((2, 3, 1, 64), (2, 3, 40, 64), (2, 1, 1, 40), False, id="a mask of each sequence"),
    pytest.param((2, 3, 1, 64), (2, 1, 40, 64), (1, 1, 1, 40), True, id="shared keys"),
    pytest.param((4, 1, 64), (40, 64), (1, 1, 40), True, id="one matrix"),
    pytest.param((3, 3, 1, 64), (40, 64), (1, 1, 1, 40), False, id="one matrix for nine"),
    pytest.param((1, 3, 2, 64), (1, 3, 40, 64), (1, 1, 1, 40), True, id="two rows"),
    pytest.param((1, 3, 6, 64), (1, 3, 40, 64), (1, 1, 6, 40), True, id="a mask of each row"),
    pytest.param((1, 3, 7, 64), (1, 3, 40, 64), (1, 1, 1, 40), False, id="seven rows"),
    pytest.param((1, 3, 1, 20), (1, 3, 40, 20), (1, 1, 1, 40), False, id="short rows"),
]


@pytest.mark.parametrize(("query", "keys", "mask", "served"), SCORES)
@pytest.mark.parametrize("strided", [False, True])
def test_scores_of_few_queries(query, keys, mask, served, strided):
    inside = (
        (0, 2, 1, 3) if strided and len(keys) == 4 else tuple(range(len(keys)))
    )  # heads inside, as linear layers do
    lying = MemoryDesc(tuple(keys[axis] for axis in inside), "f32").transpose(inside)
    matrix = lying.transpose((*range(len(keys) - 2), len(keys) - 1, len(keys) - 2))
    formats = {"src": MemoryDesc(query, "f32"), "weights": matrix, "post_op_1": MemoryDesc(mask, "f32")}
    tail = (PostOp("eltwise", Eltwise("linear", 0.125)), PostOp("binary", Binary("add"), "post_op_1"))
    types = {name: TensorType(formats[name].dims) for name in ("src", "weights")}
    node = node_of("matmul", MatMul(), types, tail)
    found = [c for c in OneDnnTarget().candidates(node, request(node, formats)) if c.impl.startswith("gemv")]
    # the same distance from each head to the next
    is_even = sum(size > 1 for size in keys[:-2]) < 2 or inside == tuple(range(len(keys)))
    assert bool(found) == (served and is_even)
    for candidate in found:
        assert selfcheck.check_node(node.with_(descs=candidate.results, choice=candidate.choice("offered"))) is None
        assert candidate.operands == formats


@pytest.mark.parametrize("dtype", ["f32", pytest.param("bf16", marks=WITH_BF16)])
@pytest.mark.parametrize("op", ["inner_product", "matmul"])
@pytest.mark.parametrize("rows", range(1, MOST_ROWS + 2))
@pytest.mark.parametrize("gap", [0, 32])
def test_few_rows_with_weights_of_any_format(op, rows, gap, dtype):
    src = MemoryDesc((rows, 96 + gap), dtype).submemory((rows, 96), (0, gap))
    weights = (53, 96) if op == "inner_product" else (96, 53)
    formats = {"src": src, "weights": MemoryDesc.any(weights, dtype), "bias": MemoryDesc((53,), "f32")}
    formats |= {"post_op_1": MemoryDesc((rows, 1), "f32"), "post_op_2": MemoryDesc((rows, 53), dtype)}
    attrs: InnerProduct | MatMul = InnerProduct()
    if op == "matmul":
        formats["bias"], attrs = MemoryDesc((1, 53), "f32"), MatMul()
    tail = [PostOp("eltwise", Eltwise("gelu_erf")), PostOp("binary", Binary("mul"), "post_op_1")]
    tail += [PostOp("binary", Binary("add"), "post_op_2")]
    types = {name: TensorType(formats[name].dims, formats[name].dtype) for name in ("src", "weights", "bias")}
    node = node_of(op, attrs, types, tail)
    found = [c for c in OneDnnTarget().candidates(node, request(node, formats)) if c.impl.startswith("gemv")]
    assert len(found) == (rows <= MOST_ROWS)
    for candidate in found:
        assert candidate.operands["src"] == src
        assert selfcheck.check_node(node.with_(descs=candidate.results, choice=candidate.choice("offered"))) is None
