"""Worked examples and rules of SPEC section 1 that concern layouts, each named by its row."""

from __future__ import annotations

import numpy as np
import pytest

from fmtprop.errors import FormatError, ShapeError
from fmtprop.layout import FormatKind, InnerBlock, MemoryDesc, pack, unpack


def test_m1_descriptor_is_logical() -> None:
    md = MemoryDesc((2, 3, 4), "bf16", tag="acb")
    assert (md.ndim, md.dims, md.dtype, md.kind) == (3, (2, 3, 4), "bf16", FormatKind.BLOCKED)


def test_m2_logical_order_is_fixed_whatever_the_layout() -> None:
    for tag in ("nchw", "nhwc", "chwn", "nChw8c"):
        assert MemoryDesc((2, 8, 5, 7), tag=tag).dims == (2, 8, 5, 7)


def test_m3_strides_must_step_over_the_faster_dimension() -> None:
    MemoryDesc((2, 3, 4), strides=(12, 4, 1))
    with pytest.raises(ShapeError) as caught:
        MemoryDesc((2, 3, 4), strides=(11, 4, 1))
    assert str(caught.value) == (
        "strides (11, 4, 1) with dims (2, 3, 4): axis 0 (a) and axis 1 (b) overlap: axis 1 (b) has 3 elements 4 apart, "
        "so axis 0 (a) must step over at least 12 elements, not 11 (use stride 0 to broadcast)"
    )


def test_m3_zero_strides_are_the_exception() -> None:
    assert MemoryDesc((2, 3), strides=(0, 1)).has_broadcast


def test_m4_offset_is_offset0_plus_the_dot_product() -> None:
    md = MemoryDesc((3, 4), strides=(10, 2), offset0=7)
    assert md.offset((2, 3)) == 7 + 2 * 10 + 3 * 2
    assert md.index_at(33) == (2, 3)


def test_m4_submemory_inherits_strides_and_concatenates_in_place() -> None:
    whole = MemoryDesc((2, 5), "s32")
    left, right = whole.submemory((2, 2), (0, 0)), whole.submemory((2, 3), (0, 2))
    assert (left.strides, left.offset0) == ((5, 1), 0)
    assert (right.strides, right.offset0) == ((5, 1), 2)
    buffer = np.zeros(10, np.int32)
    a, b = np.array([[1, 2], [6, 7]], np.int32), np.array([[3, 4, 5], [8, 9, 10]], np.int32)
    pack(a, left, out=buffer)
    pack(b, right, out=buffer)
    assert unpack(buffer, whole).tolist() == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]


def test_m5_matrix_transposed_or_not() -> None:
    m, n, lda = 3, 4, 6
    plain, transposed = MemoryDesc((m, n), strides=(lda, 1)), MemoryDesc((m, n), strides=(1, lda))
    assert plain.dims == transposed.dims == (m, n)
    assert plain.offset((2, 1)) == 2 * lda + 1
    assert transposed.offset((2, 1)) == 2 + lda
    assert not plain.is_dense
    assert MemoryDesc((m, n), strides=(n, 1)) == MemoryDesc((m, n), tag="ab")
    assert MemoryDesc((m, n), strides=(1, m)) == MemoryDesc((m, n), tag="ba")
    for strides in ((n - 1, 1), (1, m - 1)):
        with pytest.raises(ShapeError, match="overlap"):
            MemoryDesc((m, n), strides=strides)


def test_m6_tag_gives_dense_strides() -> None:
    assert MemoryDesc((2, 3, 4, 5), tag="acdb").strides == (60, 1, 15, 3)
    assert MemoryDesc((2, 3), tag="ba").strides == (1, 2)


def test_m6_blocked_tag() -> None:
    md = MemoryDesc((2, 17, 5, 7), tag="nChw16c")
    assert md.inner_blocks == (InnerBlock(1, 16),)
    assert md.padded_dims == (2, 32, 5, 7)
    assert md.strides == (1120, 560, 112, 16)
    assert md.nbytes == 2 * 32 * 5 * 7 * 4
    assert md.offset((1, 16, 2, 3)) == 1120 + 560 + 2 * 112 + 3 * 16
    assert md.padding_percent == pytest.approx(100 * 15 / 32)
    twice = MemoryDesc((16, 16, 3, 3), tag="ABcd4b16a4b")
    assert twice.offset((5, 6, 0, 1)) == 256 + (6 // 4) * 64 + 5 * 4 + 6 % 4


def test_m7_any_says_nothing_of_the_format() -> None:
    md = MemoryDesc.any((2, 3), "f32")
    assert (md.kind, md.nbytes, md.padded_dims) == (FormatKind.ANY, 0, (2, 3))
    assert md == MemoryDesc((2, 3), tag="any")
    with pytest.raises(FormatError, match="format any has no strides or blocks; ask a primitive descriptor"):
        _ = md.strides
    with pytest.raises(FormatError, match="format any"):
        md.offset((0, 0))


def test_m8_opaque_has_a_size_and_an_identity_only() -> None:
    md = MemoryDesc.opaque((64, 64, 3, 3), "s8", 37120, token=7)
    assert (md.kind, md.nbytes, md.dtype.nbytes) == (FormatKind.OPAQUE, 37120, 1)
    assert md == MemoryDesc.opaque((64, 64, 3, 3), "s8", 37120, token=7)
    assert md != MemoryDesc.opaque((64, 64, 3, 3), "s8", 37120, token=8)
    for transform in (
        lambda: md.permute_axes((1, 0, 2, 3)),
        lambda: md.reshape((4096, 9)),
        lambda: md.submemory((1, 64, 3, 3), (0, 0, 0, 0)),
        lambda: md.with_dtype("u8"),
    ):
        with pytest.raises(FormatError, match="format opaque has no strides or blocks; reorder to blocked first"):
            transform()


def test_m8_blocked_formats_refuse_what_they_cannot_express() -> None:
    md = MemoryDesc((2, 32, 5, 7), tag="aBcd16b")
    assert md.nbytes == 2 * 32 * 5 * 7 * 4
    assert MemoryDesc((2, 17, 5, 7), tag="aBcd16b").nbytes != 2 * 17 * 5 * 7 * 4
    with pytest.raises(FormatError, match=r"axis 1 \(b\) of dims .* is blocked by 16; convert to a plain format"):
        md.reshape((64, 5, 7))
    with pytest.raises(FormatError, match="offset 8 must be a multiple of its block 16"):
        md.submemory((2, 16, 5, 7), (0, 8, 0, 0))
    assert md.permute_axes((0, 3, 1, 2)).tag == "aDbc16d"
