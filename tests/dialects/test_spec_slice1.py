"""Rules and worked examples of SPEC section 3 (DML_SLICE1), each named by its row."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fmtprop.dialects.slice1 import FeatureLevel, Slice1
from fmtprop.errors import FormatError, ShapeError
from fmtprop.layout import MemoryDesc, pack, unpack

IMAGE = np.arange(1, 17, dtype=np.float32).reshape(1, 1, 4, 4)


def test_s1_start_depends_on_the_sign() -> None:
    op = Slice1((0, 0, 0, 1), (1, 1, 4, 3), (1, 1, -2, 2))
    assert op.start == (0, 0, 3, 1)


def test_s1_positive_stride_from_the_start_negative_from_the_end() -> None:
    row = np.arange(10)
    assert Slice1((2,), (6,), (2,)).apply(row).tolist() == [2, 4, 6]
    assert Slice1((2,), (6,), (-2,)).apply(row).tolist() == [7, 5, 3]


def test_s2_max_copied() -> None:
    assert Slice1((0, 0), (4, 7), (2, -3)).max_copied == (2, 3)
    assert Slice1((0,), (5,), (100,)).max_copied == (1,)


def test_s2_output_need_not_copy_every_reachable_element() -> None:
    assert Slice1((2,), (6,), (2,), (2,)).apply(np.arange(10)).tolist() == [2, 4]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Slice1((0, 0), (4, 0), (1, 1)), r"axis 1 \(b\): the window is empty \(InputWindowSizes is 0\)"),
        (lambda: Slice1((0,), (4,), (0,)), r"axis 0 \(a\): InputWindowStrides must not be 0"),
        (lambda: Slice1((0,), (4,), (2,), (3,)), r"output size 3 must lie between 1 and 2 = 1 \+ \(4 - 1\) / \|2\|"),
        (lambda: Slice1((0,), (4,), (2,), (0,)), "output size 0 must lie between 1 and 2"),
        (lambda: Slice1((0,), (4, 4), (1, 1)), r"InputWindowSizes \(4, 4\) must have 1 entries"),
        (lambda: Slice1((0,), (4,), (1, 1)), r"InputWindowStrides \(1, 1\) must have 1 entries"),
        (lambda: Slice1((0,), (4,), (1,), (1, 1)), r"OutputSizes \(1, 1\) must have the input's rank 1"),
        (lambda: Slice1((-1,), (4,), (1,)), r"InputWindowOffsets\[0\] is -1"),
        (lambda: Slice1((3,), (4,), (1,)).check((6,)), r"window offset 3 \+ size 4 exceeds the input's size 6"),
        (lambda: Slice1((3,), (4,), (1,)).apply(np.arange(6)), "exceeds the input's size 6"),
        (lambda: Slice1((3,), (4,), (1,)).check((9, 9)), "InputTensor has 2 dimensions, but the window has 1"),
        (lambda: Slice1((0,), (4,), (1,)).check((4,), "f32", "f16"), "InputTensor is f32 but OutputTensor is f16"),
        (lambda: Slice1((0,), (4,), (1,)).check((4,), "bf16"), "data type bf16 is not supported at feature level 4.1"),
        (lambda: Slice1((0,), (4,), (1,)).check((4,), feature_level="5.0"), "unknown feature level '5.0'"),
    ],
)
def test_s2_each_rule_has_its_own_error(make: object, says: str) -> None:
    with pytest.raises(ShapeError, match=says):
        make()  # type: ignore[operator]


# data types, ranks, by feature level, as the document's table of tensor support has them
UP_TO_32 = {"f32", "f16", "s32", "s16", "s8", "u32", "u16", "u8"}
SUPPORT = {
    "4.1": (UP_TO_32 | {"f64", "s64", "u64"}, range(1, 9)),
    "3.0": (UP_TO_32, range(1, 9)),
    "2.1": (UP_TO_32, range(4, 6)),
}


@pytest.mark.parametrize("level", SUPPORT)
def test_s2_feature_levels(level: str) -> None:
    types, ranks = SUPPORT[level]
    for rank in range(1, 10):
        op = Slice1((0,) * rank, (2,) * rank, (1,) * rank)
        for dtype in (*UP_TO_32, "f64", "s64", "u64", "bf16", "boolean"):
            if dtype in types and rank in ranks:
                op.check((2,) * rank, dtype, feature_level=level)
            else:
                with pytest.raises(ShapeError, match=f"feature level {level}"):
                    op.check((2,) * rank, dtype, feature_level=f"DML_FEATURE_LEVEL_{level.replace('.', '_')}")
    assert [x.value for x in FeatureLevel] == sorted(SUPPORT)


def test_s2_data_types_under_their_own_names() -> None:
    op = Slice1((0,), (1,), (1,))
    for name in "f64 f32 f16 i64 i32 i16 i8 u64 u32 u16 u8".split():
        op.check((1,), name)
    for name in "FLOAT64 FLOAT32 FLOAT16 INT64 INT32 INT16 INT8 UINT64 UINT32 UINT16 UINT8".split():
        op.check((1,), name, f"DML_TENSOR_DATA_TYPE_{name}")


def test_s3_example_1_positive_strides() -> None:
    op = Slice1((0, 0, 0, 1), (1, 1, 4, 3), (1, 1, 2, 2), (1, 1, 2, 2))
    op.check(IMAGE.shape, "f32", "f32", "2.1")
    assert op.apply(IMAGE).tolist() == [[[[2, 4], [10, 12]]]]


def test_s3_example_2_negative_strides() -> None:
    op = Slice1((0, 0, 0, 1), (1, 1, 4, 3), (1, 1, -2, 2), (1, 1, 2, 2))
    assert op.apply(IMAGE).tolist() == [[[[14, 16], [6, 8]]]]


def test_s4_positive_strides_are_a_view() -> None:
    md = MemoryDesc(IMAGE.shape)
    op = Slice1((0, 0, 0, 1), (1, 1, 4, 3), (1, 1, 2, 2))
    view = op.view(md)
    assert (view.dims, view.strides[2:], view.offset0) == ((1, 1, 2, 2), (8, 2), 1)
    assert unpack(pack(IMAGE, md), view).tolist() == [[[[2, 4], [10, 12]]]]
    assert op.is_view(md)


def test_s4_copies_where_the_format_does_not_permit() -> None:
    op = Slice1((0, 0, 0, 1), (1, 1, 4, 3), (1, 1, -2, 2))
    assert not op.is_view(MemoryDesc(IMAGE.shape))
    with pytest.raises(FormatError, match="no negative strides; copy instead"):
        op.view(MemoryDesc(IMAGE.shape))
    blocked = MemoryDesc((1, 32, 4, 4), tag="aBcd16b")
    assert Slice1((0, 16, 0, 1), (1, 16, 4, 3), (1, 1, 2, 2)).is_view(blocked)
    assert not Slice1((0, 8, 0, 0), (1, 16, 4, 4), (1, 1, 1, 1)).is_view(blocked)
    with pytest.raises(FormatError, match="slice with step 2: axis 1"):
        Slice1((0, 0, 0, 0), (1, 32, 4, 4), (1, 2, 1, 1)).view(blocked)
    assert not Slice1((0,), (2,), (1,)).is_view(MemoryDesc.any((4,)))


def test_s4_a_single_element_has_no_direction() -> None:
    view = Slice1((1,), (5,), (-7,)).view(MemoryDesc((8,)))
    assert (view.dims, view.offset0) == ((1,), 5)


@st.composite
def operators(draw: st.DrawFn) -> tuple[tuple[int, ...], Slice1]:
    dims = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    sizes = tuple(draw(st.integers(1, n)) for n in dims)
    offsets = tuple(draw(st.integers(0, n - k)) for n, k in zip(dims, sizes, strict=True))
    strides = tuple(draw(st.integers(-4, 4).filter(bool)) for _ in dims)
    most = Slice1(offsets, sizes, strides).max_copied
    return dims, Slice1(offsets, sizes, strides, [draw(st.integers(1, n)) for n in most])


@settings(max_examples=60)
@given(operators(), st.randoms(use_true_random=False))
def test_s1_s4_reference_agrees_with_the_formula_and_with_the_view(case: tuple, random: object) -> None:
    dims, op = case
    array = np.arange(np.prod(dims), dtype=np.int32).reshape(dims)
    out = op.apply(array)
    for x in np.ndindex(*op.output_sizes):
        start = [o + (n - 1 if s < 0 else 0) for o, n, s in zip(op.offsets, op.sizes, op.strides, strict=True)]
        assert out[x] == array[tuple(b + s * i for b, s, i in zip(start, op.strides, x, strict=True))]
    order = list(range(len(dims)))
    random.shuffle(order)  # type: ignore[attr-defined]
    md = MemoryDesc(dims, "s32", tag="".join("abcd"[a] for a in order))
    if op.is_view(md):
        assert (unpack(pack(array, md), op.view(md)) == out).all()
    else:
        assert any(s < 0 and n > 1 for s, n in zip(op.strides, op.output_sizes, strict=True))


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 8), st.integers(-9, 9), st.integers(-9, 9), st.integers(-3, 3)), max_size=4))
def test_python_slices_map_onto_the_operator(axes: list[tuple[int, int, int, int]]) -> None:
    dims = [n for n, *_ in axes]
    slices = [slice(start, stop, step or None) for _, start, stop, step in axes]
    array = np.arange(int(np.prod(dims))).reshape(dims)
    expected = array[tuple(slices)]
    if expected.size:
        assert np.array_equal(Slice1.from_slices(dims, slices).apply(array), expected)
    else:
        with pytest.raises(ShapeError, match="the window is empty"):
            Slice1.from_slices(dims, slices)


def test_flips_map_onto_the_operator() -> None:
    array = np.arange(24).reshape(2, 3, 4)
    backwards = slice(None, None, -1)
    flip = Slice1.from_slices(array.shape, [backwards, slice(None), backwards])
    assert np.array_equal(flip.apply(array), np.flip(array, (0, 2)))
    with pytest.raises(ShapeError, match="2 slices for 1 dimensions"):
        Slice1.from_slices((4,), [slice(None), slice(None)])
