"""A 1x1 convolution and the depthwise convolution behind it as one node: which, what it means, that it travels."""

from __future__ import annotations

import pytest
import torch

from fmtprop.errors import VerifyError
from fmtprop.ir.file import load, save
from fmtprop.ir.graph import Graph
from fmtprop.ir.node import PostOp, Value
from fmtprop.ir.post_ops import types_along
from fmtprop.ir.types import TensorType
from fmtprop.ir.verify import Stage, verify
from fmtprop.ops import Binary, Conv, Eltwise, emit
from fmtprop.ops.evaluate import evaluate
from fmtprop.passes.variants.depthwise_fusion import fused

RELU6 = PostOp("eltwise", Eltwise("clip", 0.0, 6.0))


def pair(*, stride=1, channels=24, size=9, bias=True, kernel=3, pad=1, groups=None, weights=(1, 1), tails=(RELU6,)):
    """Return a graph of a 1x1 and a depthwise convolution, both with bias and tail, and the names of the two."""
    graph = Graph("pair")
    groups = groups or channels
    sizes = {
        "w": (channels, 8, *weights),
        "b": (channels,),
        "w2": (groups, channels // groups, channels // groups, kernel, kernel),
        "b2": (channels,),
    }
    torch.manual_seed(5)
    values = {name: graph.constant(name, TensorType(dims), torch.randn(dims)) for name, dims in sizes.items()}
    src = graph.input("x", TensorType((2, 8, size, size)))
    given = {"src": src, "weights": values["w"], "bias": values["b"] if bias else None}
    first = emit(graph, "convolution", given, Conv.make(2))
    given = {"src": first, "weights": values["w2"], "bias": values["b2"] if bias else None}
    second = emit(graph, "convolution", given, Conv.make(2, stride, pad_l=pad, groups=groups))
    for value in (first, second):
        graph.replace(graph.node(value.node).with_(post_ops=tails))
    graph.output(second)
    return graph, first.node, second.node


def fuse(graph, first, second):
    found = fused(graph, graph.node(second))
    assert found is None or found.covers == (first, second)
    return found and (found.node, found.inputs)


def fused_graph(graph, first, second):
    """Return the same graph with the pair as one node."""
    node, inputs = fuse(graph, first, second)
    out = Graph("fused")
    for old in graph.nodes():
        if old.name == second:
            out.add(node, inputs)
        elif old.name != first:
            out.add(old, graph.inputs(old.name))
    out.constants.update(graph.constants)
    return out


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("stride", "size"), [(1, 9), (2, 9), (2, 12)])
def test_the_node_means_what_the_two_mean(stride, size, bias):
    graph, first, second = pair(stride=stride, size=size, bias=bias)
    single = fused_graph(graph, first, second)
    verify(single, Stage.NORMAL)
    src = {"x": torch.randn(2, 8, size, size)}
    (wanted,), (got,) = evaluate(graph, src), evaluate(single, src)
    assert wanted.std() > 0.1
    assert torch.equal(got, wanted)


def test_the_node_keeps_the_second_ones_name_and_names_its_operands():
    graph, first, second = pair()
    node, inputs = fuse(graph, first, second)
    assert (node.name, node.results) == (second, graph.node(second).results)
    assert [post_op.op for post_op in node.post_ops] == ["eltwise", "convolution", "eltwise"]
    assert node.post_ops[1].operands == ("post_op_1", "post_op_1_bias")
    assert set(inputs) == {"src", "weights", "bias", "post_op_1", "post_op_1_bias"}
    assert inputs["post_op_1"] == graph.inputs(second)["weights"]
    before, results = types_along(node, {name: graph.type_of(value) for name, value in inputs.items()})
    assert [type_.dims for type_ in before] == [(2, 24, 9, 9), (2, 24, 9, 9), node.results[0].dims]
    assert results == node.results


@pytest.mark.parametrize(
    "changes",
    [
        {"stride": 3},
        {"kernel": 5, "pad": 2},
        {"pad": 0},
        {"groups": 12},
        {"weights": (3, 3)},
        {"tails": (PostOp("binary", Binary("add"), "post_op_0"),)},
    ],
)
def test_other_pairs_stay_two(changes):
    assert fuse(*pair(**changes)) is None


def test_a_pair_must_follow_each_other():
    graph, first, second = pair()
    graph.set_inputs(second, {**graph.inputs(second), "src": graph.input("other", graph.node(first).results[0])})
    assert fuse(graph, first, second) is None


def test_nobody_else_may_read_the_first():
    graph, first, second = pair()
    graph.output(Value(first))
    assert fuse(graph, first, second) is None


def test_the_node_survives_a_graph_file(tmp_path):
    single = fused_graph(*pair())
    path = tmp_path / "fused.json"
    save(single, path)
    again = load(path)
    (node,) = [node for node in single.nodes() if node.op == "convolution"]
    assert again.node(node.name) == node
    assert again.inputs(node.name) == single.inputs(node.name)
    verify(again, Stage.NORMAL)


def broken(**changes):
    """Return a fused graph whose convolution post-op is changed."""
    single = fused_graph(*pair())
    (node,) = [node for node in single.nodes() if node.op == "convolution"]
    first, second, third = node.post_ops
    fields = {name: getattr(second, name) for name in ("op", "attrs", "operand", "origin", "bias")}
    single.replace(node.with_(post_ops=(first, PostOp(**{**fields, **changes}), third)))
    return single


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"operand": None, "bias": None}, r"V2: node conv_2 \(convolution\): .* no operand .post_op_1."),
        ({"bias": "post_op_9_bias"}, r"V2: .* operand 'post_op_9_bias' of its convolution post-op is not connected"),
        ({"attrs": Conv.make(2, 2, pad_l=1, groups=24)}, "V7: .* recorded results are .* inferred are"),
        ({"attrs": Conv.make(2, pad_l=1, groups=12)}, "V7: .* weights axis 0 has 24 groups but the attribute says"),
    ],
)
def test_a_broken_post_op_is_named(changes, message):
    with pytest.raises(VerifyError, match=message):
        verify(broken(**changes), Stage.NORMAL)


def test_a_bias_of_another_post_op_is_named():
    single = fused_graph(*pair())
    (node,) = [node for node in single.nodes() if node.op == "convolution"]
    single.set_inputs(node.name, {**single.inputs(node.name), "post_op_0": Value("b")})
    first = PostOp("eltwise", Eltwise("relu"), bias="post_op_0")
    single.replace(node.with_(post_ops=(first, *node.post_ops[1:])))
    with pytest.raises(VerifyError, match=r"V8: .* its eltwise post-op has a bias, post_op_0; only a convolution"):
        verify(single, Stage.NORMAL)
