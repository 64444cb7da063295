"""Checks of sizes as Python integers, before oneDNN gets them: it does not check overflow, and ctypes wraps."""

from __future__ import annotations

from collections.abc import Iterable
from ctypes import Array, c_float, c_int64

from fmtprop.errors import ShapeError
from fmtprop.layout.geometry import INT64_MAX
from fmtprop.layout.tags import MAX_NDIMS


def int64_array(values: Iterable[int], what: str) -> Array[c_int64]:
    """Return a C array of int64; refuse a number that does not fit (ctypes would wrap silently)."""
    numbers = [int(value) for value in values]
    if len(numbers) > MAX_NDIMS:
        raise ShapeError(f"{what} {numbers}: oneDNN takes at most {MAX_NDIMS} dimensions")
    for number in numbers:
        if not -INT64_MAX <= number <= INT64_MAX:
            raise ShapeError(f"{what} {numbers}: {number} does not fit in 64 bits")
    return (c_int64 * len(numbers))(*numbers)


def float_array(values: Iterable[float]) -> Array[c_float]:
    """Return a C array of float."""
    numbers = [float(value) for value in values]
    return (c_float * len(numbers))(*numbers)
