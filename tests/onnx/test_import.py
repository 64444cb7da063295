"""ONNX models become graphs: the right ops, the right numbers, and one clear error where they cannot."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper, parser
from onnx.reference import ReferenceEvaluator

import fmtprop as fp
from fmtprop.errors import ImportModelError
from fmtprop.ir.initialiser import Initialiser
from fmtprop.onnx.model import from_onnx, open_program

#: for a process that starts elsewhere: the package under test, wherever it lies
_ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(fp.__file__).parents[1])}

CONVOLUTION = """
<ir_version: 8, opset_import: ["" : 17]>
net (float[1, 3, 8, 8] image) => (float[1, 5] scores) {
    hidden = Conv<pads = [1, 1, 1, 1]>(image, w, b)
    active = Relu(hidden)
    pooled = GlobalAveragePool(active)
    flat = Flatten(pooled)
    scores = Gemm<transB = 1>(flat, v, c)
}
"""


def with_weights(text: str, **weights: np.ndarray) -> onnx.ModelProto:
    model = onnx.ModelProto()
    model.CopyFrom(parser.parse_model(text))
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    return model


@pytest.fixture
def network() -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    shapes = {"w": (4, 3, 3, 3), "b": (4,), "v": (5, 4), "c": (5,)}
    return with_weights(CONVOLUTION, **{name: rng.standard_normal(s).astype(np.float32) for name, s in shapes.items()})


def test_layers_are_native_ops(network):
    graph = from_onnx(network)
    assert [node.op for node in graph.nodes() if node.op not in ("input", "constant", "output")] == [
        "convolution",
        "eltwise",
        "pooling",
        "reshape",
        "inner_product",
    ]
    assert [node.name for node in graph.input_nodes] == ["image"]
    assert [node.name for node in graph.output_nodes] == ["scores"]
    assert set(graph.constants) == {"w", "b", "v", "c"}
    assert {node.origin for node in graph.nodes() if node.op == "convolution"} == {"hidden"}


def test_results_are_those_of_pytorch(network, tmp_path):
    image = torch.rand(1, 3, 8, 8)
    weights = {t.name: torch.from_numpy(numpy_helper.to_array(t).copy()) for t in network.graph.initializer}
    hidden = torch.conv2d(image, weights["w"], weights["b"], padding=1).relu().mean((2, 3))
    expected = torch.nn.functional.linear(hidden, weights["v"], weights["c"])
    onnx.save(network, tmp_path / "net.onnx")
    for model in (network, network.SerializeToString(), tmp_path / "net.onnx"):
        torch.testing.assert_close(fp.compile(model, policy="propagate")(image), expected)


def test_external_weights(network, tmp_path):
    expected = fp.compile(network, policy="propagate")(image := torch.rand(1, 3, 8, 8))
    onnx.save(network, tmp_path / "net.onnx", save_as_external_data=True, location="weights", size_threshold=0)
    torch.testing.assert_close(fp.compile(tmp_path / "net.onnx", policy="propagate")(image), expected)


def test_shapes_fix_dynamic_axes():
    text = '<ir_version: 8, opset_import: ["" : 17]> g (float[n, 4] x) => (float[n, 4] y) { y = Softmax(x) }'
    model = parser.parse_model(text)
    assert from_onnx(model, {"x": (3, 4)}).input_nodes[0].results[0].dims == (3, 4)
    with pytest.raises(ImportModelError, match=r"input x has the dynamic shape \(n, 4\).*shapes="):
        from_onnx(model)
    with pytest.raises(ImportModelError, match=r"shapes\['x'\] is \(3, 5\), but the model declares \(n, 4\)"):
        from_onnx(model, {"x": (3, 5)})
    with pytest.raises(ImportModelError, match="shapes names 'z'; the model's inputs are x"):
        from_onnx(model, {"z": (3, 4)})
    with pytest.raises(ImportModelError, match="shapes are for ONNX models"):
        fp.load("chain", shapes={"x": (1,)})


def test_a_large_constant_of_one_number_takes_no_memory():
    """ONNX's own light models have such weights, 574 MB of them in one of VGG-19."""
    weights = " ".join(f"w{i} = ConstantOfShape<value = float {{0.5}}>(s)" for i in range(3))
    sums = "y0 = MatMul(x, w0) y1 = MatMul(y0, w1) y = MatMul(y1, w2)"
    text = f"""
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[1, 8000] x) => (float[1, 8000] y) {{ s = Constant<value_ints = [8000, 8000]>() {weights} {sums} }}
    """
    graph = from_onnx(parser.parse_model(text))  # 768 MB
    described = [data for data in graph.constants.values() if isinstance(data, Initialiser)]
    assert described and set(described) == {Initialiser.constant(0.5)}
    with pytest.raises(ImportModelError, match=r"w4 .* makes 256000000 bytes of one number; all nodes together may"):
        from_onnx(
            parser.parse_model(text.replace(sums, "w3 = ConstantOfShape(s) w4 = ConstantOfShape(s) y = MatMul(x, w4)"))
        )


