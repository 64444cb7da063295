"""Formats inside formats: a tensor is cut along one axis, and each part is a range of its storage.

Owns the rule for when a concatenation needs no copies. Must not know about ops, graphs or oneDNN.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from fmtprop.errors import FormatError, ShapeError
from fmtprop.layout.desc import MemoryDesc


def in_place_parts(whole: MemoryDesc, axis: int, sizes: Sequence[int]) -> list[MemoryDesc] | None:
    """Cut a format along an axis into dense parts, each a range of the storage.

    The parts are dense if every axis outside of `axis` in memory has size 1 and, for a blocked `axis`, all parts but
    the last are whole blocks.

    Result: each part within the whole (``offset0`` is its first position); None if one of them would not be dense.

    >>> [part.offset0 for part in in_place_parts(MemoryDesc((1, 48, 5, 5), tag="aBcd16b"), 1, [16, 32])]
    [0, 400]
    >>> in_place_parts(MemoryDesc((1, 48, 5, 5), tag="acdb"), 1, [16, 32]) is None  # channels of a pixel lie together
    True

    oneDNN developer guide, "Memory Format Propagation": kernels are fast on dense tensors only.
    """
    parts = _parts(whole, axis, tuple(sizes))
    return None if parts is None else [*parts]


@lru_cache(maxsize=1024)  # passes, the verifier and the plan ask for the parts of one node
def _parts(whole: MemoryDesc, axis: int, sizes: tuple[int, ...]) -> tuple[MemoryDesc, ...] | None:
    if not 0 <= axis < whole.ndim or sum(sizes) != whole.dims[axis] or min(sizes, default=0) < 0:
        raise ShapeError(f"cannot cut dims {whole.dims} along axis {axis} into parts of {sizes}")
    if not whole.is_dense or not whole.nelems or 0 in sizes:
        return None
    parts: list[MemoryDesc] = []
    start = 0
    for size in sizes:
        offsets, dims = [0] * whole.ndim, list(whole.dims)
        offsets[axis], dims[axis] = start, size
        try:
            part = whole.submemory(dims, offsets)
        except FormatError:
            return None
        if not part.at_start().is_dense:
            return None
        parts.append(part)
        start += size
    return tuple(parts)
