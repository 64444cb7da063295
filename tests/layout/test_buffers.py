"""pack, unpack and convert: what they write, and what they refuse."""

from __future__ import annotations

import numpy as np
import pytest

from fmtprop.errors import FormatError, ShapeError
from fmtprop.layout import DataType, MemoryDesc, cast, convert, pack, unpack


def test_padding_is_zero() -> None:
    md = MemoryDesc((2, 3), "s32", tag="aB4b")
    assert pack(np.arange(1, 7, dtype=np.int32).reshape(2, 3), md).tolist() == [1, 2, 3, 0, 4, 5, 6, 0]


def test_gaps_of_a_new_buffer_are_zero_and_of_a_given_one_untouched() -> None:
    md, ones = MemoryDesc((2, 2), "s8", strides=(3, 1)), np.ones((2, 2), np.int8)
    assert pack(ones, md).tolist() == [1, 1, 0, 1, 1, 0]
    out = np.full(6, 9, np.int8)
    assert pack(ones, md, out=out) is out
    assert out.tolist() == [1, 1, 9, 1, 1, 9]


def test_submemory_inside_a_block_leaves_its_neighbours() -> None:
    parent = MemoryDesc((1, 8), "s8", tag="aB4b")
    buffer = np.arange(8, dtype=np.int8)
    pack(np.array([[70, 71]], np.int8), parent.submemory((1, 2), (0, 4)), out=buffer)
    assert buffer.tolist() == [0, 1, 2, 3, 70, 71, 6, 7]
    # The last window of a padded tensor owns the padding behind it.
    tail = MemoryDesc((1, 6), "s8", tag="aB4b").submemory((1, 2), (0, 4))
    pack(np.array([[80, 81]], np.int8), tail, out=buffer)
    assert buffer.tolist() == [0, 1, 2, 3, 80, 81, 0, 0]


def test_raw_bytes_are_a_buffer() -> None:
    md = MemoryDesc((2, 3), "f32", tag="ba")
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    raw = pack(array, md).view(np.uint8)
    assert np.array_equal(unpack(raw, md), array)
    out = np.zeros(24, np.uint8)
    pack(array, md, out=out)
    assert np.array_equal(out, raw)
    for text in (raw.tobytes(), bytearray(raw), memoryview(raw)):
        assert np.array_equal(unpack(text, md), array)
        assert np.array_equal(convert(text, md, MemoryDesc((2, 3))), array.ravel())
    assert unpack(b"\1\2", MemoryDesc((2,), "u8")).tolist() == [1, 2]
    assert unpack(b"", MemoryDesc((0, 3))).shape == (0, 3)


def test_empty_and_scalar() -> None:
    assert pack(np.empty((0, 3), np.float32), MemoryDesc((0, 3))).size == 0
    assert unpack(np.empty(0, np.float32), MemoryDesc((2, 0), tag="ba")).shape == (2, 0)
    assert unpack(pack(np.float64(3), MemoryDesc((), "f64")), MemoryDesc((), "f64")) == 3


