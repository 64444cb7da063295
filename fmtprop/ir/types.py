"""Logical types of tensors, independent of their memory formats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from fmtprop.errors import ShapeError
from fmtprop.layout import DataType


@dataclass(frozen=True)
class TensorType:
    """Dimensions and data type of a tensor; no format.

    Raises ShapeError if a dimension is negative or not an integer.

    >>> TensorType((1, 3, 224, 224), "f32")
    f32[1,3,224,224]
    """

    #: logical dimensions, outermost first; the order is fixed per primitive (SPEC M2)
    dims: tuple[int, ...]
    dtype: DataType

    def __init__(self, dims: Sequence[int], dtype: DataType | str = "f32") -> None:
        dims = tuple(dims)
        for size in dims:
            if type(size) is not int or size < 0:
                _check(dims)
        object.__setattr__(self, "dims", dims)
        object.__setattr__(self, "dtype", dtype if type(dtype) is DataType else DataType(dtype))

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.dims)

    @property
    def size(self) -> int:
        """Number of logical elements."""
        return prod(self.dims)

    @property
    def nbytes(self) -> int:
        """Bytes of the logical elements, without any padding."""
        return self.size * self.dtype.nbytes

    def with_dims(self, dims: Sequence[int]) -> TensorType:
        """Return the type with other dimensions."""
        return TensorType(dims, self.dtype)

    def with_dtype(self, dtype: DataType | str) -> TensorType:
        """Return the type with another data type."""
        return TensorType(self.dims, dtype)

    def __repr__(self) -> str:
        return f"{self.dtype.value}[{','.join(map(str, self.dims))}]"


def _check(dims: tuple[int, ...]) -> None:
    for axis, size in enumerate(dims):
        if not isinstance(size, int) or isinstance(size, bool) or size < 0:
            raise ShapeError(f"dimension {axis} must be a non-negative int, got {size!r} in {dims}")
