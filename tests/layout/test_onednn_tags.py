"""Every name in oneDNN's format-tag enum parses, prints back, and gives oneDNN's own descriptor (SPEC M6)."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from fmtprop.layout import MemoryDesc, parse_tag
from fmtprop.layout.tags import IRREGULAR
from tests.layout import _native
from tests.layout._native import ALIASES, TAGS


def dims_for(name: str) -> tuple[int, ...]:
    """Sizes that no block divides, of at least two blocks, so that no two tags give the same descriptor."""
    blocks = dict(parse_tag(name).blocked_axes)
    return tuple(blocks.get(axis, 1) + 1 for axis in range(parse_tag(name).ndim))


def test_the_table_is_complete() -> None:
    assert len(TAGS) == 760
    assert len(ALIASES) == 714
    assert set(ALIASES.values()) <= set(TAGS)


def test_the_table_is_the_headers() -> None:
    header = Path(sys.prefix) / "include" / "oneapi" / "dnnl" / "dnnl_types.h"
    if not header.exists():
        pytest.skip("oneDNN's headers are not installed (package onednn-devel-cpu-gomp)")
    enum = re.search(r"dnnl_format_tag_undef = 0,(.*?)} dnnl_format_tag_t;", header.read_text(), re.S)
    assert enum is not None
    text = re.sub(r"//.*", "", enum.group(1))
    names = re.findall(r"\bdnnl_([A-Za-z]\w*)(?: = dnnl_(\w+))?,", text)
    plain = [name for name, alias in names if not alias and not name.startswith("format_tag")]
    assert set(plain) >= set(TAGS)
    assert {name: alias for name, alias in names if alias}.items() >= ALIASES.items()


def test_m6_enum_name_prints_back() -> None:
    for name in (*TAGS, *ALIASES):
        assert str(parse_tag(name)) == name
        assert parse_tag(name).abstract == ALIASES.get(name, name)


def test_m6_irregular_names_are_those_of_the_enum() -> None:
    assert IRREGULAR.items() <= ALIASES.items()


def test_m6_enum_name_gives_onednns_descriptor() -> None:
    for name in TAGS:
        native = _native.by_enum(dims_for(name), "f32", name)
        assert isinstance(native, _native.Native), name
        md = MemoryDesc(dims_for(name), "f32", tag=name)
        assert native.fields() == {key: getattr(md, key) for key in native.fields()}, name


def test_m6_descriptor_finds_its_tag() -> None:
    for name in TAGS:
        assert MemoryDesc(dims_for(name), "f32", tag=name).tag == name


SPEC_ALIASES = {
    **{"nchw": "abcd", "nhwc": "acdb", "oihw": "abcd", "goihw": "abcde", "nc": "ab", "tnc": "abc"},
    **{"ldio": "abcd", "ldoi": "abdc", "nChw16c": "aBcd16b", "OIhw16i16o": "ABcd16b16a"},
}


@pytest.mark.parametrize(("alias", "tag"), SPEC_ALIASES.items())
def test_m6_domain_aliases_of_the_spec(alias: str, tag: str) -> None:
    assert parse_tag(alias).abstract == tag
    assert MemoryDesc((4, 32, 3, 5, 6)[: parse_tag(tag).ndim], tag=alias).tag == tag