def test_broadcast_packs_what_is_equal() -> None:
    md = MemoryDesc((2, 3), "f32", strides=(0, 1))
    row = np.array([1, np.nan, -0.0], np.float32)
    assert np.array_equal(pack(np.stack([row, row]), md), row, equal_nan=True)
    with pytest.raises(ShapeError, match=r"axis 0 \(a\) has stride 0: its elements share one position"):
        pack(np.arange(6, dtype=np.float32).reshape(2, 3), md)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: unpack(np.zeros(5, np.float32), MemoryDesc((2, 3))), r"5 elements \(20 bytes\), .* allocate 24 bytes"),
        (lambda: unpack(np.zeros(6, np.float64), MemoryDesc((2, 3))), "buffer has dtype float64, .* stores float32"),
        (lambda: unpack(np.zeros(7, np.uint8), MemoryDesc((2, 3))), "buffer has dtype uint8"),
        (lambda: unpack(np.zeros((2, 3), np.float32), MemoryDesc((2, 3))), r"must be 1-D, not of shape \(2, 3\)"),
        (lambda: unpack(b"12345", MemoryDesc((2, 3))), "buffer has dtype uint8"),
        (lambda: unpack(b"1234", MemoryDesc((2, 3))), r"the buffer has 1 elements \(4 bytes\)"),
        (
            lambda: unpack(np.zeros(48, np.uint8)[::2], MemoryDesc((2, 3))),
            "bytes must be contiguous, not 2 bytes apart",
        ),
        (lambda: unpack([[1], [2, 3]], MemoryDesc((2,))), r"unpack: numpy cannot read this list \("),
        (
            lambda: pack(np.zeros((2, 3), "f4"), MemoryDesc((2, 3)), out=b"0" * 24),
            "out is a bytes that cannot be written to",
        ),  # type: ignore[arg-type]
        (lambda: pack(np.zeros(1), MemoryDesc((1,), "f64"), out=[0.0]), "out is a list that cannot be written to"),  # type: ignore[arg-type]
        (lambda: pack(np.zeros((3, 2), np.float32), MemoryDesc((2, 3))), r"shape \(3, 2\), the descriptor .* \(2, 3\)"),
        (
            lambda: pack(np.zeros((2, 3)), MemoryDesc((2, 3))),
            "dtype float64, the descriptor .* stores float32; convert",
        ),
        (
            lambda: pack(np.zeros((2, 3), "f4"), MemoryDesc((2, 3)), np.zeros(5, "f4")),
            "the buffer has 5 elements",
        ),
        (
            lambda: convert(np.zeros(6, "f4"), MemoryDesc((2, 3)), MemoryDesc((3, 2))),
            r"src dims \(2, 3\) and dst dims \(3, 2\) differ",
        ),
    ],
)
def test_refused(call: object, says: str) -> None:
    with pytest.raises(ShapeError, match=says):
        call()  # type: ignore[operator]


def test_a_read_only_buffer_is_no_destination() -> None:
    out = np.zeros(6, np.float32)
    out.flags.writeable = False
    with pytest.raises(ShapeError, match="out is a ndarray that cannot be written to; give a writeable numpy array"):
        pack(np.ones((2, 3), np.float32), MemoryDesc((2, 3)), out=out)


def test_tensors_that_numpy_cannot_read() -> None:
    torch = pytest.importorskip("torch")
    ones = torch.ones(2, 3, dtype=torch.bfloat16)
    md = MemoryDesc((2, 3), "bf16")
    for call in (lambda: pack(ones, md), lambda: unpack(ones[0], md)):
        with pytest.raises(
            ShapeError, match=r"pack: numpy cannot read this Tensor \(.*holds bf16 as uint16 bits: tensor"
        ):
            call()
    assert pack(ones.view(torch.int16).numpy().view(np.uint16), md).tolist() == [0x3F80] * 6
    with pytest.raises(ShapeError, match=r"numpy cannot read this Parameter \(.*requires grad"):
        pack(torch.nn.Parameter(torch.ones(2, 3)), MemoryDesc((2, 3)))


def test_formats_without_a_layout() -> None:
    for md in (MemoryDesc.any((2,)), MemoryDesc.opaque((2,), "f32", 8, 1)):
        with pytest.raises(FormatError, match="has no strides or blocks"):
            pack(np.zeros(2, np.float32), md)
        with pytest.raises(FormatError, match="has no strides or blocks"):
            unpack(np.zeros(2, np.float32), md)


def test_convert_between_data_types() -> None:
    src, dst = MemoryDesc((1, 4), "f32"), MemoryDesc((1, 4), "u8", tag="ba")
    assert convert(np.array([-1, 0.5, 1.5, 300], np.float32), src, dst).tolist() == [0, 0, 2, 255]


