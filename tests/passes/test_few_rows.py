"""Products of few rows: which read the parts of a joined matrix, or a repeated matrix once, and which do not."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import fmtprop as fp
from fmtprop.ir import Graph, Value
from fmtprop.ops import Concat
from fmtprop.ops.matmul import MatMul
from fmtprop.ops.view_attrs import Expand, Permute, Reshape
from fmtprop.passes.rewrites.few_rows import FewRows
from tests.passes.rewriting import Builder, rewrite, summary

#: enough columns for a matrix of 64 KiB
CACHED = 600


def joined(build: Builder, axis: int = 1, parts: int = 2) -> Value:
    """Return keys of a cache and of new tokens, one behind the other."""
    inputs = [build.input(2, n if n else CACHED, 16, name=f"keys_{n}") for n in range(parts)]
    return build.op("concat", Concat(axis), "joined", **{f"src_{n}": part for n, part in enumerate(inputs)})


def transposed(build: Builder, value: Value) -> Value:
    return build.op("permute", Permute((0, 2, 1)), "transposed", src=value)


def product(build: Builder, src: Value, weights: Value, name: str = "product") -> Value:
    return build.op("matmul", MatMul(), name, src=src, weights=weights)


def ops(graph: Graph) -> list[str]:
    return [node.op for node in graph.nodes() if not node.is_boundary]


@pytest.mark.parametrize("parts", [2, 3])
def test_scores_of_parts_are_joined(parts):
    build = Builder()
    x = build.input(2, 1, 16)
    graph = build.output(product(build, x, transposed(build, joined(build, parts=parts))))
    assert ops(rewrite(graph, FewRows())) == [*["permute"] * parts, *["matmul"] * parts, "concat"]


def test_sums_over_parts_are_added():
    build = Builder()
    x = build.input(2, 1, CACHED + 1)
    graph = build.output(product(build, x, joined(build)))
    assert ops(rewrite(graph, FewRows(), tolerance=1e-4)) == ["slice", "matmul", "slice", "matmul", "binary"]


def test_many_rows_keep_the_concat():
    build = Builder()
    graph = build.output(product(build, build.input(2, 17, 16), transposed(build, joined(build))))
    assert summary(rewrite(graph, FewRows())) == ["joined", "transposed", "product"]


def test_a_concat_that_is_returned_stays():
    build = Builder()
    value = joined(build)
    graph = build.output(product(build, build.input(2, 1, 16), transposed(build, value)), value)
    assert summary(rewrite(graph, FewRows())) == ["joined", "transposed", "product"]


def test_a_concat_of_computed_parts_stays():
    build = Builder()
    parts = {f"src_{n}": build.act(build.input(2, CACHED, 16, name=f"keys_{n}"), name=f"relu_{n}") for n in range(2)}
    value = build.op("concat", Concat(1), "joined", **parts)
    graph = build.output(product(build, build.input(2, 1, 16), transposed(build, value)))
    assert summary(rewrite(graph, FewRows()))[-3:] == ["joined", "transposed", "product"]


def test_a_concat_of_batches_stays():
    build = Builder()
    value = build.op(
        "concat",
        Concat(0),
        "joined",
        src_0=build.input(1, 16, CACHED, name="a"),
        src_1=build.input(1, 16, CACHED, name="b"),
    )
    graph = build.output(product(build, build.input(2, 1, 16), value))
    assert summary(rewrite(graph, FewRows())) == ["joined", "product"]


def repeated(build: Builder, keys: Value, groups: int) -> Value:
    """Return keys that several heads share, once for each head."""
    batch, heads, rows, columns = build.graph.type_of(keys).dims
    value = build.op("reshape", Reshape((batch, heads, 1, rows, columns)), "unsqueezed", src=keys)
    value = build.op("expand", Expand((batch, heads, groups, rows, columns)), "expanded", src=value)
    return build.op("reshape", Reshape((batch, heads * groups, rows, columns)), "merged", src=value)


@pytest.mark.parametrize("rows", [1, 3])
def test_heads_that_share_keys_are_rows_of_one_product(rows):
    build = Builder()
    value = repeated(build, build.input(2, 3, 5, 16, name="keys"), 4)
    value = build.op("permute", Permute((0, 1, 3, 2)), "transposed", src=value)
    rewritten = rewrite(build.output(product(build, build.input(2, 12, rows, 16), value)), FewRows())
    assert ops(rewritten) == ["reshape", "permute", "matmul", "reshape"]
    assert next(node for node in rewritten.nodes() if node.op == "matmul").results[0].dims == (2, 3, 4 * rows, 5)


def test_another_repetition_stays():
    build = Builder()
    value = build.op("reshape", Reshape((2, 1, 3, 5, 16)), "unsqueezed", src=build.input(2, 3, 5, 16, name="keys"))
    value = build.op("expand", Expand((2, 4, 3, 5, 16)), "expanded", src=value)
    value = build.op("reshape", Reshape((2, 12, 5, 16)), "merged", src=value)  # the heads one after the other
    graph = build.output(product(build, build.input(2, 12, 1, 5), value))
    assert summary(rewrite(graph, FewRows())) == ["unsqueezed", "expanded", "merged", "product"]


@pytest.mark.parametrize("dims", [(2,), (2, 3), (2, 3, 4)])
def test_an_expansion_of_few_axes_stays(dims):
    build = Builder()
    expanded = build.op("expand", Expand(dims), "expanded", src=build.input(*[1] * len(dims), name="one"))
    matrix = build.op("reshape", Reshape((2, math.prod(dims) // 2)), "matrix", src=expanded)
    graph = build.output(product(build, build.input(1, 2), matrix))
    assert ops(rewrite(graph, FewRows())) == ["expand", "reshape", "matmul"]


def test_a_step_with_shared_keys_copies_no_cache():
    class Step(nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *new: torch.Tensor) -> torch.Tensor:
            k, v = (torch.cat(pair, 2) for pair in zip((k, v), new, strict=True))
            return nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    cache = [torch.randn(1, 2, CACHED, 32) for _ in range(2)]
    inputs = torch.randn(1, 8, 1, 32), *cache, *(torch.randn(1, 2, 1, 32) for _ in range(2))
    net = fp.compile(Step(), inputs, tune="model", confirm=False)
    torch.testing.assert_close(net(*inputs), Step()(*inputs), rtol=1e-4, atol=1e-5)
    copied = [node for node in net.graph.nodes() if node.op in ("concat", "reorder") and node.choice is not None]
    assert all(node.results[0].size < cache[0].numel() // 4 for node in copied)
