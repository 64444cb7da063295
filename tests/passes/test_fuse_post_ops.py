from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fmtprop as fp
from fmtprop.ir.verify import Stage, verify
from fmtprop.ops import Concat, Eltwise, FakeQuantize, MatMul, Permute, Prelu, Reduction, Softmax, Sum
from fmtprop.ops.evaluate import evaluate
from fmtprop.ops.pooling import Pooling
from fmtprop.passes.rewrites.fuse_post_ops import FusePostOps
from tests.passes.rewriting import Builder, rewrite, summary
from tests.passes.table_target import TableTarget


def fused(graph) -> list[str]:
    result = rewrite(graph, FusePostOps())
    verify(result, Stage.NORMAL)
    return summary(result)


def test_a_chain_is_absorbed_in_order():
    build = Builder()
    value = build.conv(build.input(1, 3, 4, 4), 5, "conv")
    value = build.act(value)
    value = build.binary("mul", value, build.constant(build.random(1, 5, 1, 1), "gate"))
    value = build.act(value, "tanh")
    assert fused(build.output(value)) == ["conv+relu+binary(gate)+tanh"]


def test_slopes_of_channels_are_absorbed_by_a_convolution():
    build = Builder()
    value = build.conv(build.input(1, 3, 4, 4), 5, "conv")
    slopes = build.constant(build.random(1, 5, 1, 1), "slopes")
    assert fused(build.output(build.op("prelu", Prelu(), "prelu", src=value, weights=slopes))) == [
        "conv+prelu(slopes)",
    ]  # fmt: skip


@pytest.mark.parametrize("dims", [(1, 1, 1, 1), (1, 1, 4, 4), (1, 5, 4, 4)])
def test_other_slopes_are_not(dims):
    build = Builder()
    slopes = build.constant(build.random(*dims), "slopes")
    value = build.op("prelu", Prelu(), "prelu", src=build.conv(build.input(1, 3, 4, 4), 5, "conv"), weights=slopes)
    assert fused(build.output(value)) == ["conv", "prelu"]


def test_computed_slopes_are_not():
    build = Builder()
    slopes = build.input(1, 5, 1, 1, name="slopes")
    value = build.op("prelu", Prelu(), "prelu", src=build.conv(build.input(1, 3, 4, 4), 5, "conv"), weights=slopes)
    assert fused(build.output(value)) == ["conv", "prelu"]


@pytest.mark.parametrize(
    ("dims", "absorbs"),
    [
        *(((2, 5, 4, 4), True), ((2, 5, 1, 1), True), ((1, 1, 1, 4), True), ((1, 1, 1, 1), True)),
        *(((2, 1, 1, 1), False), ((2, 5, 4, 1), False), ((1, 1, 4, 1), False)),
    ],
)
def test_a_broadcast_that_onednn_has_no_kernel_for_absorbs_nothing(dims, absorbs):
    build = Builder()
    product = build.binary("mul", build.input(2, 5, 4, 4), build.input(*dims, name="other"))
    assert fused(build.output(build.act(product))) == (["mul+relu"] if absorbs else ["mul", "relu"])


def test_a_reduction_absorbs_nothing():
    build = Builder()
    mean = build.op("reduction", Reduction("mean", (1,)), "mean", src=build.input(2, 5, 4, 4))
    assert fused(build.output(build.act(mean))) == ["mean", "relu"]


def test_origins_of_absorbed_nodes_are_kept():
    build = Builder()
    graph = FusePostOps().run(build.output(build.act(build.conv(build.input(1, 3, 4, 4), 5, "conv"))))
    assert [tail.origin for tail in graph.node("conv").post_ops] == ["layer.relu"]


def test_an_identity_block_sums_into_its_own_input():
    build = Builder()
    first = build.act(build.conv(build.input(1, 3, 4, 4), 8, "stem"))
    value = build.act(build.conv(first, 4, "reduce"), name="relu_1")
    value = build.binary("add", build.conv(value, 8, "expand"), first)
    assert fused(build.output(build.act(value, name="relu_2"))) == [
        "stem+relu", "reduce+relu", "expand+sum(stem)+relu",
    ]  # fmt: skip


@pytest.mark.parametrize("swapped", [False, True])
def test_of_two_producers_the_later_absorbs(swapped):
    build = Builder()
    x = build.act(build.input(1, 3, 4, 4), name="act")
    branch, shortcut = build.conv(x, 5, "branch"), build.conv(x, 5, "shortcut")
    a, b = (shortcut, branch) if swapped else (branch, shortcut)
    assert fused(build.output(build.act(build.binary("add", a, b)))) == ["act", "branch", "shortcut+sum(branch)+relu"]


