"""Operands at the edge of what PyTorch's functions take: scalars of a run, unsigned types, axes without elements."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper, parser
from onnx.reference import ReferenceEvaluator

import fmtprop as fp
from fmtprop.errors import ImportModelError

OPTIONS = {"policy": "propagate", "confirm": False}

X = np.arange(6, dtype=np.float32).reshape(2, 3)
EMPTY = np.zeros((2, 0), np.float32)
PLACE = np.int64([[1]])
ONES = np.ones((1, 3, 1, 1), np.float32)


def model(text: str, opset: int = 17) -> onnx.ModelProto:
    return parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}]> g {text}')


def assert_as_the_reference(made: onnx.ModelProto, feed: dict[str, np.ndarray], *, planned: bool = True) -> None:
    session = fp.onnx.InferenceSession(made, **OPTIONS)
    for got, want in zip(session.run(None, feed), ReferenceEvaluator(made).run(None, feed), strict=True):
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    assert (session.reason is None) == planned


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("(float[2,3] x, int64 i) => (float[3] y) { y = Gather(x, i) }", np.int64(1)),
        ("(float[n,3] x, int64 i) => (float[3] y) { y = Gather(x, i) }", np.int64(-2)),
        ("(float[2,3] x, int32 i) => (float[2] y) { y = Gather<axis=1>(x, i) }", np.int32(2)),
    ],
)
def test_a_run_gives_the_scalar_that_names_a_row(text, place):
    assert_as_the_reference(model(text), {"x": X, "i": place})


def test_the_place_of_the_largest_number_names_a_row():
    text = "(float[4] s, float[4,2] w) => (float[2] y) { i = ArgMax<axis=0, keepdims=0>(s) y = Gather(w, i) }"
    assert_as_the_reference(
        model(text), {"s": np.float32([0, 3, 1, 2]), "w": np.arange(8, dtype=np.float32).reshape(4, 2)}
    )


@pytest.mark.parametrize("value", [9007199254740993, -9007199254740993])
def test_a_whole_number_that_f64_lacks_pads_exactly(value):
    text = f"(int64[1] x) => (int64[2] y) <int64[2] p = {{0, 1}}, int64 c = {{{value}}}> {{ y = Pad(x, p, c) }}"
    (got,) = fp.onnx.InferenceSession(model(text), **OPTIONS).run(None, {"x": np.int64([1])})
    assert got.tolist() == [1, value]


@pytest.mark.parametrize(
    ("windows", "dims"),
    [
        ("kernel_shape=[2,3,3], pads=[1,1,1,1,1,1]", (1, 5, 5)),
        ('kernel_shape=[3,1,1], auto_pad="SAME_UPPER"', (2, 5, 1)),
    ],
)
def test_a_window_reaches_over_an_axis_and_both_paddings(windows, dims):
    sizes = ",".join(map(str, dims))
    made = model(f"(float[1,1,{sizes}] x) => (float[?,?,?,?,?] y) {{ y = AveragePool<{windows}>(x) }}")
    x = np.random.default_rng(0).random((1, 1, *dims), np.float32)
    assert_as_the_reference(made, {"x": x})


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
@pytest.mark.parametrize("more", ["", ", strides=[2], pads=[1, 0], ceil_mode=1"])
def test_bytes_on_one_axis_are_pooled(dtype, more):
    made = model(f"({dtype}[1,1,5] x) => ({dtype}[?,?,?] y) {{ y = MaxPool<kernel_shape=[2]{more}>(x) }}")
    assert_as_the_reference(made, {"x": np.array([[[1, 7, 3, 4, 9]]], dtype)})


@pytest.mark.parametrize(
    ("call", "opset"), [("InstanceNormalization(x, s, s)", 17), ("GroupNormalization<num_groups=3>(x, s, s)", 21)]
)
def test_one_number_is_normalized_to_its_shift(call, opset):
    made = model(f"(float[1,3,1,1] x) => (float[1,3,1,1] y) <float[3] s = {{1, 2, 3}}> {{ y = {call} }}", opset)
    (got,) = fp.onnx.InferenceSession(made, **OPTIONS).run(None, {"x": ONES})
    assert got.reshape(-1).tolist() == [1, 2, 3]


def test_a_real_signal_is_transformed_back_by_nodes_and_as_a_constant():
    signal = np.float32([[[1], [2], [3], [5]]])
    text = "(float[1,4,1] x) => (float[1,4,2] y, int64[a,b] z) { y = DFT<inverse=1, axis=1>(x) z = NonZero(x) }"
    assert_as_the_reference(model(text), {"x": signal}, planned=False)
    text = "(float[1,4,2] x) => (float[1,4,2] y) <float[1,4,1] w = {1,2,3,5}> { k = DFT<inverse=1>(w) y = Add(x, k) }"
    assert_as_the_reference(model(text), {"x": np.zeros((1, 4, 2), np.float32)})


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "uint64"])
@pytest.mark.parametrize(
    "text",
    [
        "({0}[2,3] x) => ({0}[2,3] y) {{ y = Abs(x) }}",
        "({0}[2,3] x) => ({0}[2,3] y) {{ y = Sign(x) }}",
        "({0}[2,3] x) => ({0}[2,3] y) {{ y = Trilu(x) }}",
        "({0}[2,3] x) => ({0}[2,3] y) <int64[3] l = {{1,2,1}}> {{ y = ReverseSequence(x, l) }}",
        "({0}[2,3] x) => ({0}[2,3] y) <int64[1,1] i = {{1}}> {{ u = Slice(x, i0, i1) y = ScatterND(x, i, u) }}",
        "({0}[2,3] x) => (int64[2,n] y) {{ y = NonZero(x) }}",
    ],
)
def test_unsigned_numbers_that_pytorch_only_stores_are_computed(text, dtype):
    text = (
        text.format(dtype)
        .replace("i0, i1", "zero, one")
        .replace("<int64[1,1]", "<int64[1] zero = {0}, int64[1] one = {1}, int64[1,1]")
    )
    planned = dtype != "uint64" and "NonZero" not in text
    assert_as_the_reference(model(text), {"x": np.array([[3, 0, 2], [60000, 1, 5]], dtype)}, planned=planned)


def test_unsigned_sums_and_places_of_the_largest():
    text = """(uint32[3] x, uint32[2] u) => (uint32[3] y, int64[1] z) <int64[2] i = {0, 0}>
        { y = ScatterElements<reduction="add">(x, i, u) z = ArgMax(x) }"""
    assert_as_the_reference(model(text, 18), {"x": np.uint32([1, 2, 3]), "u": np.uint32([5, 6])})


def test_bits_of_64_are_shifted_in_a_plan():
    text = """(uint64[4] x, uint64[4] n) => (uint64[4] y, uint64[4] z)
        { y = BitShift<direction="LEFT">(x, n) z = BitShift<direction="RIGHT">(x, n) }"""
    feed = {"x": np.uint64([2**64 - 1, 2**63, 7, 2**63 + 5]), "n": np.uint64([0, 63, 1, 3])}
    assert_as_the_reference(model(text), feed)


def test_the_largest_numbers_of_the_cells_of_regions():
    # ONNX's reference has no such operator: these are ONNX Runtime's results
    text = """(float[1,1,4,4] x, float[3,5] r) => (float[3,1,2,2] y) { y = MaxRoiPool<pooled_shape=[2,2]>(x, r) }"""
    regions = np.float32([[0, 0, 0, 3, 3], [0, 1.4, 0.6, 2.4, 3], [0, 5, 5, 9, 9]])
    feed = {"x": np.arange(16, dtype=np.float32).reshape(1, 1, 4, 4), "r": regions}
    (got,) = fp.onnx.InferenceSession(model(text), **OPTIONS).run(None, feed)
    assert got.reshape(3, 4).tolist() == [[5, 7, 13, 15], [9, 10, 13, 14], [0, 0, 0, 0]]


@pytest.mark.parametrize(
    ("text", "feed"),
    [
        ("(float[2,0] x, int64[1,1] i) => (float[1,0] y) { y = GatherND(x, i) }", {"i": PLACE}),
        (
            "(float[2,0] x, int64[1,1] i, float[1,0] u) => (float[2,0] y) { y = ScatterND(x, i, u) }",
            {"i": PLACE, "u": EMPTY[:1]},
        ),
        ("(float[2,0] x) => (float[2,0] y) <int64 a = {1}> { y = CumSum<exclusive=1>(x, a) }", {}),
    ],
)
def test_axes_without_elements(text, feed):
    assert_as_the_reference(model(text), {"x": EMPTY, **feed})


def test_places_of_bytes_count_from_the_end_of_a_long_axis():
    text = """(int32[2] x) => (float[2,200] y) <int64 d = {200}, float[2] v = {0, 1}>
        { z = Cast<to=3>(x) y = OneHot(z, d, v) }"""
    assert_as_the_reference(model(text), {"x": np.int32([-1, 5])})


def test_the_sign_of_nan_is_nan():
    (got,) = fp.onnx.InferenceSession(model("(float[3] x) => (float[3] y) { y = Sign(x) }"), **OPTIONS).run(
        None, {"x": np.float32([np.nan, -2, 0])}
    )
    np.testing.assert_array_equal(got, np.float32([np.nan, -1, 0]))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "(float[1,1,4,4] x) => (float[?,?,?,?] y) <float[1,1,1,1] w = {1}> { y = Conv<strides=[2]>(x, w) }",
            "must have 2 numbers",
        ),
        ("(float[2] x) => (float[2] y) { y = Cast<to=99>(x) }", "to is 99, which is no element type"),
    ],
)
def test_attributes_that_fit_no_operand(text, words):
    with pytest.raises(ImportModelError, match=words):
        fp.onnx.InferenceSession(model(text), **OPTIONS)


@pytest.mark.parametrize(("op", "opset"), [("Neg", 13), ("Neg", 18), ("Relu", 18), ("HardSwish", 22)])
def test_a_function_of_another_opset_is_written_out(op, opset):
    body = [helper.make_node(op, ["X"], ["Y"])]
    function = helper.make_function("loc", "F", ["X"], ["Y"], body, [helper.make_opsetid("", opset)])
    (x, y) = (helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2]) for name in "xy")
    graph = helper.make_graph([helper.make_node("F", ["x"], ["y"], domain="loc")], "g", [x], [y])
    imports = [helper.make_opsetid("", 22), helper.make_opsetid("loc", 1)]
    assert_as_the_reference(
        helper.make_model(graph, opset_imports=imports, functions=[function], ir_version=10), {"x": np.float32([1, -2])}
    )


@pytest.mark.parametrize("ratio", [0, 2])
@pytest.mark.parametrize("mode", ["avg", "max"])
@pytest.mark.parametrize("transformation", ["half_pixel", "output_half_pixel"])
def test_boxes_of_images_are_sampled(transformation, mode, ratio):
    text = f"""(float[2,3,9,7] x, float[k,4] boxes, int64[k] places) => (float[k,3,4,2] y) {{
        y = RoiAlign<coordinate_transformation_mode="{transformation}", mode="{mode}", sampling_ratio={ratio},
            output_height=4, output_width=2, spatial_scale=0.5>(x, boxes, places) }}"""
    x = np.float32(np.random.default_rng(0).standard_normal((2, 3, 9, 7)))
    boxes = np.float32([[0, 0, 14, 18], [3, 2, 9.5, 12], [-6, -4, 5, 40], [5, 5, 5, 5], [-40, -40, -20, -20]])
    feed = {"x": x, "boxes": boxes, "places": np.int64([0, 1, 1, 0, 1])}
    assert_as_the_reference(model(text, 16), feed, planned=ratio > 0)


def test_many_boxes_are_sampled_in_parts(monkeypatch):
    from fmtprop.onnx.model.operators import resampling

    text = """(float[1,3,9,7] x, float[k,4] boxes, int64[k] places) => (float[k,3,2,2] y) {
        y = RoiAlign<sampling_ratio=2, output_height=2, output_width=2>(x, boxes, places) }"""
    draw = np.random.default_rng(0)
    starts = draw.random((7, 2)) * 4
    boxes = np.float32(np.concatenate([starts, starts + 3 * draw.random((7, 2))], 1))
    feed = {"x": np.float32(draw.standard_normal((1, 3, 9, 7))), "boxes": boxes, "places": np.zeros(7, np.int64)}
    monkeypatch.setattr(resampling, "_SAMPLES_NBYTES", 400)
    assert_as_the_reference(model(text, 16), feed)


@pytest.mark.parametrize("scale", [1.4, 2.8, 0.7])
def test_a_scale_multiplies_in_f32(scale):
    text = f"""(float[1,1,5,10] x) => (float[1,1,h,w] y) <float[4] s = {{1, 1, {scale}, {scale}}}> {{
        y = Resize<mode="linear">(x, , s) }}"""
    (y,) = fp.onnx.InferenceSession(model(text), **OPTIONS).run(None, {"x": np.ones((1, 1, 5, 10), np.float32)})
    assert y.shape[2:] == (round(5 * scale - 0.25), round(10 * scale)), "as PyTorch and ONNX Runtime"


def test_halves_of_pixels_for_neighbours():
    how = 'mode="nearest", nearest_mode="floor", coordinate_transformation_mode="tf_half_pixel_for_nn"'
    text = f"""(float[1,1,1,5] x, float[0] none) => (float[1,1,1,8] y) <float[4] s = {{1, 1, 1, 1.6}}> {{
        y = Resize<{how}>(x, none, s) }}"""
    x = np.arange(5, dtype=np.float32).reshape(1, 1, 1, 5)
    session = fp.onnx.InferenceSession(model(text, 11), **OPTIONS)
    (y,) = session.run(None, {"x": x, "none": np.zeros(0, np.float32)})
    assert y.ravel().tolist() == [0, 0, 1, 2, 2, 3, 4, 4]


def test_a_result_is_not_what_a_branch_holds():
    text = """(float[n] x, bool c) => (float[m] y) {
        found = NonZero(x)
        y = If(c) <
            then_branch = a () => (float[3] t) <float[3] w = {1, 2, 3}> { t = Identity(w) },
            else_branch = b () => (float[2] e) <float[2] v = {4, 5}> { e = Identity(v) }
        > }"""
    session = fp.onnx.InferenceSession(model(text), **OPTIONS)
    for _ in range(2):
        (y,) = session.run(["y"], {"x": np.ones(4, np.float32), "c": np.array(True)})
        assert y.tolist() == [1, 2, 3]
        y[:] = 9
