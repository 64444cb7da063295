"""Views of a descriptor: what each format can express, and the error where it cannot."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fmtprop.errors import FormatError, ShapeError
from fmtprop.layout import MemoryDesc, pack, unpack


def test_permute_axes_is_onednns_convention_and_transpose_is_numpys() -> None:
    md = MemoryDesc((2, 3, 4))
    order = (2, 0, 1)  # axis 0 goes to place 2
    assert md.permute_axes(order).dims == (3, 4, 2)
    assert md.transpose(order).dims == (4, 2, 3)
    array = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    assert np.array_equal(unpack(array.ravel(), md.transpose(order)), array.transpose(order))


def test_any_can_be_permuted_and_reshaped() -> None:
    md = MemoryDesc.any((2, 3, 4))
    assert md.permute_axes((2, 0, 1)) == MemoryDesc.any((3, 4, 2))
    assert md.reshape((6, 4)) == MemoryDesc.any((6, 4))


def test_reshape_keeps_blocks_where_they_are_untouched() -> None:
    md = MemoryDesc((4, 32, 6, 6), tag="aBcd16b")
    assert md.reshape((4, 32, 36)).tag == "aBc16b"
    assert md.reshape((2, 2, 32, 6, 6)).tag == "abCde16c"
    assert md.reshape((1, 4, 32, 36)).tag == "abCd16c"
    assert MemoryDesc((6, 4), tag="ba").reshape((2, 3, 4)).tag == "cab"


def test_reshape_keeps_the_offset() -> None:
    sub = MemoryDesc((4, 6)).submemory((2, 6), (1, 0))
    assert (sub.reshape((12,)).strides, sub.reshape((12,)).offset0) == ((1,), 6)


@pytest.mark.parametrize(
    ("md", "dims", "says"),
    [
        (MemoryDesc((2, 3), tag="ba"), (6,), r"axis 0 \(a\) and axis 1 \(b\) do not follow each other in memory"),
        (MemoryDesc((4, 6), strides=(8, 1)), (24,), "do not follow each other"),
        (MemoryDesc((2, 17), tag="aB16b"), (34,), r"axis 1 \(b\) of dims \(2, 17\) is blocked by 16"),
        (MemoryDesc((32,), tag="A16a"), (2, 16), r"axis 0 \(a\) of dims \(32,\) is blocked by 16"),
        (MemoryDesc((2, 3), padded_dims=(2, 4)), (6,), r"axis 1 \(b\) is padded to 4"),
        (MemoryDesc((1, 3), tag="Ab8a"), (3,), r"axis 0 \(a\) of size 1 is blocked by 8 \(or padded to 8\)"),
    ],
)
def test_reshape_that_the_format_cannot_express(md: MemoryDesc, dims: tuple[int, ...], says: str) -> None:
    with pytest.raises(FormatError, match=says):
        md.reshape(dims)


@pytest.mark.parametrize(
    ("md", "dims", "says"),
    [
        (MemoryDesc((2, 3)), (7,), r"cannot reshape dims \(2, 3\) \(6 elements\) to \(7,\) \(7 elements\)"),
        (MemoryDesc((0, 3)), (3,), r"\(0 elements\) to \(3,\) \(3 elements\)"),
        (MemoryDesc((0, 3)), (3, 0), "a dimension of size 0 must stay as it is"),
        (MemoryDesc.any((2, 3)), (7,), "cannot reshape"),
    ],
)
def test_reshape_to_another_number_of_elements(md: MemoryDesc, dims: tuple[int, ...], says: str) -> None:
    with pytest.raises(ShapeError, match=says):
        md.reshape(dims)


@pytest.mark.parametrize("permutation", [(0,), (0, 0), (1, 2), (0, 1, 2)])
def test_not_a_permutation(permutation: tuple[int, ...]) -> None:
    for md in (MemoryDesc((2, 3)), MemoryDesc.any((2, 3))):
        with pytest.raises(ShapeError, match="must hold each of 0 to 1 exactly once"):
            md.permute_axes(permutation)


@pytest.mark.parametrize(
    ("dims", "offsets", "says"),
    [
        ((2, 3), (1, 1), r"axis 1 \(b\): offset 1 \+ size 3 does not lie inside size 3"),
        ((2, 3), (-1, 0), "offset -1"),
        ((-1, 3), (0, 0), "size -1"),
        ((2,), (0, 0), r"submemory dims \(2,\) must have one entry per dimension"),
        ((2, 3), (0,), r"submemory offsets \(0,\) must have one entry per dimension"),
    ],
)
def test_window_outside(dims: tuple[int, ...], offsets: tuple[int, ...], says: str) -> None:
    with pytest.raises(ShapeError, match=says):
        MemoryDesc((3, 3)).submemory(dims, offsets)


def test_submemory_of_a_blocked_format_cuts_whole_blocks() -> None:
    md = MemoryDesc((2, 40), tag="aB16b")
    tail = md.submemory((2, 8), (0, 32))
    assert (tail.padded_dims, tail.offset0) == ((2, 16), 32)
    assert md.submemory((2, 4), (0, 0)).padded_dims == (2, 4)  # inside one block
    with pytest.raises(FormatError, match=r"axis 1 \(b\): offset 8 must be a multiple of its block 16"):
        md.submemory((2, 16), (0, 8))
    with pytest.raises(FormatError, match="size 20 ends inside a block of 16"):
        md.submemory((2, 20), (0, 0))
    with pytest.raises(FormatError, match="has padding in front"):
        MemoryDesc((2, 3), padded_dims=(4, 3), padded_offsets=(1, 0)).submemory((1, 3), (0, 0))
    with pytest.raises(FormatError, match="format any"):
        MemoryDesc.any((2, 3)).submemory((1, 3), (0, 0))


def test_slices_are_views_that_onednn_may_not_know() -> None:
    md = MemoryDesc((3, 6))
    array = np.arange(18, dtype=np.float32).reshape(3, 6)
    view = md.slice((0, 1), (2, 3), (2, 2))
    assert np.array_equal(unpack(array.ravel(), view), array[0:3:2, 1:6:2])
    assert view.is_regular
    third = MemoryDesc((4, 3)).slice((0, 0), (4, 2), (1, 2))
    assert third.strides == (3, 2)
    assert not third.is_regular  # 2 * 2 > 3: M3 is broken, yet nothing overlaps
    with pytest.raises(ShapeError, match="overlap"):
        MemoryDesc(third.dims, strides=third.strides)
    assert third == MemoryDesc.view(third.dims, strides=third.strides)


def test_slice_of_blocked_and_padded_axes() -> None:
    md = MemoryDesc((2, 32, 6), tag="aBc16b")
    view = md.slice((0, 16, 1), (2, 16, 3), (1, 1, 2))
    assert view.strides == (192, 96, 32)
    with pytest.raises(FormatError, match=r"slice with step 2: axis 1 \(b\) of dims .* is blocked by 16"):
        md.slice((0, 0, 0), (2, 16, 6), (1, 2, 1))
    with pytest.raises(FormatError, match="is padded; copy instead"):
        MemoryDesc((3, 3), padded_dims=(4, 3)).slice((0, 0), (2, 3), (2, 1))
    with pytest.raises(FormatError, match="step -1: a memory descriptor has no negative strides"):
        MemoryDesc((3, 3)).slice((0, 0), (3, 3), (-1, 1))
    with pytest.raises(ShapeError, match=r"slice: step \(1,\) must have one entry per dimension"):
        MemoryDesc((3, 3)).slice((0, 0), (3, 3), (1,))
    with pytest.raises(ShapeError, match="does not lie inside"):
        MemoryDesc((3, 3)).slice((0, 0), (3, 2), (1, 3))


def test_broadcast_repeats_size_one_with_stride_zero() -> None:
    md = MemoryDesc((3, 1))
    view = md.broadcast_to((2, 3, 4))
    assert view.strides == (0, 1, 0)
    assert np.array_equal(unpack(np.arange(3, dtype=np.float32), view), np.broadcast_to([[0], [1], [2]], (2, 3, 4)))
    assert md.expand((2, -1, 4)) == view
    blocked = MemoryDesc((1, 32), tag="aB16b").broadcast_to((5, 4, 32))
    assert (blocked.strides, blocked.inner_blocks) == ((0, 0, 16), ((2, 16),))


def test_broadcasts_that_do_not_exist() -> None:
    with pytest.raises(ShapeError, match=r"cannot broadcast dims \(3, 2\) to \(3, 4\): axis 1 \(b\) has size 2, not 1"):
        MemoryDesc((3, 2)).broadcast_to((3, 4))
    with pytest.raises(ShapeError, match="it has fewer dimensions"):
        MemoryDesc((3, 2)).broadcast_to((2,))
    with pytest.raises(FormatError, match="its size 1 is padded to 16"):
        MemoryDesc((2, 1), tag="aB16b").broadcast_to((2, 5))
    with pytest.raises(ShapeError, match="-1 keeps an existing dimension only"):
        MemoryDesc((3,)).expand((-1, 3))


def test_a_reshape_of_a_broadcast_stays_one() -> None:
    md = MemoryDesc((1, 1, 4)).broadcast_to((2, 3, 4))
    assert md.reshape((6, 4)).strides == (0, 1)
    with pytest.raises(FormatError, match="do not follow each other"):
        md.reshape((2, 12))


def test_pack_through_a_view_changes_the_view_only() -> None:
    buffer = np.zeros(12, np.float32)
    pack(np.ones((2, 2), np.float32), MemoryDesc((3, 4)).slice((0, 1), (2, 2), (2, 2)), out=buffer)
    assert buffer.reshape(3, 4).tolist() == [[0, 1, 0, 1], [0, 0, 0, 0], [0, 1, 0, 1]]


@given(st.lists(st.sampled_from([1, 1, 2, 3, 4]), min_size=2, max_size=5), st.randoms(use_true_random=False))
def test_the_stride_of_a_dimension_of_one_never_matters(dims: list[int], random: Random) -> None:
    order = random.sample(range(len(dims)), len(dims))
    one = MemoryDesc(tuple(dims[axis] for axis in order)).transpose([order.index(axis) for axis in range(len(dims))])
    strides = [stride if size > 1 else random.randint(1, 99) for size, stride in zip(dims, one.strides, strict=True)]
    other = MemoryDesc(tuple(dims), strides=tuple(strides))
    assert one == other
    merged = list(dims)
    while len(merged) > 1 and random.random() < 0.7:
        first = random.randrange(len(merged) - 1)
        merged[first : first + 2] = [merged[first] * merged[first + 1]]
    outcomes = []
    for desc in (one, other):
        try:
            outcomes.append(desc.reshape(tuple(merged)))
        except FormatError:
            outcomes.append(None)
    assert outcomes[0] == outcomes[1]
