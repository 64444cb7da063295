"""Laws that hold for every layout, checked on random ones."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fmtprop.layout import InnerBlock, MemoryDesc, convert, format_tag, pack, parse_tag, unpack
from fmtprop.layout.tags import LETTERS


@st.composite
def tags(draw: st.DrawFn, ndim: int) -> str:
    order = tuple(draw(st.permutations(range(ndim))))
    block = st.builds(InnerBlock, st.integers(0, ndim - 1), st.sampled_from([2, 3, 4, 8]))
    return format_tag(order, tuple(draw(st.lists(block, max_size=3 if ndim else 0))))


# Deadlines measure the machine's other work.
law = settings(max_examples=60)

dims_of = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


@st.composite
def layouts(draw: st.DrawFn, dims: tuple[int, ...] | None = None, broadcast: bool = False) -> MemoryDesc:
    """Tags, strides with gaps, padding, windows, slices; broadcasts on demand."""
    dims = draw(dims_of) if dims is None else dims
    kind = draw(st.sampled_from(["tag", "strides", "padded", "window", "slice"] + ["broadcast"] * broadcast))
    if kind == "tag":
        return MemoryDesc(dims, "s32", tag=draw(tags(len(dims))))
    if kind == "padded":
        offsets = [draw(st.integers(0, 2)) for _ in dims]
        padded = [n + k + draw(st.integers(0, 2)) for n, k in zip(dims, offsets, strict=True)]
        return MemoryDesc(dims, "s32", padded_dims=padded, padded_offsets=offsets)
    if kind == "window":
        parent = MemoryDesc([n + 2 for n in dims], "s32", tag=draw(st.permutations(LETTERS[: len(dims)]).map("".join)))
        return parent.submemory(dims, [draw(st.integers(0, 2)) for _ in dims])
    if kind == "slice":
        steps = [draw(st.integers(1, 3)) for _ in dims]
        parent = MemoryDesc([(n - 1) * k + 1 for n, k in zip(dims, steps, strict=True)], "s32")
        return parent.slice([0] * len(dims), dims, steps)
    strides, step = [0] * len(dims), draw(st.integers(1, 3))
    for axis in draw(st.permutations(range(len(dims)))):
        strides[axis] = 0 if kind == "broadcast" and draw(st.booleans()) else step
        step = step * dims[axis] + draw(st.integers(0, 3))
    return MemoryDesc(dims, "s32", strides=strides, offset0=draw(st.integers(0, 3)))


def numbered(md: MemoryDesc) -> np.ndarray:
    return np.arange(1, md.nelems + 1, dtype=np.int32).reshape(md.dims)


def all_indices(md: MemoryDesc) -> list[tuple[int, ...]]:
    return list(np.ndindex(*md.dims))


@law
@given(st.integers(1, 12).flatmap(tags))
def test_printing_a_parsed_tag_is_the_identity(name: str) -> None:
    assert str(parse_tag(name)) == parse_tag(name).abstract == name


@law
@given(layouts())
def test_tag_of_a_descriptor_gives_it_back(md: MemoryDesc) -> None:
    if md.tag is not None:
        assert MemoryDesc(md.dims, md.dtype, tag=md.tag) == md


@law
@given(st.data())
def test_every_tagged_descriptor_has_a_tag(data: st.DataObject) -> None:
    dims = data.draw(dims_of)
    md = MemoryDesc(dims, tag=data.draw(tags(len(dims))))
    assert md.tag is not None
    assert MemoryDesc(dims, tag=md.tag) == md


@law
@given(layouts())
def test_index_at_is_the_inverse_of_offset(md: MemoryDesc) -> None:
    for index in all_indices(md):
        assert md.index_at(md.offset(index)) == index


@law
@given(layouts())
def test_offsets_are_injective_and_inside_the_storage(md: MemoryDesc) -> None:
    positions = [md.offset(index) for index in all_indices(md)]
    assert len(set(positions)) == len(positions)
    assert max(positions) * 4 < md.nbytes
    inside = {p: md.index_at(p) for p in range(-1, md.nbytes // 4 + 2)}
    assert {p for p, index in inside.items() if index is not None} == set(positions)


@law
@given(layouts(broadcast=True))
def test_broadcast_answers_with_the_first_index(md: MemoryDesc) -> None:
    for index in all_indices(md):
        first = tuple(0 if s == 0 else i for i, s in zip(index, md.strides, strict=True)) if md.is_plain else index
        assert md.offset(first) == md.offset(index)
        assert md.index_at(md.offset(index)) == first


@law
@given(layouts(broadcast=True))
def test_vectorised_forms_agree(md: MemoryDesc) -> None:
    indices = np.array(all_indices(md))
    assert md.offsets(indices).tolist() == [md.offset(index) for index in all_indices(md)]
    positions = np.arange(-2, md.nbytes // 4 + 2)
    expected = [md.index_at(p) or (-1,) * md.ndim for p in positions.tolist()]
    assert [tuple(row) for row in md.indices_at(positions).tolist()] == expected
    assert [index for _, index in md.walk()] == [md.index_at(p) for p in range(md.offset0, md.nbytes // 4)]


@law
@given(layouts())
def test_unpack_is_the_inverse_of_pack(md: MemoryDesc) -> None:
    array = numbered(md)
    buffer = pack(array, md)
    assert np.array_equal(unpack(buffer, md), array)
    for position, value in enumerate(buffer.tolist()):
        index = md.index_at(position)
        assert value == (0 if index is None else array[index])


@law
@given(st.data())
def test_convert_through_any_third_format_is_direct(data: st.DataObject) -> None:
    dims = data.draw(dims_of)
    a, b, c = (data.draw(layouts(dims)) for _ in range(3))
    buffer = pack(numbered(a), a)
    direct = convert(buffer, a, b)
    assert np.array_equal(convert(convert(buffer, a, c), c, b), direct)
    assert np.array_equal(convert(direct, b, a), buffer)


@law
@given(st.data())
def test_transforms_move_no_element(data: st.DataObject) -> None:
    md = data.draw(layouts())
    array, buffer = numbered(md), pack(numbered(md), md)
    axes = data.draw(st.permutations(range(md.ndim)))
    assert np.array_equal(unpack(buffer, md.transpose(axes)), array.transpose(axes))
    assert md.transpose(axes).permute_axes(axes) == md
    ones = (1, *md.dims, 1)
    assert np.array_equal(unpack(buffer, md.reshape(ones)), array.reshape(ones))
    back = md.reshape(ones).reshape(md.dims)
    assert back.nbytes == md.nbytes
    assert np.array_equal(unpack(buffer, back), array)
    # which dimension of size 1 the padding belongs to, the elements do not tell
    if all(size > 1 or padded == 1 for size, padded in zip(md.dims, md.padded_dims, strict=True)):
        assert back == md


@law
@given(layouts())
def test_size_counts_every_element_once(md: MemoryDesc) -> None:
    assert md.nbytes >= md.nelems * 4
    assert md.padding_bytes == md.nbytes - md.nelems * 4
    assert md.is_packed == (md.padding_bytes == 0)
