"""A session as ONNX Runtime's users know it, and the interface of ONNX's backends."""

from __future__ import annotations

import gc
import pickle

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper, parser

import fmtprop as fp
from fmtprop.errors import ImportModelError, InputError, ShapeError, UnsupportedOpError
from fmtprop.onnx import backend
from fmtprop.onnx.model import limits
from fmtprop.runtime.constants import ConstantStore

DYNAMIC = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[n, 2] x, int64[k] extra) => (float[n, 2] y, int64[k] twice) { y = Relu(x) twice = Add(extra, extra) }
"""
FIXED = '<ir_version: 8, opset_import: ["" : 17]> g (float[2, 2] x) => (float[2, 2] y) { y = Relu(x) }'
NON_ZERO = '<ir_version: 8, opset_import: ["" : 17]> g (float[n] x) => (int64[1, m] y) { y = NonZero(x) }'
OPTIONS = {"policy": "propagate"}


def session(text: str, **options: object) -> fp.onnx.InferenceSession:
    return fp.onnx.InferenceSession(parser.parse_model(text), **OPTIONS, **options)


def test_inputs_and_outputs_are_described():
    made = session(DYNAMIC)
    assert [(a.name, a.type, a.shape) for a in made.get_inputs()] == [
        ("x", "tensor(float)", ["n", 2]),
        ("extra", "tensor(int64)", ["k"]),
    ]
    assert [a.name for a in made.get_outputs()] == ["y", "twice"]


def of_weights(listed: str = "") -> tuple[onnx.ModelProto, np.ndarray]:
    """Return a model with a convolution, and its weights; these are maybe listed among the inputs."""
    text = f"""<ir_version: 8, opset_import: ["" : 17]>
        g (float[1, 33, 5, 5] x{listed}) => (float[1, 64, 3, 3] y) {{ y = Conv (x, w) }}"""
    model, weights = parser.parse_model(text), np.random.default_rng(0).standard_normal((64, 33, 3, 3), np.float32)
    model.graph.initializer.append(numpy_helper.from_array(weights, "w"))
    return model, weights


def test_weights_are_kept_once_where_one_plan_is_all_that_reads_them():
    model, weights = of_weights()
    made = fp.onnx.InferenceSession(model, **OPTIONS)
    # by its type: a proxy of something that is gone has no class
    assert not [one for one in gc.get_objects() if type(one) is torch.Tensor and one.shape == weights.shape]
    x = np.random.default_rng(1).standard_normal((1, 33, 5, 5), np.float32)
    want = torch.nn.functional.conv2d(torch.from_numpy(x), torch.from_numpy(weights)).numpy()
    np.testing.assert_allclose(made.run(None, {"x": x})[0], want, rtol=1e-4, atol=1e-4)
    with pytest.raises(InputError, match="there is no input 'w'"):
        made.run(None, {"x": x, "w": weights})


def test_weights_among_the_inputs_can_be_replaced():
    model, weights = of_weights(", float[64, 33, 3, 3] w")
    made = fp.onnx.InferenceSession(model, **OPTIONS)
    x = np.ones((1, 33, 5, 5), np.float32)
    assert [arg.name for arg in made.get_inputs()] == ["x"]
    (y,), (twice,) = made.run(None, {"x": x}), made.run(None, {"x": x, "w": 2 * weights})
    np.testing.assert_allclose(twice, 2 * y, rtol=1e-3, atol=1e-3)


def test_a_plan_for_each_shape():
    made = session(DYNAMIC)
    for n in (1, 3, 1):
        x, extra = np.full((n, 2), -1, np.float32), np.arange(n)
        y, twice = made.run(None, {"x": x, "extra": extra})
        assert y.tolist() == [[0, 0]] * n and twice.tolist() == (2 * extra).tolist()
    assert list(made.plans) == [((3, 2), (3,)), ((1, 2), (1,))]
    assert made.reason is None
    assert made.run(["twice"], {"x": x, "extra": extra})[0].tolist() == [0]


def test_plans_for_other_shapes_do_not_pack_weights_again(monkeypatch):
    packed, plain = [], ConstantStore.compute
    monkeypatch.setattr(
        ConstantStore, "compute", lambda self, node, *args: packed.append(node.name) or plain(self, node, *args)
    )
    weights = np.random.default_rng(0).standard_normal((64, 33, 3, 3)).astype(np.float32)
    model = parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[n, 33, 8, 8] x, float[64, 33, 3, 3] w) => '
        "(float[n, 64, 6, 6] y) { y = Conv(x, w) }"
    )
    del model.graph.input[1]
    model.graph.initializer.append(numpy_helper.from_array(weights, "w"))
    made, counts = fp.onnx.InferenceSession(model, **OPTIONS), []
    for n in (2, 3):
        x = np.random.default_rng(n).standard_normal((n, 33, 8, 8)).astype(np.float32)
        want = torch.nn.functional.conv2d(torch.from_numpy(x), torch.from_numpy(weights)).numpy()
        np.testing.assert_allclose(made.run(None, {"x": x})[0], want, atol=1e-3)
        counts.append(len(packed))
    first, second = (
        {c.data_ptr() for c in net.plan.constants if c.nbytes >= weights.nbytes} for net in made.plans.values()
    )
    assert counts[0] == counts[1] > 0 and first == second != set()


def test_options_that_are_none_are_the_default():
    made = session(FIXED, boundary=None, pin=None, special_values=None)
    assert made.run(None, {"x": np.float32([[-1, 2], [3, -4]])})[0].tolist() == [[0, 2], [3, 0]]


def test_few_plans_are_kept():
    made = session(DYNAMIC)
    for n in (*range(1, 11), 10, 10):
        made.run(None, {"x": np.zeros((n, 2), np.float32), "extra": np.arange(1)})
    assert [shapes[0][0] for shapes in made.plans] == [*range(2, 9), 10]  # 9 was run once


def test_a_shape_takes_a_place_at_its_third_run():
    made = session(DYNAMIC, max_shapes=2)
    for n in (1, 2, 3, 1, 3):
        x = np.float32(np.random.default_rng(n).standard_normal((n, 2)))
        assert made.run(["y"], {"x": x, "extra": np.arange(1)})[0].tolist() == np.maximum(x, 0).tolist()
    assert [shapes[0][0] for shapes in made.plans] == [2, 1] and made.reason is None
    x = np.float32([[-1, 2]] * 3)
    assert made.run(["y"], {"x": x, "extra": np.arange(1)})[0].tolist() == [[0, 2]] * 3
    assert [shapes[0][0] for shapes in made.plans] == [1, 3]


def test_sizes_that_no_node_accepts_are_one_error_without_a_warning(caplog):
    text = """<ir_version: 8, opset_import: ["" : 17]>
        g (float[n, 4] x) => (float[a, b] y) <int64[2] s = {-1, 8}> { y = Reshape(x, s) }"""
    made = session(text)
    made.run(None, {"x": np.zeros((2, 4), np.float32)})
    for _ in range(2):
        with pytest.raises(InputError, match=r"node y \(Reshape\) cannot run on .*; the inputs are x \[3, 4\]"):
            made.run(None, {"x": np.zeros((3, 4), np.float32)})
    assert not caplog.records and made.reason is None
    assert made.run(None, {"x": np.zeros((4, 4), np.float32)})[0].shape == (2, 8) and len(made.plans) == 2


def test_rare_shapes_have_plans_where_pytorch_takes_longer(monkeypatch):
    made = session(DYNAMIC, max_shapes=1)
    for n in (1, 2, 3):
        made.run(None, {"x": np.zeros((n, 2), np.float32), "extra": np.arange(1)})
        monkeypatch.setattr(made._plans, "_seconds", 0.0)  # of a plan's making
    assert [shapes[0][0] for shapes in made.plans] == [3]  # 2 was run by PyTorch


@pytest.mark.parametrize("text", ["deterministic", "bytes"])
def test_each_shape_has_a_plan_where_pytorch_computes_otherwise(text):
    weights = """<ir_version: 8, opset_import: ["" : 17]>
        g (uint8[n, 4] x) => (int32[n, 2] y) <int8[4, 2] w = {1, 2, 3, 4, 5, 6, 7, 8}> { y = MatMulInteger(x, w) }"""
    relu = """<ir_version: 8, opset_import: ["" : 17]> g (uint8[n, 4] x) => (float[n, 4] y) { z = Cast<to=1>(x)
        y = Relu(z) }"""
    options = {"deterministic": True, "tune": None} if text == "deterministic" else {}
    made = session(relu if options else weights, max_shapes=1, **options)
    for n in (1, 2):
        made.run(None, {"x": np.ones((n, 4), np.uint8)})
    assert list(made.plans) == [((2, 4),)]


def test_what_no_plan_can_hold_runs_node_by_node():
    made = session(NON_ZERO)
    assert made.run(None, {"x": np.float32([0, 1, 2])})[0].tolist() == [[1, 2]]
    assert made.reason.startswith("node y (NonZero): the result's shape") and not made.plans


def test_a_plan_is_made_at_once_where_shapes_are_fixed():
    assert list(session(FIXED).plans) == [((2, 2),)]


@pytest.mark.parametrize(
    ("feed", "message"),
    [
        ({}, "input x is missing; the model's inputs are x"),
        ({"x": np.zeros((2, 2), np.float32), "z": np.zeros(1)}, "there is no input 'z'; the model's inputs are x"),
        ({"x": np.zeros((2, 2))}, r"input x is tensor\(float\), the array is tensor\(double\): convert it"),
        ({"x": None}, "input x is None; it must be an array"),
        ({"x": np.zeros((2, 3), np.float32)}, r"input x has shape \[2, 2\], the array has \[2, 3\]"),
        ({"x": [[1.0], [1.0, 2.0]]}, "input x is no array of a type that ONNX has: .*inhomogeneous"),
        ({"x": np.zeros((2, 2), "M8[s]")}, "input x is no array of a type that ONNX has"),
        ([np.zeros((2, 2), np.float32)], "input_feed is a list; it must be a dictionary of arrays by name"),
        ({"x": np.zeros(4, np.float32)}, r"input x has shape \[2, 2\], the array has \[4\]"),
    ],
)
def test_wrong_inputs(feed, message):
    with pytest.raises(InputError, match=message):
        session(FIXED).run(None, feed)


LIKE_X = np.float32([[-1, 2], [3, -4]])


@pytest.mark.parametrize("change", [
    lambda x: x.astype(">f4"), np.asfortranarray, lambda x: np.repeat(x, 2, axis=0)[::2],
    lambda x: x[::-1].copy()[::-1], np.ndarray.tolist,
], ids=["big-endian", "columns", "strides", "backwards", "lists"])  # fmt: skip
def test_arrays_of_any_memory(change):
    x = change(LIKE_X)
    assert session(FIXED).run(["y", "y"], {"x": x})[1].tolist() == [[0, 2], [3, 0]]


def test_numbers_and_empty_axes():
    scalar = '<ir_version: 8, opset_import: ["" : 17]> g (float x) => (float y) { y = Relu(x) }'
    for x in (np.array(2, np.float32), np.float32(2), 2, 2.0):
        (y,) = session(scalar).run(None, {"x": x})
        assert (y.shape, y.dtype, y) == ((), np.float32, 2)
    x, extra = np.zeros((0, 2), np.float32), np.arange(0)
    assert [y.shape for y in session(DYNAMIC).run([], {"x": x, "extra": extra})] == [(0, 2), (0,)]


def test_arguments_of_onnx_runtime():
    class SessionOptions:
        intra_op_num_threads = 0

    model = parser.parse_model(FIXED)
    model.producer_name = "me"
    model.metadata_props.add(key="names", value="{0: 'cat'}")
    providers = [("CPUExecutionProvider", {})]
    made = fp.onnx.InferenceSession(model.SerializeToString(), SessionOptions(), providers, [{}], **OPTIONS)
    assert made.run(None, {"x": LIKE_X}, object())[0].tolist() == [[0, 2], [3, 0]]
    meta = made.get_modelmeta()
    assert (meta.producer_name, meta.graph_name, meta.custom_metadata_map) == ("me", "g", {"names": "{0: 'cat'}"})
    SessionOptions.intra_op_num_threads = torch.get_num_threads() + 1
    with pytest.warns(UserWarning, match="sess_options wants .* call torch.set_num_threads"):
        fp.onnx.InferenceSession(model, SessionOptions(), **OPTIONS)
    with pytest.raises(UnsupportedOpError, match="sess_options is a list; it must be ONNX Runtime's SessionOptions"):
        fp.onnx.InferenceSession(model, ["CPUExecutionProvider"], **OPTIONS)


def test_load_takes_what_compile_takes():
    model = parser.parse_model(FIXED)
    graphs = [fp.load(model), fp.load(model.SerializeToString())]
    assert [[node.op for node in graph.nodes()] for graph in graphs] == 2 * [["input", "eltwise", "output"]]


def test_wrong_names():
    x = {"x": np.zeros((2, 2), np.float32)}
    with pytest.raises(InputError, match="there is no output 'z'; the model's outputs are y"):
        session(FIXED).run(["z"], x)
    with pytest.raises(InputError, match="output_names is 'y'; it must be a list of names"):
        session(FIXED).run("y", x)
    with pytest.raises(ImportModelError, match="fmtprop runs on the CPU"):
        session(FIXED, providers=["CUDAExecutionProvider"])
    with pytest.raises(ImportModelError, match="providers is 'CPUExecutionProvider'; it must be a list of names"):
        session(FIXED, providers="CPUExecutionProvider")


def test_bound_arrays_are_read_and_written_in_place():
    made = session(FIXED, providers=["CPUExecutionProvider"])
    binding = made.io_binding()
    x, y = np.float32([[-1, 2], [3, -4]]), np.empty((2, 2), np.float32)
    binding.bind_cpu_input("x", x)
    binding.bind_output("y", y)
    made.run_with_iobinding(binding)
    assert y.tolist() == [[0, 2], [3, 0]]
    x[0, 0] = 5
    made.run_with_iobinding(binding)
    assert y[0, 0] == 5 and binding.copy_outputs_to_cpu()[0] is not y
    with pytest.raises(InputError, match="there is no output 'z'"):
        binding.bind_output("z")
    for wrong in (y[::-1], y.astype(">f4")):
        with pytest.raises(InputError, match="cannot be written backwards or in another byte order"):
            binding.bind_output("y", wrong)


def test_backend():
    assert backend.supports_device("CPU") and not backend.supports_device("CUDA")
    x = np.float32([[-1, 2], [3, -4]])
    assert backend.run_model(parser.parse_model(FIXED), x, **OPTIONS)[0].tolist() == [[0, 2], [3, 0]]
    assert backend.run_node(helper.make_node("Neg", ["x"], ["y"]), [x], **OPTIONS)[0].tolist() == (-x).tolist()
    assert backend.prepare(parser.parse_model(FIXED), **OPTIONS).run({"x": x})[0].tolist() == [[0, 2], [3, 0]]


def test_strings_and_sequences():
    text = """
    <ir_version: 8, opset_import: ["" : 17]>
    g (seq(float[n]) s, string[2] w) => (float[m] y, string[2] v) {
        y = ConcatFromSequence<axis = 0>(s)
        v = Identity(w)
    }
    """
    y, v = session(text).run(None, {"s": [np.float32([1]), np.float32([2, 3])], "w": np.array(["a", "b"])})
    assert y.tolist() == [1, 2, 3] and v.tolist() == ["a", "b"]


ENDLESS = """
    <ir_version: 8, opset_import: ["" : 17]> g (int64 m, bool c, float[n] x) => (float[k] y) {
        y = Loop(m, c, x) <body = b (int64 i, bool k, float[n] s) => (bool k2, float[j] u) { k2 = Identity(k) BODY }>
    }"""


@pytest.mark.parametrize("body, kind, message", [
    ("u = Neg(s)", ImportModelError, "loops have run 2000 nodes in this run, and may run no more"),
    ("u = Concat<axis = 0>(s, s)", InputError, "after 8 rounds its state and rows have 2048 bytes; they may have 1024"),
])  # fmt: skip
def test_a_loop_that_does_not_end_is_an_error(body, kind, message, monkeypatch):
    monkeypatch.setattr(limits, "LOOP_STEPS", 2000)
    monkeypatch.setattr(limits, "LOOP_NBYTES", 1024)
    made = session(ENDLESS.replace("BODY", body))
    with pytest.raises(kind, match=message):
        made.run(None, {"m": np.int64(10**12), "c": np.bool_(True), "x": np.float32([1, 2])})


def test_options_that_do_not_exist_are_named():
    with pytest.raises(UnsupportedOpError, match="a session has no option 'speed'; it has max_shapes, boundary"):
        session(FIXED, speed=2)
    with pytest.raises(UnsupportedOpError, match="max_shapes must be a whole number of at least 1, got 0"):
        session(DYNAMIC, max_shapes=0)


def test_the_plan_used_longest_ago_goes_first():
    made = session(DYNAMIC, max_shapes=1)
    for n in (1, 3, 3, 3):
        made.run(None, {"x": np.zeros((n, 2), np.float32), "extra": np.arange(n)})
    assert list(made.plans) == [((3, 2), (3,))]


def test_known_ranges_are_planned_when_a_session_is_made():
    text = """<ir_version: 8, opset_import: ["" : 17]>
        g (float[n, 2, w] x, float[n] b) => (float[n, 2, w] y) { y = Relu(x) }"""
    made = session(text, shapes={"x": ((1, 2, 1), 2, (4, 9, 4)), "b": ((1, 2, 1),)})
    planned = list(made.plans)
    assert planned == [((n, 2, w), (n,)) for n in (1, 2) for w in (4, 8)]
    x = np.float32(np.random.default_rng(0).standard_normal((2, 2, 8)))
    np.testing.assert_array_equal(made.run(None, {"x": x, "b": np.zeros(2, np.float32)})[0], np.maximum(x, 0))
    assert sorted(made.plans) == planned
    for shapes, words in [
        ({"z": (1,)}, "must map inputs to sizes: x, b"),
        ({"x": (1, 2)}, "the input has the shape"),
        ({"x": (1, 3, 4), "b": (1,)}, "not the model's own 2"),
        ({"x": (1, 2, (9, 4, 1)), "b": (1,)}, "neither a size nor"),
        ({"x": (1, 2, 4), "b": (2,)}, "other sizes in another input"),
        ({"x": (1, 2, (1, 99, 1)), "b": (1,)}, "99 combinations of sizes, but max_shapes is 8"),
        ({"x": (1, 2, 4)}, "neither a size nor"),
    ]:
        with pytest.raises(InputError, match=words):
            session(text, shapes=shapes)


def test_a_loop_without_rounds_has_rows_of_the_declared_shape():
    text = """<ir_version: 8, opset_import: ["" : 17]> g (float[2] x, int64 n) => (float[2] y, float[k, 2] z) {
        t = Constant<value_int = 1>()
        c = Cast<to = 9>(t)
        y, z = Loop(n, c, x) <body = b (int64 i, bool k, float[2] s) => (bool k2, float[2] u, float[2] v) {
            k2 = Identity(k) u = Neg(s) v = Relu(s)
        }>
    }"""
    session = fp.onnx.InferenceSession(onnx.parser.parse_model(text), policy="propagate", confirm=False)
    x = np.float32([1, -2])
    assert [result.tolist() for result in session.run(None, {"x": x, "n": np.array(1)})] == [[-1, 2], [[1, 0]]]
    y, z = session.run(None, {"x": x, "n": np.array(0)})
    assert y.tolist() == x.tolist() and z.shape == (0, 2) and z.dtype == np.float32


def test_an_output_may_be_named_twice():
    text = '<ir_version: 8, opset_import: ["" : 17]> g (float[2] x) => (float[2] y, float[2] y) { y = Relu(x) }'
    session = fp.onnx.InferenceSession(onnx.parser.parse_model(text), policy="propagate", confirm=False)
    assert session.reason is None
    assert [result.tolist() for result in session.run(None, {"x": np.float32([1, -2])})] == [[1, 0], [1, 0]]


def test_an_index_that_does_not_exist_is_an_error_of_the_input():
    made = session(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[4, 3] w, int64[n] i) => (float[n, 3] y) { y = Gather(w, i) }'
    )
    table = np.ones((4, 3), np.float32)
    message = r"node .* from y: .*operands are f32\[4, 3\], s64\[2\].* input i holds 0 to 9; pass indices that do"
    with pytest.raises(InputError, match=message):
        made.run(None, {"w": table, "i": np.array([0, 9])})
    table[3] = 7
    assert made.run(None, {"w": table, "i": np.array([-1, -4])})[0].tolist() == [[7] * 3, [1] * 3]
    assert made.reason is None
    (plan,) = made.plans.values()
    assert len(plan.plan.steps) == 1  # negative indices need no step of their own


def test_a_size_that_no_node_accepts_is_an_error_of_the_input():
    made = session(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[1, 3, h, w] x, float[4, 3, 5, 5] f) => '
        "(float[1, 4, a, b] y) { y = Conv(x, f) }"
    )
    weights = np.ones((4, 3, 5, 5), np.float32)
    message = r"node y \(Conv\) cannot run on .*; the inputs are x \[1, 3, 3, 3\], f .*: pass sizes and values that"
    with pytest.raises(InputError, match=message):
        made.run(None, {"x": np.ones((1, 3, 3, 3), np.float32), "f": weights})
    # the next run has a plan all the same
    made.run(None, {"x": np.ones((1, 3, 6, 5), np.float32), "f": weights})
    assert made.reason is None and len(made.plans) == 1


@pytest.mark.parametrize("body, message", [
    ("s = Constant<value_ints = [-1, 2]>() y = Tile(x, s)", r"node y \(Tile\) cannot run on .*: Repeats cannot be"),
    ("s = Constant<value_ints = [-5]>() z = ConstantOfShape(s) y = Add(x, z)", "shape .-5. has a negative size"),
    ("y = Flatten<axis = 9>(x)", "axis 9 is not one of 2"),
])  # fmt: skip
def test_a_node_that_no_inputs_make_run_is_an_error_of_the_model(body, message):
    with pytest.raises(ImportModelError, match=message):
        session(f'<ir_version: 8, opset_import: ["" : 17]> g (float[2, 3] x) => (float[a, b] y) {{ {body} }}')


@pytest.mark.parametrize("dims", ["2", "n"])
def test_a_result_of_another_type_than_declared_is_an_error_of_the_model(dims):
    text = f'<ir_version: 8, opset_import: ["" : 17]> g (float[{dims}] x) => (int64[{dims}] y) {{ y = Relu(x) }}'
    with pytest.raises(ImportModelError, match="output y is declared as INT64, but the nodes make FLOAT"):
        session(text).run(None, {"x": np.float32([1, 2])})


def test_tensors_of_more_axes_than_a_plan_has_run_node_by_node():
    shape = ", ".join(["1"] * 20)
    made = session(
        f'<ir_version: 8, opset_import: ["" : 17]> g (float[2] x) => (float[{shape}, 2] y) '
        f"{{ s = Constant<value_ints = [{shape}, 2]>() y = Reshape(x, s) }}"
    )
    assert "at most 12 dimensions" in made.reason
    assert made.run(None, {"x": np.float32([1, 2])})[0].shape == (1,) * 20 + (2,)


def test_a_loop_that_copies_a_growing_sequence_is_an_error(monkeypatch):
    monkeypatch.setattr(limits, "LOOP_STEPS", 5000)
    text = """<ir_version: 8, opset_import: ["" : 17]> g (float[2] x, int64 n) => (float[k] y) {
        e = SequenceEmpty() t = Constant<value_int = 1>() c = Cast<to = 9>(t)
        s = Loop(n, c, e) <body = b (int64 i, bool k, seq(float[2]) q) => (bool k2, seq(float[2]) u) {
            k2 = Identity(k) u = SequenceInsert(q, x)
        }>
        y = ConcatFromSequence<axis = 0>(s)
    }"""
    made = session(text)
    assert made.run(None, {"x": np.float32([1, 2]), "n": np.array(3)})[0].shape == (6,)
    with pytest.raises(ImportModelError, match="loops have run 5000 nodes in this run"):
        made.run(None, {"x": np.float32([1, 2]), "n": np.array(2400)})  # 4800 nodes and the copies


@pytest.mark.parametrize(("nodes", "values"), [
    ("r = Gather(x, i)", (1, 9)), ("d = Div(j, i) f = Cast<to = 1>(d) r = Add(x, f)", (1, 0)),
])  # fmt: skip
def test_a_branch_that_is_not_taken_does_not_fail(nodes, values):
    """A branch guards an index or a divisor: both branches of a plan would run."""
    text = f"""
    <ir_version: 8, opset_import: ["" : 17]> g (float[4] x, int64[4] i, int64[1] j, bool c) => (float[4] y) {{
        y = If(c) <
            then_branch = one () => (float[4] q) {{ q = Neg(x) }}, else_branch = two () => (float[4] r) {{ {nodes} }}>
    }}"""
    made = session(text)
    x = np.float32([1, 2, 3, 4])
    for i, c in zip(values, (False, True), strict=True):
        feed = {"x": x, "i": np.full(4, i), "j": np.array([2]), "c": np.array(c)}
        (y,) = made.run(None, feed)
        assert y.tolist() == (-x if c else x[[1] * 4] if "Gather" in nodes else x + 2).tolist()


@pytest.mark.parametrize(("shape", "message"), [
    (3, r"shapes\['x'\] is 3; it must be a tuple of sizes"), ((10**12, 2), "input x has 2000000000000 elements"),
])  # fmt: skip
def test_wrong_shapes(shape, message):
    with pytest.raises(ImportModelError, match=message):
        fp.compile(parser.parse_model(DYNAMIC), shapes={"x": shape, "extra": (2,)})
    with pytest.raises(ImportModelError, match=r"shapes is \[2\]; it must map inputs to tuples of sizes"):
        fp.compile(parser.parse_model(DYNAMIC), shapes=[2])


def test_a_result_of_the_reference_beyond_the_memory_is_an_error():
    text = """<ir_version: 8, opset_import: ["" : 17]> g (float[2] x, int64 n) => (float[a, b] w) {
        r = Constant<value_int = 16000>() l = Constant<value_float = 0.0>() u = Constant<value_float = 8000.0>()
        w = MelWeightMatrix(n, n, r, l, u)
    }"""
    made, x = session(text), np.zeros(2, np.float32)
    assert made.run(None, {"x": x, "n": np.array(8)})[0].shape == (5, 8)
    with pytest.raises(
        InputError, match=r"node w \(MelWeightMatrix\) cannot run on .* more than this machine's memory"
    ):
        made.run(None, {"x": x, "n": np.array(10**9)})


@pytest.mark.parametrize(
    "node", ["y = GatherND(x, i)", "u = Constant<value_floats = [9.0]>() y = ScatterND(x, i, u)"], ids=["read", "write"]
)
@pytest.mark.parametrize("index", [[0, 5], [0, -4], [2, 0], [-3, 2]])
def test_an_index_beyond_one_axis_is_no_index_of_the_next_row(node, index):
    made = session(
        f'<ir_version: 8, opset_import: ["" : 17]> g (float[2, 3] x, int64[1, 2] i) => (float[a] y) {{ {node} }}'
    )
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert 5 in made.run(None, {"x": x, "i": np.int64([[1, -1]])})[0] or "ScatterND" in node
    with pytest.raises(InputError, match="index 6 is out of bounds"):
        made.run(None, {"x": x, "i": np.int64([index])})


def test_limits_on_constants_are_no_reason_to_run_node_by_node():
    nodes = (
        "s = Constant<value_ints = [30000, 30000]>() b = ConstantOfShape(s) d = Neg(b) y = ReduceSum<keepdims = 0>(d)"
    )
    with pytest.raises(ImportModelError, match="all nodes together may make"):
        session(f'<ir_version: 8, opset_import: ["" : 17]> g (float[1] x) => (float y) {{ {nodes} }}')


def test_a_window_of_more_channels_than_there_are():
    header = '<ir_version: 8, opset_import: ["" : 17]> g (float[1, 3, 1, 1] x) => (float[1, 3, 1, 1] y)'
    x = np.float32([1, 2, 3]).reshape(1, 3, 1, 1)
    for size in (8, 1 << 40):
        (y,) = session(f"{header} {{ y = LRN<size = {size}>(x) }}").run(None, {"x": x})
        np.testing.assert_allclose(y, x / (1 + 1e-4 / size * 14) ** 0.75, rtol=1e-6)


def test_a_session_of_a_file_is_pickled_as_its_path(tmp_path):
    made = parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[n, 2] x) => (float[n, 2] y) { y = Relu(x) }'
    )
    onnx.save(made, tmp_path / "m.onnx")
    feed = {"x": np.float32([[-1, 2]])}
    net = pickle.loads(pickle.dumps(fp.onnx.InferenceSession(tmp_path / "m.onnx", policy="plain", max_shapes=2)))
    np.testing.assert_array_equal(net.run(None, feed)[0], [[0, 2]])
    for rows in (3, 4):
        net.run(None, {"x": np.zeros((rows, 2), np.float32)})
    assert len(net.plans) == 2  # the options came along
    with pytest.raises(InputError, match="in memory cannot be pickled"):
        pickle.dumps(fp.onnx.InferenceSession(made))


@pytest.mark.parametrize("op, gates", [("LSTM", 4), ("GRU", 3), ("RNN", 1)])
def test_a_recurrent_layer_of_no_sequences(op, gates):
    made = parser.parse_model(f"""<ir_version: 8, opset_import: ["" : 17]>
        g (float[t, n, 2] x, float[1, {3 * gates}, 2] w, float[1, {3 * gates}, 3] r) => (float[t, d, n, 3] y) {{
            y = {op} <hidden_size = 3> (x, w, r)
        }}""")
    rng = np.random.default_rng(0)
    weights = {
        name: rng.standard_normal((1, 3 * gates, size)).astype(np.float32) for name, size in (("w", 2), ("r", 3))
    }
    made.graph.initializer.extend(numpy_helper.from_array(numbers, name) for name, numbers in weights.items())
    net = fp.onnx.InferenceSession(made)
    assert net.run(None, {"x": np.zeros((4, 0, 2), np.float32)})[0].shape == (4, 1, 0, 3)
    assert net.run(None, {"x": np.zeros((4, 2, 2), np.float32)})[0].shape == (4, 1, 2, 3)


def test_weights_are_read_again_where_the_plan_that_had_them_fails(monkeypatch):
    def fail(graph, *rest, **options):
        assert options["owned"]
        raise ShapeError("no plan")

    monkeypatch.setattr("fmtprop.onnx.session.compile_graph", fail)
    model, weights = of_weights()
    made = fp.onnx.InferenceSession(model)
    assert made.reason == "no plan"
    x = np.random.default_rng(1).standard_normal((1, 33, 5, 5), np.float32)
    want = torch.nn.functional.conv2d(torch.from_numpy(x), torch.from_numpy(weights)).numpy()
    np.testing.assert_allclose(made.run(None, {"x": x})[0], want, rtol=1e-4, atol=1e-4)
