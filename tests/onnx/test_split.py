"""A model whose end no plan can express: the nodes before run as a plan, for each shape."""

from __future__ import annotations

import logging

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper, parser
from onnx.reference import ReferenceEvaluator

import fmtprop as fp
from fmtprop.errors import ImportModelError, InputError

OPTIONS = {"policy": "propagate", "confirm": False}

#: boxes and scores by convolutions, the best boxes by value, and the numbers of these
DETECTOR = """
    <ir_version: 8, opset_import: ["" : 18]>
    g (float[1, 3, 8, n] x) => (float[1, a, 4] boxes, int64[k, 3] chosen, float[m, 4] best, int64[2] size)
    <int64[1] most = {5}, float[1] overlap = {0.5}, int64[3] to_boxes = {1, -1, 4}, int64[3] to_scores = {1, 1, -1},
     int64 two = {2}> {
        features = Conv<pads = [1, 1, 1, 1]>(x, w)
        places = Conv(features, w_boxes)
        last = Transpose<perm = [0, 2, 3, 1]>(places)
        boxes = Reshape(last, to_boxes)
        kinds = Conv(features, w_scores)
        scores = Reshape(kinds, to_scores)
        chosen = NonMaxSuppression(boxes, scores, most, overlap)
        which = Gather<axis = 1>(chosen, two)
        flat = Squeeze(boxes)
        best = Gather(flat, which)
        size = Shape(best)
    }"""


def detector() -> onnx.ModelProto:
    made, draw = parser.parse_model(DETECTOR), np.random.default_rng(0)
    for name, dims in (("w", (8, 3, 3, 3)), ("w_boxes", (4, 8, 1, 1)), ("w_scores", (1, 8, 1, 1))):
        made.graph.initializer.append(numpy_helper.from_array(draw.standard_normal(dims).astype(np.float32), name))
    return made


def image(columns: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((1, 3, 8, columns)).astype(np.float32)


def assert_as_the_reference(
    session: fp.onnx.InferenceSession, made: onnx.ModelProto, feed: dict[str, np.ndarray]
) -> None:
    for got, want in zip(session.run(None, feed), ReferenceEvaluator(made).run(None, feed), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_convolutions_before_a_selection_of_boxes_are_planned(caplog):
    made = detector()
    session = fp.onnx.InferenceSession(made, **OPTIONS)
    with caplog.at_level(logging.WARNING, logger="fmtprop"):
        for columns, seed in ((8, 0), (12, 1), (8, 2)):
            assert_as_the_reference(session, made, {"x": image(columns, seed)})
    assert [len(case[0]) for case in session.plans] == [4, 4]
    assert sum(step.node.op == "convolution" for step in next(iter(session.plans.values())).plan.steps) == 3
    assert session.reason is not None and "NonMaxSuppression" in session.reason
    (record,) = caplog.records
    assert "the last 4 of 11 nodes run one by one" in record.getMessage()


def test_one_output_of_either_part_and_bound_ones():
    made = detector()
    session, feed = fp.onnx.InferenceSession(made, **OPTIONS), {"x": image(8)}
    everything = session.run(None, feed)
    np.testing.assert_array_equal(session.run(["size"], feed)[0], everything[3])
    binding, boxes = session.io_binding(), np.empty_like(everything[0])
    binding.bind_cpu_input("x", feed["x"])
    binding.bind_output("boxes", boxes)
    session.run_with_iobinding(binding)
    np.testing.assert_array_equal(boxes, everything[0])
    np.testing.assert_array_equal(binding.copy_outputs_to_cpu()[1], everything[1])
    boxes[:] = 0  # no other result lies there
    np.testing.assert_array_equal(session.run(None, feed)[0], everything[0])


def test_fixed_sizes_and_a_shared_plan_in_which_weights_are_dropped():
    made = detector()
    made.graph.input[0].type.tensor_type.shape.dim[3].dim_value = 8
    session = fp.onnx.InferenceSession(made, **OPTIONS)
    assert len(session.plans) == 1  # planned when it is made
    assert_as_the_reference(session, made, {"x": image(8)})


def test_a_branch_on_a_computed_number_runs_behind_the_plan_and_reads_its_values():
    made = parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 18]>
        g (float[2, 4] x) => (float[2, 3] y, float[2, 3] products)
        <float[4, 3] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}, float zero = {0}, float[1] ten = {10}> {
            products = MatMul(x, w)
            total = ReduceSum<keepdims = 0>(products)
            is_positive = Greater(total, zero)
            y = If(is_positive) <
                then_branch = then () => (float[2, 3] a) { a = Mul(products, ten) },
                else_branch = else () => (float[2, 3] b) { b = Sub(products, ten) n = NonZero(b) }
            >
        }""")
    session = fp.onnx.InferenceSession(made, **OPTIONS)
    for sign in (1, -1, 1):
        assert_as_the_reference(session, made, {"x": sign * np.ones((2, 4), np.float32)})
    assert len(session.plans) == 1


def test_nothing_is_planned_before_the_first_product():
    made = parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 18]>
        g (float[4] x) => (int64[1, k] y) { a = Relu(x) y = NonZero(a) }""")
    session = fp.onnx.InferenceSession(made, **OPTIONS)
    assert_as_the_reference(session, made, {"x": np.float32([1, -2, 3, 0])})
    assert session.plans == {}
    assert session.reason is not None and "NonZero" in session.reason