def test_results_of_one_number_can_be_written_to():
    text = '<ir_version: 8, opset_import: ["" : 17]> g (int64[2] s, float[1] x) => (float[a, b] y, float[c] z)'
    model = parser.parse_model(f"{text} {{ y = ConstantOfShape(s) z = Expand(x, s) }}")
    del model.graph.output[1].type.tensor_type.shape.dim[0]
    model.graph.output[1].type.tensor_type.shape.dim.extend(model.graph.output[0].type.tensor_type.shape.dim)
    x = np.ones(1, np.float32)
    for result in fp.onnx.InferenceSession(model).run(None, {"s": np.array([2, 3]), "x": x}):
        result[0, 0] = 7
        assert (result == 7).sum() == 1
    assert x == 1


def test_functions_have_their_own_defaults():
    """Not those of the operators in them, which onnx's inliner takes."""
    text = """
        <ir_version: 9, opset_import: ["" : 18, "own" : 1]>
        g (float[4] x, bool c) => (float[4] y) {
            a = own.Outer(x)
            y = If(c) <then_branch = t () => (float[4] p) { p = own.Outer<slope = 0.5>(a) },
                       else_branch = e () => (float[4] q) { q = own.Inner(a) }>
        }
        <domain: "own", opset_import: ["" : 18, "own" : 1]>
        Outer <slope: float = 0.25> (x) => (y) { z = own.Inner<slope: float = @slope>(x) y = Add(z, z) }
        <domain: "own", opset_import: ["" : 18]>
        Inner <slope: float = 0.125> (x) => (y) { y = LeakyRelu<alpha: float = @slope>(x) }
    """
    x = np.float32([-8, -1, 1, 8])
    session = fp.onnx.InferenceSession(parser.parse_model(text), tune="model", confirm=False)
    once = 2 * np.where(x < 0, 0.25 * x, x)
    assert (
        session.run(None, {"x": x, "c": np.array(True)})[0].tolist()
        == (2 * np.where(once < 0, once / 2, once)).tolist()
    )
    assert session.run(None, {"x": x, "c": np.array(False)})[0].tolist() == np.where(once < 0, once / 8, once).tolist()


def test_shape_arithmetic_is_folded():
    """What exporters write for a view with a dynamic batch leaves one reshape."""
    text = """
    <ir_version: 8, opset_import: ["" : 17]>
    g (float[n, 4, 6] x) => (float[n, 24] y) {
        shape = Shape(x)
        zero = Constant<value_ints = [0]>()
        n = Gather(shape, zero)
        rest = Constant<value_ints = [-1]>()
        target = Concat<axis = 0>(n, rest)
        y = Reshape(x, target)
    }
    """
    graph = from_onnx(parser.parse_model(text), {"x": (2, 4, 6)})
    assert [node.op for node in graph.nodes()] == ["input", "reshape", "output"]


def test_branches_are_chosen_or_both_computed():
    text = """
    <ir_version: 8, opset_import: ["" : 17]>
    g (float[2] x, bool c) => (float[2] y) {
        y = If(c) <
            then_branch = a () => (float[2] p) { p = Relu(x) },
            else_branch = b () => (float[2] q) { q = Neg(x) }
        >
    }
    """
    net = fp.compile(parser.parse_model(text), policy="plain")
    x = torch.tensor([-1.0, 2.0])
    assert net(x, torch.tensor(True)).tolist() == [0.0, 2.0]
    assert net(x, torch.tensor(False)).tolist() == [1.0, -2.0]


