"""Recurrent networks whose sequences have lengths of their own: each gives what it gives alone."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import fmtprop as fp

OPTIONS = {"policy": "propagate", "confirm": False}
HIDDEN, WIDTH, STEPS = 5, 4, 6
GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}


def numbers(seed: int, *dims: int) -> np.ndarray:
    return np.float32(np.random.default_rng(seed).standard_normal(dims) * 0.4)


def network(kind: str, direction: str, *, has_lengths: bool, layout: int = 0, states: bool = True) -> onnx.ModelProto:
    """Return a network that takes x, lengths and the first states."""
    ways = 2 if direction == "bidirectional" else 1
    rows = GATES[kind] * HIDDEN
    weights = {"W": numbers(1, ways, rows, WIDTH), "R": numbers(2, ways, rows, HIDDEN), "B": numbers(3, ways, 2 * rows)}
    first, outputs = (["h", "c"], ["y", "yh", "yc"]) if kind == "LSTM" else (["h"], ["y", "yh"])
    attributes = {"linear_before_reset": 1} if kind == "GRU" else {}
    lengths = ["n"] if has_lengths else []
    operands = [*weights, *(lengths or [""]), *(first if states else ())]
    node = helper.make_node(
        kind, ["x", *operands], outputs, hidden_size=HIDDEN, direction=direction, layout=layout, **attributes
    )
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [None] * 3) for name in ("x", *first[: 9 * states])
    ]
    inputs += [helper.make_tensor_value_info(name, TensorProto.INT32, [None]) for name in lengths]
    results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
    held = [numpy_helper.from_array(value, name) for name, value in weights.items()]
    graph = helper.make_graph([node], "g", inputs, results, held)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("kind", list(GATES))
def test_each_sequence_ends_at_its_length(kind, direction):
    ways = 2 if direction == "bidirectional" else 1
    lengths = np.int32([STEPS, 1, 3, 0])
    feed = {"x": numbers(4, STEPS, 4, WIDTH), "h": numbers(5, ways, 4, HIDDEN)}
    feed["x"][np.arange(STEPS)[:, None] >= lengths] = np.nan  # nobody reads what is behind a sequence
    feed |= {"c": numbers(6, ways, 4, HIDDEN)} if kind == "LSTM" else {}
    session = fp.onnx.InferenceSession(network(kind, direction, has_lengths=True), **OPTIONS)
    y, *last = session.run(None, {**feed, "n": lengths})
    assert session.reason is None and session.plans
    alone = fp.onnx.InferenceSession(network(kind, direction, has_lengths=False), **OPTIONS)
    for place, length in enumerate(lengths):
        one = {name: value[:, place : place + 1] for name, value in feed.items()}
        if length:
            wanted, *finals = alone.run(None, {**one, "x": one["x"][:length]})
        else:
            wanted, finals = (
                np.zeros((0, ways, 1, HIDDEN), np.float32),
                [one[name] for name in ("h", "c") if name in one],
            )
        np.testing.assert_allclose(y[:length, :, place : place + 1], wanted, rtol=1e-5, atol=1e-6)
        assert not y[length:, :, place].any()
        for got, want in zip(last, finals, strict=True):
            np.testing.assert_allclose(got[:, place : place + 1], want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", list(GATES))
def test_sequences_may_come_before_time(kind):
    both = [network(kind, "bidirectional", has_lengths=True, layout=layout, states=False) for layout in (0, 1)]
    x, n = numbers(4, STEPS, 3, WIDTH), np.int32([2, STEPS, 4])
    time_first = fp.onnx.InferenceSession(both[0], **OPTIONS).run(None, {"x": x, "n": n})
    batch_first = fp.onnx.InferenceSession(both[1], **OPTIONS).run(None, {"x": x.swapaxes(0, 1), "n": n})
    np.testing.assert_allclose(batch_first[0], time_first[0].transpose(2, 0, 1, 3), rtol=1e-5, atol=1e-6)
    for got, want in zip(batch_first[1:], time_first[1:], strict=True):
        np.testing.assert_allclose(got, want.swapaxes(0, 1), rtol=1e-5, atol=1e-6)


def test_a_long_sequence_is_one_step_of_a_plan():
    session = fp.onnx.InferenceSession(network("GRU", "forward", has_lengths=True, states=False), **OPTIONS)
    session.run(None, {"x": numbers(4, 50, 1, WIDTH), "n": np.int32([40])})
    (net,) = session.plans.values()
    assert len(net.plan.steps) < 20


def test_a_direction_that_the_weights_lack_is_named():
    made = network("GRU", "forward", has_lengths=False, states=False)
    (direction,) = (one for one in made.graph.node[0].attribute if one.name == "direction")
    direction.s = b"bidirectional"
    with pytest.raises(fp.FmtpropError, match="direction 'bidirectional'"):
        fp.onnx.InferenceSession(made, **OPTIONS).run(None, {"x": numbers(4, 2, 1, WIDTH)})
