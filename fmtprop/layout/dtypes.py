"""Data types of tensor elements, and the reference conversion between them.

Owns the names, sizes and numpy storage of element types. Must not know about shapes or formats.
"""

from __future__ import annotations

from enum import Enum
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from fmtprop.errors import FormatError, ShapeError


class DataType(str, Enum):
    """Type of a tensor element, with oneDNN's names.

    ``bf16`` has no numpy type of its own: its bits are stored in ``uint16`` (see :func:`cast`).
    ``s64``, ``s16``, ``u64``, ``u32`` and ``u16``, which oneDNN lacks, exist for DirectML and XLA.

    Examples
    --------
    >>> DataType("bf16").nbytes, DataType.from_any("float32")
    (2, <DataType.F32: 'f32'>)

    References
    ----------
    ``dnnl_data_type_t`` in oneapi/dnnl/dnnl_common_types.h.
    """

    F32 = "f32"
    BF16 = "bf16"
    F16 = "f16"
    F64 = "f64"
    S32 = "s32"
    S8 = "s8"
    U8 = "u8"
    S64 = "s64"
    S16 = "s16"
    U64 = "u64"
    U32 = "u32"
    U16 = "u16"
    BOOLEAN = "boolean"

    nbytes: int
    """Size of one element in bytes."""
    numpy_dtype: np.dtype[Any]
    """Numpy type of the stored bits."""

    def __str__(self) -> str:
        return str(self.value)

    @property
    def is_floating(self) -> bool:
        """True for f16, bf16, f32 and f64."""
        return self.value in ("f32", "bf16", "f16", "f64")

    @classmethod
    def from_any(cls, value: object) -> DataType:
        """Return the data type that `value` names.

        Parameters
        ----------
        value : DataType, str, numpy.dtype, numpy scalar type or torch.dtype
            ``"f32"``, ``"float32"``, ``"i32"``, ``"FLOAT32"``, ``"DML_TENSOR_DATA_TYPE_INT32"``, ``numpy.float32``,
            ``torch.float32``, … The digits of a name are bits: ``"i8"`` is ``s8``, unlike in numpy.

        Raises
        ------
        ShapeError
            No data type has that name.
        """
        if isinstance(value, cls):
            return value
        try:
            return _found(value)
        except TypeError:  # not hashable
            return cls._find(value)

    @classmethod
    def _find(cls, value: object) -> DataType:
        # torch is not imported here: its dtypes print as "torch.float32".
        name = value if isinstance(value, str) else str(value).removeprefix("torch.")
        found = _BY_NAME.get(name.removeprefix("DML_TENSOR_DATA_TYPE_").lower())
        # numpy takes None for float64
        if found is None and value is not None and not isinstance(value, str):
            try:
                found = _BY_NAME.get(np.dtype(value).name)  # type: ignore[call-overload]
            except TypeError:
                found = None
        if found is None:
            raise ShapeError(f"unknown data type {value!r}; use one of {', '.join(t.value for t in cls)}")
        return found


_NUMPY = {
    DataType.F32: "float32",
    DataType.BF16: "uint16",
    DataType.F16: "float16",
    DataType.F64: "float64",
    DataType.S32: "int32",
    DataType.S8: "int8",
    DataType.U8: "uint8",
    DataType.S64: "int64",
    DataType.S16: "int16",
    DataType.U64: "uint64",
    DataType.U32: "uint32",
    DataType.U16: "uint16",
    DataType.BOOLEAN: "bool",
}

for _member, _name in _NUMPY.items():
    _member.numpy_dtype = np.dtype(_name)
    _member.nbytes = _member.numpy_dtype.itemsize

_BY_NAME = {
    **{t.value: t for t in DataType},
    **{name: t for t, name in _NUMPY.items() if t is not DataType.BF16},
    "bfloat16": DataType.BF16,
    # SPEC S2's names
    **{f"i{t.value[1:]}": t for t in (DataType.S64, DataType.S32, DataType.S16, DataType.S8)},
}


_found = lru_cache(256)(DataType._find)


def cast(array: npt.NDArray[Any], src: DataType, dst: DataType) -> npt.NDArray[Any]:
    """Convert elements from one data type to another as oneDNN's reorder does.

    Floats are rounded to nearest even; integers saturate. A NaN is refused as no integer represents it.

    `array`: elements of type `src`, stored as ``src.numpy_dtype``. Result: same shape, stored as ``dst.numpy_dtype``;
    `array` itself where the two types are the same. Raises FormatError if a NaN would have to become an integer.
    """
    if src is dst:
        return array
    if src is DataType.BF16:
        array, src = (array.astype(np.uint32) << 16).view(np.float32), DataType.F32
    if dst.is_floating or dst is DataType.BOOLEAN:
        # IEEE 754 defines overflow to infinity, so numpy must not warn.
        with np.errstate(over="ignore"):
            return _bf16_bits(array.astype(np.float32)) if dst is DataType.BF16 else array.astype(dst.numpy_dtype)
    if src.is_floating:
        return _saturate_float(array, src, dst)
    if src is DataType.BOOLEAN:
        return array.astype(dst.numpy_dtype)
    info, have = np.iinfo(dst.numpy_dtype), np.iinfo(src.numpy_dtype)
    inside: npt.NDArray[Any] = np.clip(array, max(info.min, have.min), min(info.max, have.max))
    return inside.astype(dst.numpy_dtype)


def _saturate_float(array: npt.NDArray[Any], src: DataType, dst: DataType) -> npt.NDArray[Any]:
    if np.isnan(array).any():
        raise FormatError(f"cannot convert NaN from {src} to {dst}: integers have no NaN; replace NaNs first")
    info = np.iinfo(dst.numpy_dtype)
    rounded = np.rint(array.astype(np.float64))
    # 2**63 - 1 and 2**64 - 1 have no exact double: compare first, then convert only the numbers that fit.
    high, low = rounded >= float(info.max), rounded <= float(info.min)
    inside = np.where(high | low, 0.0, rounded).astype(dst.numpy_dtype)
    return np.where(high, info.max, np.where(low, info.min, inside)).astype(dst.numpy_dtype)


def _bf16_bits(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    bits = np.ascontiguousarray(values).view(np.uint32).reshape(values.shape)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1)).astype(np.uint32)) >> 16
    quiet = (bits >> 16) | 0x40  # rounding could carry a NaN into infinity: keep it a quiet NaN
    return np.where(np.isnan(values), quiet, rounded).astype(np.uint16)
