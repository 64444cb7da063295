"""XLA's dialect: shapes with a minor-to-major layout and padding.

Owns ``Shape``, the two directions of ``IndexUtil``, and the text form; ``Layout`` comes from ``xla_layout``. Shapes
convert to and from :class:`~fmtprop.layout.MemoryDesc`. Must not know about oneDNN or graphs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy.typing as npt

from fmtprop.dialects.xla_layout import PADDING_NAMES, Layout
from fmtprop.errors import FormatError, ShapeError
from fmtprop.layout import address, buffers
from fmtprop.layout.desc import MemoryDesc
from fmtprop.layout.dtypes import DataType
from fmtprop.layout.geometry import Geometry, check_dims, integer, integers

__all__ = ["IndexUtil", "Layout", "Shape", "make_shape", "parse_shape"]

_ELEMENT_NAMES = {**{t: t.value for t in DataType}, DataType.BOOLEAN: "pred"}
_BY_ELEMENT_NAME = {name: t for t, name in _ELEMENT_NAMES.items()}


@dataclass(frozen=True, init=False)
class Shape:
    """Element type and sizes of an n-dimensional array, with its layout (SPEC X1).

    Parameters
    ----------
    element_type : DataType or anything that ``DataType.from_any`` takes, or XLA's ``"pred"``
    dimensions : iterable of int
        Sizes, dimension 0 first; ``()`` is a scalar.
    layout : Layout, optional
        Default: major to minor.

    Raises
    ------
    ShapeError
        A size is negative, or `layout` is not a layout or does not fit.

    Examples
    --------
    >>> shape = make_shape("f32", (2, 1, 3))
    >>> shape.rank, shape.true_rank, shape.dimension(-1), str(shape)
    (3, 2, 3, 'f32[2,1,3]{2,1,0}')

    References
    ----------
    ``ShapeProto`` in xla_data.proto; SPEC X1.
    """

    element_type: DataType
    dimensions: tuple[int, ...]
    layout: Layout

    def __init__(self, element_type: object, dimensions: Iterable[int], layout: Layout | None = None) -> None:
        known = _BY_ELEMENT_NAME.get(element_type.lower()) if isinstance(element_type, str) else None
        dims = check_dims(dimensions, "dimensions")
        used = Layout.default(len(dims)) if layout is None else layout
        if not isinstance(used, Layout):
            raise ShapeError(f"layout must be a Layout such as Layout((1, 0)), not {used!r}")
        used.geometry(dims)
        object.__setattr__(self, "element_type", known or DataType.from_any(element_type))
        object.__setattr__(self, "dimensions", dims)
        object.__setattr__(self, "layout", used)

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.dimensions)

    @property
    def true_rank(self) -> int:
        """Number of dimensions of size greater than 1."""
        return sum(size > 1 for size in self.dimensions)

    def dimension(self, number: int) -> int:
        """Return the size of a dimension.

        Parameters
        ----------
        number : int
            0 to N-1; negative numbers count from the end, -1 is N-1.

        Raises
        ------
        ShapeError
            There is no such dimension.
        """
        number = integer(number, "dimension number")
        if not -self.rank <= number < self.rank:
            raise ShapeError(f"dimension {number} is out of range for {self} of rank {self.rank}")
        return self.dimensions[number]

    def linearize(self, array: npt.ArrayLike) -> npt.NDArray[Any]:
        """Return the image of an array of this shape in linear memory (SPEC X3).

        Parameters
        ----------
        array : array_like, shape ``dimensions``
            Elements stored as ``element_type.numpy_dtype``.

        Returns
        -------
        numpy.ndarray, 1-D

        Raises
        ------
        ShapeError
            The array has another shape or data type.
        """
        values = buffers.as_array(array, "linearize")
        if values.shape != self.dimensions:
            raise ShapeError(f"the array has shape {values.shape}, not the dimensions of {self}")
        return self.layout.linearize(values, self.element_type)

    def to_memory_desc(self) -> MemoryDesc:
        """Return the descriptor of an array of this shape (see :meth:`Layout.to_memory_desc`)."""
        return self.layout.to_memory_desc(self)

    @classmethod
    def from_memory_desc(cls, md: MemoryDesc) -> Shape:
        """Return the shape and layout of a plain descriptor (see :meth:`Layout.from_memory_desc`).

        Parameters
        ----------
        md : MemoryDesc
            Plain.
        """
        layout = Layout.from_memory_desc(md)
        return cls(md.dtype, md.dims, layout)

    def __str__(self) -> str:
        """Return XLA's text form, such as ``f32[2,3]{0,1}``; a scalar has no braces."""
        dims = ",".join(map(str, self.dimensions))
        return f"{_ELEMENT_NAMES[self.element_type]}[{dims}]{self.layout if self.dimensions else ''}"


