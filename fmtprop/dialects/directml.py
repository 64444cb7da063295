"""DirectML's dialect: buffer tensors described by sizes and strides.

Owns ``DML_BUFFER_TENSOR_DESC``, packed strides under axis names, and the minimum buffer size. A tensor converts
to and from :class:`~fmtprop.layout.MemoryDesc`. Must not know about oneDNN or graphs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from fmtprop.dialects.slice1 import FeatureLevel, Slice1
from fmtprop.errors import FormatError, ShapeError
from fmtprop.layout.desc import MemoryDesc
from fmtprop.layout.dtypes import DataType
from fmtprop.layout.geometry import check_dims, dense_strides, integer, integers

__all__ = ["BufferTensor", "FeatureLevel", "Slice1", "calc_buffer_tensor_size", "packed_strides"]

MAX_RANK = 8
UINT32_MAX = 2**32 - 1

# Logical order of the axis names: batch, channel, depth, height, width.
_AXES = "NCDHW"

# DML_TENSOR_DATA_TYPE; the others have no DirectML counterpart.
_DATA_TYPES = {
    *(DataType.F64, DataType.F32, DataType.F16),
    *(DataType.S64, DataType.S32, DataType.S16, DataType.S8),
    *(DataType.U64, DataType.U32, DataType.U16, DataType.U8),
}


def packed_strides(sizes: Iterable[int], order: str | None = None) -> tuple[int, ...]:
    """Return packed strides: each is the product of the sizes of all lower-order dimensions (SPEC D2).

    Parameters
    ----------
    sizes : iterable of int
        Sizes in logical order: those of N, C, D, H, W that the tensor has.
    order : str, optional
        Axis names from the highest-order dimension to the lowest: ``"HW"`` row major, ``"WH"`` column major,
        ``"DHW"``, ``"WHD"``, ``"NCHW"``, ``"NHWC"``. Default: the logical order.

    Returns
    -------
    tuple of int
        Strides in elements, in logical order.

    Raises
    ------
    ShapeError
        DirectML does not take the sizes, or the names do not match the number of dimensions.

    Examples
    --------
    >>> packed_strides((1, 1, 3, 5), "NHWC")
    (15, 1, 5, 1)
    >>> packed_strides((2, 3), "WH")
    (1, 2)
    """
    dims = _check_sizes(sizes)
    if order is None:
        return dense_strides(dims, range(len(dims)))
    if not isinstance(order, str):
        raise ShapeError(f"order must be a str of axis names such as 'NHWC', not {order!r}")
    names = order.upper()
    logical = [name for name in _AXES if name in names]
    if len(names) != len(dims) or sorted(names) != sorted(logical):
        raise ShapeError(
            f"order {order!r} must name each of the {len(dims)} dimensions of sizes {dims} once, by letters of {_AXES}"
        )
    return dense_strides(dims, [logical.index(name) for name in names])


def calc_buffer_tensor_size(dtype: object, sizes: Iterable[int], strides: Iterable[int] | None = None) -> int:
    """Return the minimum size of a buffer tensor in bytes (SPEC D6).

    Parameters
    ----------
    dtype : DataType or anything that ``DataType.from_any`` takes
    sizes : iterable of int
        Sizes of the tensor.
    strides : iterable of int, optional
        Strides in elements; None for packed.

    Returns
    -------
    int
        The last element's offset + 1 in elements, times the element size, rounded up to a multiple of 4.

    Raises
    ------
    ShapeError
        Sizes, strides or data type are not DirectML's.

    Examples
    --------
    >>> calc_buffer_tensor_size("f32", (2, 3), (5, 1)), calc_buffer_tensor_size("u8", (2, 3))
    (32, 8)

    References
    ----------
    ``DMLCalcBufferTensorSize``, DirectML helper functions.
    """
    return BufferTensor(sizes, strides, dtype).size_in_bytes


@dataclass(frozen=True, init=False)
class BufferTensor:
    """A DirectML buffer tensor: sizes and strides over a linear buffer (SPEC D1).

    Parameters
    ----------
    sizes : iterable of int
        1 to 8 sizes, none of them 0.
    strides : iterable of int, optional
        Elements to skip to the next element of each dimension; 0 repeats it (broadcast). None means packed.
    dtype : DataType or anything that ``DataType.from_any`` takes
        Not bf16 or boolean, which DirectML lacks.

    Raises
    ------
    ShapeError
        Sizes, strides or data type are not DirectML's.

    Examples
    --------
    >>> BufferTensor((2, 2, 3), (6, 3, 1)).offset((1, 0, 1))
    7

    References
    ----------
    ``DML_BUFFER_TENSOR_DESC``; SPEC D1-D7.
    """

    sizes: tuple[int, ...]
    strides: tuple[int, ...] | None
    dtype: DataType

    def __init__(
        self, sizes: Iterable[int], strides: Iterable[int] | None = None, dtype: object = DataType.F32
    ) -> None:
        dims = _check_sizes(sizes)
        steps = None if strides is None else check_dims(strides, "strides")
        if steps is not None and len(steps) != len(dims):
            raise ShapeError(f"strides {steps} must have one entry per dimension of sizes {dims}")
        if steps is not None and max(steps) > UINT32_MAX:
            raise ShapeError(f"strides {steps}: DirectML's strides are 32-bit, at most {UINT32_MAX}")
        data_type = DataType.from_any(dtype)
        if data_type not in _DATA_TYPES:
            raise ShapeError(
                f"data type {data_type} is not DirectML's; use one of {', '.join(sorted(t.value for t in _DATA_TYPES))}"
            )
        object.__setattr__(self, "sizes", dims)
        object.__setattr__(self, "strides", steps)
        object.__setattr__(self, "dtype", data_type)

    @property
    def effective_strides(self) -> tuple[int, ...]:
        """The strides, packed ones where none were given (SPEC D7)."""
        return packed_strides(self.sizes) if self.strides is None else self.strides

    @property
    def size_in_elements(self) -> int:
        """Elements from the buffer's start through the last element."""
        return 1 + sum((n - 1) * s for n, s in zip(self.sizes, self.effective_strides, strict=True))

    @property
    def size_in_bytes(self) -> int:
        """Minimum buffer size as ``DMLCalcBufferTensorSize`` computes it (SPEC D6)."""
        return -(-self.size_in_elements * self.dtype.nbytes // 4) * 4

    @property
    def is_packed(self) -> bool:
        """True where as many places as elements are in use and no two elements share one (SPEC D3)."""
        if self.size_in_elements != prod(self.sizes):
            return False
        moving = sorted((s, n) for n, s in zip(self.sizes, self.effective_strides, strict=True) if n > 1)
        need = 1
        for stride, size in moving:
            if stride != need:
                return False
            need *= size
        return True

    @property
    def is_broadcast(self) -> bool:
        """True where a dimension is repeated by stride 0 (SPEC D4)."""
        return any(s == 0 and n > 1 for n, s in zip(self.sizes, self.effective_strides, strict=True))

    def offset(self, index: Sequence[int]) -> int:
        """Return the position of an element: the dot product of index and strides (SPEC D1).

        Parameters
        ----------
        index : sequence of int
            One coordinate per dimension.

        Returns
        -------
        int
            Elements from the buffer's start.

        Raises
        ------
        ShapeError
            The index has another rank or is out of range.
        """
        where = integers(index, "index")
        if len(where) != len(self.sizes) or any(not 0 <= i < n for i, n in zip(where, self.sizes, strict=True)):
            raise ShapeError(f"index {where} is out of range for sizes {self.sizes}")
        return sum(i * s for i, s in zip(where, self.effective_strides, strict=True))

    def promote(self, rank: int) -> BufferTensor:
        """Return the tensor with leading sizes of 1, as operators that want 4 or 5 dimensions need it (SPEC D7).

        Parameters
        ----------
        rank : int
            Number of dimensions wanted, at least the present one.

        Returns
        -------
        BufferTensor
            Null strides stay null.

        Raises
        ------
        ShapeError
            `rank` is not an integer, exceeds 8, or is less than the tensor's.

        Examples
        --------
        >>> BufferTensor((3, 5), (5, 1)).promote(4)
        BufferTensor(sizes=(1, 1, 3, 5), strides=(15, 15, 5, 1), dtype=<DataType.F32: 'f32'>)
        """
        rank = integer(rank, "rank")
        extra = rank - len(self.sizes)
        if extra < 0 or rank > MAX_RANK:
            raise ShapeError(
                f"cannot promote sizes {self.sizes} to rank {rank}: it must be {len(self.sizes)} to {MAX_RANK}"
            )
        strides = self.strides
        if strides is not None:
            strides = (self.sizes[0] * strides[0],) * extra + strides
        return BufferTensor((1,) * extra + self.sizes, strides, self.dtype)

    def to_memory_desc(self) -> MemoryDesc:
        """Return the descriptor of the same layout.

        Returns
        -------
        MemoryDesc
            Plain, with these strides.

        Raises
        ------
        ShapeError
            Elements overlap other than by stride 0, which no memory descriptor describes.
        """
        return MemoryDesc.view(self.sizes, self.dtype, strides=self.effective_strides)

    @classmethod
    def from_memory_desc(cls, md: MemoryDesc) -> BufferTensor:
        """Return the buffer tensor of a plain descriptor.

        Parameters
        ----------
        md : MemoryDesc
            Plain; strides are kept as they are.

        Raises
        ------
        FormatError
            The descriptor is blocked, padded, offset, any or opaque: DirectML has strides only.
        ShapeError
            Sizes or data type are not DirectML's, or `md` is no descriptor.
        """
        if not isinstance(md, MemoryDesc):
            raise ShapeError(f"md must be a MemoryDesc, not {md!r}")
        if md.geometry.inner_blocks:  # the kinds any and opaque have no geometry, and say so
            raise FormatError(
                f"{md}: DirectML describes a tensor by strides only, not by inner blocks; reorder to plain"
            )
        if md.padded_dims != md.dims:
            raise FormatError(f"{md}: DirectML has no padded sizes {md.padded_dims}; express padding by strides")
        if md.offset0:
            raise FormatError(f"{md}: DirectML's tensor has no offset {md.offset0}; bind the buffer at that offset")
        return cls(md.dims, md.strides, md.dtype)


def _check_sizes(sizes: Iterable[int]) -> tuple[int, ...]:
    dims = check_dims(sizes, "sizes")
    if not 1 <= len(dims) <= MAX_RANK:
        raise ShapeError(f"sizes {dims}: a DirectML tensor has 1 to {MAX_RANK} dimensions")
    for axis, size in enumerate(dims):
        if not 1 <= size <= UINT32_MAX:
            raise ShapeError(f"sizes[{axis}] is {size}; DirectML's sizes lie between 1 and {UINT32_MAX}")
    return dims