def test_inputs_that_the_last_nodes_refuse_are_one_error_and_no_reason_to_run_others_so():
    made = parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 18]>
        g (float[n, 2] x, float[m] v) => (float[k] y) <float[2, 2] w = {1, 0, 0, 1}, int64[1] flat = {-1}> {
            a = MatMul(x, w) b = Reshape(a, flat) c = NonZero(b) d = Reshape(c, flat) e = Cast<to = 1>(d) y = Add(e, v)
        }""")
    session = fp.onnx.InferenceSession(made, **OPTIONS)
    with pytest.raises(InputError, match="cannot run on"):
        session.run(None, {"x": np.ones((2, 2), np.float32), "v": np.ones(3, np.float32)})
    (got,) = session.run(None, {"x": np.ones((2, 2), np.float32), "v": np.ones(4, np.float32)})
    assert got.tolist() == [1, 2, 3, 4]


def test_compile_refuses_such_a_model_with_the_reason(tmp_path):
    onnx.save(detector(), tmp_path / "detector.onnx")
    with pytest.raises(ImportModelError, match="NonMaxSuppression"):
        fp.compile(tmp_path / "detector.onnx", shapes={"x": (1, 3, 8, 8)})


def test_a_loop_of_a_computed_length_is_left_with_nothing_of_its_rounds_in_the_plan():
    made = parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 18]>
        g (float[2, 2] x) => (float[2, 2] y, float[2, 2] products)
        <float[2, 2] w = {1, 2, 3, 4}, bool going = {1}> {
            products = MatMul(x, w)
            total = ReduceSum<keepdims = 0>(x)
            rounds = Cast<to = 7>(total)
            y = Loop(rounds, going, products) <
                body = body (int64 i, bool before, float[2, 2] last) => (bool after, float[2, 2] next) {
                    after = Identity(before) next = Add(last, products)
                }
            >
        }""")
    session = fp.onnx.InferenceSession(made, **OPTIONS)
    for number in (1, 2):
        assert_as_the_reference(session, made, {"x": number * np.ones((2, 2), np.float32)})
    (net,) = session.plans.values()
    assert not any(step.node.op == "binary" for step in net.plan.steps)


def test_an_absent_optional_is_an_output_beside_those_of_the_last_nodes():
    made = parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 18]>
        g (float[2, 2] x) => (int64[2, k] y) <float[2, 2] w = {1, 2, 3, 4}> {
            products = MatMul(x, w)
            y = NonZero(products)
        }""")
    tensor = helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, [2])
    made.graph.node.insert(0, helper.make_node("Optional", [], ["absent"], type=tensor))
    made.graph.output.append(helper.make_value_info("absent", helper.make_optional_type_proto(tensor)))
    session = fp.onnx.InferenceSession(made, **OPTIONS)
    places, absent = session.run(None, {"x": np.float32([[1, 0], [0, 0]])})
    assert (places.tolist(), absent, len(session.plans)) == ([[0, 0], [0, 1]], None, 1)


def test_a_contradiction_among_the_first_nodes_is_told():
    made = parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 18]>
        g (float[2, 2] x) => (int64[2, k] y, int32[2, 2] z) <float[2, 2] w = {1, 2, 3, 4}> {
            z = MatMul(x, w)
            y = NonZero(z)
        }""")
    with pytest.raises(ImportModelError):
        fp.onnx.InferenceSession(made, **OPTIONS)


def test_a_node_that_leaves_out_an_operand_reads_no_result_that_another_leaves_out(caplog):
    made = parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 18]>
        g (float[4] v, float[2, 2] x) => (float[k] few, float[2, 2] y) <float[2, 2] w = {1, 2, 3, 4}, float one = {1}> {
            few = Unique(v)
            products = MatMul(x, w)
            y = Clip(products, , one)
        }""")
    made.graph.node[0].output.extend(["", "", "counts"])
    session = fp.onnx.InferenceSession(made, **OPTIONS)
    feed = {"v": np.float32([2, 1, 2, 1]), "x": np.float32([[1, 0], [0, 1]])}
    few, y = session.run(None, feed)  # ONNX's reference takes the results without names for the operand
    assert (few.tolist(), y.tolist()) == ([1, 2], [[1, 1], [1, 1]])
    assert "the last 1 of 3 nodes" in caplog.text
