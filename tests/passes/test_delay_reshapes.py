"""Element-wise ops before reshapes: where they move, where they stay, and the fusion that it allows."""

from __future__ import annotations

import pytest

from fmtprop.ir.graph import Graph
from fmtprop.ops import Binary, MatMul, Permute, Reshape
from fmtprop.ops.inner_product import InnerProduct
from fmtprop.ops.normalization import GroupNorm, LayerNorm
from fmtprop.ops.quantization import FakeQuantize
from fmtprop.passes.rewrites.delay_reshapes import DelayReshapes
from fmtprop.passes.rewrites.fuse_post_ops import FusePostOps
from fmtprop.passes.rewrites.recognise_group_norm import RecogniseGroupNorm
from fmtprop.passes.rewrites.remove_identities import RemoveIdentities
from tests.passes.rewriting import Builder, rewrite, summary


def layer(build: Builder, src, outputs: int, name: str):
    """Return a linear layer over the rows of [1, M, K], as models write it with a matrix product."""
    _, rows, inputs = build.graph.type_of(src).dims
    flat = build.op("reshape", Reshape((rows, inputs)), f"{name}_rows", src=src)
    weights = build.constant(build.random(outputs, inputs))
    product = build.op("inner_product", InnerProduct(), name, src=flat, weights=weights)
    return build.op("reshape", Reshape((1, rows, outputs)), f"{name}_image", src=product)


def fused(graph) -> list[str]:
    result = rewrite(graph, DelayReshapes(), FusePostOps())
    return [line for line in summary(result) if not line.startswith("reshape") and not line.endswith("_rows")]


def test_an_activation_between_two_layers_is_absorbed_and_the_reshapes_vanish():
    build = Builder()
    hidden = build.act(layer(build, build.input(1, 6, 8), 16, "up"), "gelu_tanh")
    graph = build.output(layer(build, hidden, 8, "down"))
    result = rewrite(graph, DelayReshapes(), FusePostOps())
    assert summary(result) == ["up_rows", "up+gelu_tanh", "down", "down_image"]


def test_a_residual_addition_becomes_a_sum():
    build = Builder()
    first = layer(build, build.input(1, 6, 8), 8, "first")
    second = layer(build, build.act(first, "relu"), 8, "second")
    lines = fused(build.output(build.binary("add", first, second)))
    assert lines[0] == "first"
    assert lines[-1].startswith("second+sum(")


def test_a_deep_network_is_not_sorted_again_for_each_exchange(monkeypatch):
    sorts = []
    usual = Graph._sorted
    monkeypatch.setattr(Graph, "_sorted", lambda self: sorts.append(1) or usual(self))
    counts = []
    for depth in (2, 12):
        build = Builder()
        value = build.input(1, 6, 8)
        for number in range(depth):
            inner = build.act(layer(build, value, 8, f"up_{number}"), "gelu_tanh", f"act_{number}")
            value = build.binary("add", value, layer(build, inner, 8, f"down_{number}"), f"sum_{number}")
        graph = build.output(value)
        sorts.clear()
        DelayReshapes().run(graph)
        counts.append(len(sorts))
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("dims", [(1, 1, 1), (16,), (1, 16), (1, 1, 16)])
def test_a_number_or_a_row_follows(dims):
    build = Builder()
    value = layer(build, build.input(1, 6, 8), 16, "fc")
    other = build.constant(build.random(*dims), "other")
    if len(dims) < 3:
        other = build.op("reshape", Reshape((1, 1, 16)), src=other)
    lines = fused(build.output(build.binary("mul", value, other)))
    assert [line.split("(")[0] for line in lines] == ["fc+binary"]


def test_a_column_does_not():
    build = Builder()
    value = layer(build, build.input(1, 6, 8), 16, "fc")
    assert fused(build.output(build.binary("mul", value, build.constant(build.random(1, 6, 1))))) == [
        "fc", "fc_image", "mul",
    ]  # fmt: skip


