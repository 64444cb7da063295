"""Memory descriptors as plain data: a table in which each format stands once.

An opaque format is a number of its process. The file has its size, and the format itself comes from the implementation,
which is asked again (:mod:`fmtprop.planfile.rebuild`). Until then a descriptor with a token of its own stands for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from fmtprop.errors import FmtpropError, PlanError
from fmtprop.layout import DataType, FormatKind, MemoryDesc

T = TypeVar("T")

#: first part of the token of a format that must be asked for
_ASKED = "to be asked for"

#: tokens that mean the same in every process
_LASTING = frozenset({"mkldnn"})

_KEYS = ("strides", "blocks", "padded", "offsets", "offset0")


class Descs:
    """The formats of a plan while it is written."""

    def __init__(self) -> None:
        self.rows: list[list[Any]] = []
        #: strides without effect are no part of a format's identity, but kernels and operators see them
        self._places: dict[tuple[MemoryDesc, tuple[int, ...]], int] = {}

    def place(self, desc: MemoryDesc) -> int:
        """Return the place of a format in the table."""
        key = desc, desc.strides if desc.kind is FormatKind.BLOCKED else ()
        if key not in self._places:
            self._places[key] = len(self.rows)
            self.rows.append(_row(desc))
        return self._places[key]


def _row(desc: MemoryDesc) -> list[Any]:
    head = [desc.dtype.value, list(desc.dims)]
    if desc.kind is FormatKind.ANY:
        return [*head, "any"]
    if desc.kind is FormatKind.OPAQUE:
        token = desc.token if desc.token in _LASTING else None
        return [*head, {"opaque": desc.nbytes, "token": token}]
    if desc.tag is not None and has_usual_strides(desc):
        return [*head, desc.tag]
    blocks = [list(block) for block in desc.inner_blocks]
    numbers = [list(desc.strides), blocks, list(desc.padded_dims), list(desc.padded_offsets), desc.offset0]
    return [*head, dict(zip(_KEYS, numbers, strict=True))]


def has_usual_strides(desc: MemoryDesc) -> bool:
    """Return whether a format's tag tells all, strides without effect included: kernels and operators see these."""
    return desc.tag is None or MemoryDesc(desc.dims, desc.dtype, tag=desc.tag).geometry == desc.geometry


def descs_of(rows: Any) -> list[MemoryDesc]:
    """Return the formats of a table, of which nothing is trusted.

    >>> descs_of([["f32", [2, 17, 5, 7], "aBcd16b"]])
    [MemoryDesc((2, 17, 5, 7), 'f32', tag='aBcd16b')]
    """
    if not isinstance(rows, list):
        raise PlanError("its table of formats must be a list")
    found = []
    for place, row in enumerate(rows):
        try:
            found.append(_desc(row, place))
        except (FmtpropError, TypeError, ValueError, KeyError, OverflowError) as error:
            raise PlanError(f"its format {place} is malformed: {error}") from error
    return found


def _desc(row: Any, place: int) -> MemoryDesc:
    if not isinstance(row, list) or len(row) != 3:
        raise PlanError(f"must be a data type, sizes and a layout, got {str(row)[:80]}")
    dtype, dims, how = row
    if not isinstance(dtype, str) or not _are_whole(dims):
        raise PlanError(f"must begin with a data type and sizes, got {str(row)[:80]}")
    kind = DataType(dtype)
    if isinstance(how, str):
        return MemoryDesc(dims, kind, tag=how)
    if not isinstance(how, dict):
        raise PlanError(f"has the layout {str(how)[:80]}")
    if set(how) == {"opaque", "token"}:
        if not _are_whole([how["opaque"]]) or not (how["token"] is None or how["token"] in _LASTING):
            raise PlanError(f"is opaque with {str(how)[:80]}")
        return MemoryDesc.opaque(dims, kind, how["opaque"], how["token"] or (_ASKED, place))
    if set(how) != set(_KEYS):
        raise PlanError(f"must have the keys {', '.join(_KEYS)}, got {', '.join(map(str, how))[:80]}")
    strides, blocks, padded, offsets, offset0 = (how[key] for key in _KEYS)
    pairs = isinstance(blocks, list) and all(_are_whole(pair) and len(pair) == 2 for pair in blocks)
    if not pairs or not all(map(_are_whole, (strides, padded, offsets, [offset0]))):
        raise PlanError("has numbers that are not whole, or negative")
    return MemoryDesc.view(
        dims,
        kind,
        strides=strides,
        inner_blocks=[(axis, size) for axis, size in blocks],
        padded_dims=padded,
        padded_offsets=offsets,
        offset0=offset0,
    )


def at(items: Sequence[T], place: object, what: str) -> T:
    """Return an item by its place in a list, of which nothing is trusted."""
    if not isinstance(place, int) or isinstance(place, bool) or not 0 <= place < len(items):
        raise PlanError(f"there is no {what} {str(place)[:80]}")
    return items[place]


def _are_whole(numbers: Any) -> bool:
    return isinstance(numbers, list) and all(
        isinstance(number, int) and not isinstance(number, bool) and 0 <= number < 2**63 for number in numbers
    )


def is_asked(desc: MemoryDesc) -> bool:
    """Return whether a descriptor stands for an opaque format that its implementation must be asked for."""
    return isinstance(desc.token, tuple) and desc.token[:1] == (_ASKED,)