def test_loops_are_unrolled():
    text = """
    <ir_version: 8, opset_import: ["" : 17]>
    g (float[2] x) => (float[2] y, float[3, 2] rows) {
        three = Constant<value_int = 3>()
        true = Constant<value_int = 1>()
        go = Cast<to = 9>(true)
        y, rows = Loop(three, go, x) <
            body = b (int64 i, bool c, float[2] s) => (bool d, float[2] t, float[2] row) {
                d = Identity(c)
                t = Add(s, x)
                row = Identity(t)
            }
        >
    }
    """
    net = fp.compile(parser.parse_model(text), policy="plain")
    y, rows = net(torch.tensor([1.0, 2.0]))
    assert y.tolist() == [4.0, 8.0] and rows.tolist() == [[2, 4], [3, 6], [4, 8]]


def test_functions_are_written_out():
    text = """
    <ir_version: 8, opset_import: ["" : 17, "mine" : 1]>
    g (float[2] x) => (float[2] y) { y = mine.twice<by = 3.0>(x) }
    <domain: "mine", opset_import: ["" : 17]>
    twice<by>(a) => (b) { c = Constant<value_float: float = @by>() b = Mul(a, c) }
    """
    net = fp.compile(parser.parse_model(text), policy="plain")
    assert net(torch.tensor([1.0, 2.0])).tolist() == [3.0, 6.0]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "y = NonZero(x)",
            r"node y \(NonZero\): the result's shape depends on the values of the inputs.*InferenceSession",
        ),
        ("y = RandomNormalLike(x)", r"node y \(RandomNormalLike\) draws random numbers"),
        (
            "t = Constant<value_int: int = 1>() t1 = Cast<to: int = 9>(t) r = Constant<value_float: float = 0.5>() "
            "y = Dropout(x, r, t1)",
            r"node y \(Dropout\): training mode, which draws random numbers \(export .* inference\), is not supported",
        ),
        ("y = MatMul(x, x)", r"node y \(MatMul\) cannot run on float32\[2, 3\]"),
        ("y = Nonsense(x)", "is no valid ONNX model.*Nonsense"),
        ("y = Relu(nothing)", "is no valid ONNX model.*nothing"),
    ],
)
def test_errors_name_the_node(body, message):
    text = f'<ir_version: 8, opset_import: ["" : 17]> g (float[2, 3] x) => (float[n] y) {{ {body} }}'
    with pytest.raises(ImportModelError, match=message):
        from_onnx(parser.parse_model(text))


def test_an_input_of_unknown_rank_is_named():
    model = parser.parse_model('<ir_version: 8, opset_import: ["" : 17]> g (float[3] x) => (float[3] y) { y = Neg(x) }')
    model.graph.input[0].type.tensor_type.ClearField("shape")
    with pytest.raises(ImportModelError, match="input x declares no axes, and ONNX requires them: give the input a sh"):
        from_onnx(model)


def test_what_no_plan_can_hold_runs_node_by_node():
    text = '<ir_version: 8, opset_import: ["" : 17]> g (float[3] x) => (int64[1, n] y) { y = NonZero(x) }'
    assert open_program(parser.parse_model(text)).run({"x": torch.tensor([0.0, 2.0, 3.0])})[0].tolist() == [[1, 2]]


def test_other_kinds_are_refused():
    with pytest.raises(ImportModelError, match=r"pass a path, bytes or an onnx.ModelProto"):
        from_onnx(17)
    with pytest.raises(ImportModelError, match=r"pass a path, bytes or an onnx.ModelProto"):
        fp.compile(helper.make_node("Relu", ["x"], ["y"]))


def test_weights_that_are_outputs_and_inputs_that_are_passed_on():
    text = (
        '<ir_version: 8, opset_import: ["" : 17]> g (float[2] x) => (float[2] x, float[3] w, float[2] y) { y = Neg(x) }'
    )
    model = with_weights(text, w=np.float32([1, 2, 3]))
    same, weights, negative = fp.compile(model, policy="plain")(torch.tensor([1.0, 2.0]))
    assert same.tolist() == [1, 2] and weights.tolist() == [1, 2, 3] and negative.tolist() == [-1, -2]


