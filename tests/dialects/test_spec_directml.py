"""Worked examples of SPEC section 2 (DirectML buffer tensors), each named by its row."""

from __future__ import annotations

import numpy as np
import pytest

import fmtprop as fp
from fmtprop.dialects.directml import BufferTensor, calc_buffer_tensor_size, packed_strides
from fmtprop.errors import FormatError, ShapeError
from fmtprop.layout import MemoryDesc, pack, unpack


def letters(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8)


def test_d1_offset_is_the_dot_product() -> None:
    tensor = BufferTensor((2, 2, 3), (6, 3, 1))
    assert tensor.offset((1, 0, 1)) == 7
    buffer = letters("ABCDEFGHIJKL")
    assert chr(buffer[tensor.offset((1, 0, 1))]) == "H"
    assert tensor.to_memory_desc().offset((1, 0, 1)) == 7
    assert tensor.to_memory_desc().index_at(7) == (1, 0, 1)


def test_d2_row_and_column_major() -> None:
    assert packed_strides((2, 3), "HW") == (3, 1)
    assert packed_strides((2, 3), "WH") == (1, 2)
    logical = letters("ABCDEF").reshape(2, 3)
    for order, memory in (("HW", b"ABCDEF"), ("WH", b"ADBECF")):
        md = BufferTensor((2, 3), packed_strides((2, 3), order), "u8").to_memory_desc()
        assert pack(logical, md).tobytes() == memory


def test_d2_names_of_higher_ranks() -> None:
    assert packed_strides((2, 2, 3), "DHW") == (6, 3, 1)
    assert packed_strides((2, 2, 3), "WHD") == (1, 2, 4)
    assert packed_strides((2, 3, 4, 5), "NCHW") == packed_strides((2, 3, 4, 5)) == (60, 20, 5, 1)
    assert packed_strides((1, 1, 3, 5), "NHWC") == (15, 1, 5, 1)
    assert packed_strides((2, 3, 4, 5, 6), "NCDHW") == (360, 120, 30, 6, 1)


def test_d3_packed() -> None:
    assert BufferTensor((2, 2, 3)).is_packed
    assert BufferTensor((2, 2, 3), (1, 2, 4)).is_packed
    assert not BufferTensor((2, 3), (5, 1)).is_packed  # padded
    assert not BufferTensor((2, 3), (0, 1)).is_packed  # broadcast
    assert not BufferTensor((2, 2, 3), (6, 3, 2)).is_packed
    # As many places as elements, but two elements share one: {0, 1, 3} and {0, 2} meet in 3 and leave a gap.
    assert not BufferTensor((3, 2), (1, 1)).is_packed


def test_d4_broadcast() -> None:
    tensor = BufferTensor((2, 3), (0, 1), "u8")
    assert (tensor.size_in_elements, tensor.is_broadcast) == (3, True)
    assert unpack(letters("ABC"), tensor.to_memory_desc()).tobytes() == b"ABCABC"
    assert tensor.to_memory_desc().index_at(1) == (0, 1)


def test_d5_padding() -> None:
    tensor = BufferTensor((2, 3), (5, 1), "u8")
    md = tensor.to_memory_desc()
    assert unpack(letters("ABCxxDEFxx"), md).tobytes() == b"ABCDEF"
    assert [md.index_at(p) for p in (2, 3, 4, 5)] == [(0, 2), None, None, (1, 0)]


def test_d6_minimum_buffer_size() -> None:
    assert calc_buffer_tensor_size("f32", (2, 3), (5, 1)) == 8 * 4
    assert calc_buffer_tensor_size("f32", (2, 3)) == 6 * 4
    assert calc_buffer_tensor_size("f32", (2, 3), (0, 1)) == 3 * 4
    assert calc_buffer_tensor_size("u8", (3, 3)) == 12  # 9 bytes, rounded up to a multiple of 4
    assert calc_buffer_tensor_size("f16", (3,)) == 8
    assert calc_buffer_tensor_size("i64", (2,)) == calc_buffer_tensor_size("INT64", (2,)) == 16
    assert fp.directml.calc_buffer_tensor_size("f64", (1, 1, 3, 5), (15, 1, 5, 1)) == 15 * 8


