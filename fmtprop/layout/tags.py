"""Format tags: the names of memory formats.

Owns parsing and printing of oneDNN's format-tag language: abstract tags (``acdb``), blocked tags
(``ABcd4b16a4b``) and domain aliases (``nChw16c``). Must not know about dimension sizes.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from fmtprop.errors import FormatError

MAX_NDIMS = 12
"""Largest number of dimensions of a descriptor (``DNNL_MAX_NDIMS``)."""

LETTERS = "abcdefghijkl"
"""Letters of the axes, in logical order."""

# Logical dimension order of each domain; a domain tag is any arrangement of one domain's letters.
# n minibatch, c channel, o/i output/input channel, g group, d/h/w spatial; RNN: t time, l layer, d direction.
DOMAINS = (
    *("x", "nc", "ncw", "nchw", "ncdhw"),
    *("oi", "oiw", "oihw", "oidhw", "goiw", "goihw", "goidhw"),
    *("tn", "tnc", "ldnc", "ldio", "ldigo", "ldgo"),
)

# Names in oneDNN's enum that break its own grammar (a capital letter without a block, or a block with the wrong
# dimension's letter), with the abstract tag that oneDNN gives them.
IRREGULAR = {
    "OhwI24o": "Acdb24a",
    "OhwI32o": "Acdb32a",
    "gOhwI24o": "aBdec24b",
    "gOhwI32o": "aBdec32b",
    "gIOhw2i8o16i2o": "aBCde2c8b16c2b",
    "gIOdhw2i8o16i2o": "aBCdef2c8b16c2b",
}

_DOMAIN_OF = {frozenset(domain): domain for domain in DOMAINS}
_TAG = re.compile(r"([A-Za-z]+)((?:\d+[a-z])*)")
_BLOCK = re.compile(r"(\d+)([a-z])")


class InnerBlock(NamedTuple):
    """One inner block of a blocked format."""

    #: logical axis that is blocked
    axis: int
    #: number of consecutive elements of that axis in the block
    size: int


class FormatTag(NamedTuple):
    """A parsed format tag.

    >>> tag = parse_tag("nChw16c")
    >>> str(tag), tag.abstract, tag.order
    ('nChw16c', 'aBcd16b', (0, 1, 2, 3))
    """

    #: logical axes, outermost first
    order: tuple[int, ...]
    inner_blocks: tuple[InnerBlock, ...]
    #: letter of every logical axis: ``"abcd"`` for an abstract tag, ``"nchw"`` for a domain alias
    letters: str
    #: the irregular oneDNN name (see :data:`IRREGULAR`) that was parsed; it is printed again
    alias: str | None = None

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.order)

    @property
    def abstract(self) -> str:
        """The tag in the abstract letters a, b, c, and so on."""
        return format_tag(self.order, self.inner_blocks)

    @property
    def blocked_axes(self) -> tuple[tuple[int, int], ...]:
        """Every blocked axis with the product of its inner blocks."""
        return _blocked_axes(self.inner_blocks)

    def __str__(self) -> str:
        return self.alias or format_tag(self.order, self.inner_blocks, self.letters)


@lru_cache(maxsize=4096)
def _blocked_axes(inner_blocks: tuple[InnerBlock, ...]) -> tuple[tuple[int, int], ...]:
    sizes: dict[int, int] = {}
    for axis, size in inner_blocks:
        sizes[axis] = sizes.get(axis, 1) * size
    return tuple(sizes.items())


def format_tag(order: tuple[int, ...], inner_blocks: tuple[InnerBlock, ...] = (), letters: str = LETTERS) -> str:
    """Print a tag.

    >>> format_tag((0, 1, 2, 3), (InnerBlock(1, 16),), "nchw")
    'nChw16c'
    """
    blocked = {block.axis for block in inner_blocks}
    outer = "".join(letters[a].upper() if a in blocked else letters[a] for a in order)
    return outer + "".join(f"{block.size}{letters[block.axis]}" for block in inner_blocks)


@lru_cache(maxsize=4096)
def parse_tag(name: str) -> FormatTag:
    """Parse a format tag: abstract, blocked, or a domain alias.

    `name`: for example ``"acdb"``, ``"ABcd4b16a4b"``, ``"nhwc"``, ``"OIhw16i16o"``.

    SPEC M6; ``dnnl_format_tag_t`` in oneapi/dnnl/dnnl_types.h.
    """
    if name == "any":
        raise FormatError(
            "format tag 'any' names no format: it leaves the choice to the primitive (MemoryDesc(dims, tag='any')); "
            "ask its primitive descriptor for the choice, or give a tag such as 'abcd'"
        )
    if name in IRREGULAR:
        return parse_tag(IRREGULAR[name])._replace(alias=name)
    match = _TAG.fullmatch(name)
    if match is None:
        raise FormatError(
            f"format tag {name!r}: a tag is letters (outermost dimension first, capitals for blocked dimensions) "
            "followed by inner blocks such as 16b"
        )
    outer, suffix = match.groups()
    letters = _logical_letters(name, outer.lower())
    blocks = tuple(_block(name, size, letter, letters) for size, letter in _BLOCK.findall(suffix))
    _check_capitals(name, outer, {letters[block.axis] for block in blocks})
    return FormatTag(tuple(letters.index(letter) for letter in outer.lower()), blocks, letters)


def _logical_letters(name: str, outer: str) -> str:
    repeated = sorted({letter for letter in outer if outer.count(letter) > 1})
    if repeated:
        raise FormatError(f"format tag {name!r}: letter {repeated[0]!r} is repeated; name every dimension once")
    ndim = len(outer)
    if ndim > MAX_NDIMS:
        raise FormatError(f"format tag {name!r} names {ndim} dimensions; at most {MAX_NDIMS} are supported")
    if set(outer) == set(LETTERS[:ndim]):
        return LETTERS[:ndim]
    domain = _DOMAIN_OF.get(frozenset(outer))
    if domain is None:
        raise FormatError(
            f"format tag {name!r}: the letters must be the first {ndim} of the alphabet "
            f"({LETTERS[:ndim]!r} in any order) or those of a domain alias ({', '.join(DOMAINS)})"
        )
    return domain


def _block(name: str, size: str, letter: str, letters: str) -> InnerBlock:
    if letter not in letters:
        raise FormatError(f"format tag {name!r}: inner block {size}{letter} names no dimension of the tag")
    if int(size) < 2:
        raise FormatError(f"format tag {name!r}: inner block {size}{letter} must have a size of at least 2")
    return InnerBlock(letters.index(letter), int(size))


def _check_capitals(name: str, outer: str, blocked: set[str]) -> None:
    for letter in outer:
        if letter.isupper() and letter.lower() not in blocked:
            raise FormatError(
                f"format tag {name!r}: capital {letter!r} says that the dimension is blocked, "
                f"but there is no inner block of {letter.lower()!r}; write {letter.lower()!r} or add a block"
            )
        if letter.islower() and letter in blocked:
            raise FormatError(
                f"format tag {name!r}: dimension {letter!r} has an inner block; write its outer letter "
                f"as {letter.upper()!r}"
            )
