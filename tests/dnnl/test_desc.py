"""MemoryDesc <-> native descriptor, with oneDNN's own answers as the second opinion."""

from __future__ import annotations

import itertools
import random
import re

import numpy as np
import pytest

from fmtprop import dnnl
from fmtprop.dnnl import NativeDesc, _abi, layout_name
from fmtprop.errors import DnnlError, FormatError, ShapeError, UnsupportedOpError
from fmtprop.layout import FormatKind, MemoryDesc
from tests.dnnl.support import SAME, A, any_of, back, buffer, over, plain, reorder, tagged, to

DIMS = (2, 17, 5, 3)


@pytest.mark.parametrize("tag", ["abcd", "acdb", "cdba", "aBcd16b", "aBcd8b", "ABcd16b16a", "ABcd8b16a2b", "Acdb16a"])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "s8", "u8", "s32", "f16"])
def test_dense_round_trip(tag: str, dtype: str) -> None:
    desc = MemoryDesc(DIMS, dtype, tag=tag)
    native = NativeDesc.from_desc(desc)
    assert native.desc == desc
    assert native.nbytes == desc.nbytes
    assert (native.dims, native.data_type, layout_name(native)) == (DIMS, dtype, tag)
    assert native.fields.padded_dims == desc.padded_dims and native.fields.strides == desc.strides


def test_equal_descs_share_one_native() -> None:
    assert NativeDesc.from_desc(MemoryDesc(DIMS, "f32", tag="acdb")) is tagged(DIMS, "acdb")


def test_equality_is_onednns() -> None:
    same = NativeDesc.from_desc(MemoryDesc(DIMS, "f32", strides=tagged(DIMS, "acdb").fields.strides))
    assert same == tagged(DIMS, "acdb") and hash(same) == hash(tagged(DIMS, "acdb"))
    assert tagged(DIMS, "abcd") != tagged(DIMS, "acdb")
    assert tagged(DIMS, "abcd") != tagged(DIMS, "abcd", "s32")
    assert tagged(DIMS, "abcd") != object()


def test_size_1_dimensions_do_not_matter() -> None:
    """abcd and acdb of one pixel are the same memory: natively equal, equal hash, one canonical form."""
    dims = (1, 64, 1, 1)
    one, other = tagged(dims, "abcd"), tagged(dims, "acdb")
    assert one == other and hash(one) == hash(other)
    assert one.fields.strides == other.fields.strides == (64, 1, 1, 1)
    odd = NativeDesc.from_desc(MemoryDesc((4, 1, 3), "f32", strides=(6, 77, 1)))
    assert odd.fields.strides == (6, 3, 1)


def test_an_image_of_one_row_has_the_strides_that_kernels_compare_with() -> None:
    """Its tag is ``adbc`` too; with the strides of that tag, oneDNN has no kernel but its reference."""
    native = NativeDesc.from_desc(MemoryDesc((2, 64, 1, 9), "f32", tag="acdb"))
    assert native.fields.strides == (576, 1, 576, 64)
    assert native == NativeDesc.from_desc(MemoryDesc((2, 64, 1, 9), "f32", tag="adbc"))
    volume = NativeDesc.from_desc(MemoryDesc((2, 64, 1, 1, 9), "f32", tag="acdeb"))
    assert volume.fields.strides == (576, 1, 576, 576, 64)


def test_any_and_zero() -> None:
    native = any_of(DIMS)
    assert native.is_any and native.desc == MemoryDesc.any(DIMS, "f32") and native.nbytes == 0
    assert str(native) == "f32 2x17x5x3 any"