def make_shape(element_type: object, dimensions: Iterable[int]) -> Shape:
    """Return a shape in the default layout, as ``ShapeUtil::MakeShape`` does (SPEC X4).

    Parameters
    ----------
    element_type : DataType or anything that ``DataType.from_any`` takes, or ``"pred"``
    dimensions : iterable of int
        Sizes, dimension 0 first.

    Returns
    -------
    Shape
    """
    return Shape(element_type, dimensions)


_SHAPE = re.compile(r"([a-z]\w*)\[([\d,\s]*)\](?:\{([\d,\s]*)(?::pad\(([\d,\s]*)\)(?:=([^}]+))?)?\})?")


def parse_shape(text: str) -> Shape:
    """Parse XLA's text form of a shape.

    Parameters
    ----------
    text : str
        Such as ``"f32[2,3]{0,1}"``, ``"f32[2,3]"`` or ``"pred[]"``; padding as ``str(layout)`` prints it.

    Returns
    -------
    Shape

    Raises
    ------
    FormatError
        The text is not the shape of an array, or its layout has tiles.
    ShapeError
        The layout does not fit the dimensions.

    Examples
    --------
    >>> parse_shape("f32[2,3]{0,1}").layout.minor_to_major
    (0, 1)
    """
    match = _SHAPE.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None:
        raise FormatError(
            f"{text!r} is not an array shape such as 'f32[2,3]{{0,1}}' "
            "(tuples, dynamic sizes and tiles are not supported)"
        )
    name, dims, order, padded, value = match.groups()
    if name not in _BY_ELEMENT_NAME:
        raise FormatError(f"{text!r}: unknown element type {name!r}; use one of {', '.join(sorted(_BY_ELEMENT_NAME))}")
    layout = None
    if order is not None:
        layout = Layout(
            _integers(text, order), None if padded is None else _integers(text, padded), _value(text, value)
        )
    return Shape(_BY_ELEMENT_NAME[name], _integers(text, dims), layout)


class IndexUtil:
    """Conversion between multidimensional and linear indices of a shape with layout (SPEC X4)."""

    @staticmethod
    def multidimensional_index_to_linear_index(shape: Shape, index: Sequence[int]) -> int:
        """Return the position of an element in the buffer.

        Parameters
        ----------
        shape : Shape
            Shape with layout.
        index : sequence of int
            One index per dimension.

        Raises
        ------
        ShapeError
            The index has another rank, is out of range or not of integers.
        """
        return address.offset(_geometry(shape), integers(index, "index"))

    @staticmethod
    def linear_index_to_multidimensional_index(shape: Shape, linear_index: int) -> tuple[int, ...]:
        """Return the index of the element at a position of the buffer.

        Parameters
        ----------
        shape : Shape
            Shape with layout.
        linear_index : int
            Position in elements.

        Raises
        ------
        ShapeError
            The position lies outside the buffer or in its padding, or is not an integer.
        """
        g = _geometry(shape)
        linear_index = integer(linear_index, "linear index")
        if not 0 <= linear_index < prod(g.padded_dims):
            raise ShapeError(
                f"linear index {linear_index} is out of range for {shape} of {prod(g.padded_dims)} elements"
            )
        index = address.index_at(g, linear_index)
        if index is None:
            raise ShapeError(f"linear index {linear_index} of {shape} lies in the padding; no element is there")
        return index


def _geometry(shape: Shape) -> Geometry:
    if not isinstance(shape, Shape):
        raise ShapeError(f"shape must be a Shape such as make_shape('f32', (2, 3)), not {shape!r}")
    return shape.layout.geometry(shape.dimensions)


def _integers(text: str, numbers: str) -> tuple[int, ...]:
    try:
        return tuple(int(n) for n in numbers.split(",")) if numbers.strip() else ()
    except ValueError:
        raise FormatError(f"{text!r}: {numbers!r} is not a list of integers") from None


def _value(text: str, value: str | None) -> float | str | None:
    if value is None or value in PADDING_NAMES:
        return value
    for number in (int, float):  # a float cannot hold all 64-bit integers
        try:
            return number(value)
        except ValueError:
            continue
    raise FormatError(f"{text!r}: padding value {value!r} is not a number")
