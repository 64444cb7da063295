"""Models of one operator of ``com.microsoft``, and their results here and in ONNX Runtime."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper

import fmtprop as fp

RNG = np.random.default_rng(0)


@dataclass
class Case:
    """One node: its inputs by name (None: left out), the number of outputs and its attributes."""

    op: str
    inputs: dict[str, Any]
    attributes: dict[str, Any] = field(default_factory=dict)
    outputs: int = 1
    #: indices of the outputs that are compared, all by default: ONNX Runtime leaves some unwritten
    compared: tuple[int, ...] | None = None
    weights: frozenset[str] = frozenset()
    #: element types of outputs that are not float32
    types: dict[int, int] = field(default_factory=dict)


def f32(*dims: int, scale: float = 1.0) -> Any:
    return (RNG.standard_normal(dims) * scale).astype(np.float32)


def i32(*numbers: Any) -> Any:
    return np.array(numbers, np.int32)


def i64(*numbers: Any) -> Any:
    return np.array(numbers, np.int64)


def u8(*dims: int) -> Any:
    return RNG.integers(0, 256, dims).astype(np.uint8)


def i8(*dims: int) -> Any:
    return RNG.integers(-128, 128, dims).astype(np.int8)


def angles(places: int, pairs: int) -> tuple[Any, Any]:
    turns = RNG.uniform(0, 6, (places, pairs)).astype(np.float32)
    return np.cos(turns), np.sin(turns)


def model_of(case: Case) -> ModelProto:
    given = {name: value for name, value in case.inputs.items() if value is not None}
    names = [name if value is not None else "" for name, value in case.inputs.items()]
    while not names[-1]:
        names.pop()
    results = [f"y{index}" for index in range(case.outputs)]
    compared = case.compared or tuple(range(case.outputs))
    node = helper.make_node(
        case.op, names, [name if index in compared else "" for index, name in enumerate(results)],
        domain="com.microsoft", **case.attributes,
    )  # fmt: skip
    if case.op == "SimplifiedLayerNormalization":  # it is ONNX Runtime's, but in ONNX's domain
        node.domain = ""
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
        for name, value in given.items() if name not in case.weights
    ]  # fmt: skip
    # writers of models leave out the shapes of outputs; ONNX's checker refuses that, ONNX Runtime does not
    outputs = [helper.make_tensor_value_info(results[i], case.types.get(i, TensorProto.FLOAT), None) for i in compared]
    weights = [
        helper.make_tensor(n, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape, v.tobytes(), raw=True)
        for n, v in given.items() if n in case.weights
    ]  # fmt: skip
    graph = helper.make_graph([node], case.op, inputs, outputs, initializer=weights)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, ir_version=8, opset_imports=opsets)


def feed_of(case: Case) -> dict[str, Any]:
    return {name: v for name, v in case.inputs.items() if v is not None and name not in case.weights}


def theirs(model: ModelProto, feed: dict[str, Any]) -> list[Any]:
    runtime = pytest.importorskip("onnxruntime")
    options = runtime.SessionOptions()
    options.log_severity_level = 4
    return list(runtime.InferenceSession(model.SerializeToString(), options).run(None, feed))


def ours(case: Case) -> list[Any]:
    session = fp.onnx.InferenceSession(model_of(case), policy="propagate", confirm=False)
    return session.run(None, feed_of(case))


def compare(case: Case) -> None:
    for got, want in zip(ours(case), theirs(model_of(case), feed_of(case)), strict=True):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        assert np.abs(got - want).max() <= 2e-5 * max(1.0, np.abs(want).max())