def test_a_residual_that_must_survive_becomes_binary():
    build = Builder()
    x = build.input(1, 5, 4, 4)
    both = build.conv(x, 5, "both")
    graph = build.output(
        build.binary("add", build.conv(build.act(x), 5, "conv_1"), x, "input"),
        build.binary("add", build.conv(x, 5, "conv_2"), both, "output"),
        both,
    )
    assert fused(graph) == ["both", "relu", "conv_1+binary(x)", "conv_2+binary(both)"]


def test_a_residual_that_is_read_later_becomes_binary():
    build = Builder()
    first = build.conv(build.input(1, 3, 4, 4), 5, "first")
    added = build.binary("add", build.conv(first, 5, "second"), first)
    late = build.op("concat", Concat(1), "late", src_0=first, src_1=added)
    assert fused(build.output(late)) == ["first", "second+binary(first)", "late"]


def test_a_residual_that_is_the_source_becomes_binary():
    build = Builder()
    first = build.conv(build.input(1, 3, 4, 4), 5, "first")
    assert fused(build.output(build.binary("add", build.conv(first, 5, "second"), first))) == [
        "first", "second+binary(first)",
    ]  # fmt: skip


def test_a_residual_that_is_the_source_through_a_view_becomes_binary():
    build = Builder()
    first = build.conv(build.input(1, 4, 4, 4), 4, "first")
    turned = build.op("permute", Permute((0, 1, 3, 2)), "turned", src=first)
    assert fused(build.output(build.binary("add", build.conv(turned, 4, "second"), first))) == [
        "first", "turned", "second+binary(first)",
    ]  # fmt: skip


def test_an_addition_after_another_post_op_becomes_binary():
    build = Builder()
    x = build.input(1, 3, 4, 4)
    shortcut = build.conv(x, 5, "shortcut")
    value = build.binary("add", build.act(build.conv(x, 5, "conv")), shortcut)
    assert fused(build.output(value)) == ["shortcut", "conv+relu+binary(shortcut)"]


def test_one_sum_per_node():
    build = Builder()
    x = build.input(1, 3, 4, 4)
    a, b = build.conv(x, 5, "a"), build.conv(x, 5, "b")
    value = build.binary("add", build.binary("add", build.conv(x, 5, "c"), a, "add_1"), b, "add_2")
    assert fused(build.output(value)) == ["a", "b", "c+sum(a)+binary(b)"]


def test_a_value_with_two_readers_is_not_absorbed_into():
    build = Builder()
    conv = build.conv(build.input(1, 3, 4, 4), 5, "conv")
    twice = build.conv(build.input(1, 3, 4, 4, name="z"), 5, "twice")
    graph = build.output(conv, build.act(conv), build.binary("mul", twice, twice, "square"))
    assert fused(graph) == ["conv", "twice", "relu", "square"]


def test_only_the_first_operand_of_a_subtraction_absorbs():
    build = Builder()
    x = build.input(1, 3, 4, 4)
    table = build.constant(build.random(1, 5, 1, 1), "table")
    wide = build.constant(build.random(1, 5, 4, 4), "wide")
    graph = build.output(
        build.binary("sub", build.conv(x, 5, "a"), table, "minus"),
        build.binary("sub", wide, build.conv(x, 5, "b"), "from"),
        build.binary("max", wide, build.conv(x, 5, "c"), "maximum"),
    )
    assert fused(graph) == ["a+binary(table)", "b", "from", "c+binary(wide)"]


def test_broadcasts_that_only_reference_code_takes_stay():
    build = Builder()
    x = build.input(2, 3, 4, 4)
    graph = build.output(
        build.binary("mul", build.conv(x, 5, "a"), build.input(2, 5, 1, 1, name="gate"), "per_item"),
        build.binary("mul", build.conv(x, 5, "b"), build.input(1, 1, 4, 1, name="rows"), "per_row"),
        build.binary("mul", build.conv(x, 5, "c"), build.input(1, 1, 1, 1, name="one"), "scalar"),
        build.binary("mul", build.conv(x, 5, "d"), build.input(1, 1, 1, 4, name="columns"), "per_column"),
    )
    assert fused(graph) == ["a", "per_item", "b", "per_row", "c+binary(one)", "d", "per_column"]


def test_the_last_axis_is_a_matrix_products_alone():
    build = Builder()
    x, last = build.input(2, 6, 4), build.constant(build.random(1, 1, 5), "last")
    product = build.op("matmul", MatMul(), "product", src=x, weights=build.constant(build.random(1, 4, 5)))
    other = build.binary("add", build.input(2, 6, 5, name="y"), build.input(2, 6, 5, name="z"), "other")
    graph = build.output(build.binary("mul", product, last, "scaled"), build.binary("mul", other, last, "plain"))
    assert fused(graph) == ["product+binary(last)", "other", "plain"]


