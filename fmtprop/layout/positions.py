"""Positions of a memory descriptor's elements in its buffer, in both directions; ``address`` has the arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy.typing as npt

from fmtprop.layout import address, geometry
from fmtprop.layout.base import DescBase


class WithPositions(DescBase):
    """Logical indices and positions; see :class:`~fmtprop.layout.MemoryDesc`."""

    __slots__ = ()

    def offset(self, index: Sequence[int]) -> int:
        """Return the position of a logical index (SPEC M4).

        Parameters
        ----------
        index : sequence of int
            One index per dimension.

        Returns
        -------
        int
            Elements from the buffer's start.

        Raises
        ------
        ShapeError
            The index has another rank or is out of range.
        FormatError
            The kind is any or opaque.
        """
        return address.offset(self.geometry, geometry.integers(index, "index"))

    def offsets(self, indices: npt.ArrayLike) -> address.IntArray:
        """Return the positions, shape (...), of many logical indices, shape (..., ndim).

        Parameters
        ----------
        indices : array_like of int, shape (..., ndim)
            Logical indices.

        Returns
        -------
        numpy.ndarray of int64, shape (...)
            Elements from the buffer's start.

        Raises
        ------
        ShapeError
            An index is out of range, or the last dimension is not ``ndim``.
        """
        return address.offsets(self.geometry, indices)

    def index_at(self, position: int) -> tuple[int, ...] | None:
        """Return the logical index at `position`, or None where it is padding, a gap or outside.

        For a repeated (broadcast) element, this is its first index.

        Parameters
        ----------
        position : int
            Elements from the buffer's start.

        Raises
        ------
        ShapeError
            `position` is not an integer.
        """
        return address.index_at(self.geometry, geometry.integer(position, "position"))

    def indices_at(self, positions: npt.ArrayLike) -> address.IntArray:
        """Return the logical indices at many positions.

        Parameters
        ----------
        positions : array_like of int, shape (...)
            Elements from the buffer's start.

        Returns
        -------
        numpy.ndarray of int64, shape (..., ndim)
            All -1 where the position is padding, a gap or outside.
        """
        return address.indices_at(self.geometry, positions)

    def walk(self) -> Iterator[tuple[int, tuple[int, ...] | None]]:
        """Walk the storage in memory order.

        Yields
        ------
        position : int
            From `offset0` to the end of the storage.
        index : tuple of int or None
            The logical index there; None for padding and gaps.
        """
        for position in range(self.offset0, self.nbytes // self.dtype.nbytes):
            yield position, address.index_at(self.geometry, position)
