"""The descriptor as a value: construction, identity, properties, and one clear error for each bad input."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import numpy as np
import pytest

from fmtprop.errors import FormatError, ShapeError
from fmtprop.layout import DataType, FormatKind, MemoryDesc


def test_default_is_dense_row_major() -> None:
    md = MemoryDesc((2, 3, 4))
    assert (md.dtype, md.strides, md.tag, md.nbytes) == (DataType.F32, (12, 4, 1), "abc", 96)
    assert md.is_plain and md.is_dense and md.is_packed and md.is_regular


@pytest.mark.parametrize("tag", [5, ["ab"], b"ab"])
def test_a_tag_is_text(tag: object) -> None:
    with pytest.raises(FormatError, match="tag must be a str such as 'nChw16c', got"):
        MemoryDesc((2, 3), tag=tag)  # type: ignore[arg-type]


def test_none_is_no_data_type() -> None:
    with pytest.raises(ShapeError, match="unknown data type None; use one of f32"):
        MemoryDesc((2, 3), None)


@pytest.mark.parametrize("position", ["a", 1.5, None])
def test_a_position_is_an_integer(position: object) -> None:
    with pytest.raises(ShapeError, match="position must be an integer, not"):
        MemoryDesc((2, 3)).index_at(position)  # type: ignore[arg-type]


def test_scalar() -> None:
    md = MemoryDesc((), "f64")
    assert (md.ndim, md.nelems, md.nbytes, md.offset(()), md.index_at(0)) == (0, 1, 8, 0, ())


def test_integers_of_numpy_are_integers() -> None:
    md = MemoryDesc(np.array([2, 3]), strides=np.array([3, 1]))
    assert md == MemoryDesc((2, 3))
    assert all(type(n) is int for n in md.dims + md.strides)


def test_numpy_integers_do_not_leak_into_views() -> None:
    one, big = np.int32(1), np.int32(2**30)
    md = MemoryDesc((2**20, 2**12), "u8")
    assert md.offset((np.int32(2**20 - 1), one)) == (2**20 - 1) * 2**12 + 1
    sub = md.submemory((one, one), (np.int32(2**20 - 1), np.int32(5)))
    assert sub.offset0 == (2**20 - 1) * 2**12 + 5
    assert all(type(n) is int for n in (*sub.dims, *sub.strides, sub.offset0, *md.index_at(big)))  # type: ignore[misc]


def test_blocks_without_strides_are_dense() -> None:
    assert MemoryDesc((2, 17, 5), inner_blocks=[(1, 16)]) == MemoryDesc((2, 17, 5), tag="aBc16b")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: MemoryDesc((2, -3)), r"dims\[1\] is -3; dims must lie between 0 and 2\*\*63 - 1"),
        (lambda: MemoryDesc((2.5,)), r"dims\[0\] is 2.5; dims must be integers"),
        (lambda: MemoryDesc(7), "dims must be a sequence of integers, not 7"),
        (lambda: MemoryDesc((1,) * 13), "dims has 13 entries; at most 12"),
        (lambda: MemoryDesc((2**62, 4)), r"dims \(4611686018427387904, 4\) .* reach beyond 2\*\*63 bytes"),
        (lambda: MemoryDesc((2**40, 2**40), tag="aB16b"), r"reach beyond 2\*\*63 bytes"),
        (lambda: MemoryDesc((3,), strides=(2**62,)), r"reach beyond 2\*\*63 bytes of 4-byte"),
        (lambda: MemoryDesc((2,), offset0=2**62), r"reach beyond 2\*\*63 bytes"),
        (lambda: MemoryDesc((0, 2**62, 4)), r"reach beyond 2\*\*63 bytes"),
        (lambda: MemoryDesc((2, 3), strides=(3,)), r"strides \(3,\) must have one entry per dimension"),
        (lambda: MemoryDesc((2, 3), strides=(-3, 1)), r"strides\[0\] is -3"),
        (lambda: MemoryDesc((2, 3), strides=(1, 1)), r"axis 1 \(b\) and axis 0 \(a\) overlap"),
        (lambda: MemoryDesc((2, 3), tag="ab", strides=(3, 1)), "give either tag='ab' or strides"),
        (lambda: MemoryDesc((2, 3), "f31"), "unknown data type 'f31'; use one of f32, bf16"),
        (lambda: MemoryDesc((2, 3), object()), "unknown data type"),
        (lambda: MemoryDesc((2, 3), offset0=-1), r"offset0\[0\] is -1"),
        (lambda: MemoryDesc((2, 3), tag="any", offset0=1), "format any has no offset0"),
        (lambda: MemoryDesc((2, 3), inner_blocks=[(2, 4)]), "inner block of axis 2: dims .* has axes 0 to 1"),
        (lambda: MemoryDesc((2, 3), inner_blocks=[(1, 0)]), r"inner block of axis 1 \(b\) has size 0; .* at least 2"),
        (lambda: MemoryDesc((2, 3), inner_blocks=[(1, 4)], padded_dims=(2, 6)), "6 must be a multiple .* product 4"),
        (lambda: MemoryDesc((2, 3), padded_dims=(2, 2)), "padded size 2 is smaller than padded offset 0 .* size 3"),
        (lambda: MemoryDesc((2, 3), padded_dims=(2,)), "padded_dims .* must have one entry per dimension"),
        (lambda: MemoryDesc((2, 3), padded_offsets=(1,)), "padded_offsets .* must have one entry per dimension"),
        (lambda: MemoryDesc((2, 32), strides=(32, 8), inner_blocks=[(1, 16)]), "inner blocks fill 16 elements"),
        (lambda: MemoryDesc((2, 32), strides=(24, 16), inner_blocks=[(1, 16)]), "2 blocks 16 apart"),
        (lambda: MemoryDesc.view((3, 2), strides=(2, 3)), "overlap"),
        (lambda: MemoryDesc.opaque((2,), "f32", -1, None), "cannot have a negative size"),
        (lambda: MemoryDesc((2, 3)).offset((2, 0)), r"index \(2, 0\): axis 0 \(a\): 2 is out of range for size 2"),
        (lambda: MemoryDesc((2, 3)).offset((0, -1)), r"axis 1 \(b\): -1 is out of range"),
        (lambda: MemoryDesc((2, 3)).offset((0,)), r"index \(0,\) must have one entry per dimension"),
        (lambda: MemoryDesc((2, 3)).offsets([[0, 0], [1, 3]]), r"index \(1, 3\) is out of range for dims \(2, 3\)"),
        (lambda: MemoryDesc((2, 3)).offsets([[0.0, 1.0]]), r"indices must be integers of shape \(..., 2\)"),
        (lambda: MemoryDesc((2, 3)).offsets([[0, 1, 2]]), r"indices must be integers of shape \(..., 2\)"),
        (lambda: MemoryDesc((2, 3)).indices_at([0.5]), "positions must be integers"),
        (lambda: MemoryDesc((2, 3)).offset((0.5, 0)), "index must be a sequence of integers"),
        (lambda: MemoryDesc((2, 3)).submemory((1, 1), (0.0, 0)), "submemory offsets must be a sequence of integers"),
        (lambda: MemoryDesc((2, 3)).slice((0, 0), (1, 1.0)), "slice size must be a sequence of integers"),
        (lambda: MemoryDesc((2, 3)).transpose("ba"), "axes must be a sequence of integers"),
    ],
)
def test_bad_input_has_one_clear_error(make: object, says: str) -> None:
    with pytest.raises(ShapeError, match=says):
        make()  # type: ignore[operator]


def test_immutable() -> None:
    md = MemoryDesc((2, 3))
    with pytest.raises(AttributeError, match="MemoryDesc is immutable: dims cannot be set"):
        md.dims = (3, 2)
    with pytest.raises(AttributeError, match="MemoryDesc is immutable: dims cannot be deleted"):
        del md.dims
    with pytest.raises(AttributeError, match="immutable"):
        md.extra = 1


@pytest.mark.parametrize(
    "md",
    [
        MemoryDesc((2, 17, 5, 7), "bf16", tag="aBcd16b"),
        MemoryDesc((4, 6), "s8").submemory((2, 3), (1, 2)),
        MemoryDesc((3, 3)).slice((0, 0), (2, 2), (2, 2)),
        MemoryDesc((2, 32), tag="aB16b").submemory((1, 16), (1, 16)),
        MemoryDesc((2, 3), "u8", padded_dims=(4, 8), padded_offsets=(1, 2)),
        MemoryDesc.any((2, 3), "f16"),
        MemoryDesc.opaque((2, 3), "s8", 128, "token"),
        MemoryDesc((2, 3), strides=(0, 1)),
        MemoryDesc(()),
    ],
)
def test_value_semantics(md: MemoryDesc) -> None:
    for twin in (pickle.loads(pickle.dumps(md)), copy.deepcopy(md), eval(repr(md))):
        assert twin == md
        assert hash(twin) == hash(md)
        assert twin.nbytes == md.nbytes
    assert md != MemoryDesc((9,))
    assert md != "md"


def test_equality_looks_at_everything_but_the_strides_of_size_one() -> None:
    base = MemoryDesc((2, 1, 3), strides=(3, 99, 1))
    assert base == MemoryDesc((2, 1, 3))
    others = [
        MemoryDesc((2, 1, 3), "s32"),
        MemoryDesc((2, 1, 3), strides=(4, 3, 1)),
        MemoryDesc((2, 1, 3), padded_dims=(2, 2, 3)),
        MemoryDesc((2, 1, 3), offset0=1),
        MemoryDesc.any((2, 1, 3)),
    ]
    assert len({base, *others}) == 6


def test_text() -> None:
    assert str(MemoryDesc((2, 17), "bf16", tag="aB16b")) == "bf16[2,17]:aB16b"
    assert str(MemoryDesc((4, 4)).submemory((2, 2), (1, 1))) == "f32[2,2]:4x1+5"
    assert str(MemoryDesc((2, 32), strides=(64, 16), inner_blocks=[(1, 16)])) == "f32[2,32]:64x16:16@1"
    assert str(MemoryDesc.any((2,))) == "f32[2]:any"
    assert repr(MemoryDesc((2, 17), tag="aB16b")) == "MemoryDesc((2, 17), 'f32', tag='aB16b')"


def test_kinds() -> None:
    assert [str(kind) for kind in FormatKind] == ["any", "blocked", "opaque"]
    assert not MemoryDesc((2, 16), tag="aB16b").is_plain
    assert not MemoryDesc.any((2,)).is_plain
    assert not MemoryDesc.any((2,)).is_dense
    assert not MemoryDesc.any((2,)).is_regular


def test_dense_packed_and_padding() -> None:
    blocked = MemoryDesc((2, 17), tag="aB16b")
    assert (blocked.is_dense, blocked.is_packed, blocked.padding_bytes) == (True, False, 2 * 15 * 4)
    assert blocked.padding_percent == pytest.approx(100 * 15 / 32)
    gaps = MemoryDesc((2, 3), strides=(5, 1))
    assert (gaps.is_dense, gaps.nbytes, gaps.padding_bytes) == (False, 40, 16)
    repeated = MemoryDesc((2, 3), strides=(0, 1))
    assert (repeated.is_dense, repeated.nbytes, repeated.padding_bytes) == (False, 12, 0)
    assert MemoryDesc((2, 2), strides=(0, 0)).nbytes == 4  # oneDNN says 0 bytes; one element is one element
    assert MemoryDesc((0, 3)).padding_percent == 0
    with pytest.raises(FormatError, match="format any"):
        _ = MemoryDesc.any((2,)).padding_bytes


def test_size_of_a_submemory_reaches_to_its_last_element() -> None:
    sub = MemoryDesc((4, 4), "f32").submemory((2, 2), (1, 1))
    assert sub.nbytes == (5 + 4 + 1 + 1) * 4


def test_walk_visits_memory_in_order() -> None:
    md = MemoryDesc((2, 3), strides=(1, 3))
    assert list(md.walk()) == [
        (0, (0, 0)),
        (1, (1, 0)),
        (2, None),
        (3, (0, 1)),
        (4, (1, 1)),
        (5, None),
        (6, (0, 2)),
        (7, (1, 2)),
        (8, None),
    ]


def test_with_dtype() -> None:
    assert MemoryDesc((2, 17), tag="aB16b").with_dtype("s8") == MemoryDesc((2, 17), "s8", tag="aB16b")
    assert MemoryDesc.any((2,)).with_dtype("s8") == MemoryDesc.any((2,), "s8")


def test_importing_the_room_loads_neither_torch_nor_onednn() -> None:
    code = (
        "import sys, fmtprop.layout, fmtprop.dialects.directml, fmtprop.dialects.xla; "
        "print('torch' in sys.modules, 'fmtprop.dnnl' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["False", "False"]
