"""XLA's layout: minor-to-major order with padding.

Owns :class:`Layout`, its image in linear memory and its conversion to and from :class:`~fmtprop.layout.MemoryDesc`.
Public through ``fmtprop.dialects.xla``. Must not know about the text form of shapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from fmtprop.errors import FormatError, ShapeError
from fmtprop.layout import buffers
from fmtprop.layout.desc import MemoryDesc
from fmtprop.layout.dtypes import DataType, cast
from fmtprop.layout.geometry import Geometry, axis_order, check_dims, dense_strides, storage_bytes

# PaddingValue of xla_data.proto.
PADDING_NAMES = ("zero", "one", "lowest", "highest")


@runtime_checkable
class ArrayShape(Protocol):
    """The properties of a shape that a layout needs: element type and dimensions."""

    @property
    def element_type(self) -> DataType:
        """Type of the elements."""

    @property
    def dimensions(self) -> tuple[int, ...]:
        """Sizes, dimension 0 first."""


@dataclass(frozen=True, init=False)
class Layout:
    """How an array lies in linear memory (SPEC X2, X3).

    Parameters
    ----------
    minor_to_major : iterable of int
        The dimensions, fastest varying first.
    padded_dimensions : iterable of int, optional
        Size to which each dimension is padded.
    padding_value : float or str, optional
        Value of the padding: a number, or ``"zero"``, ``"one"``, ``"lowest"``, ``"highest"`` (the infinities for
        floating-point types). None leaves it open (:meth:`linearize` writes zeros).

    Raises
    ------
    ShapeError
        Not a permutation, a wrong number of padded dimensions, or an unknown padding value.

    Examples
    --------
    >>> Layout((0, 1), (3, 5), 0).linearize(np.array([[1, 2, 3], [4, 5, 6]]))
    array([1, 4, 0, 2, 5, 0, 3, 6, 0, 0, 0, 0, 0, 0, 0])

    References
    ----------
    ``LayoutProto`` in xla_data.proto; SPEC X2, X3.
    """

    minor_to_major: tuple[int, ...]
    padded_dimensions: tuple[int, ...] | None
    padding_value: float | str | None

    def __init__(
        self,
        minor_to_major: Iterable[int],
        padded_dimensions: Iterable[int] | None = None,
        padding_value: float | str | None = None,
    ) -> None:
        order = check_dims(minor_to_major, "minor_to_major")
        if sorted(order) != list(range(len(order))):
            raise ShapeError(f"minor_to_major {order} must hold each of 0 to {len(order) - 1} exactly once")
        padded = None if padded_dimensions is None else check_dims(padded_dimensions, "padded_dimensions")
        if padded is not None and len(padded) != len(order):
            raise ShapeError(f"padded_dimensions {padded} must have one entry per dimension of {order}")
        value = padding_value.item() if isinstance(padding_value, np.generic) else padding_value
        named = isinstance(value, str) and value in PADDING_NAMES
        if not (value is None or named or isinstance(value, (int, float))):
            raise ShapeError(f"padding_value {padding_value!r} must be a number or one of {', '.join(PADDING_NAMES)}")
        object.__setattr__(self, "minor_to_major", order)
        object.__setattr__(self, "padded_dimensions", padded)
        object.__setattr__(self, "padding_value", value)

    @classmethod
    def default(cls, rank: int) -> Layout:
        """Return the layout of a new shape: major to minor, N-1 to 0 (SPEC X2).

        Parameters
        ----------
        rank : int
            Number of dimensions.
        """
        return cls(range(check_dims((rank,), "rank")[0] - 1, -1, -1))

    def linearize(self, array: npt.ArrayLike, dtype: object = None) -> npt.NDArray[Any]:
        """Return the image of an array in linear memory, padding values included (SPEC X3).

        Parameters
        ----------
        array : array_like
            The logical array; its elements are only moved, so they may be of any numpy type.
        dtype : DataType or the like, optional
            Its data type, where numpy cannot tell (bf16 bits in uint16).

        Returns
        -------
        numpy.ndarray, 1-D
            All elements of the padded array, in the array's type; an empty array gives only padding.

        Raises
        ------
        ShapeError
            The array's rank is not the layout's, a dimension exceeds its padded size, or the padding value does
            not fit the data type.

        Examples
        --------
        >>> "".join(Layout((0, 1)).linearize([list("abc"), list("def")]))
        'adbecf'
        """
        values = buffers.as_array(array, "linearize")
        g = self.geometry(values.shape)
        storage_bytes(g._replace(dims=g.padded_dims), values.dtype.itemsize)  # refuses sizes beyond 64 bits
        whole = np.zeros(g.padded_dims, values.dtype)
        data_type, padding = _stored_type(values, dtype), self.padding_value
        if g.padded_dims != g.dims and padding is not None and padding != "zero":
            whole[...] = _padding(padding, data_type, whole.dtype)
        whole[tuple(slice(size) for size in g.dims)] = values
        image: npt.NDArray[Any] = whole.transpose(self.minor_to_major[::-1]).ravel()
        return image

    def to_memory_desc(self, shape: ArrayShape) -> MemoryDesc:
        """Return the descriptor of an array of `shape` in this layout.

        Parameters
        ----------
        shape : Shape
            Dimensions and element type; its own layout is ignored.

        Returns
        -------
        MemoryDesc
            Padding becomes gaps between strides if `padding_value` is None and the padded sizes follow from the
            strides (a slower dimension must step over the padding). Otherwise it becomes ``padded_dims``, which oneDNN
            keeps zero. (As in oneDNN, a tensor with a size of 0 has no storage, even if it is padded.)

        Raises
        ------
        ShapeError
            The shape does not fit the layout, or `shape` is not a shape.
        FormatError
            The padding holds another value than 0.
        """
        if not isinstance(shape, ArrayShape):
            raise ShapeError(f"shape must be a Shape such as make_shape('f32', (2, 3)), not {shape!r}")
        g = self.geometry(shape.dimensions)
        if g.padded_dims != g.dims and self.padding_value not in (None, 0, "zero"):
            raise FormatError(
                f"padding value {self.padding_value!r} cannot be expressed: a memory descriptor's padding is zero"
            )
        gaps = MemoryDesc.view(g.dims, shape.element_type, strides=g.strides)
        if self.padding_value is None and _told_by_strides(gaps) == g.padded_dims:
            return gaps
        return MemoryDesc.view(g.dims, shape.element_type, strides=g.strides, padded_dims=g.padded_dims)

    @classmethod
    def from_memory_desc(cls, md: MemoryDesc) -> Layout:
        """Return the layout of a plain descriptor.

        Parameters
        ----------
        md : MemoryDesc
            Plain. Gaps between its strides become padded dimensions without a padding value.

        Raises
        ------
        FormatError
            The descriptor is blocked, broadcast, offset, any or opaque, or its strides are not multiples of each
            other; the message says which.
        ShapeError
            `md` is no descriptor.
        """
        if not isinstance(md, MemoryDesc):
            raise ShapeError(f"md must be a MemoryDesc, not {md!r}")
        if md.geometry.inner_blocks:  # the kinds any and opaque have no geometry, and say so
            raise FormatError(f"{md}: XLA's minor_to_major cannot express inner blocks; reorder to plain")
        if md.has_broadcast:
            raise FormatError(f"{md}: XLA's layout cannot repeat elements (stride 0); convert to a dense format first")
        if md.offset0 or any(md.padded_offsets):
            raise FormatError(f"{md}: XLA's layout has no offset {md.offset0} into the buffer")
        order = axis_order(md.geometry)[::-1]
        padded, gaps = _padded_dimensions(md, order)
        if gaps and md.padded_dims != md.dims:
            raise FormatError(f"{md}: XLA cannot tell gaps between strides from padded dimensions; use one of the two")
        if padded == md.dims:
            return cls(order)
        return cls(order, padded, None if gaps else 0)

    def geometry(self, dims: Sequence[int]) -> Geometry:
        """Return the dense geometry of the padded array.

        Parameters
        ----------
        dims : sequence of int
            Sizes of the array.

        Raises
        ------
        ShapeError
            The rank is not the layout's, or a size exceeds its padded size.
        """
        sizes = check_dims(dims, "dimensions")
        if len(sizes) != len(self.minor_to_major):
            raise ShapeError(f"dimensions {sizes} have rank {len(sizes)}, the layout {self} {len(self.minor_to_major)}")
        padded = sizes if self.padded_dimensions is None else self.padded_dimensions
        for axis, (size, whole) in enumerate(zip(sizes, padded, strict=True)):
            if whole < size:
                raise ShapeError(f"padded_dimensions[{axis}] is {whole}, smaller than the dimension's size {size}")
        strides = dense_strides(padded, self.minor_to_major[::-1])
        return Geometry(sizes, strides, (), padded, (0,) * len(sizes), 0)

    def __str__(self) -> str:
        """Return ``{0,1}``, or ``{0,1:pad(3,5)=0}`` where padded (XLA's own text omits padding)."""
        text = ",".join(map(str, self.minor_to_major))
        if self.padded_dimensions is not None:
            text += f":pad({','.join(map(str, self.padded_dimensions))})"
            text += "" if self.padding_value is None else f"={self.padding_value}"
        return "{" + text + "}"


def _stored_type(values: npt.NDArray[Any], dtype: object) -> DataType | None:
    """Return the data type of an array; None for the other types that numpy has."""
    if dtype is None:
        return next((t for t in DataType if t is not DataType.BF16 and t.numpy_dtype == values.dtype), None)
    data_type = DataType.from_any(dtype)
    if values.dtype != data_type.numpy_dtype:
        raise ShapeError(
            f"linearize: the array has dtype {values.dtype}, but {data_type} is stored as {data_type.numpy_dtype}; "
            "convert it first (fmtprop.layout.cast)"
        )
    return data_type


def _padding(value: float | str, dtype: DataType | None, stored: np.dtype[Any]) -> Any:
    """Return a padding value as an array stores it; refuse a value that the data type cannot hold."""
    if dtype is None:
        if value != 0:
            raise ShapeError(f"padding value {value!r}: an array of dtype {stored} can be padded with 0 only")
        return np.zeros((), stored)
    number = _named_value(value, dtype) if isinstance(value, str) else value
    if dtype.is_floating:
        return _float_bits(number, dtype)
    low, high = (0, 1) if dtype is DataType.BOOLEAN else _integer_range(dtype)
    if not low <= number <= high or number != int(number):
        raise ShapeError(
            f"padding value {value!r} is not a value of data type {dtype}: it must be an integer from {low} to {high}"
        )
    return int(number)


def _float_bits(number: float, dtype: DataType) -> Any:
    try:
        stored = cast(np.array([number], np.float64), DataType.F64, dtype)
    except OverflowError:  # an int beyond float64
        stored = cast(np.array([np.inf]), DataType.F64, dtype)
    if np.isinf(cast(stored, dtype, DataType.F64)[0]) and number not in (np.inf, -np.inf):
        raise ShapeError(
            f"padding value {number!r} is not a value of data type {dtype}: it is too large; "
            "'highest' and 'lowest' are the infinities"
        )
    return stored[0]


def _named_value(name: str, dtype: DataType) -> float:
    if name in ("zero", "one"):
        return float(name == "one")
    if dtype is DataType.BOOLEAN:
        return float(name == "highest")
    if dtype.is_floating:
        return np.inf if name == "highest" else -np.inf
    return _integer_range(dtype)[name == "highest"]


def _integer_range(dtype: DataType) -> tuple[int, int]:
    info = np.iinfo(dtype.numpy_dtype)
    return int(info.min), int(info.max)


def _told_by_strides(md: MemoryDesc) -> tuple[int, ...] | None:
    """Return the padded sizes that follow from the strides; None if no XLA layout has these strides."""
    try:
        return _padded_dimensions(md, axis_order(md.geometry)[::-1])[0]
    except FormatError:
        return None


def _padded_dimensions(md: MemoryDesc, order: tuple[int, ...]) -> tuple[tuple[int, ...], bool]:
    """Return the padded sizes that give the strides, and whether gaps had to become padding."""
    padded, gaps, step = list(md.padded_dims), False, 1
    before = None
    for axis in (a for a in order if md.padded_dims[a] != 1):
        stride = md.strides[axis]
        if before is None and stride != 1:
            raise FormatError(f"{md}: XLA's most minor dimension must have stride 1, but dimension {axis} has {stride}")
        if stride != step and before is not None:
            size, rest = divmod(stride, md.strides[before])
            if rest or size < md.padded_dims[before]:
                raise FormatError(
                    f"{md}: stride {stride} of dimension {axis} is not a multiple of dimension {before}'s "
                    f"{md.strides[before]} that spans its {md.padded_dims[before]} elements; XLA pads whole elements "
                    "of a dimension"
                )
            padded[before], gaps = size, True
        # an empty dimension takes the place of one element, as in `dense_strides`
        step, before = stride * (md.padded_dims[axis] or 1), axis
    return tuple(padded), gaps
