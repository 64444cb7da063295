"""Normalizations and functions before a concat: where they move, where they stay, and that they are absorbed."""

from __future__ import annotations

import pytest

from fmtprop.ops import Concat
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