def test_int4_weights_are_read_by_the_reference():
    weights = helper.make_tensor("w", TensorProto.INT4, (4,), [1, -2, 3, -8])
    text = (
        '<ir_version: 10, opset_import: ["" : 21]> g (float[4] x) => (float[4] y) { f = Cast<to = 1>(w) y = Add(x, f) }'
    )
    model = with_weights(text)
    model.graph.initializer.append(weights)
    assert fp.compile(model, policy="plain")(torch.zeros(4)).tolist() == [1, -2, 3, -8]


_DOORS = """
import sys
sys.modules["onnx"] = None
import fmtprop as fp
for door in (fp.load, fp.compile, lambda path: fp.onnx.InferenceSession(path)):
    try:
        door("model.onnx")
    except fp.errors.ImportModelError as error:
        print(error)
"""


def test_a_missing_package_is_one_error_that_says_how_to_get_it(tmp_path):
    (tmp_path / "model.onnx").write_bytes(b"some bytes")
    done = subprocess.run(
        [sys.executable, "-c", _DOORS], cwd=tmp_path, env=_ENVIRONMENT, capture_output=True, text=True, check=True
    )
    messages = done.stdout.splitlines()
    assert len(messages) == 3
    for message in messages:
        assert message.startswith("ONNX models are read and written with")
        assert "pip install 'fmtprop[onnx]'" in message


@pytest.mark.parametrize("node", [
    'Resize<mode="nearest", coordinate_transformation_mode="tf_crop_and_resize", extrapolation_value=3.0>(x, r, , s)',
    'Resize<mode = "nearest", nearest_mode = "ceil", coordinate_transformation_mode = "asymmetric">(x, , , s)',
])  # fmt: skip
def test_positions_that_are_known_are_constants_of_a_plan(node):
    text = (
        '<ir_version: 8, opset_import: ["" : 18]> g (float[1, 2, 4, 5] x) => (float[1, 2, 7, 6] y) '
        "<int64[4] s = {1, 2, 7, 6}, float[8] r = {0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.5, 1.2}> { y = " + node + " }"
    )
    model = parser.parse_model(text)
    x = torch.rand(1, 2, 4, 5)
    (want,) = ReferenceEvaluator(model).run(None, {"x": x.numpy()})
    torch.testing.assert_close(fp.compile(model, policy="plain")(x), torch.from_numpy(want))


def test_a_view_of_a_view_of_weights_is_a_constant():
    text = (
        '<ir_version: 8, opset_import: ["" : 17]> g (float[2, 64] x) => (float[2, 64] y) '
        "{ a = Transpose<perm = [1, 0]>(w) b = Transpose<perm = [1, 0]>(a) y = MatMul(x, b) }"
    )
    weights = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    x = torch.rand(2, 64)
    y = fp.compile(with_weights(text, w=weights), policy="plain")(x)
    torch.testing.assert_close(y, x @ torch.from_numpy(weights), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 3), (2, 3, 4, 5)])
def test_slopes_of_old_opsets_are_for_channels(shape):
    """The converter leaves them as they are: then they would be for the last axis, without an error where it fits."""
    x, slope = np.linspace(-1, 1, math.prod(shape), dtype=np.float32).reshape(shape), np.float32([0.1, 0.2, 0.3])
    sizes = ", ".join(map(str, shape))
    model = parser.parse_model(
        f'<ir_version: 3, opset_import: ["" : 6]> g (float[{sizes}] a, float[3] slope) => (float[{sizes}] y) '
        "{ x = Abs(a) z = Neg(x) y = PRelu(z, slope) }"
    )
    model.graph.initializer.append(numpy_helper.from_array(slope, "slope"))
    got = fp.onnx.InferenceSession(model, policy="propagate").run(None, {"a": x})[0]
    np.testing.assert_allclose(got, -abs(x) * slope.reshape(1, 3, *[1] * (len(shape) - 2)), atol=1e-6)


