"""Parts of a format that are dense: what the rule promises, checked address by address."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fmtprop.errors import ShapeError
from fmtprop.layout import MemoryDesc
from fmtprop.layout.parts import in_place_parts


def test_parts_are_made_once():
    first, second = (in_place_parts(MemoryDesc((1, 48, 5, 5), tag="aBcd16b"), 1, [16, 32]) for _ in range(2))
    assert all(a is b for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("dims", "tag", "axis", "sizes", "dense"),
    [
        ((1, 48, 5, 5), "abcd", 1, (17, 31), True),
        ((1, 48, 5, 5), "aBcd16b", 1, (16, 32), True),
        ((1, 48, 5, 5), "aBcd8b", 1, (8, 40), True),
        ((1, 48, 5, 5), "aBcd16b", 1, (8, 40), False),  # cut inside a block
        ((1, 35, 5, 5), "aBcd16b", 1, (16, 19), True),  # the last part is padded, as the whole is
        ((1, 35, 5, 5), "aBcd16b", 1, (19, 16), False),
        ((1, 48, 5, 5), "acdb", 1, (16, 32), False),  # channels of a pixel lie together
        ((1, 48, 1, 1), "acdb", 1, (16, 32), True),
        ((2, 48, 5, 5), "abcd", 1, (16, 32), False),  # the second image follows the first
        ((2, 48, 5, 5), "acdb", 0, (1, 1), True),
        ((2, 48, 5, 5), "bacd", 1, (16, 32), True),  # channels are outermost
        ((1, 1, 6, 4), "abcd", 2, (2, 4), True),
        ((1, 48, 5, 5), "abcd", 1, (48,), True),
        ((1, 48, 5, 5), "abcd", 1, (0, 48), False),  # nothing lies nowhere
    ],
)
def test_which_parts_are_dense(dims, tag, axis, sizes, dense):
    assert (in_place_parts(MemoryDesc(dims, tag=tag), axis, sizes) is not None) is dense


@given(
    st.sampled_from([(1, 1), (1, 3), (2, 1)]),
    st.sampled_from([1, 2]),
    st.sampled_from(["abcd", "acdb", "bacd", "aBcd4b", "aBcd2b", "Abcd2a"]),
    st.integers(0, 2),
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
)
def test_parts_lie_side_by_side_where_the_whole_has_them(outer, width, tag, axis, sizes):
    dims = [*outer, 2, width]
    dims[axis] = sum(sizes)
    whole = MemoryDesc(dims, tag=tag)
    parts = in_place_parts(whole, axis, sizes)
    if parts is None:
        return
    end = start = 0
    for part, size in zip(parts, sizes, strict=True):
        assert part.offset0 == end  # no gaps, no overlap, in order
        assert part.at_start().is_dense
        end += part.at_start().nbytes // part.dtype.nbytes
        indices = np.moveaxis(np.indices(part.dims), 0, -1)
        moved = indices + [start if a == axis else 0 for a in range(4)]
        assert np.array_equal(part.offsets(indices), whole.offsets(moved))
        start += size
    assert end * whole.dtype.nbytes == whole.nbytes


@pytest.mark.parametrize(("axis", "sizes"), [(1, (16, 16)), (1, (-1, 49)), (4, (48,)), (-1, (5,)), (1, ())])
def test_sizes_that_do_not_add_up_are_refused(axis, sizes):
    with pytest.raises(ShapeError, match=r"cannot cut dims \(1, 48, 5, 5\) along axis"):
        in_place_parts(MemoryDesc((1, 48, 5, 5)), axis, sizes)


def test_moving_a_layout():
    desc = MemoryDesc((2, 3))
    assert desc.moved(0) is desc
    assert desc.moved(4).offset0 == 4
    assert desc.moved(4).moved(-4) == desc
    with pytest.raises(ShapeError, match=r"offset0\[0\] is -1; offset0 must lie between"):
        desc.moved(-1)
