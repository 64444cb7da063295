"""Products between reshapes that merge and split batch axes: four axes are read as they lie."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fmtprop.capture import from_torch
from fmtprop.ir import Graph
from fmtprop.ir.verify import Stage
from fmtprop.ops.evaluate import evaluate
from fmtprop.passes.base import Pipeline
from fmtprop.passes.pipeline import NORMALISE
from fmtprop.passes.rewrites.remove_identities import RemoveIdentities
from fmtprop.passes.rewrites.unmerge_batches import UnmergeBatches
from fmtprop.passes.variants.attention_fusion import attention


class Products(nn.Module):
    """Attention as AOTAutograd writes it."""

    def __init__(self, lead: tuple[int, int] = (2, 3)) -> None:
        super().__init__()
        self.lead = lead

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (one.reshape(2, -1, 3, 8).transpose(1, 2) for one in (q, k, v))
        scores = torch.bmm(q.reshape(6, -1, 8), k.transpose(-2, -1).reshape(6, 8, -1)).reshape(*self.lead, 5, -1)
        weights = (0.3 * scores).softmax(-1)
        return torch.bmm(weights.reshape(6, 5, -1), v.reshape(6, -1, 8)).reshape(2, 3, 5, 8).transpose(1, 2)


def examples() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return torch.randn(2, 5, 24), torch.randn(2, 7, 24), torch.randn(2, 7, 24)


def rewritten(module: nn.Module) -> tuple[Graph, Graph]:
    graph = from_torch(module, examples())
    return graph, UnmergeBatches().run(RemoveIdentities().run(graph))


def products(graph: Graph) -> list[int]:
    return [node.results[0].ndim for node in graph.nodes() if node.op == "matmul"]


def test_products_get_their_axes_back():
    graph, made = rewritten(Products())
    assert products(graph) == [3, 3] and products(made) == [4, 4]
    names = [node.name for node in graph.input_nodes]
    given = dict(zip(names, examples(), strict=True))
    for got, expected in zip(evaluate(made, given), evaluate(graph, given), strict=True):
        torch.testing.assert_close(got, expected)


def test_attention_is_found():
    normal = Pipeline(NORMALISE, Stage.NORMAL).run(from_torch(Products(), examples()))
    assert any(attention(normal, node) for node in normal.nodes() if node.op == "matmul")


def test_keys_may_be_reshaped_from_other_axes():
    class Keys(nn.Module):
        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            q = q.reshape(2, 5, 3, 8).transpose(1, 2).reshape(6, 5, 8)
            return torch.bmm(q, k.reshape(6, 8, 7)).reshape(2, 3, 5, 7)

    torch.manual_seed(0)
    given = torch.randn(2, 5, 24), torch.randn(2, 24, 7)
    graph = from_torch(Keys(), given)
    made = UnmergeBatches().run(RemoveIdentities().run(graph))
    assert products(made) == [4]
    (got,) = evaluate(made, dict(zip([node.name for node in graph.input_nodes], given, strict=True)))
    torch.testing.assert_close(got, Keys()(*given))


def test_a_result_that_is_split_otherwise_than_both_operands_stays():
    graph, made = rewritten(Products(lead=(3, 2)))
    assert products(made) == [3, 4]
    given = dict(zip([node.name for node in graph.input_nodes], examples(), strict=True))
    for got, expected in zip(evaluate(made, given), evaluate(graph, given), strict=True):
        torch.testing.assert_close(got, expected)


def test_a_result_with_another_reader_stays():
    class Read(Products):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k = (one.reshape(2, -1, 3, 8).transpose(1, 2) for one in (q, k))
            scores = torch.bmm(q.reshape(6, -1, 8), k.transpose(-2, -1).reshape(6, 8, -1))
            return scores.reshape(2, 3, 5, 7), scores.relu()

    assert products(rewritten(Read())[1]) == [3]
