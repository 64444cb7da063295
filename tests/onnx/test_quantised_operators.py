"""Operators on integers, against ONNX's reference: full range, zero points that are not zero, odd channels."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx.parser
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import fmtprop as fp
from fmtprop.jit.kernel import takes
from fmtprop.layout import DataType
from fmtprop.ops import quantization
from fmtprop.runtime.plan import Home

RNG = np.random.default_rng(0)


def integers(dtype: Any, *dims: int) -> Any:
    limits = np.iinfo(dtype)
    return RNG.integers(limits.min, limits.max + 1, dims).astype(dtype)


def model(nodes: list[Any], inputs: dict[str, Any], constants: dict[str, Any], **outputs: Any) -> Any:
    """Return a model; an output is given by its type."""
    types = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
        for name, value in inputs.items()
    ]
    graph = helper.make_graph(
        nodes,
        "quantised",
        types,
        [helper.make_tensor_value_info(name, kind, None) for name, kind in outputs.items()],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    return helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])


def compared(made: Any, inputs: dict[str, Any]) -> tuple[Any, Any]:
    """Return the plan's result and the reference's, which convolves in f64 so that its sums are exact."""
    (want,) = ReferenceEvaluator(made).run(None, inputs)
    (got,) = fp.onnx.InferenceSession(made, confirm=False).run(None, inputs)
    assert got.dtype == want.dtype and got.shape == want.shape
    return got.astype(np.float64), want.astype(np.float64)


def check_steps(got: Any, want: Any) -> None:
    """Check the rule of docs/numerics.md for one operator."""
    steps = np.abs(got - want)
    assert steps.max() <= 1 and (steps > 0).mean() <= 1e-3


@pytest.mark.parametrize("x_type", [np.uint8, np.int8])
@pytest.mark.parametrize("channels, groups, kernel", [(17, 1, 3), (3, 1, 7), (24, 24, 3), (16, 4, 1)])
def test_qlinear_conv(x_type: Any, channels: int, groups: int, kernel: int) -> None:
    outputs = 24 if groups > 1 else 19
    inputs = {"x": integers(x_type, 1, channels, 13, 12)}
    zero = 120 if x_type is np.uint8 else -7
    step = 127 * 74 * (channels // groups * kernel**2) ** 0.5 * 0.02 * 0.01 / 40
    constants = {
        "xs": np.float32(0.02), "xz": x_type(zero), "w": integers(np.int8, outputs, channels // groups, kernel, kernel),
        "ws": (0.005 + 0.01 * RNG.random(outputs)).astype(np.float32), "wz": np.zeros(outputs, np.int8),
        "ys": np.float32(step), "yz": np.uint8(131), "b": RNG.integers(-30000, 30000, outputs).astype(np.int32),
    }  # fmt: skip
    names = ["x", "xs", "xz", "w", "ws", "wz", "ys", "yz", "b"]
    node = helper.make_node("QLinearConv", names, ["y"], pads=[kernel // 2] * 4, group=groups)
    got, want = compared(model([node], inputs, constants, y=TensorProto.UINT8), inputs)
    assert np.unique(want).size > 50
    check_steps(got, want)


@pytest.mark.parametrize("depth", [33, 300, 3000])
def test_matmul_integer_is_exact(depth: int) -> None:
    inputs = {"a": np.full((3, depth), 255, np.uint8)}
    inputs["a"][1] = integers(np.uint8, depth)
    constants = {"b": integers(np.int8, depth, 5), "az": np.uint8(3), "bz": np.int8(-2)}
    constants["b"][:, 0] = 127
    node = helper.make_node("MatMulInteger", ["a", "b", "az", "bz"], ["y"])
    got, want = compared(model([node], inputs, constants, y=TensorProto.INT32), inputs)
    assert np.array_equal(got, want)


def test_conv_integer_is_exact() -> None:
    inputs = {"x": integers(np.uint8, 2, 65, 9, 9)}
    constants = {"w": integers(np.uint8, 7, 65, 3, 3), "xz": np.uint8(200), "wz": np.uint8(128)}
    node = helper.make_node("ConvInteger", ["x", "w", "xz", "wz"], ["y"], pads=[1, 1, 1, 1], strides=[2, 2])
    got, _ = compared(model([node], inputs, constants, y=TensorProto.INT32), inputs)
    x, w = inputs["x"].astype(np.float64) - 200, constants["w"].astype(np.float64) - 128
    windows = np.lib.stride_tricks.sliding_window_view(np.pad(x, [(0, 0), (0, 0), (1, 1), (1, 1)]), (3, 3), (2, 3))
    assert np.array_equal(got, np.einsum("ncyxkl,ockl->noyx", windows[:, :, ::2, ::2], w))


def dynamic(kind: str) -> tuple[Any, dict[str, Any]]:
    """A product of numbers that are quantised in the run, as ONNX Runtime's quantiser writes it."""
    product = kind.partition("_")[0]
    dims, attributes = ((2, 17, 11, 9), {"pads": [1, 1, 1, 1]}) if product == "ConvInteger" else ((2, 3, 300), {})
    w = integers(np.uint8, 8, 17, 3, 3) if product == "ConvInteger" else integers(np.uint8, 300, 8)
    inputs = {"x": (RNG.standard_normal(dims) + (2 if "shifted" in kind else 0)).astype(np.float32)}
    biased = "biased" in kind
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"]),
        helper.make_node(product, ["q", "w", "z", "wz"], ["sums"], **attributes),
        helper.make_node("Mul", ["s", "ws"], ["scale"]),
    ]
    if biased:  # as whole numbers in units of the sums: so did older quantisers
        nodes += [
            helper.make_node("Div", ["b", "scale"], ["many"]),
            helper.make_node("Floor", ["many"], ["whole"]),
            helper.make_node("Cast", ["whole"], ["bias"], to=TensorProto.INT32),
            helper.make_node("Reshape", ["bias", "row"], ["channels"]),
            helper.make_node("Add", ["sums", "channels"], ["all"]),
        ]
    nodes += [
        helper.make_node("Cast", ["all" if biased else "sums"], ["real"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["real", "scale"], ["y"]),
    ]
    constants = {"w": w, "wz": np.uint8(128), "ws": np.float32(0.01)}
    if biased:
        row = np.array([1, 8, 1, 1] if product == "ConvInteger" else [8])
        constants |= {"b": RNG.standard_normal(8).astype(np.float32), "row": row}
    return model(nodes, inputs, constants, y=TensorProto.FLOAT), inputs


@pytest.mark.parametrize("kind", ["", "_shifted", "_biased", "_shifted_biased"])
@pytest.mark.parametrize("product", ["ConvInteger", "MatMulInteger"])
def test_dynamic_products_are_products_of_bytes(product: str, kind: str) -> None:
    made, inputs = dynamic(product + kind)
    got, want = compared(made, inputs)
    assert np.abs(got - want).max() <= 2e-6 * np.abs(want).max()
    graph = fp.compile(made, policy="propagate", confirm=False).compilation.normal
    (product,) = (node for node in graph.nodes() if node.op in ("convolution", "matmul", "inner_product"))
    assert {"src", "weights"} <= product.grids.keys()


def test_dynamic_quantization_is_one_node_for_all_its_readers() -> None:
    nodes = [helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"])]
    constants = [numpy_helper.from_array(np.array(0, np.int8), "zero")]
    for name in ("a", "b"):
        codes = RNG.integers(-127, 128, (32, 24)).astype(np.int8)
        constants += [numpy_helper.from_array(codes, f"{name}_codes")]
        nodes += [
            helper.make_node("MatMulInteger", ["q", f"{name}_codes", "z", "zero"], [f"{name}_sums"]),
            helper.make_node("Cast", [f"{name}_sums"], [f"{name}_reals"], to=TensorProto.FLOAT),
            helper.make_node("Mul", [f"{name}_reals", "s"], [name]),
        ]
    values = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [7, size]) for name, size in (("x", 32), ("a", 24))
    ]
    values += [helper.make_tensor_value_info("b", TensorProto.FLOAT, [7, 24])]
    graph = helper.make_graph(nodes, "two", values[:1], values[1:], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    net = fp.compile(model, deterministic=True)
    found = [node.op for node in net.compilation.normal.nodes() if node.op not in ("constant", "reshape")]
    assert found.count("dynamic_quantize") == 1 and "aten" not in found
    assert sum({"src", "weights"} <= node.grids.keys() for node in net.compilation.normal.nodes()) == 2
    for shift in (-3.0, 0.0, 3.0):
        x = (RNG.standard_normal((7, 32)) + shift).astype(np.float32)
        wanted = ReferenceEvaluator(model).run(None, {"x": x})
        for got, expected in zip(net(torch.from_numpy(x)), wanted, strict=True):
            assert np.abs(got.numpy() - expected).max() <= 1e-5 * np.abs(expected).max()


def test_numbers_that_do_not_vary_have_no_scale() -> None:
    made, inputs = dynamic("MatMulInteger")
    got, want = compared(made, {"x": np.zeros_like(inputs["x"])})
    assert not got.any() and not want.any()


def test_integers_between_two_layers_stay_bytes() -> None:
    scalars = {"s": np.float32(0.05), "z": np.uint8(128), "ws": np.float32(0.01), "wz": np.int8(0)}
    inputs = {"x": integers(np.uint8, 1, 16, 12, 12)}
    constants = {**scalars, "w": integers(np.int8, 16, 16, 3, 3)}
    names = ["s", "z", "w", "ws", "wz", "s", "z"]
    nodes = [
        helper.make_node("QLinearConv", ["x", *names], ["a"], pads=[1, 1, 1, 1]),
        helper.make_node("MaxPool", ["a"], ["b"], kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]),
        helper.make_node("Transpose", ["b"], ["c"], perm=[0, 1, 3, 2]),
        helper.make_node("QLinearConv", ["c", *names], ["y"], pads=[1, 1, 1, 1]),
    ]
    made = model(nodes, inputs, constants, y=TensorProto.UINT8)
    graph = fp.compile(made, policy="propagate", confirm=False).compilation.normal
    assert all("src" in node.grids for node in graph.nodes() if node.op in ("convolution", "pooling", "permute"))
    # a network: a rounding to the other side in the first layer may be many steps of the second
    steps = np.abs(np.subtract(*compared(made, inputs)))
    assert (steps > 1).mean() <= 0.02