def test_cast_rounds_to_nearest_even_and_saturates() -> None:
    half = np.array([0.5, 1.5, 2.5, -0.5, 1e30, -np.inf], np.float32)
    assert cast(half, DataType.F32, DataType.S8).tolist() == [0, 2, 2, 0, 127, -128]
    assert cast(half, DataType.F32, DataType.S64).tolist()[-2:] == [2**63 - 1, -(2**63)]
    assert cast(np.array([300, -300], np.int32), DataType.S32, DataType.S8).tolist() == [127, -128]
    assert cast(np.array([-5, 7], np.int8), DataType.S8, DataType.U64).tolist() == [0, 7]
    assert cast(np.array([2**64 - 1], np.uint64), DataType.U64, DataType.S32).tolist() == [2**31 - 1]
    assert cast(np.array([1e300]), DataType.F64, DataType.F16).tolist() == [np.inf]
    assert cast(np.array([1e39]), DataType.F64, DataType.BF16).tolist() == [0x7F80]
    assert cast(np.array([True, False]), DataType.BOOLEAN, DataType.S32).tolist() == [1, 0]
    assert cast(np.array([0.0, 3.0]), DataType.F64, DataType.BOOLEAN).tolist() == [False, True]


def test_cast_of_bf16_is_exact_there_and_nearest_even_back() -> None:
    torch = pytest.importorskip("torch")
    bits = np.arange(2**16, dtype=np.uint16)
    floats = cast(bits, DataType.BF16, DataType.F32)
    finite = ~np.isnan(floats)
    assert np.array_equal(cast(floats, DataType.F32, DataType.BF16)[finite], bits[finite])
    assert np.isnan(cast(cast(floats[~finite], DataType.F32, DataType.BF16), DataType.BF16, DataType.F32)).all()
    values = np.random.default_rng(0).standard_normal(10_000).astype(np.float32)
    theirs = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(cast(values, DataType.F32, DataType.BF16), theirs)


def test_nan_has_no_integer() -> None:
    with pytest.raises(FormatError, match="cannot convert NaN from f32 to s8"):
        cast(np.array([np.nan], np.float32), DataType.F32, DataType.S8)


@pytest.mark.parametrize("dtype", list(DataType))
def test_every_data_type_has_storage(dtype: DataType) -> None:
    assert dtype.numpy_dtype.itemsize == dtype.nbytes
    zeros = np.zeros(3, dtype.numpy_dtype)
    assert unpack(pack(zeros, MemoryDesc((3,), dtype)), MemoryDesc((3,), dtype)).dtype == dtype.numpy_dtype
    assert DataType.from_any(dtype.value) is DataType.from_any(dtype) is dtype
    if dtype is not DataType.BF16:
        assert DataType.from_any(dtype.numpy_dtype) is dtype
        assert DataType.from_any(dtype.numpy_dtype.type) is dtype


@pytest.mark.parametrize(
    ("names", "dtype"),
    [
        (("i64", "INT64", "DML_TENSOR_DATA_TYPE_INT64"), "s64"),
        (("i32", "INT32", "DML_TENSOR_DATA_TYPE_INT32"), "s32"),
        (("i16", "INT16", "DML_TENSOR_DATA_TYPE_INT16"), "s16"),
        (("i8", "INT8", "DML_TENSOR_DATA_TYPE_INT8"), "s8"),
        (("UINT8", "DML_TENSOR_DATA_TYPE_UINT8"), "u8"),
        (("F32", "FLOAT32", "DML_TENSOR_DATA_TYPE_FLOAT32"), "f32"),
        (("FLOAT16", "DML_TENSOR_DATA_TYPE_FLOAT16"), "f16"),
    ],
)
def test_the_names_of_directml(names: tuple[str, ...], dtype: str) -> None:
    assert {DataType.from_any(name) for name in names} == {DataType(dtype)}


@pytest.mark.parametrize("name", ["DML_TENSOR_DATA_TYPE_UNKNOWN", "DML_TENSOR_DATA_TYPE_", "i4", "i", "f8", ""])
def test_names_that_are_no_data_type(name: str) -> None:
    with pytest.raises(ShapeError, match=f"unknown data type '{name}'; use one of f32"):
        DataType.from_any(name)


def test_torch_data_types() -> None:
    torch = pytest.importorskip("torch")
    names = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "float64": "f64", "int32": "s32", "int8": "s8"}
    names |= {"uint8": "u8", "int64": "s64", "int16": "s16", "bool": "boolean"}
    assert {n: DataType.from_any(getattr(torch, n)).value for n in names} == names
