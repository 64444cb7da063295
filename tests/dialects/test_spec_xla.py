"""Worked examples of SPEC section 4 (XLA shapes and layouts), each named by its row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fmtprop.dialects.xla import IndexUtil, Layout, Shape, make_shape, parse_shape
from fmtprop.errors import FormatError, ShapeError
from fmtprop.layout import MemoryDesc, pack

ABCDEF = np.frombuffer(b"abcdef", np.uint8).reshape(2, 3)


def test_x1_rank_true_rank_and_negative_numbers() -> None:
    shape = make_shape("f32", (5, 1, 7))
    assert (shape.rank, shape.true_rank) == (3, 2)
    assert [shape.dimension(k) for k in (0, 1, 2, -1, -2, -3)] == [5, 1, 7, 7, 1, 5]
    for number in (3, -4):
        with pytest.raises(ShapeError, match=f"dimension {number} is out of range"):
            shape.dimension(number)


def test_x2_dimension_0_is_minor() -> None:
    assert Layout((0, 1)).linearize(ABCDEF).tobytes() == b"adbecf"


def test_x2_letters_are_letters() -> None:
    letters = np.array([list("abc"), list("def")])
    assert "".join(Layout((0, 1)).linearize(letters)) == "adbecf"
    assert "".join(Layout((1, 0)).linearize(letters)) == "abcdef"
    assert Layout((0, 1), (3, 5), 0).linearize(letters).tolist() == ["a", "d", "", "b", "e", "", "c", "f", *[""] * 7]
    with pytest.raises(ShapeError, match="padding value 1: an array of dtype <U1 can be padded with 0 only"):
        Layout((0, 1), (3, 5), 1).linearize(letters)


@pytest.mark.parametrize("dtype", ["c8", ">f4", "M8[s]", "O", "S2", [("x", "i4"), ("y", "f8")]])
def test_x2_linearize_moves_elements_of_any_type(dtype: Any) -> None:
    array = np.arange(6).reshape(2, 3).astype(dtype)
    image = Layout((0, 1), (3, 3)).linearize(array)
    assert image.dtype == array.dtype
    assert np.array_equal(image.reshape(3, 3).T[:2], array)


def test_x2_dimension_0_is_major() -> None:
    assert Layout((1, 0)).linearize(ABCDEF).tobytes() == b"abcdef"


def test_x2_default_is_major_to_minor() -> None:
    assert make_shape("f32", (2, 3, 4, 5)).layout.minor_to_major == (3, 2, 1, 0)


def test_x3_padding() -> None:
    image = Layout((0, 1), (3, 5), 0).linearize(ABCDEF)
    assert image.tobytes() == b"ad\0be\0cf\0\0\0\0\0\0\0"
    assert Layout((0, 1), (3, 5)).linearize(ABCDEF).tobytes() == image.tobytes()


def test_x3_other_padding_values() -> None:
    values = np.array([[1.0, 2.0]], np.float32)
    assert Layout((1, 0), (1, 4), 7).linearize(values).tolist() == [1, 2, 7, 7]
    assert Layout((1, 0), (1, 3), "lowest").linearize(values).tolist() == [1, 2, -np.inf]
    assert Layout((1, 0), (1, 3), "highest").linearize(values.astype(np.int8)).tolist() == [1, 2, 127]
    assert Layout((1, 0), (1, 3), "one").linearize(values > 1).tolist() == [False, True, True]
    bf16 = Shape("bf16", (1, 2), Layout((1, 0), (1, 3), 1))
    assert bf16.linearize(np.array([[0x4000, 0x4040]], np.uint16)).tolist() == [0x4000, 0x4040, 0x3F80]


@pytest.mark.parametrize("value", [None, 0, "zero", 7])
def test_x3_an_empty_array_is_all_padding(value: Any) -> None:
    fill = 7 if value == 7 else 0
    assert Layout((1, 0), (2, 3), value).linearize(np.zeros((0, 3), np.int8)).tolist() == [fill] * 6
    assert Layout((1, 0), None, value).linearize(np.zeros((0, 3), np.int8)).tolist() == []


@pytest.mark.parametrize(
    ("value", "dtype", "says"),
    [
        (np.nan, np.int32, "padding value nan is not a value of data type s32: it must be an integer from -2147483648"),
        (np.inf, np.int32, "padding value inf is not a value of data type s32"),
        (300, np.uint8, "padding value 300 is not a value of data type u8: it must be an integer from 0 to 255"),
        (-1, np.uint8, "padding value -1 is not a value of data type u8"),
        (2**64, np.uint64, "padding value 18446744073709551616 is not a value of data type u64"),
        (2, np.bool_, "padding value 2 is not a value of data type boolean: it must be an integer from 0 to 1"),
        (np.nan, np.bool_, "padding value nan is not a value of data type boolean"),
        (
            1e39,
            np.float32,
            "padding value 1e.39 is not a value of data type f32: it is too large; 'highest' and 'lowest'",
        ),
        (-70000, np.float16, "padding value -70000 is not a value of data type f16"),
        (10**400, np.float64, "is not a value of data type f64: it is too large"),
    ],
)
def test_x3_padding_that_the_data_type_does_not_hold(value: Any, dtype: Any, says: str) -> None:
    with pytest.raises(ShapeError, match=says):
        Layout((0,), (3,), value).linearize(np.zeros(2, dtype))


def test_x3_padding_that_bf16_does_not_hold() -> None:
    zeros = np.zeros(2, np.uint16)
    assert Layout((0,), (3,), 3.38e38).linearize(zeros, "bf16").tolist() == [0, 0, 0x7F7E]
    assert Layout((0,), (3,), -np.inf).linearize(zeros, "bf16").tolist() == [0, 0, 0xFF80]
    for value in (3.4e38, 1e39):
        with pytest.raises(ShapeError, match=r"is not a value of data type bf16"):
            Layout((0,), (3,), value).linearize(zeros, "bf16")


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(2**64 - 1, np.uint64), (-(2**63), np.int64), (1e39, np.float64), (np.inf, np.float16), (True, np.bool_)],
)
def test_x3_padding_that_the_data_type_just_holds(value: Any, dtype: Any) -> None:
    assert Layout((0,), (3,), value).linearize(np.zeros(2, dtype)).tolist() == [0, 0, value]
    assert np.isnan(Layout((0,), (3,), np.nan).linearize(np.zeros(2, np.float32))[2])


def test_x4_index_util_both_ways() -> None:
    shape = Shape("f32", (2, 3), Layout((0, 1)))
    assert IndexUtil.multidimensional_index_to_linear_index(shape, (1, 2)) == 5
    assert IndexUtil.linear_index_to_multidimensional_index(shape, 2) == (0, 1)
    for linear in (-1, 6):
        with pytest.raises(ShapeError, match=f"linear index {linear} is out of range"):
            IndexUtil.linear_index_to_multidimensional_index(shape, linear)
    for index in ((2, 0), (0, 3), (0, -1), (0,)):
        with pytest.raises(ShapeError, match="index"):
            IndexUtil.multidimensional_index_to_linear_index(shape, index)


def test_x4_index_util_with_padding() -> None:
    shape = Shape("f32", (2, 3), Layout((0, 1), (3, 5), 9))
    assert IndexUtil.multidimensional_index_to_linear_index(shape, (1, 2)) == 7
    assert IndexUtil.linear_index_to_multidimensional_index(shape, 7) == (1, 2)
    with pytest.raises(ShapeError, match=r"linear index 2 of .* lies in the padding"):
        IndexUtil.linear_index_to_multidimensional_index(shape, 2)
    with pytest.raises(ShapeError, match="linear index 15 is out of range"):
        IndexUtil.linear_index_to_multidimensional_index(shape, 15)


@pytest.mark.parametrize("index", [(0.5, 2), (0, 2.0), (0, None), "00", 5])
def test_x4_an_index_is_integers(index: Any) -> None:
    shape = Shape("f32", (2, 3), Layout((0, 1), (3, 5), 0))
    with pytest.raises(ShapeError, match="index must be a sequence of integers, not"):
        IndexUtil.multidimensional_index_to_linear_index(shape, index)


@pytest.mark.parametrize("number", [1.0, 1.5, None, "1", (1,)])
def test_x4_a_linear_index_and_a_dimension_are_integers(number: Any) -> None:
    shape = make_shape("f32", (2, 3))
    with pytest.raises(ShapeError, match="linear index must be an integer, not"):
        IndexUtil.linear_index_to_multidimensional_index(shape, number)
    with pytest.raises(ShapeError, match="dimension number must be an integer, not"):
        shape.dimension(number)
    with pytest.raises(ShapeError, match=r"rank\[0\] is .*; rank must be integers"):
        Layout.default(number)


def test_x4_numpys_integers_are_integers() -> None:
    shape = Shape("f32", (2, 3), Layout((0, 1)))
    assert IndexUtil.multidimensional_index_to_linear_index(shape, np.array([1, 2])) == 5  # type: ignore[arg-type]
    assert IndexUtil.linear_index_to_multidimensional_index(shape, np.int8(2)) == (0, 1)  # type: ignore[arg-type]
    assert shape.dimension(np.int64(-1)) == 3  # type: ignore[arg-type]


def test_x4_make_shape() -> None:
    shape = make_shape("F32", (2, 3, 4, 5))
    assert str(shape) == "f32[2,3,4,5]{3,2,1,0}"
    assert parse_shape(str(shape)) == shape


@pytest.mark.parametrize(
    "text",
    [
        *("f32[2,3]{0,1}", "f32[2,3]{1,0}", "bf16[7]{0}", "pred[]", "s8[1,2,3]{1,0,2}", "u16[2,3]{0,1:pad(3,5)=0}"),
        *("u64[1]{0:pad(2)=18446744073709551615}", "f64[1]{0:pad(2)=0.5}", "f32[1]{0:pad(2)=-inf}"),
    ],
)
def test_text_form_prints_back(text: str) -> None:
    assert str(parse_shape(text)) == text


def test_text_form_is_text() -> None:
    with pytest.raises(FormatError, match="5 is not an array shape such as"):
        parse_shape(5)  # type: ignore[arg-type]


def test_text_form_without_layout() -> None:
    assert parse_shape("f32[2,3]") == make_shape("f32", (2, 3))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("f32", "is not an array shape"),
        ("(f32[2], f32[3])", "is not an array shape"),
        ("f32[<=2]", "is not an array shape"),
        ("f32[8,128]{1,0:T(8,128)}", "tiles are not supported"),
        ("f33[2]", "unknown element type 'f33'"),
        ("f32[2,,3]", "is not a list of integers"),
        ("f32[2]{0:pad(4)=x}", "padding value 'x' is not a number"),
    ],
)
def test_bad_text(text: str, says: str) -> None:
    with pytest.raises(FormatError, match=says):
        parse_shape(text)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Layout((0, 0)), r"minor_to_major \(0, 0\) must hold each of 0 to 1 exactly once"),
        (lambda: Layout((1, 2)), "must hold each of 0 to 1"),
        (lambda: Layout((0, 1), (3,)), r"padded_dimensions \(3,\) must have one entry per dimension"),
        (lambda: Layout((0,), (3,), "two"), "padding_value 'two' must be a number or one of zero"),
        (lambda: Layout((0,), (3,), [1]), r"padding_value \[1\] must be a number or one of zero"),  # type: ignore[arg-type]
        (lambda: Layout((0,), (3,), 1j), "padding_value 1j must be a number"),  # type: ignore[arg-type]
        (lambda: Layout((0,)).linearize([[1], [2, 3]]), r"linearize: numpy cannot read this list \("),
        (lambda: Layout((0, 1), (2**62, 8)).linearize(ABCDEF), r"beyond 2\*\*63 bytes"),
        (lambda: Layout((0, 1)).linearize(ABCDEF, "f32"), "has dtype uint8, but f32 is stored as float32; convert it"),
        (lambda: Shape("f32", (2, 3), Layout((0,))), "rank 2, the layout .* 1"),
        (lambda: Shape("f32", (2, 3), Layout((0, 1), (1, 3))), r"padded_dimensions\[0\] is 1, smaller than"),
        (lambda: Shape("f32", (-2,)), r"dimensions\[0\] is -2"),
        (lambda: Shape("f32", (2, 3), (0, 1)), r"layout must be a Layout such as Layout\(\(1, 0\)\), not \(0, 1\)"),  # type: ignore[arg-type]
        (lambda: Layout((1, 0)).to_memory_desc((2, 3)), r"shape must be a Shape such as .*, not \(2, 3\)"),  # type: ignore[arg-type]
        (lambda: Layout.from_memory_desc("ab"), "md must be a MemoryDesc, not 'ab'"),  # type: ignore[arg-type]
        (lambda: Shape.from_memory_desc(None), "md must be a MemoryDesc, not None"),  # type: ignore[arg-type]
        (lambda: IndexUtil.linear_index_to_multidimensional_index((2, 3), 0), "shape must be a Shape such as"),  # type: ignore[arg-type]
        (lambda: Layout((0,), (3,), 0.5).linearize(np.zeros(2, np.int32)), "0.5 is not a value of data type s32"),
        (lambda: make_shape("f32", (2,)).linearize(np.zeros(3, np.float32)), r"shape \(3,\), not the dimensions"),
    ],
)
def test_refused(make: object, says: str) -> None:
    with pytest.raises(ShapeError, match=says):
        make()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("md", "says"),
    [
        (MemoryDesc((2, 16), tag="aB8b"), "cannot express inner blocks"),
        (MemoryDesc.any((2,)), "format any has no strides or blocks; ask a primitive descriptor for its choice"),
        (MemoryDesc.opaque((2,), "f32", 8, 0), "format opaque has no strides or blocks; reorder to blocked"),
        (MemoryDesc((2, 3), strides=(0, 1)), "cannot repeat elements"),
        (MemoryDesc((4, 4)).submemory((2, 4), (2, 0)), "no offset 8"),
        (MemoryDesc((2, 3), strides=(6, 2)), "most minor dimension must have stride 1, but dimension 1 has 2"),
        (MemoryDesc((2, 3, 4), strides=(25, 6, 1)), "stride 25 of dimension 0 is not a multiple of dimension 1's 6"),
        (MemoryDesc((2, 3), padded_dims=(3, 3), strides=(5, 1)), "cannot tell gaps between strides from padded"),
    ],
)
def test_a1_what_xla_cannot_express(md: MemoryDesc, says: str) -> None:
    with pytest.raises(FormatError, match=says):
        Shape.from_memory_desc(md)


def test_a1_what_a_memory_desc_cannot_express() -> None:
    with pytest.raises(FormatError, match="padding value 1 cannot be expressed"):
        Shape("f32", (2,), Layout((0,), (3,), 1)).to_memory_desc()


def test_a1_onednn_tag_as_minor_to_major() -> None:
    assert str(Shape.from_memory_desc(MemoryDesc((2, 3, 4, 5), tag="nhwc"))) == "f32[2,3,4,5]{1,3,2,0}"
    assert Shape.from_memory_desc(MemoryDesc((2, 3), strides=(5, 1))).layout == Layout((1, 0), (2, 5))


@pytest.mark.parametrize(
    "text",
    [
        *("f32[1,3]{1,0:pad(1,4)", "f32[2,1]{0,1:pad(4,1)", "f32[1,1]{1,0:pad(1,4)", "f32[2,1]{1,0:pad(2,4)"),
        *("f32[1,2,3]{2,1,0:pad(1,2,4)", "f32[2,1,3]{2,1,0:pad(2,4,3)", "f32[1,2,3]{2,1,0:pad(4,2,4)"),
        *("f32[0,3]{1,0:pad(2,3)", "f32[0,3]{1,0:pad(0,5)", "f32[2,0]{1,0:pad(2,1)", "f32[0,3,4]{2,1,0:pad(1,3,5)"),
    ],
)
def test_a1_padding_survives(text: str) -> None:
    """Padding that strides alone do not tell becomes padded_dims, whose value is zero."""
    shape = parse_shape(text + "}")
    md = shape.to_memory_desc()
    back = Shape.from_memory_desc(md)
    assert back.layout.padded_dimensions == shape.layout.padded_dimensions
    assert back.to_memory_desc() == md
    array = np.zeros(shape.dimensions, np.float32)
    assert shape.linearize(array).size == np.prod(shape.layout.padded_dimensions or ())
    if array.size:
        assert md.nbytes == shape.linearize(array).nbytes


@pytest.mark.parametrize(
    "md",
    [
        *(MemoryDesc(dims, tag=tag) for dims in ((0, 3), (3, 0), (0, 0), (0, 1), (1, 0)) for tag in ("ab", "ba")),
        *(MemoryDesc((2, 0, 3), tag=tag) for tag in ("abc", "acb", "bac", "bca", "cab", "cba")),
        MemoryDesc((0, 3), strides=(5, 1)),
        MemoryDesc((3, 0), strides=(5, 1)),
        MemoryDesc((0, 3), padded_dims=(2, 3), strides=(1, 2)),
    ],
    ids=repr,
)
def test_a1_an_empty_tensor_keeps_its_order(md: MemoryDesc) -> None:
    assert Shape.from_memory_desc(md).to_memory_desc() == md


def test_a1_strides_of_an_empty_tensor_that_xla_cannot_express() -> None:
    with pytest.raises(
        FormatError, match="stride 2 of dimension 0 is not a multiple of dimension 1's 1 that spans its 3"
    ):
        Shape.from_memory_desc(MemoryDesc((0, 3), strides=(2, 1)))


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    dims = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    layout = Layout(draw(st.permutations(range(len(dims)))))
    if dims and draw(st.booleans()):
        value = draw(st.sampled_from([0, None]))
        layout = Layout(layout.minor_to_major, [n + draw(st.integers(0, 2)) for n in dims], value)
    return Shape("s32", dims, layout)


@settings(max_examples=60)
@given(shapes())
def test_round_trips(shape: Shape) -> None:
    md = shape.to_memory_desc()
    assert parse_shape(str(shape)) == shape
    assert Shape.from_memory_desc(md).to_memory_desc() == md
    array = np.arange(1, int(np.prod(shape.dimensions)) + 1, dtype=np.int32).reshape(shape.dimensions)
    image = shape.linearize(array)
    assert np.array_equal(image, pack(array, md))
    for position in range(image.size):
        index = md.index_at(position)
        if index is None:
            assert image[position] == 0
        else:
            assert IndexUtil.linear_index_to_multidimensional_index(shape, position) == index
            assert IndexUtil.multidimensional_index_to_linear_index(shape, index) == position
            assert image[position] == array[index]
