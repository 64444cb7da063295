"""Models that ONNX Runtime's quantiser made of small networks, and its quantised operators: equal to ONNX Runtime."""

from __future__ import annotations

import io
import itertools
import logging
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper
from torch import nn

import fmtprop as fp
from fmtprop.jit import unavailable

pytestmark = pytest.mark.peers

#: whether ONNX Runtime adds products of two full bytes exactly: without VNNI they saturate, those of 7 bits do not
IS_EXACT = "vnni" in Path("/proc/cpuinfo").read_text()

RNG = np.random.default_rng(0)
OPTIONS = {"policy": "propagate", "confirm": False}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.head = nn.Linear(32, 10)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.embedding(ids)))


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, stride=2, groups=4), nn.Hardswish(), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(32, 10), nn.Softmax(-1),
    )  # fmt: skip


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 8, bidirectional=True)

    def forward(self, x: torch.Tensor) -> Any:
        y, (h, c) = self.lstm(x)
        return y, h, c


NETWORKS = {
    "convolutional": (convolutional, lambda: torch.randn(2, 3, 16, 16)),
    "dense": (lambda: nn.Sequential(nn.Linear(20, 64), nn.GELU(), nn.Linear(64, 5)), lambda: torch.randn(4, 20)),
    "attention": (Attention, lambda: torch.randint(0, 50, (2, 7))),
}
#: one sequence: of several, ONNX Runtime's threads round their own rows by scales of their own
DYNAMIC = NETWORKS | {"recurrent": (Recurrent, lambda: torch.randn(5, 1, 6))}
STATIC = [
    (form, activations, weights, channels)
    for form, activations, weights, channels in itertools.product(
        ("QDQ", "QOperator"), ("QUInt8", "QInt8", "QUInt16"), ("QInt8", "QInt4"), (False, True)
    )
    if form == "QDQ" or (activations, weights) in (("QUInt8", "QInt8"), ("QInt8", "QInt8"))
    if weights == "QInt8" or activations == "QUInt8"
]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: Any) -> dict[str, tuple[Path, torch.Tensor]]:
    pytest.importorskip("onnxruntime")
    folder, found = tmp_path_factory.mktemp("floats"), {}
    for name, (make, example) in DYNAMIC.items():
        torch.manual_seed(0)
        model, x, buffer = make().eval(), example(), io.BytesIO()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(model, (x,), buffer, dynamo=False, opset_version=17)
        (folder / f"{name}.onnx").write_bytes(buffer.getvalue())
        found[name] = folder / f"{name}.onnx", x
    return found


def check(model: Any, feed: dict[str, Any], units: int = 0) -> None:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    # its optimiser rounds elsewhere
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    source = str(model) if isinstance(model, Path) else model.SerializeToString()
    want = onnxruntime.InferenceSession(source, options).run(None, feed)
    for got, expected in zip(fp.onnx.InferenceSession(model, **OPTIONS).run(None, feed), want, strict=True):
        assert got.dtype == expected.dtype
        error = np.abs(got.astype(np.float64) - expected.astype(np.float64)).max()
        assert error <= (max(1e-4 * np.abs(expected).max(), 2**-16) if got.dtype == np.float32 else units)


def feed_of(path: Path, x: torch.Tensor) -> dict[str, Any]:
    return {onnx.load(path).graph.input[0].name: x.numpy()}


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("weights", ["QInt8", "QUInt8"])
@pytest.mark.parametrize("name", DYNAMIC)
def test_dynamic(exported: Any, tmp_path: Path, name: str, weights: str, channels: bool) -> None:
    from onnxruntime import quantization

    path, x = exported[name]
    logging.disable(logging.WARNING)
    kind = getattr(quantization.QuantType, weights)
    few = name == "recurrent" or not IS_EXACT
    quantization.quantize_dynamic(path, tmp_path / "q.onnx", weight_type=kind, per_channel=channels, reduce_range=few)
    logging.disable(logging.NOTSET)
    check(tmp_path / "q.onnx", feed_of(path, x))