def test_the_rank_behind_slopes_of_old_opsets_must_be_known():
    model = parser.parse_model(
        '<ir_version: 3, opset_import: ["" : 6]> g (float[12] a, int64[k] sizes, float[3] slope) => (float[n, 3] y) '
        "{ z = Reshape(a, sizes) y = PRelu(z, slope) }"
    )
    with pytest.raises(ImportModelError, match="number of its operands' axes is unknown"):
        fp.onnx.InferenceSession(model, policy="propagate")


def test_integer_constants_of_old_opsets():
    text = """<ir_version: 3, opset_import: ["" : 8]> g (float[2, 3] x) => (float[3, 2] y) {
        s = Constant<value = int64[2] {3, 2}>()
        y = Reshape(x, s)
    }"""
    ops = [node.op for node in from_onnx(onnx.parser.parse_model(text)).nodes()]
    assert ops == ["input", "reshape", "output"]


def test_a_huge_initial_state_is_refused_before_it_is_made():
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        net (float[1, 2147483648, 1] x, float[1, 12, 1] w, float[1, 12, 3] r) => (float[1, 1, m, 3] y) {
            y = LSTM <hidden_size = 3> (x, w, r)
        }""")
    with pytest.raises(ImportModelError, match="makes a constant of 25769803776 bytes, 1073741824 are allowed"):
        from_onnx(model)


def test_a_file_gives_its_name_since_exporters_call_all_graphs_alike(network, tmp_path):
    network.graph.name = "main_graph"
    onnx.save(network, tmp_path / "my net.onnx")
    assert fp.load(tmp_path / "my net.onnx").name == "my net"
    assert from_onnx(network).name == "main_graph"


def test_names_of_graphs_and_the_long_name_of_the_domain():
    """The checker refuses a graph without a name and the domain of its own nodes; ONNX Runtime takes both."""
    text = """<ir_version: 8, opset_import: ["" : 17]> g (float[2] x, bool c) => (float[2] y) {
        z = Neg(x)
        y = If(c) <
            then_branch = one () => (float[2] a) { a = Exp(z) }, else_branch = two () => (float[2] b) { b = Abs(z) }>
    }"""
    model = onnx.ModelProto()
    model.CopyFrom(onnx.parser.parse_model(text))
    branch = model.graph.node[1].attribute[0].g
    model.graph.name = branch.name = ""
    model.graph.node[0].domain = branch.node[0].domain = "ai.onnx"
    session = fp.onnx.InferenceSession(model, policy="propagate", confirm=False)
    (y,) = session.run(None, {"x": np.float32([1, -2]), "c": np.bool_(True)})
    np.testing.assert_allclose(y, np.exp(np.float32([-1, 2])), rtol=1e-6)


def test_a_file_needs_no_compiler_of_pytorch():
    """Channels that come last, quantized numbers and PRelu: PyTorch's own rules of shapes import its compiler."""
    text = """<ir_version: 8, opset_import: ["" : 17]> g (float[1, 9, 9, 3] x) => (float[1, 4, 7, 7] y)
        <float[4, 3, 3, 3] w, float[4, 1, 1] slope, float scale = {0.1}, uint8 zero = {3}> {
            t = Transpose <perm = [0, 3, 1, 2]> (x)
            c = Conv (t, w)
            p = PRelu (c, slope)
            q, s, z = DynamicQuantizeLinear (p)
            d = DequantizeLinear (q, s, z)
            e = QuantizeLinear (d, scale, zero)
            y = DequantizeLinear (e, scale, zero)
        }"""
    model = onnx.parser.parse_model(text.replace("float[4, 3, 3, 3] w, float[4, 1, 1] slope, ", ""))
    for name, dims in (("w", (4, 3, 3, 3)), ("slope", (4, 1, 1))):
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.full(dims, 0.1, np.float32), name))
    code = """
import sys, onnx
from fmtprop.onnx.model import from_onnx
from_onnx(onnx.load_model_from_string(sys.stdin.buffer.read()))
print({"sympy", "torch._dynamo", "torch.fx.experimental.symbolic_shapes"} & sys.modules.keys())
"""
    made = subprocess.run(
        [sys.executable, "-c", code], input=model.SerializeToString(), capture_output=True, check=True, env=_ENVIRONMENT
    )
    assert made.stdout.decode().strip() == "set()"
