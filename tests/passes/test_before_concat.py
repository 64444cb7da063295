"""Normalizations and functions before a concat: where they move, where they stay, and that they are absorbed."""

from __future__ import annotations

import pytest
import torch

from fmtprop.ir.graph import Graph
from fmtprop.ir.types import TensorType
from fmtprop.ops import Concat, FakeQuantize, emit
from fmtprop.ops.evaluate import evaluate
from fmtprop.passes.rewrites.before_concat import BeforeConcat
from fmtprop.passes.rewrites.fold_batch_norm import FoldBatchNorm
from fmtprop.passes.rewrites.fuse_post_ops import FusePostOps
from tests.passes.rewriting import Builder, rewrite, summary

PASSES = (BeforeConcat(), FoldBatchNorm(), FusePostOps())


def mixed(build: Builder, axis: int = 1, sources: int = 2):
    """Return a concat of convolutions of several sizes, and what the convolutions read."""
    x = build.input(2, 3, 6, 6)
    parts = [build.conv(x, 4 + (axis == 1) * n, f"conv_{n}", kernel=1 + 2 * n, pad_l=n) for n in range(sources)]
    return build.op("concat", Concat(axis), "joined", **{f"src_{n}": part for n, part in enumerate(parts)}), x


@pytest.mark.parametrize("sources", [2, 3])
def test_a_normalization_and_a_function_become_parts_of_the_convolutions(sources):
    build = Builder()
    value, _ = mixed(build, sources=sources)
    graph = build.output(build.act(build.norm(value, "bn"), "swish", "swish", 1.0))
    result = summary(rewrite(graph, *PASSES, tolerance=1e-4))
    assert result == [*(f"conv_{n}+swish" for n in range(sources)), "joined"]


def test_a_function_moves_before_a_concat_along_any_axis():
    build = Builder()
    value, _ = mixed(build, axis=0)
    assert summary(rewrite(build.output(build.act(value)), *PASSES)) == ["conv_0+relu", "conv_1+relu", "joined"]


def test_a_normalization_stays_behind_a_concat_of_images():
    build = Builder()
    value, _ = mixed(build, axis=0)
    assert summary(rewrite(build.output(build.norm(value, "bn")), BeforeConcat())) == [
        "conv_0", "conv_1", "joined", "bn",
    ]  # fmt: skip


def test_another_reader_of_the_concat_keeps_it():
    build = Builder()
    value, _ = mixed(build)
    assert summary(rewrite(build.output(build.act(value), value), *PASSES))[-2:] == ["joined", "relu"]


def test_another_reader_of_a_part_keeps_it():
    build = Builder()
    first = build.conv(build.input(2, 3, 6, 6), 4, "conv_0")
    value = build.op("concat", Concat(1), "joined", src_0=first, src_1=build.conv(first, 4, "conv_1"))
    assert summary(rewrite(build.output(build.act(value)), *PASSES))[-2:] == ["joined", "relu"]


def test_a_source_that_is_no_product_keeps_it():
    build = Builder()
    x = build.input(2, 3, 6, 6)
    value = build.op("concat", Concat(1), "joined", src_0=build.conv(x, 4, "conv"), src_1=x)
    assert summary(rewrite(build.output(build.norm(value, "bn")), *PASSES)) == ["conv", "joined", "bn"]


def rounded(count, readers=1):
    """A rounding of a concat of tensors on other grids."""
    graph = Graph("rounded")
    parts = [graph.input(f"x_{index}", TensorType((1, 4, 3, 3))) for index in range(count)]
    parts = [emit(graph, "fake_quantize", {"src": x}, FakeQuantize(0.1 + i, -8, 8)) for i, x in enumerate(parts)]
    joined = emit(graph, "concat", {f"src_{index}": part for index, part in enumerate(parts)}, Concat(1))
    graph.output(emit(graph, "fake_quantize", {"src": joined}, FakeQuantize(0.5, -8, 8)))
    for _ in range(readers - 1):
        graph.output(joined)
    return graph


@pytest.mark.parametrize(("count", "readers", "moves"), [(2, 1, True), (4, 1, True), (5, 1, False), (2, 2, False)])
def test_a_rounding_of_a_few_rounded_tensors_is_that_of_each(count, readers, moves):
    graph = rounded(count, readers)
    result = BeforeConcat().run(graph)
    concat = next(node for node in result.nodes() if node.op == "concat")
    sources = [result.node(value.node).attrs for value in result.inputs(concat.name).values()]
    assert (sources == [FakeQuantize(0.5, -8, 8)] * count) == moves
    inputs = {f"x_{index}": torch.randn(1, 4, 3, 3) * 5 for index in range(count)}
    for got, want in zip(evaluate(result, inputs), evaluate(graph, inputs), strict=True):
        assert torch.equal(got, want)
