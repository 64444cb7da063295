from __future__ import annotations

from fmtprop.ops import Concat, Expand, Permute, Reduction, Reorder, Reshape, Slice, Sum
from fmtprop.passes.rewrites.remove_identities import RemoveIdentities
from tests.passes.rewriting import Builder, rewrite, summary


def test_every_kind_of_identity_goes():
    build = Builder()
    value = build.act(build.input(2, 3), "relu", "real")
    value = build.op("reshape", Reshape((2, 3)), src=value)
    value = build.op("permute", Permute((0, 1)), src=value)
    value = build.op("slice", Slice((0, 0), (2, 3), (1, 1)), src=value)
    value = build.op("expand", Expand((2, 3)), src=value)
    value = build.op("reorder", Reorder(), src=value)
    value = build.op("reorder", Reorder("f32"), src=value)
    value = build.act(value, "linear", None, 1.0, 0.0)
    value = build.op("sum", Sum((1.0,)), src_0=value)
    value = build.op("concat", Concat(1), src_0=value)
    value = build.op("reshape", Reshape((2, 1, 3)), src=value)
    value = build.op("reduction", Reduction("mean", (1,)), src=value)
    value = build.op("reshape", Reshape((2, 3)), src=value)
    assert summary(rewrite(build.output(value), RemoveIdentities())) == ["real"]


def test_what_changes_something_stays():
    build = Builder()
    x = build.input(2, 3)
    graph = build.output(
        build.op("permute", Permute((1, 0)), "turn", src=x),
        build.op("slice", Slice((0, 1), (2, 2), (1, 1)), "cut", src=x),
        build.op("reorder", Reorder("bf16"), "cast", src=x),
        build.act(x, "linear", "scale", 2.0, 0.0),
        build.act(x, "linear", "shift", 1.0, 1.0),
        build.op("sum", Sum((2.0,)), "twice", src_0=x),
        build.op("reduction", Reduction("mean", (0, 1)), "mean", src=x),
        build.op(
            "reduction",
            Reduction("norm_lp_sum", (1,), 1.0),
            "magnitude",
            src=build.op("reshape", Reshape((2, 1, 3)), "r", src=x),
        ),
    )
    assert summary(rewrite(graph, RemoveIdentities())) == summary(graph)


def test_moving_a_dimension_of_size_one_is_an_identity_only_in_place():
    build = Builder()
    x = build.input(1, 1, 5)
    graph = build.output(
        build.op("permute", Permute((1, 0, 2)), "same", src=x), build.op("permute", Permute((2, 0, 1)), "moved", src=x)
    )
    assert summary(rewrite(graph, RemoveIdentities())) == ["moved"]


def test_views_of_views_merge():
    build = Builder()
    x = build.input(2, 3, 4)
    value = build.op("permute", Permute((2, 0, 1)), "p1", src=x)
    value = build.op("permute", Permute((2, 0, 1)), "p2", src=value)
    value = build.op("reshape", Reshape((6, 4)), "r1", src=value)
    value = build.op("reshape", Reshape((4, 6)), "r2", src=value)
    merged = rewrite(build.output(value), RemoveIdentities())
    assert summary(merged) == ["p2", "r2"]
    assert merged.node("p2").attrs == Permute((1, 2, 0))


def test_views_that_cancel_vanish():
    build = Builder()
    value = build.op("permute", Permute((2, 0, 1)), src=build.input(2, 3, 4))
    value = build.op("permute", Permute((1, 2, 0)), src=value)
    value = build.op("reshape", Reshape((24,)), src=value)
    value = build.op("reshape", Reshape((2, 3, 4)), src=value)
    assert summary(rewrite(build.output(value), RemoveIdentities())) == []


def test_an_inner_view_with_another_reader_stays():
    build = Builder()
    inner = build.op("reshape", Reshape((6,)), "inner", src=build.input(2, 3))
    graph = build.output(inner, build.op("reshape", Reshape((3, 2)), "outer", src=inner))
    assert summary(rewrite(graph, RemoveIdentities())) == ["inner", "outer"]