def test_a_result_that_the_operand_widens_stays():
    build = Builder()
    value = build.conv(build.input(1, 3, 1, 1), 5, "conv")
    graph = build.output(build.binary("add", value, build.input(1, 5, 4, 4, name="wide")))
    assert fused(graph) == ["conv", "add"]


def test_an_unweighted_sum_is_an_addition():
    build = Builder()
    x = build.input(1, 3, 4, 4)
    graph = build.output(
        build.op("sum", Sum((1.0, 1.0)), src_0=build.conv(x, 5, "a"), src_1=build.conv(x, 5, "b")),
        build.op("sum", Sum((1.0, 2.0)), "weighted", src_0=build.conv(x, 5, "c"), src_1=build.conv(x, 5, "d")),
    )
    assert fused(graph) == ["a", "b+sum(a)", "c", "d", "weighted"]


def test_eltwise_absorbs_nothing_but_binary_and_pooling_do():
    build = Builder()
    x = build.input(1, 3, 4, 4)
    pooled = build.op("pooling", Pooling.make("avg_include_padding", (2, 2)), "pool", src=x)
    graph = build.output(
        build.binary("mul", build.act(x), build.constant(build.random(1, 3, 1, 1)), "scaled"),
        build.act(build.binary("mul", x, x, "squared"), "sqrt"),
        build.act(pooled, "tanh"),
    )
    assert fused(graph) == ["pool+tanh", "relu", "scaled", "squared+sqrt"]


def test_ops_that_are_slow_with_post_ops_absorb_none():
    build = Builder()
    x = build.input(1, 3, 4, 4)
    soft = build.op("softmax", Softmax(1), "soft", src=x)
    mean = build.op("reduction", Reduction("mean", (2,)), "mean", src=x)
    graph = build.output(build.act(soft), build.act(mean, "tanh"))
    assert sorted(fused(graph)) == ["mean", "relu", "soft", "tanh"]


class LoopsWith(TableTarget):
    """Has nothing but loops for an op with some kinds of post-op."""

    def candidates(self, node, request):
        slow = any((node.op, post_op.op) in self.ref for post_op in node.post_ops)
        for candidate in super().candidates(node, request):
            yield replace(candidate, is_ref=slow)


def test_what_the_target_would_run_in_loops_stays_two_nodes():
    build = Builder()
    graph = build.output(build.act(build.conv(build.input(1, 3, 4, 4), 5, "conv")))
    asked = LoopsWith(ref=frozenset({("convolution", "eltwise")}))
    assert summary(FusePostOps(target=asked).run(graph)) == ["conv", "relu"]
    assert summary(FusePostOps(target=LoopsWith()).run(graph)) == ["conv+relu"]


def test_rounded_results_of_element_wise_ops_absorb_nothing():
    build = Builder()
    x = build.input(1, 3, 4, 4)
    value = build.binary(
        "mul", build.act(x, "logistic"), build.op("eltwise", Eltwise("abs"), "other", src=x), "product"
    )
    value = build.op("fake_quantize", FakeQuantize(0.5, 0, 255), "round", src=value)
    graph = build.output(build.binary("add", value, build.op("eltwise", Eltwise("exp"), "more", src=x), "sum"))
    found = {node.name: [one.op for one in node.post_ops] for node in FusePostOps().run(graph).nodes()}
    assert found["product"] == ["fake_quantize"] and found["sum"] == []


def test_a_chain_of_roundings_is_as_long_as_onednn_can_express():
    build = Builder()
    value = build.conv(build.input(1, 16, 4, 4), 16, "conv")
    for number in range(12):
        value = build.act(value, "relu", f"relu_{number}")
        value = build.op("fake_quantize", FakeQuantize(0.5 + 0.0371 * number, 0, 255), f"round_{number}", src=value)
    graph = build.output(value)
    net = fp.compile(graph, policy="propagate", confirm=False)
    x = torch.randn(1, 16, 4, 4, generator=torch.Generator().manual_seed(0))
    (expected,) = evaluate(graph, {graph.input_nodes[0].name: x})
    assert ((net(x) - expected).abs() > 1e-4).float().mean() < 0.02  # in the middle between two steps, either
    counts = [len(node.post_ops) for node in net.compilation.normal.nodes() if node.op == "convolution"]
    assert counts == [13]  # 7 functions and 6 roundings are 31 of oneDNN's 32