def test_d7_null_strides_and_leading_ones() -> None:
    implicit, explicit = BufferTensor((1, 1, 3, 5)), BufferTensor((1, 1, 3, 5), (15, 15, 5, 1))
    assert implicit.strides is None
    assert implicit.effective_strides == explicit.strides
    assert implicit.to_memory_desc() == explicit.to_memory_desc()
    nhwc = BufferTensor((1, 1, 3, 5), packed_strides((1, 1, 3, 5), "NHWC"))
    assert nhwc.strides == (15, 1, 5, 1)
    assert BufferTensor((3, 5)).promote(4) == implicit
    assert BufferTensor((3, 5), (5, 1)).promote(4) == explicit
    assert BufferTensor((3, 5)).promote(5).sizes == (1, 1, 1, 3, 5)


@pytest.mark.parametrize("strides", [(20, 5, 1), (0, 5, 1), (1, 3, 12), (40, 10, 2)])
def test_a1_round_trip_through_memory_desc(strides: tuple[int, ...]) -> None:
    tensor = BufferTensor((3, 4, 5), strides, "s16")
    assert BufferTensor.from_memory_desc(tensor.to_memory_desc()) == tensor


@pytest.mark.parametrize(
    ("md", "says"),
    [
        (MemoryDesc((2, 16), tag="aB8b"), "not by inner blocks"),
        (MemoryDesc.any((2, 3)), "format any has no strides or blocks; ask a primitive descriptor for its choice"),
        (MemoryDesc.opaque((2, 3), "f32", 24, 0), "format opaque has no strides or blocks; reorder to blocked"),
        (MemoryDesc((2, 3), padded_dims=(2, 4)), r"no padded sizes \(2, 4\); express padding by strides"),
        (MemoryDesc((4, 4)).submemory((2, 4), (2, 0)), "no offset 8; bind the buffer at that offset"),
    ],
)
def test_a1_what_directml_cannot_express(md: MemoryDesc, says: str) -> None:
    with pytest.raises(FormatError, match=says):
        BufferTensor.from_memory_desc(md)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: BufferTensor(()), "1 to 8 dimensions"),
        (lambda: BufferTensor((1,) * 9), "1 to 8 dimensions"),
        (lambda: BufferTensor((2, 0)), r"sizes\[1\] is 0"),
        (lambda: BufferTensor((2**32,)), r"sizes\[0\] is 4294967296"),
        (lambda: BufferTensor((2, 3), (1,)), "one entry per dimension"),
        (lambda: BufferTensor((2, 3), (2**32, 1)), "32-bit"),
        (lambda: BufferTensor((2, 3), (-3, 1)), r"strides\[0\] is -3"),
        (lambda: BufferTensor((2, 3), None, "bf16"), "data type bf16 is not DirectML's"),
        (lambda: BufferTensor((2, 3)).offset((2, 0)), r"index \(2, 0\) is out of range for sizes \(2, 3\)"),
        (lambda: BufferTensor((2, 3)).offset((0,)), "out of range"),
        (lambda: BufferTensor((2, 3)).promote(1), "cannot promote"),
        (lambda: BufferTensor((2, 3)).promote(9), "cannot promote"),
        (lambda: BufferTensor((2, 3)).promote(4.5), r"rank must be an integer, not 4\.5"),  # type: ignore[arg-type]
        (lambda: BufferTensor((2, 3)).promote("4"), "rank must be an integer, not '4'"),  # type: ignore[arg-type]
        (lambda: packed_strides((2, 3), 5), "order must be a str of axis names such as 'NHWC', not 5"),  # type: ignore[arg-type]
        (lambda: BufferTensor.from_memory_desc(None), "md must be a MemoryDesc, not None"),  # type: ignore[arg-type]
        (lambda: packed_strides((2, 3), "HH"), "must name each of the 2 dimensions"),
        (lambda: packed_strides((2, 3), "NCHW"), "must name each of the 2 dimensions"),
        (lambda: BufferTensor((3, 3), (2, 1)).to_memory_desc(), "overlap"),
    ],
)
def test_refused(make: object, says: str) -> None:
    with pytest.raises(ShapeError, match=says):
        make()  # type: ignore[operator]