def regions() -> list[MemoryDesc]:
    cases = [
        MemoryDesc((2, 64, 8, 8), "f32", tag="acdb").submemory((2, 32, 8, 8), (0, 32, 0, 0)),
        MemoryDesc((2, 64, 8, 8), "f32", tag="aBcd16b").submemory((2, 32, 8, 8), (0, 16, 0, 0)),
        MemoryDesc((2, 64, 8, 8), "f32", tag="aBcd16b").submemory((1, 16, 3, 4), (1, 48, 5, 4)),
        MemoryDesc((2, 40, 8, 8), "f32", tag="aBcd16b").submemory((2, 24, 8, 8), (0, 16, 0, 0)),
        MemoryDesc((5, 6), "s8", tag="ab").submemory((2, 3), (3, 2)),
        MemoryDesc((32, 48, 3, 3), "f32", tag="ABcd16b16a").submemory((16, 32, 3, 1), (16, 16, 0, 1)),
        MemoryDesc((4, 6, 5), "f32", strides=(60, 10, 2)),
        MemoryDesc((4, 6, 5), "bf16", strides=(1, 8, 48)),
        MemoryDesc((3, 32, 2), "f32", strides=(256, 64, 16), inner_blocks=((1, 16),)),
    ]
    return cases


def single_blocks() -> list[MemoryDesc]:
    """Return regions with an axis of one block: its stride has no effect, and oneDNN gets another."""
    slice_ = MemoryDesc((3, 8, 10), "f32", tag="acB8b").submemory((3, 8, 1), (0, 0, 4))
    return [
        slice_.reshape((3, 8)),
        MemoryDesc((1, 8), "f32", strides=(80, 80), inner_blocks=((1, 8),)),
        MemoryDesc((24, 16, 1), "f32", strides=(16, 96, 16), inner_blocks=((1, 16),)),
        MemoryDesc((24, 16, 3), "f32", strides=(16, 96, 400), inner_blocks=((1, 16),)),
        MemoryDesc((24, 10, 1), "f32", strides=(16, 96, 16), inner_blocks=((1, 16),)),
        MemoryDesc((1, 1, 2), "f32", strides=(1, 1, 1), offset0=1),
    ]


@pytest.mark.parametrize("desc", regions(), ids=str)
def test_strided_and_regions_round_trip(desc: MemoryDesc) -> None:
    native = NativeDesc.from_desc(desc)
    assert native.desc == desc
    assert native.nbytes == desc.nbytes


@pytest.mark.parametrize("desc", [*regions(), *single_blocks()], ids=str)
def test_elements_lie_where_the_desc_says(desc: MemoryDesc) -> None:
    """oneDNN's reorder writes each element at MemoryDesc.offset."""
    if desc.dtype.value != "f32":
        desc = desc.with_dtype("f32")
    values = np.arange(1, desc.nelems + 1, dtype=np.float32).reshape(desc.dims)
    native = NativeDesc.from_desc(desc)
    data = to(native, values).view(np.float32)
    for index in itertools.islice(np.ndindex(*desc.dims), 0, None, 7):
        assert data[desc.offset(index)] == values[index]
    np.testing.assert_array_equal(back(native, data.view(np.uint8)), values)


def test_random_regions_agree_with_onednn() -> None:
    """submemory, permute_axes and reshape of the algebra and of oneDNN give the same descriptor."""
    generator = random.Random(7)
    checked = 0
    for _ in range(200):
        tag = generator.choice(["abcd", "acdb", "aBcd8b", "ABcd8b8a", "cdab"])
        dims = tuple(generator.randint(1, 24) for _ in range(4))
        desc = MemoryDesc(dims, "f32", tag=tag)
        offsets = tuple(generator.randrange(0, d) for d in dims)
        sizes = tuple(generator.randint(1, d - o) for d, o in zip(dims, offsets, strict=True))
        try:
            wanted = desc.submemory(sizes, offsets)
        except FormatError:
            continue
        assert NativeDesc.from_desc(desc).submemory(sizes, offsets).desc == wanted
        checked += 1
    assert checked > 50


@pytest.mark.parametrize("tag", ["abcd", "acdb", "aBcd8b"])
def test_permute_and_reshape_agree(tag: str) -> None:
    desc, native = MemoryDesc((2, 16, 3, 5), "f32", tag=tag), tagged((2, 16, 3, 5), tag)
    for permutation in itertools.permutations(range(4)):
        assert native.permute_axes(permutation).desc == desc.permute_axes(permutation)
    assert native.reshape((2, 16, 15)).desc == desc.reshape((2, 16, 15))