def test_a_permuted_operand_would_need_a_copy():
    build = Builder()
    value = layer(build, build.input(1, 6, 8), 16, "fc")
    other = build.op("permute", Permute((0, 2, 1)), "turned", src=build.input(1, 16, 6, name="y"))
    assert fused(build.output(build.binary("add", value, other))) == ["fc", "fc_image", "turned", "add"]


def test_another_reader_of_the_reshape_keeps_it():
    build = Builder()
    value = layer(build, build.input(1, 6, 8), 16, "fc")
    assert fused(build.output(build.act(value), value)) == ["fc", "fc_image", "relu"]


def test_a_reshape_of_no_product_stays():
    build = Builder()
    scale, shift = (build.constant(build.random(8)) for _ in range(2))
    normed = build.op("layer_normalization", LayerNorm(1e-5), "ln", src=build.input(6, 8), scale=scale, shift=shift)
    value = build.op("reshape", Reshape((1, 6, 8)), "image", src=normed)
    assert fused(build.output(build.act(value))) == ["ln", "image", "relu"]


def test_both_operands_may_be_reshaped_products_and_the_later_one_absorbs():
    build = Builder()
    x = build.input(2, 6, 8)
    products = []
    for name in ("a", "b"):
        weights = build.constant(build.random(2, 8, 8))
        product = build.op("matmul", MatMul(), name, src=x, weights=weights)
        products.append(build.op("reshape", Reshape((12, 8)), f"{name}_image", src=product))
    added = build.op("binary", Binary("add"), "add", src_0=products[0], src_1=products[1])
    lines = fused(build.output(added))
    assert lines == ["a", "b+sum(a)"]


def test_a_reshape_that_the_op_broadcasts_stays():
    """Involution multiplies the unfolded source by one computed factor for each group of channels."""
    build = Builder()
    weights = build.constant(build.random(4, 8))
    factor = build.op("inner_product", InnerProduct(), "fc", src=build.input(6, 8), weights=weights)
    factor = build.op("reshape", Reshape((2, 1, 12)), "for_all", src=factor)
    product = build.binary("mul", factor, build.input(2, 5, 12, name="y"))
    assert fused(build.output(product)) == ["fc", "for_all", "mul"]


@pytest.mark.parametrize("rounds", [False, True])
def test_groups_that_were_made_channels_are_normalized_in_the_tensors_own_shape(rounds):
    build = Builder()
    src = build.conv(build.input(2, 3, 4, 5), 6, "conv")
    groups = build.op("reshape", Reshape((2, 3, 40)), "groups", src=src)
    scale, shift = build.constant(build.random(3)), build.constant(build.random(3))
    norm = build.op("group_normalization", GroupNorm(3), "norm", src=groups, scale=scale, shift=shift)
    value = build.op("fake_quantize", FakeQuantize(0.02, -128, 127), "round", src=norm) if rounds else norm
    graph = build.output(build.op("reshape", Reshape((2, 6, 4, 5)), "back", src=value))
    result = rewrite(graph, RecogniseGroupNorm(), DelayReshapes(), RemoveIdentities())
    (found,) = [node for node in result.nodes() if node.op == "group_normalization"]
    assert found.attrs == GroupNorm(3) and found.results[0].dims == (2, 6, 4, 5)
    assert not [node for node in result.nodes() if node.op == "reshape"]


def test_groups_that_do_not_get_their_shape_back_stay():
    build = Builder()
    groups = build.op("reshape", Reshape((2, 3, 40)), "groups", src=build.input(2, 6, 4, 5))
    vectors = {name: build.constant(build.random(3)) for name in ("scale", "shift")}
    graph = build.output(build.op("group_normalization", GroupNorm(3), "norm", src=groups, **vectors))
    (found,) = [node for node in rewrite(graph, RecogniseGroupNorm()).nodes() if node.op == "group_normalization"]
    assert found.results[0].dims == (2, 3, 40)
