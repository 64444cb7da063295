"""What files of the field do: branches on a scalar of the caller's, sizes of -1, slopes of any shape."""

from __future__ import annotations

import logging

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, parser
from onnx.reference import ReferenceEvaluator

import fmtprop as fp

OPTIONS = {"policy": "propagate", "confirm": False}

#: the branch that is not taken does not fit the shapes
RATES = """
    <ir_version: 8, opset_import: ["" : 18]>
    g (float[n, k] x, int64 rate) => (float[?, ?] y)
    <float[3, 2] narrow = {1, 2, 3, 4, 5, 6}, float[2, 2] wide = {1, 0, 0, 1}, int64 high = {16}> {
        is_high = Equal(rate, high)
        y = If(is_high) <
            then_branch = then () => (float[?, ?] a) { a = MatMul(x, narrow) },
            else_branch = else () => (float[?, ?] b) { b = MatMul(x, wide) }
        >
    }"""

#: as many rounds as the caller says
ROUNDS = """
    <ir_version: 8, opset_import: ["" : 18]>
    g (float[4] x, int64 rounds) => (float[4] y)
    <bool going = {1}> {
        y = Loop(rounds, going, x) <
            body = body (int64 i, bool before, float[4] last) => (bool after, float[4] next) {
                after = Identity(before)
                next = Add(last, last)
            }
        >
    }"""


def checked(session: fp.onnx.InferenceSession, text: str, feed: dict[str, np.ndarray]) -> None:
    (got,) = session.run(None, feed)
    (want,) = ReferenceEvaluator(parser.parse_model(text)).run(None, feed)
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_a_branch_on_a_scalar_has_a_plan_for_each_value():
    session = fp.onnx.InferenceSession(parser.parse_model(RATES), **OPTIONS)
    for rate, width in ((16, 3), (8, 2), (16, 3), (8, 2)):
        checked(session, RATES, {"x": np.float32([range(width)]), "rate": np.int64(rate)})
    assert session.reason is None
    assert list(session.plans) == [((1, 3), (), (16, ())), ((1, 2), (), (8, ()))]
    assert all([step.node.op for step in net.plan.steps] != [] for net in session.plans.values())


def test_a_loop_of_a_scalars_length_is_unrolled_for_each_value():
    session = fp.onnx.InferenceSession(parser.parse_model(ROUNDS), **OPTIONS)
    for rounds in (3, 1, 0, 3):
        checked(session, ROUNDS, {"x": np.float32([1, 2, 3, 4]), "rounds": np.int64(rounds)})
    assert session.reason is None and len(session.plans) == 3


def test_a_scalar_of_many_values_is_an_input_like_others(caplog):
    session = fp.onnx.InferenceSession(parser.parse_model(ROUNDS), max_shapes=2, **OPTIONS)
    with caplog.at_level(logging.WARNING, "fmtprop"):
        for rounds in range(5):
            checked(session, ROUNDS, {"x": np.float32([1, 2, 3, 4]), "rounds": np.int64(rounds)})
    assert "trip count" in str(session.reason)
    messages = [record.message for record in caplog.records]
    assert len(messages) == 1 and messages[0].startswith(
        "g runs node by node in PyTorch for inputs of shapes [[4], []]: node y (Loop)"
    )


def test_sizes_that_cannot_be_planned_leave_the_plans_of_others(caplog):
    text = """
        <ir_version: 8, opset_import: ["" : 18]>
        g (float[4] x, float[k] t) => (float[4] y) <bool going = {1}> {
            sizes = Shape(t)
            rounds = Squeeze(sizes)
            y = Loop(rounds, going, x) <
                body = body (int64 i, bool before, float[4] last) => (bool after, float[4] next) {
                    after = Identity(before)
                    less = Sub(last, last)
                    next = Sub(last, less)
                }
            >
        }"""
    session = fp.onnx.InferenceSession(parser.parse_model(text), **OPTIONS)
    with caplog.at_level(logging.WARNING, "fmtprop"):
        for rounds in (3, 2000, 3, 2000, 2):
            checked(session, text, {"x": np.float32([1, 2, 3, 4]), "t": np.zeros(rounds, np.float32)})
    assert [shapes[1] for shapes in session.plans] == [(3,), (2,)] and "2000" not in str(session.plans)
    assert len(caplog.records) == 1 and "for inputs of shapes [[4], [2000]]" in caplog.records[0].message


def test_a_session_without_a_plan_says_so_when_it_is_made(caplog):
    text = '<ir_version: 8, opset_import: ["" : 18]> g (float[4] x) => (int64[1, n] y) { y = NonZero(x) }'
    with caplog.at_level(logging.WARNING, "fmtprop"):
        session = fp.onnx.InferenceSession(parser.parse_model(text), **OPTIONS)
        session.run(None, {"x": np.float32([0, 1, 0, 2])})
    assert [record.message for record in caplog.records] == [
        f"g runs node by node in PyTorch, without a plan: {session.reason}"
    ]
    assert "node y (NonZero)" in str(session.reason)


@pytest.mark.parametrize("size", [-1, 0])
def test_a_declared_size_that_is_none_is_unknown(size):
    model = parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 18]> g (float[n, 2] x) => (float[n, 2] y) { y = Relu(x) }'
    )
    for info in (model.graph.input[0], model.graph.output[0]):
        info.type.tensor_type.shape.dim[0].dim_value = size
    before = model.SerializeToString()
    session = fp.onnx.InferenceSession(model, **OPTIONS)
    assert session.get_inputs()[0].shape == [None, 2]
    for rows in (1, 3):
        assert session.run(None, {"x": -np.ones((rows, 2), np.float32)})[0].tolist() == [[0.0, 0.0]] * rows
    net = fp.compile(model, shapes={"x": (5, 2)}, **OPTIONS)
    assert net.plan.outputs[0][1].desc.dims == (5, 2)
    assert model.SerializeToString() == before


@pytest.mark.parametrize(
    "slope",
    [(1,), (1, 1, 1, 1), (5, 1, 1), (1, 5, 1, 1), (2, 5, 3, 4), (5, 3, 4), (4,), (3, 1), (2, 1, 1, 4), ()],
    ids=str,
)
@pytest.mark.parametrize("behind", [False, True])
def test_prelu_of_any_slope_is_one_op_or_a_post_op(slope, behind):
    rng = np.random.default_rng(0)
    slopes = rng.standard_normal(slope).astype(np.float32)
    weights = rng.standard_normal((5, 5, 1, 1)).astype(np.float32)
    nodes = [helper.make_node("PRelu", ["c" if behind else "x", "slopes"], ["y"])]
    if behind:
        nodes.insert(0, helper.make_node("Conv", ["x", "weights"], ["c"]))
    infos = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, (2, 5, 3, 4)) for name in "xy"]
    constants = [onnx.numpy_helper.from_array(slopes, "slopes"), onnx.numpy_helper.from_array(weights, "weights")]
    graph = helper.make_graph(nodes, "g", infos[:1], infos[1:], constants[: 1 + behind])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    x = rng.standard_normal((2, 5, 3, 4)).astype(np.float32)
    net = fp.compile(model, **OPTIONS)
    got = net(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(got, ReferenceEvaluator(model).run(None, {"x": x})[0], atol=1e-5)
    ops = {node.op for node in net.compilation.normal.nodes()} - {
        "input",
        "output",
        "constant",
        "reshape",
        "convolution",
    }
    fused = {post_op.op for node in net.compilation.normal.nodes() for post_op in node.post_ops}
    assert ops | fused <= {"prelu", "eltwise"}, (ops, fused)