@pytest.mark.parametrize("form, activations, weights, channels", STATIC)
@pytest.mark.parametrize("name", NETWORKS)
def test_static(
    exported: Any, tmp_path: Path, name: str, form: str, activations: str, weights: str, channels: bool
) -> None:
    from onnxruntime import quantization

    path, x = exported[name]
    feed = feed_of(path, x)

    class Data(quantization.CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.left = iter([feed] * 2)

        def get_next(self) -> Any:
            return next(self.left, None)

    logging.disable(logging.WARNING)
    quantization.quantize_static(
        path, tmp_path / "q.onnx", Data(), per_channel=channels,
        quant_format=getattr(quantization.QuantFormat, form),
        activation_type=getattr(quantization.QuantType, activations),
        weight_type=getattr(quantization.QuantType, weights), reduce_range=not IS_EXACT,
    )  # fmt: skip
    logging.disable(logging.NOTSET)
    check(tmp_path / "q.onnx", feed)


# ---------------------------------------------------------------- operators


def integers(dtype: Any, *dims: int) -> Any:
    limits = np.iinfo(dtype)
    return RNG.integers(limits.min, limits.max + 1, dims).astype(dtype)


def linear(dtype: Any, scale: float, *dims: int) -> list[Any]:
    """Integers with their scale and zero point."""
    zero = 120 if dtype == np.uint8 else -7
    return [integers(dtype, *dims), np.float32(scale), dtype(zero)]


def end(dtype: Any, scale: float) -> list[Any]:
    return linear(dtype, scale)[1:]


OPERATORS = {
    "QLinearAdd": lambda d: ([*linear(d, 0.1, 2, 3, 5), *linear(d, 0.03, 3, 1), *end(d, 0.2)], {}),
    "QLinearMul": lambda d: ([*linear(d, 0.1, 2, 3, 5), *linear(d, 0.03, 3, 1), *end(d, 0.2)], {}),
    "QLinearSigmoid": lambda d: ([*linear(d, 0.05, 2, 3, 5), *end(d, 1 / 256)], {}),
    "QLinearLeakyRelu": lambda d: ([*linear(d, 0.1, 2, 3, 5), *end(d, 0.1)], {"alpha": 0.3}),
    "QLinearSoftmax": lambda d: ([*linear(d, 0.05, 2, 3, 5), *end(d, 1 / 256)], {"axis": 1, "opset": 13}),
    "QLinearConcat": lambda d: ([*end(d, 0.1), *linear(d, 0.1, 2, 3), *linear(d, 0.03, 2, 5)], {"axis": 1}),
    "QLinearAveragePool": lambda d: (
        [*linear(d, 0.1, 1, 3, 7, 6), *end(d, 0.07)],
        {"kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 0, 1, 1]},
    ),
    "QLinearConv": lambda d: (
        [*linear(d, 0.1, 1, 7, 6, 3), integers(np.int8, 4, 3, 3, 3), np.float32(0.02), np.int8(0), *end(d, 4.7)],
        {"pads": [1, 1, 1, 1], "channels_last": 1},
    ),
    "QLinearGlobalAveragePool": lambda d: ([*linear(d, 0.1, 2, 3, 5, 4), *end(d, 0.02)], {}),
    "QGemm": lambda d: (
        [*linear(d, 0.1, 3, 6), *linear(d, 0.03, 4, 6), integers(np.int16, 4).astype(np.int32), *end(d, 0.9)],
        {"transB": 1, "alpha": 1.0},
    ),
    "QGemm_float": lambda d: ([*linear(d, 0.1, 3, 6), *linear(d, 0.03, 6, 4)], {"alpha": 0.5}),
    "MatMulIntegerToFloat": lambda d: (
        [integers(d, 2, 3, 6), integers(d, 6, 4), np.float32(0.1), np.float32(0.2), d(9), d(3)], {},
    ),
    "DynamicQuantizeMatMul": lambda d: (
        [RNG.standard_normal((3, 6)).astype(np.float32), integers(d, 6, 4), np.float32(0.1), d(3)], {},
    ),
}  # fmt: skip


def number(array: Any) -> int:
    return int(helper.np_dtype_to_tensor_dtype(array.dtype))


@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
@pytest.mark.parametrize("name", OPERATORS)
def test_operator(name: str, dtype: Any) -> None:
    pytest.importorskip("onnxruntime")
    operands, attributes = OPERATORS[name](dtype)
    if name == "QLinearConv" and not IS_EXACT:
        operands[3] = operands[3] // 2
    given = {f"x{index}": np.asarray(value) for index, value in enumerate(operands)}
    varying = {key: value for key, value in given.items() if value.ndim and not (name == "QLinearConv" and key == "x3")}
    floats = name in ("QGemm_float", "MatMulIntegerToFloat", "DynamicQuantizeMatMul")
    element = onnx.TensorProto.FLOAT if floats else helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    rank = next(iter(varying.values())).ndim
    node = helper.make_node(name.partition("_")[0], list(given), ["y"], domain="com.microsoft", **attributes)
    graph = helper.make_graph(
        [node],
        name,
        [
            helper.make_tensor_value_info(k, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape)
            for k, v in varying.items()
        ],
        [helper.make_tensor_value_info("y", element, [None] * rank)],
        initializer=[onnx.numpy_helper.from_array(v, k) for k, v in given.items() if k not in varying],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    # ONNX Runtime rounds floats in an order of its own, which decides where a result lies half between two integers
    units = int(name in ("QLinearAveragePool", "QLinearGlobalAveragePool", "QLinearMul"))
    check(helper.make_model(graph, ir_version=8, opset_imports=opsets), varying, units)


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
def test_an_lstm_of_bytes_is_as_in_onnxruntime(direction: str) -> None:
    ort = pytest.importorskip("onnxruntime")
    times, batch, size, hidden, count = 6, 3, 20, 32, 1 + (direction == "bidirectional")
    # two products of a byte do not saturate in ONNX Runtime
    constants = {"w": RNG.integers(-60, 61, (count, size, 4 * hidden)).astype(np.int8)}
    constants["r"] = RNG.integers(-60, 61, (count, hidden, 4 * hidden)).astype(np.int8)
    constants["b"] = RNG.standard_normal((count, 8 * hidden)).astype(np.float32) * 0.3
    constants |= {f"{name}s": RNG.uniform(2e-3, 4e-3, count).astype(np.float32) for name in "wr"}
    constants |= {f"{name}z": np.zeros(count, np.int8) for name in "wr"}
    given = {"x": (times, batch, size), "h": (count, batch, hidden), "c": (count, batch, hidden)}
    inputs = {name: RNG.uniform(-0.9, 0.9, dims).astype(np.float32) for name, dims in given.items()}
    names = ["x", "w", "r", "b", "", "h", "c", "", "ws", "wz", "rs", "rz"]
    node = helper.make_node(
        "DynamicQuantizeLSTM", names, ["y", "yh", "yc"], domain="com.microsoft", direction=direction, hidden_size=hidden
    )
    graph = helper.make_graph(
        [node],
        "lstm",
        [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, dims) for name, dims in given.items()],
        [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in node.output],
        initializer=[onnx.numpy_helper.from_array(v, k) for k, v in constants.items()],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    made = helper.make_model(graph, ir_version=8, opset_imports=opsets).SerializeToString()
    session = fp.onnx.InferenceSession(made, confirm=False)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1  # several of its threads share the sequences, each with a scale of its own
    wanted = ort.InferenceSession(made, options, providers=["CPUExecutionProvider"]).run(None, inputs)
    for got, want in zip(session.run(None, inputs), wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
    (net,) = session.plans.values()
    layers = [node for node in net.compilation.formatted.nodes() if node.op == "lstm_bytes"]
    assert len(layers) == count
    assert unavailable() or all(layer.choice.impl.startswith("lstm_bytes") for layer in layers)