def pair(scale: Any, zero: Any, axis: int = 1) -> Any:
    """A quantization and a dequantization of four channels."""
    names = ["s", "z"]
    nodes = [
        helper.make_node("QuantizeLinear", ["x", *names], ["q"], name="quant", axis=axis),
        helper.make_node("DequantizeLinear", ["q", *names], ["y"], name="dequant", axis=axis),
    ]
    inputs = {"x": np.ones((1, 4, 5, 5), np.float32)}
    return model(nodes, inputs, {"s": np.asarray(scale, np.float32), "z": np.asarray(zero)}, y=TensorProto.FLOAT)


def layer(**changed: Any) -> Any:
    """A QLinearConv of three channels."""
    constants = {
        "xs": np.float32(0.1), "xz": np.uint8(1), "w": np.ones((4, 3, 3, 3), np.int8), "ws": np.ones(4, np.float32),
        "wz": np.zeros(4, np.int8), "ys": np.float32(1), "yz": np.uint8(0), **changed,
    }  # fmt: skip
    node = helper.make_node("QLinearConv", ["x", *constants], ["y"], name="layer")
    return model([node], {"x": np.ones((1, 3, 8, 8), np.uint8)}, constants, y=TensorProto.UINT8)


ZEROS = np.zeros(4, np.uint8)
WRONG = {
    "zero": (pair(0.0, np.uint8(0)), "from quant: its scale is 0.0, but must be positive"),
    "negative": (pair(-1.0, np.uint8(0)), "from quant: its scale is -1.0, but must be positive"),
    "nan": (pair(np.nan, np.uint8(0)), "from quant: its scale is nan, but must be positive"),
    "infinite": (pair(np.inf, np.uint8(0)), "from quant: its scale is inf, but must be positive"),
    "axis": (pair([1.0] * 4, ZEROS, axis=7), "node quant .*axis 7 is not one of 4"),
    "length": (pair([1.0] * 3, ZEROS[:3]), r"node quant .*scale has dims \(3,\) but src axis 1 has size 4"),
    "zeros": (pair([1.0] * 4, ZEROS[:3]), r"node quant .*zero_point has dims \(3,\) but scale has dims \(4,\)"),
    "type": (pair(1.0, np.int16(0)), "quant.*y_zero_point.*unsupported type"),
    "none": (pair([], ZEROS[:0]), r"node quant .*scale has dims \(0,\)"),
    "weights": (layer(ws=np.array([1, 0, 1, 1], np.float32)), "from layer: its scale is 0.0"),
    "result": (layer(ys=np.float32(0)), "from layer: its scale is 0.0"),
    "outputs": (layer(ws=np.ones(3, np.float32), wz=np.zeros(3, np.int8)), r"layer.*w_scale has shape .* 4 outputs"),
    "source": (layer(xs=np.ones(3, np.float32), xz=ZEROS[:3]), r"layer.*x_scale has shape \(3,\), but must be one"),
    "results": (layer(ys=np.ones(4, np.float32), yz=ZEROS), r"layer.*y_scale has shape \(4,\), but must be one"),
    "reals": (layer(xz=np.float32(1)), r"layer.*x_zero_point is torch.float32, but must be of 8 bits"),
    "bias": (layer(b=np.zeros(3, np.int32)), r"layer.*B has shape \(3,\), but there are 4 outputs"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("door", [fp.compile, fp.onnx.InferenceSession])
def test_wrong_parameters_are_one_error_with_node_and_rule(door: Any, name: str) -> None:
    wrong, said = WRONG[name]
    with pytest.raises(fp.FmtpropError, match=f"(?s){said}"):
        door(wrong)


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
@pytest.mark.parametrize("sizes", [(6, 8), (9, 4), (5, 7)], ids=str)
def test_resized_bytes_between_two_layers_stay_bytes(dtype, sizes):
    rng, zero = np.random.default_rng(0), 3
    limits = np.iinfo(dtype)
    integers = rng.integers(limits.min, limits.max, (1, 4, 3, 4), endpoint=True)
    text = (
        f'<ir_version: 8, opset_import: ["" : 17]> g (float[1, 4, 3, 4] x) => (float[1, 4, {sizes[0]}, {sizes[1]}] y) '
        f"<float s = {{0.5}}, {dtype} z = {{{zero}}}, int64[4] n = {{1, 4, {sizes[0]}, {sizes[1]}}}> "
        "{ q = QuantizeLinear(x, s, z) "
        'r = Resize<mode = "nearest", coordinate_transformation_mode = "asymmetric", nearest_mode = "floor">(q, , , n) '
        "y = DequantizeLinear(r, s, z) }"
    )
    session = fp.onnx.InferenceSession(onnx.parser.parse_model(text), policy="propagate", confirm=False)
    real = (integers - zero).astype(np.float32) * np.float32(0.5)
    rows, columns = (np.arange(size) * given // size for size, given in zip(sizes, (3, 4), strict=True))
    assert np.array_equal(session.run(None, {"x": real})[0], real[:, :, rows][:, :, :, columns])
    (net,) = session.plans.values()
    ops = {node.op for node in net.compilation.normal.nodes()}
    # broken factors read other places than oneDNN's
    assert ops.isdisjoint({"aten", "quantize", "dequantize"}) == (sizes != (5, 7))


@pytest.mark.parametrize("hidden", [24, 32])
def test_a_quantised_lstm_reads_the_weights_of_its_input_once_and_is_a_step_where_blocks_are_whole(hidden: int) -> None:
    times, size = 4, 16
    codes = {"w": integers(np.int8, 2, size, 4 * hidden), "r": integers(np.int8, 2, hidden, 4 * hidden)}
    constants = codes | {"b": RNG.standard_normal((2, 8 * hidden)).astype(np.float32) * 0.1}
    constants |= {f"{name}s": np.float32([1e-3, 2e-3]) for name in "wr"}
    constants |= {f"{name}z": np.zeros(2, np.int8) for name in "wr"}
    inputs = {"x": RNG.standard_normal((times, 1, size)).astype(np.float32)}
    names = ["x", "w", "r", "b", "", "", "", "", "ws", "wz", "rs", "rz"]
    attributes = {"direction": "bidirectional", "hidden_size": hidden, "domain": "com.microsoft"}
    made = model(
        [helper.make_node("DynamicQuantizeLSTM", names, ["y"], **attributes)], inputs, constants, y=TensorProto.FLOAT
    )
    made.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    (got,) = fp.onnx.InferenceSession(made, confirm=False).run(None, inputs)
    lstm = torch.nn.LSTM(size, hidden, bidirectional=True)
    gates = torch.tensor([0, 2, 3, 1])  # ONNX's are input, output, forget and cell
    for k, suffix in enumerate(("l0", "l0_reverse")):
        for name, scale in (("w", "ih"), ("r", "hh")):
            matrix = torch.from_numpy(codes[name][k] * constants[f"{name}s"][k]).t().reshape(4, hidden, -1)
            bias = torch.from_numpy(constants["b"][k]).reshape(2, 4, hidden)[int(name == "r")]
            getattr(lstm, f"weight_{scale}_{suffix}").data = matrix[gates].flatten(0, 1)
            getattr(lstm, f"bias_{scale}_{suffix}").data = bias[gates].flatten()
    with torch.no_grad():
        want = lstm(torch.from_numpy(inputs["x"]))[0].reshape(times, 1, 2, hidden).permute(0, 2, 1, 3)
    assert np.abs(got - want.numpy()).max() < 0.01  # roundings to 8 bits
    graph = fp.compile(made, policy="propagate", confirm=False).compilation.normal
    ops = [node.op for node in graph.nodes()]
    assert "aten" not in ops and "dequantize" not in ops
    assert ops.count("lstm_bytes") == (2 if hidden == 32 else 0)
    assert sum(op in ("inner_product", "matmul") for op in ops) <= 2 * (1 if hidden == 32 else 1 + times)
    if takes(DataType.BF16):
        (narrow,) = fp.onnx.InferenceSession(made, confirm=False, dtype="bf16").run(None, inputs)
        assert np.abs(narrow - got).max() < 0.03  # the state and its codes are as in f32


def test_weights_are_not_decoded_to_learn_sizes_and_packed_once_for_all_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    depth, outputs = 96, 128
    weights = integers(np.int8, depth, outputs)
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "scale", "zero"]),
        helper.make_node("MatMulInteger", ["q", "w", "zero"], ["sums"]),
        helper.make_node("Cast", ["sums"], ["real"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["real", "scale"], ["y"]),
    ]
    made = model(nodes, {"x": np.zeros((1, depth), np.float32)}, {"w": weights}, y=TensorProto.FLOAT)
    made.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "rows"
    session = fp.onnx.InferenceSession(made, tune="model", confirm=False)
    decoded: list[int] = []
    usual = quantization.reference_dequantize  # of calls while the file is traced

    def counted(attrs: Any, given: Any) -> Any:
        decoded.append(given["src"].numel())
        return usual(attrs, given)

    monkeypatch.setattr(quantization, "reference_dequantize", counted)
    for rows in (24, 40, 56):
        x = RNG.standard_normal((rows, depth)).astype(np.float32)
        (y,) = session.run(None, {"x": x})
        low, high = min(x.min(), 0), max(x.max(), 0)
        scale = np.float32(high - low) / np.float32(255)
        zero = np.clip(np.rint(-low / scale), 0, 255)
        numbers = np.clip(np.rint(x / scale) + zero, 0, 255)
        np.testing.assert_allclose(y, (numbers - zero) @ weights.astype(np.float64) * scale, rtol=1e-4, atol=1e-3)
    kept: list[dict[Any, int]] = []
    for net in session.plans.values():
        read = {access for step in net.plan.steps for access in step.operands.values()}
        buffers = {access.desc: net.plan.buffers[access.buffer] for access in read}
        kept.append({
            desc: net.plan.constants[buffer.index].data_ptr()
            for desc, buffer in buffers.items()
            if buffer.home is Home.CONSTANT and desc.nbytes >= depth * outputs
        })  # fmt: skip
    assert all(kept)
    assert all(kept[2][desc] == kept[1][desc] for desc in kept[1].keys() & kept[2].keys()), "packed once"
    assert not [size for size in decoded if size >= depth * outputs]