def test_compensation_makes_an_opaque_desc_that_leads_back() -> None:
    src, weights, dst = any_of((1, 32, 8, 8), "s8"), any_of((32, 32, 3, 3), "s8"), any_of((1, 32, 8, 8))
    pds = [dnnl.create(dnnl.Convolution(src=src, weights=weights, dst=dst, **SAME)) for _ in range(2)]
    native = pds[0].query_md("weights")
    assert native is not None
    if native.desc.kind is not FormatKind.OPAQUE:
        pytest.skip(f"{dnnl.lib().isa}: this implementation needs no compensation")
    assert native.desc.nbytes == native.nbytes > 32 * 32 * 9
    assert NativeDesc.from_desc(native.desc) == native
    other = pds[1].query_md("weights")
    assert other is not None and other.desc == native.desc
    assert layout_name(native).endswith("+extra")
    # It is a working destination of a reorder, which fills in the compensation: for each output channel the sum
    # of its weights times 128. (Without VNNI the weights are halved, so 2 becomes 1.)
    source = plain((32, 32, 3, 3), "s8")
    values, data = np.full((32, 32, 3, 3), 2, np.int8), buffer(native)
    with reorder(source, native) as pd, dnnl.Primitive(pd) as primitive, dnnl.Stream() as stream:
        memories: dict[int | dnnl.Arg, dnnl.Memory] = {A.SRC: over(values, source), A.DST: over(data, native)}
        scratchpad = pd.query_md("scratchpad")
        if scratchpad is not None:
            memories[A.SCRATCHPAD] = over(buffer(scratchpad), scratchpad)
        primitive.execute(stream, memories)
    stored = data[: 32 * 32 * 9]
    assert stored[0] in (1, 2) and (stored == stored[0]).all()
    assert np.abs(data[32 * 32 * 9 :].view(np.int32)[:32]).tolist() == [128 * 32 * 9 * int(stored[0])] * 32


def test_opaque_from_elsewhere_is_refused() -> None:
    with pytest.raises(FormatError, match=r"does not come from this process's oneDNN.*ask a primitive for `any` again"):
        NativeDesc.from_desc(MemoryDesc.opaque((2, 3), "s8", 64, "elsewhere"))


@pytest.mark.parametrize(
    ("dims", "dtype"), [((2**62, 4), "f32"), ((2**31, 2**31, 2), "f32"), ((2**60, 2**4), "u8"), ((2**61,), "f64")]
)
def test_overflow_is_refused_before_onednn_sees_it(dims: tuple[int, ...], dtype: str) -> None:
    """oneDNN itself accepts {2**62, 4} f32 and says 16 bytes."""
    with pytest.raises(ShapeError, match=r"64 bits"):
        NativeDesc.from_desc(MemoryDesc.any(dims, dtype))


def test_arrays_do_not_wrap() -> None:
    native = plain((4, 4))
    with pytest.raises(ShapeError, match=r"18446744073709551616 does not fit in 64 bits"):
        native.reshape((2**64, 16))
    with pytest.raises(ShapeError, match=r"at most 12 dimensions"):
        native.reshape((1,) * 13)


def test_scalars_are_refused() -> None:
    with pytest.raises(FormatError, match=r"no tensors of 0 dimensions; reshape the scalar to dims \(1,\)"):
        NativeDesc.from_desc(MemoryDesc((), "f32"))


def test_types_that_onednn_lacks() -> None:
    with pytest.raises(UnsupportedOpError, match=r"no data type 'u64'; known: .*f32"):
        NativeDesc.from_desc(MemoryDesc((2,), "u64"))


def test_the_size_of_types_that_this_version_lacks() -> None:
    """oneDNN creates a descriptor of s64 before it has the type, and says 18446744073709551610 bytes."""
    native = NativeDesc.from_desc(MemoryDesc((2, 3), "s64"))
    if dnnl.lib()._cdll.dnnl_data_type_size(_abi.ENUMS["dnnl_data_type_t"]["s64"]) == 8:
        assert native.nbytes == 48
        return
    with pytest.raises(UnsupportedOpError, match=r"s64 2x3 ab: oneDNN 3\.\d+\.\d+ \(.*\) does not take data type s64"):
        native.nbytes  # noqa: B018


