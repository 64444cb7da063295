"""``DML_SLICE1``: one strided window of a tensor, forwards or backwards.

Owns the operator's rules by feature level, its numpy reference, and the rule for when it is a view of a descriptor.
Must not know about graphs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

from fmtprop.errors import FormatError, ShapeError
from fmtprop.layout.desc import FormatKind, MemoryDesc
from fmtprop.layout.dtypes import DataType
from fmtprop.layout.geometry import axis_name, check_dims, integers


class FeatureLevel(str, Enum):
    """DirectML feature level: which ranks and data types ``DML_SLICE1`` takes (SPEC S2)."""

    LEVEL_2_1 = "2.1"
    LEVEL_3_0 = "3.0"
    LEVEL_4_1 = "4.1"

    def __str__(self) -> str:
        return str(self.value)

    @property
    def ranks(self) -> range:
        """Numbers of dimensions that the operator takes."""
        return range(4, 6) if self is FeatureLevel.LEVEL_2_1 else range(1, 9)

    @property
    def data_types(self) -> tuple[DataType, ...]:
        """Data types that the operator takes."""
        return _ALL if self is FeatureLevel.LEVEL_4_1 else _UP_TO_32_BITS


_UP_TO_32_BITS = tuple(DataType(name) for name in ("f32", "f16", "s32", "s16", "s8", "u32", "u16", "u8"))
_ALL = (DataType.F64, DataType.S64, DataType.U64, *_UP_TO_32_BITS)


@dataclass(frozen=True, init=False)
class Slice1:
    """``out[x] = in[start + stride * x]`` within a window of the input (SPEC S1).

    Parameters
    ----------
    offsets : iterable of int
        Start of the input window in each dimension.
    sizes : iterable of int
        Extent of the input window in each dimension.
    strides : iterable of int
        Step in each dimension, never 0. A positive step copies from the window's start, a negative one from its end.
    output_sizes : iterable of int, optional
        Sizes of the output; default: every element that can be reached.

    Raises
    ------
    ShapeError
        The arguments break a rule of SPEC S2; the message names the dimension, value and rule.

    Examples
    --------
    >>> image = np.arange(1, 17).reshape(1, 1, 4, 4)
    >>> Slice1((0, 0, 0, 1), (1, 1, 4, 3), (1, 1, -2, 2)).apply(image)[0, 0]
    array([[14, 16],
           [ 6,  8]])

    References
    ----------
    ``DML_SLICE1_OPERATOR_DESC`` (directml.h); SPEC S1-S4.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    output_sizes: tuple[int, ...]

    def __init__(
        self,
        offsets: Iterable[int],
        sizes: Iterable[int],
        strides: Iterable[int],
        output_sizes: Iterable[int] | None = None,
    ) -> None:
        put = object.__setattr__
        put(self, "offsets", check_dims(offsets, "InputWindowOffsets"))
        put(self, "sizes", check_dims(sizes, "InputWindowSizes"))
        put(self, "strides", _check_strides(strides))
        rank = len(self.offsets)
        for name, values in (("InputWindowSizes", self.sizes), ("InputWindowStrides", self.strides)):
            if len(values) != rank:
                raise ShapeError(
                    f"slice1: {name} {values} must have {rank} entries like InputWindowOffsets {self.offsets}"
                )
        for axis, size in enumerate(self.sizes):
            if size < 1:
                raise ShapeError(
                    f"slice1: {axis_name(axis)}: the window is empty (InputWindowSizes is {size}); use at least 1"
                )
        out = self.max_copied if output_sizes is None else check_dims(output_sizes, "OutputSizes")
        if len(out) != rank:
            raise ShapeError(f"slice1: OutputSizes {out} must have the input's rank {rank}")
        for axis, (size, most) in enumerate(zip(out, self.max_copied, strict=True)):
            if not 1 <= size <= most:
                raise ShapeError(
                    f"slice1: {axis_name(axis)}: output size {size} must lie between 1 and {most} = "
                    f"1 + ({self.sizes[axis]} - 1) / |{self.strides[axis]}|"
                )
        put(self, "output_sizes", out)

    @property
    def max_copied(self) -> tuple[int, ...]:
        """Number of elements that can be reached in each dimension: ``1 + (size - 1) / |stride|``."""
        return tuple(1 + (n - 1) // abs(s) for n, s in zip(self.sizes, self.strides, strict=True))

    @property
    def start(self) -> tuple[int, ...]:
        """First input index that is copied: the window's start, or its end where the stride is negative."""
        return tuple(
            o + (n - 1 if s < 0 else 0) for o, n, s in zip(self.offsets, self.sizes, self.strides, strict=True)
        )

    def check(
        self,
        input_sizes: Sequence[int],
        dtype: object = DataType.F32,
        output_dtype: object = None,
        feature_level: FeatureLevel | str = FeatureLevel.LEVEL_4_1,
    ) -> None:
        """Refuse an input that breaks a rule of SPEC S2.

        Parameters
        ----------
        input_sizes : sequence of int
            Sizes of the input tensor.
        dtype : DataType or anything that ``DataType.from_any`` takes
            Data type of the input.
        output_dtype : DataType or the like, optional
            Data type of the output; default: the input's.
        feature_level : FeatureLevel or str
            ``"2.1"``, ``"3.0"`` or ``"4.1"``.

        Raises
        ------
        ShapeError
            The input breaks a rule; the message names the dimension, the value and the rule.
        """
        level = _level(feature_level)
        dims, data_type = check_dims(input_sizes, "InputTensor.Sizes"), DataType.from_any(dtype)
        out_type = data_type if output_dtype is None else DataType.from_any(output_dtype)
        if out_type is not data_type:
            raise ShapeError(
                f"slice1: InputTensor is {data_type} but OutputTensor is {out_type}; both must be the same"
            )
        self._check_inside(dims)
        if len(dims) not in level.ranks:
            raise ShapeError(
                f"slice1: rank {len(dims)} is not in {level.ranks[0]} to {level.ranks[-1]} of feature level {level}"
            )
        if data_type not in level.data_types:
            raise ShapeError(
                f"slice1: data type {data_type} is not supported at feature level {level}; "
                f"use one of {', '.join(t.value for t in level.data_types)}"
            )

    def apply(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the slice of a logical array: the reference of the operator.

        Parameters
        ----------
        array : numpy.ndarray
            The input.

        Returns
        -------
        numpy.ndarray, shape ``output_sizes``
            A copy.

        Raises
        ------
        ShapeError
            The window does not fit the array.
        """
        self._check_inside(array.shape)
        index = np.ix_(
            *(o + s * np.arange(n) for o, n, s in zip(self.start, self.output_sizes, self.strides, strict=True))
        )
        taken: npt.NDArray[Any] = array[index]
        return taken

    def view(self, md: MemoryDesc) -> MemoryDesc:
        """Return the slice as a view of the input's descriptor: no copy, no reorder (SPEC S4).

        Parameters
        ----------
        md : MemoryDesc
            Descriptor of the input.

        Returns
        -------
        MemoryDesc
            Dims ``output_sizes``, over the same buffer.

        Raises
        ------
        ShapeError
            The window does not fit the input.
        FormatError
            The format cannot express the view: more than one element with a negative stride, a step along a
            blocked or padded axis, or a cut inside a block.
        """
        self._check_inside(md.dims)
        # One element has no direction: its stride does not matter.
        steps = tuple(1 if n == 1 else s for n, s in zip(self.output_sizes, self.strides, strict=True))
        return md.slice(self.start, self.output_sizes, steps)

    def is_view(self, md: MemoryDesc) -> bool:
        """Return whether :meth:`view` succeeds; where it does not, the slice is a copy.

        Parameters
        ----------
        md : MemoryDesc
            Descriptor of the input.

        Raises
        ------
        ShapeError
            The window does not fit the input.
        """
        if md.kind is not FormatKind.BLOCKED:
            self._check_inside(md.dims)
            return False
        try:
            self.view(md)
        except FormatError:
            return False
        return True

    @classmethod
    def from_slices(cls, input_sizes: Sequence[int], slices: Sequence[slice]) -> Slice1:
        """Return the operator that takes Python (and torch) slices.

        Parameters
        ----------
        input_sizes : sequence of int
            Sizes of the input.
        slices : sequence of slice
            One per leading dimension; the others are taken whole. A step may be negative.

        Raises
        ------
        ShapeError
            There are more slices than dimensions, or a slice is empty, which the operator forbids.

        Examples
        --------
        >>> Slice1.from_slices((4, 6), [slice(None, None, -1), slice(1, 6, 2)]).strides
        (-1, 2)
        """
        dims = check_dims(input_sizes, "InputTensor.Sizes")
        if len(slices) > len(dims):
            raise ShapeError(f"slice1: {len(slices)} slices for {len(dims)} dimensions")
        taken = [range(n)[s] for n, s in zip(dims, slices, strict=False)] + [range(n) for n in dims[len(slices) :]]
        for axis, indices in enumerate(taken):
            if not indices:
                raise ShapeError(
                    f"slice1: {axis_name(axis)}: the window is empty; the operator needs at least 1 element"
                )
        return cls([min(r[0], r[-1]) for r in taken], [abs(r[-1] - r[0]) + 1 for r in taken], [r.step for r in taken])

    def _check_inside(self, dims: Sequence[int]) -> None:
        if len(dims) != len(self.offsets):
            raise ShapeError(f"slice1: InputTensor has {len(dims)} dimensions, but the window has {len(self.offsets)}")
        for axis, (offset, size, whole) in enumerate(zip(self.offsets, self.sizes, dims, strict=True)):
            if offset + size > whole:
                raise ShapeError(
                    f"slice1: {axis_name(axis)}: window offset {offset} + size {size} exceeds the input's size {whole}"
                )


def _check_strides(strides: Iterable[int]) -> tuple[int, ...]:
    values = integers(strides, "InputWindowStrides")
    for axis, stride in enumerate(values):
        if stride == 0:
            raise ShapeError(
                f"slice1: {axis_name(axis)}: InputWindowStrides must not be 0; use 1 to take every element"
            )
    return values


def _level(feature_level: FeatureLevel | str) -> FeatureLevel:
    name = str(feature_level).removeprefix("DML_FEATURE_LEVEL_").replace("_", ".")
    for level in FeatureLevel:
        if level.value == name:
            return level
    raise ShapeError(f"slice1: unknown feature level {feature_level!r}; use one of 2.1, 3.0, 4.1")
