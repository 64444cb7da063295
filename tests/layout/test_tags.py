"""The tag language: what parses, what does not, and what the message says."""

from __future__ import annotations

import pytest

from fmtprop.errors import FormatError, ShapeError
from fmtprop.layout import InnerBlock, MemoryDesc, format_tag, parse_tag


def test_tag_with_any_nesting() -> None:
    tag = parse_tag("ABcd4b16a4b")
    assert tag.order == (0, 1, 2, 3)
    assert tag.inner_blocks == (InnerBlock(1, 4), InnerBlock(0, 16), InnerBlock(1, 4))
    assert dict(tag.blocked_axes) == {1: 16, 0: 16}


def test_printing_uses_the_given_letters() -> None:
    assert format_tag((1, 0), (InnerBlock(0, 8), InnerBlock(1, 2)), "oi") == "IO8o2i"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("abcc", "letter 'c' is repeated"),
        ("abAd", "letter 'a' is repeated"),
        ("abd", "the letters must be the first 3 of the alphabet"),
        ("nchz", "or those of a domain alias"),
        ("aBcd", "capital 'B' says that the dimension is blocked"),
        ("abcd16b", "write its outer letter as 'B'"),
        ("aBcd0b", "must have a size of at least 2"),
        ("aBcd1b", "must have a size of at least 2"),
        ("aBcd16e", "inner block 16e names no dimension"),
        ("aBcd16", "a tag is letters"),
        ("", "a tag is letters"),
        ("ab cd", "a tag is letters"),
        ("abcdefghijklm", "at most 12"),
    ],
)
def test_bad_tag(name: str, says: str) -> None:
    with pytest.raises(FormatError, match=says) as caught:
        parse_tag(name)
    assert repr(name) in str(caught.value)


def test_tag_of_another_rank() -> None:
    with pytest.raises(ShapeError, match=r"format tag 'abcd' names 4 dimensions, but dims \(2, 3\) has 2"):
        MemoryDesc((2, 3), tag="abcd")


@pytest.mark.parametrize(
    ("dims", "given", "named"),
    [
        ((8, 1, 5, 5), "acdb", "abcd"),  # one channel: nhwc is nchw
        ((1, 8, 5, 5), "bcda", "abcd"),
        ((2, 3, 1, 1), "acdb", "abcd"),
        ((2, 3, 4, 1), "acdb", "acdb"),
        ((2, 16, 1, 1), "aBcd16b", "aBcd16b"),
        ((1, 1, 1, 1), "dcba", "abcd"),
        ((1, 1, 1, 1), "Abcd8a", "Abcd8a"),
    ],
)
def test_size_one_dimensions_are_named_in_logical_order(dims: tuple[int, ...], given: str, named: str) -> None:
    md = MemoryDesc(dims, tag=given)
    assert md.tag == named
    assert md == MemoryDesc(dims, tag=named)
    assert hash(md) == hash(MemoryDesc(dims, tag=named))


def test_descriptor_without_a_name_says_so() -> None:
    assert MemoryDesc((2, 3), strides=(5, 1)).tag is None
    assert MemoryDesc((4, 4)).submemory((4, 2), (0, 2)).tag is None
    assert MemoryDesc((2, 3), strides=(0, 1)).tag is None
    assert MemoryDesc((2, 3), padded_dims=(2, 8)).tag is None
    assert MemoryDesc.any((2, 3)).tag == "any"
    assert MemoryDesc.opaque((2, 3), "f32", 64, "token").tag is None