@pytest.mark.parametrize("desc", [MemoryDesc.any((2, 3), "s64"), MemoryDesc((2, 3), "s64", strides=(5, 1))], ids=str)
def test_types_that_this_version_refuses(desc: MemoryDesc) -> None:
    if dnnl.lib()._cdll.dnnl_data_type_size(_abi.ENUMS["dnnl_data_type_t"]["s64"]) == 8:
        assert NativeDesc.from_desc(desc).desc == desc
        return
    with pytest.raises(
        UnsupportedOpError,
        match=rf"desc {re.escape(str(desc))}: .*does not take data type s64 here; convert the tensor, or load",
    ):
        NativeDesc.from_desc(desc)


def test_layouts_that_the_api_cannot_create() -> None:
    # Rows of 40 cannot lie 100 apart when each parent row holds whole blocks of 16.
    odd = MemoryDesc.view((3, 40), "f32", strides=(100, 16), inner_blocks=((1, 16),))
    with pytest.raises(FormatError, match=r"oneDNN"):
        NativeDesc.from_desc(odd)
    stepped = MemoryDesc.view((3, 2), "f32", strides=(3, 2))
    with pytest.raises(FormatError, match=r"oneDNN cannot create strides \(3, 2\) with dims \(3, 2\): .*reorder it"):
        NativeDesc.from_desc(stepped)


def test_a_region_that_onednn_declines_is_a_format_error() -> None:
    desc = MemoryDesc((1, 2, 2), "s8", strides=(1, 2, 1), offset0=1)
    with pytest.raises(FormatError, match=r"oneDNN's API cannot create this layout; reorder it first") as caught:
        NativeDesc.from_desc(desc)
    assert isinstance(caught.value.__cause__, DnnlError)


def test_every_view_is_created_or_refused_as_a_format() -> None:
    created = refused = 0
    for dims in itertools.product((1, 2, 3), repeat=3):
        for strides in itertools.product((0, 1, 2, 3, 5, 6), repeat=3):
            try:
                desc = MemoryDesc.view(dims, strides=strides)
            except ShapeError:
                continue
            try:
                assert NativeDesc.from_desc(desc).desc == desc
                created += 1
            except FormatError:
                assert not desc.is_regular
                refused += 1
    assert created > 100 and refused > 10


def test_transform_errors() -> None:
    native = tagged((2, 17, 5, 7), "aBcd16b")
    with pytest.raises(ShapeError, match=r"\[0, 0, 1, 2\] is not a permutation"):
        native.permute_axes((0, 0, 1, 2))
    with pytest.raises(ShapeError, match=r"one entry per axis"):
        native.submemory((1, 1), (0, 0, 0, 0))
    with pytest.raises(DnnlError, match=r"create_submemory answered .*multiples of the blocks"):
        native.submemory((2, 8, 5, 7), (0, 3, 0, 0))
    with pytest.raises(DnnlError, match=r"dnnl_memory_desc_reshape answered .*aBcd16b to dims"):
        native.reshape((2, 17 * 5, 7))


def test_queried_descs_are_shared() -> None:
    first = reorder(plain(DIMS), tagged(DIMS, "acdb"))
    second = reorder(plain(DIMS), tagged(DIMS, "acdb"))
    assert first.query_md("dst") is second.query_md("dst")


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_queried_descs_have_strides_of_their_own(order: tuple[int, int]) -> None:
    """Of axes of size 1, too: a kernel chooses by them, and an equal desc of another primitive may have others."""
    size = 23 + order[0]
    both = plain((size, 1)), plain((1, size)).permute_axes((1, 0))
    assert both[0] == both[1] and both[0].fields.strides != both[1].fields.strides
    for weights in (both[place] for place in order):
        got = dnnl.create(dnnl.Matmul(src=plain((4, size)), weights=weights, dst=plain((4, 1)))).query_md("weights")
        assert got is not None and got.fields.strides == weights.fields.strides
