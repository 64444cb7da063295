"""Siblings merged into one: the graph means the same, and what differs stays apart."""

from __future__ import annotations

import pytest
import torch

from fmtprop.ir.graph import Graph
from fmtprop.ir.node import PostOp, Value
from fmtprop.ir.types import TensorType
from fmtprop.ir.verify import Stage, verify
from fmtprop.ops import Binary, Conv, Eltwise, InnerProduct, MatMul, emit
from fmtprop.ops.evaluate import evaluate
from fmtprop.ops.merging import merged

RELU = PostOp("eltwise", Eltwise("relu"))
SOURCES = {"convolution": (2, 6, 7, 5), "inner_product": (4, 6), "matmul": (2, 5, 6)}


def member(graph, op, src, outputs, *, attrs=None, bias=True, tails=(RELU,), kernel=(1, 1), bias_dims=None):
    """Add one sibling with constants of its own."""
    name = graph.fresh_name("given")
    dims, row, default = {
        "convolution": ((outputs, 6, *kernel), (outputs,), Conv.make(2)),
        "inner_product": ((outputs, 6), (outputs,), InnerProduct()),
        "matmul": ((6, outputs), (1, 1, outputs), MatMul()),
    }[op]
    given = {"src": src, "weights": graph.constant(f"{name}_w", TensorType(dims), torch.randn(dims))}
    if bias:
        row = bias_dims or row
        given["bias"] = graph.constant(f"{name}_b", TensorType(row), torch.randn(row))
    node = graph.node(emit(graph, op, given, attrs or default).node)
    graph.replace(node.with_(post_ops=tails))
    return node.name


def siblings(op, outputs, changes=({}, {}, {})):
    """Return a graph of siblings, each an output, and their names."""
    torch.manual_seed(7)
    graph = Graph("siblings")
    src = graph.input("x", TensorType(SOURCES[op]))
    names = [member(graph, op, src, size, **change) for size, change in zip(outputs, changes, strict=False)]
    for name in names:
        graph.output(Value(name))
    return graph, names


def merge(graph, names):
    return merged([(graph.node(name), graph.inputs(name)) for name in names], graph.type_of, "wide")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("outputs", [(8, 3), (4, 4, 4), (1, 7, 2)])
@pytest.mark.parametrize("op", SOURCES)
def test_the_merged_graph_means_the_same(op, outputs, bias):
    graph, names = siblings(op, outputs, [{"bias": bias}] * 3)
    merger = merge(graph, names)
    single = Graph("merged")
    for node in graph.nodes():
        if node.op in ("input", "constant"):
            single.add(node, {})
    single.constants.update(graph.constants)
    for node, inputs in merger.members:
        single.add(node, inputs)
    for node in graph.output_nodes:
        single.add(node, graph.inputs(node.name))
    verify(single, Stage.NORMAL)
    assert [node.op for node in single.nodes()].count(op) == 1
    x = {"x": torch.randn(SOURCES[op])}
    for got, wanted in zip(evaluate(single, x), evaluate(graph, x), strict=True):
        assert wanted.std() > 0.1
        torch.testing.assert_close(got, wanted)


def test_the_parts_have_their_names():
    graph, names = siblings("convolution", (8, 3))
    merger = merge(graph, names)
    assert [(node.name, node.op) for node, _ in merger.members] == [
        ("wide.weights", "concat"),
        ("wide.bias", "concat"),
        ("wide", "convolution"),
        (names[0], "slice"),
        (names[1], "slice"),
    ]
    assert merger.node.results[0].dims == (2, 11, 7, 5)
    assert merger.node.post_ops == (RELU,)
    assert [node.results for node, _ in merger.members[-2:]] == [graph.node(name).results for name in names]


@pytest.mark.parametrize(
    ("op", "change"),
    [
        ("convolution", {"attrs": Conv.make(2, 2)}),
        ("convolution", {"attrs": Conv.make(2, pad_l=1), "kernel": (3, 3)}),
        ("convolution", {"bias": False}),
        ("convolution", {"tails": ()}),
        ("convolution", {"tails": (PostOp("eltwise", Eltwise("tanh")),)}),
        ("inner_product", {"bias": False}),
        ("matmul", {"bias_dims": (1, 5, 1)}),
        ("matmul", {"bias_dims": (1, 1, 1)}),
    ],
)
def test_siblings_that_differ_stay_apart(op, change):
    assert merge(*siblings(op, (8, 3), [{}, {}])) is not None
    assert merge(*siblings(op, (8, 3), [{}, change])) is None
    assert merge(*siblings(op, (8, 3), [change, {}])) is None


def test_biases_that_are_no_rows_stay_apart_though_alike():
    columns = {"bias_dims": (1, 5, 1)}
    assert merge(*siblings("matmul", (8, 3), [columns, columns])) is None


def test_tails_with_operands_stay_apart():
    tail = {"tails": (PostOp("binary", Binary("add"), "post_op_0"),)}
    assert merge(*siblings("convolution", (8, 8), [tail, tail])) is None


def test_one_alone_another_source_and_another_op_are_no_siblings():
    graph, names = siblings("convolution", (8, 3))
    assert merge(graph, names[:1]) is None
    assert merge(graph, [names[0], names[0]]) is None
    other = member(graph, "convolution", graph.input("y", TensorType(SOURCES["convolution"])), 4)
    assert merge(graph, [names[0], other]) is None
    pool = emit(graph, "eltwise", {"src": Value(names[0])}, Eltwise("relu"))
    assert merge(graph, [pool.node, pool.node]) is None
