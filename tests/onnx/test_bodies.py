"""Loops with as many rounds as values say: each round is a plan, and gives what it gives node by node."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper, parser

import fmtprop as fp
from fmtprop.onnx import bodies

OPTIONS = {"policy": "propagate", "confirm": False}

#: rounds are the sum of the input `t`; `w` is handed on by each round, as exporters of other frameworks do, and `u` is
#: made outside of the loop; `m` has as many rows as the caller gives
TEXT = """
    <ir_version: 8, opset_import: ["" : 18]>
    g (float[1,4] x, int64[k] t, float[r,4] m) => (float[1,4] y, float[4,4] last, float[n,1,4] rows)
    <bool going = {1}> {
        rounds = ReduceSum<keepdims = 0>(t)
        u = Relu(m)
        y, last, rows = Loop(rounds, going, x, w) <
            body = body (int64 i, bool before, float[1,4] h, float[4,4] v) =>
                (bool after, float[1,4] next, float[4,4] same, float[1,4] row) <float[1,4] b = {1, 2, 3, 4}> {
                after = Identity(before)
                product = MatMul(h, v)
                sum = Add(product, b)
                mean = ReduceMean<keepdims = 1>(u)
                shifted = Add(sum, mean)
                next = Tanh(shifted)
                same = Identity(v)
                row = Identity(next)
            }
        >
    }"""
WEIGHTS = np.float32(np.random.default_rng(0).standard_normal((4, 4)) * 0.4)


def model(*, replaceable: bool = False) -> onnx.ModelProto:
    made = parser.parse_model(TEXT)
    made.graph.initializer.append(numpy_helper.from_array(WEIGHTS, "w"))
    if replaceable:
        made.graph.input.append(helper.make_tensor_value_info("w", onnx.TensorProto.FLOAT, [4, 4]))
    return made


def expected(feed: dict[str, np.ndarray]) -> list[np.ndarray]:
    h, w, rows = feed["x"], feed.get("w", WEIGHTS), []
    for _ in range(int(feed["t"].sum())):
        h = np.tanh(h @ w + np.float32([1, 2, 3, 4]) + np.maximum(feed["m"], 0).mean())
        rows.append(h)
    return [h, w, np.stack(rows)]


def feeds(rounds: int, rows: int, seed: int = 0, **more: np.ndarray) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    numbers = {"x": draw.standard_normal((1, 4)), "m": draw.standard_normal((rows, 4))}
    return {"t": np.int64([1, rounds - 1]), **{name: np.float32(value) for name, value in numbers.items()}, **more}


def checked(session: fp.onnx.InferenceSession, feed: dict[str, np.ndarray]) -> None:
    for got, want in zip(session.run(None, feed), expected(feed), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
        got[...] = 9  # its memory is the caller's


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Return the plans of bodies that are made; they are made after three rounds."""
    found: list[object] = []
    plain = bodies.Bodies._made
    monkeypatch.setattr(bodies, "_ROUNDS", 3)
    monkeypatch.setattr(bodies.Bodies, "_made", lambda *given: found.append(plan := plain(*given)) or plan)
    return found


def test_a_body_is_planned_once_for_its_shapes(made):
    session = fp.onnx.InferenceSession(model(), **OPTIONS)
    for seed, (rounds, rows) in enumerate(((2, 3), (20, 3), (7, 3), (20, 5), (9, 3))):
        checked(session, feeds(rounds, rows, seed))
    assert [len(plan.fixed) for plan in made] == [1, 1], "for three rows and for five; the weights are constants"
    assert "Loop" in session.reason


def test_weights_that_a_run_replaces_are_no_constants(made):
    session = fp.onnx.InferenceSession(model(replaceable=True), **OPTIONS)
    checked(session, feeds(9, 3))
    for seed in (1, 2):
        other = np.float32(np.random.default_rng(seed).standard_normal((4, 4)) * 0.4)
        checked(session, feeds(9, 3, seed, w=other))
    checked(session, feeds(9, 3))
    assert made


def test_what_no_plan_can_hold_runs_node_by_node_in_each_round(made):
    text = TEXT.replace("row = Identity(next)", "places = NonZero(next) row = Cast<to = 1>(places)").replace(
        "float[1,4] row)", "float[2,f] row)"
    )
    source = parser.parse_model(text)
    source.graph.initializer.append(numpy_helper.from_array(WEIGHTS, "w"))
    session = fp.onnx.InferenceSession(source, **OPTIONS)
    for seed in (0, 1):
        feed = feeds(12, 3, seed)
        y, _, rows = session.run(None, feed)
        np.testing.assert_allclose(y, expected(feed)[0], rtol=1e-4, atol=1e-5)
        assert rows.shape == (12, 2, 4)
    (plan,) = made
    assert plan is not None and plan.split is not None


def test_a_body_of_nothing_to_plan_is_tried_once(made):
    text = """
        <ir_version: 8, opset_import: ["" : 18]>
        g (float[3] x, int64[k] t) => (float[3] y) <bool going = {1}> {
            rounds = ReduceSum<keepdims = 0>(t)
            y = Loop(rounds, going, x) <
                body = body (int64 i, bool before, float[3] h) => (bool after, float[3] next) {
                    after = Identity(before)
                    u, places, back, counts = Unique(h)
                    next = Gather(u, back)
                }
            >
        }"""
    session = fp.onnx.InferenceSession(parser.parse_model(text), **OPTIONS)
    (y,) = session.run(None, {"x": np.float32([3, 1, 3]), "t": np.int64([9])})
    assert y.tolist() == [3, 1, 3] and made == [None]


def test_equal_bits_are_asked_for(made):
    session = fp.onnx.InferenceSession(model(), deterministic=True)
    checked(session, feeds(9, 3))
    assert not made
