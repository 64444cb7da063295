"""Weights that are read from a large file one by one: the same tensors as protobuf's, and the same checks."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

from fmtprop.errors import ImportModelError
from fmtprop.onnx.model.reading import read_model
from fmtprop.onnx.model.wire import varint_of

RNG = np.random.default_rng(0)
WEIGHTS = {
    "w": RNG.standard_normal((700, 800)).astype(np.float32),
    "small": np.float32([1, 2]),
    "halves": RNG.standard_normal((300, 300)).astype(np.float16),
    "integers": RNG.integers(-9, 9, 20_000),
    "empty": np.zeros((0, 3), np.float32),
}


@pytest.fixture
def model() -> onnx.ModelProto:
    text = '<ir_version: 10, opset_import: ["" : 21]> g (float[2, 700] x) => (float[2, 800] y) { y = MatMul(x, w) }'
    made = onnx.parser.parse_model(text)
    made.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in WEIGHTS.items())
    nibbles = bytes(range(256)) * 300
    packed = TensorProto(name="nibbles", dims=[76_800, 2], data_type=TensorProto.INT4, raw_data=nibbles)
    made.graph.initializer.append(packed)
    return made


def test_tensors_are_those_of_the_bytes(tmp_path, model):
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    found, expected = read_model(path), read_model(model.SerializeToString())
    assert list(found.weights) == list(expected.weights) == [*WEIGHTS, "nibbles"]
    assert found.model == expected.model
    for name, value in expected.weights.items():
        np.testing.assert_array_equal(np.asarray(found.weights[name]), np.asarray(value))


def test_messages_that_protobuf_merges_are_merged(tmp_path, model):
    second = onnx.ModelProto()
    second.graph.initializer.append(numpy_helper.from_array(np.ones((200, 200), np.float32), "more"))
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString() + second.SerializeToString())
    assert list(read_model(path).weights) == [*WEIGHTS, "nibbles", "more"]


def _dims(model):
    model.graph.initializer[0].dims[0] = 1 << 40


def _twice(model):
    model.graph.initializer[0].float_data.append(1.0)


def _elsewhere(model):
    model.graph.initializer[0].data_location = TensorProto.EXTERNAL
    model.graph.initializer[0].external_data.add(key="location", value="data")


def _texts(model):
    model.graph.initializer[0].data_type = TensorProto.STRING


@pytest.mark.parametrize(
    "change, message",
    [
        (_dims, r"initialiser w declares \[1099511627776, 800\], \d+ bytes, but has 2240000"),
        (_twice, "initialiser w has its numbers twice"),
        (_elsewhere, "initialiser w has its numbers twice"),
        (_texts, "initialiser w holds strings"),
    ],
)
def test_declarations_are_compared_with_the_file(tmp_path, model, change, message):
    change(model)
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ImportModelError, match=message):
        read_model(path)


@pytest.mark.parametrize("part", [0.9, 0.999])
def test_a_file_that_was_cut_off(tmp_path, model, part):
    data = model.SerializeToString()
    path = tmp_path / "model.onnx"
    path.write_bytes(data[: int(len(data) * part)])
    with pytest.raises(ImportModelError, match="protobuf cannot read it"):
        read_model(path)


def test_of_raw_data_twice_the_last_counts_as_for_protobuf(tmp_path, model):
    first = model.graph.initializer[0].SerializeToString()
    last = TensorProto(raw_data=np.ones((700, 800), np.float32).tobytes()).SerializeToString()
    del model.graph.initializer[0]
    tensor = first + last
    graph = b"\x2a" + varint_of(len(tensor)) + tensor
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString() + b"\x3a" + varint_of(len(graph)) + graph)
    np.testing.assert_array_equal(read_model(path).weights["w"], np.ones((700, 800), np.float32))
