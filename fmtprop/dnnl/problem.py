"""What a primitive is asked to do: operands and parameters, checked before oneDNN sees them."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Array, c_int64
from dataclasses import dataclass, field
from typing import Any

from fmtprop.dnnl.attr import PostOp
from fmtprop.dnnl.desc import NativeDesc
from fmtprop.dnnl.sizes import int64_array
from fmtprop.errors import ShapeError

# Extents, strides and paddings of windows: far beyond any tensor, yet sums of them stay within 64 bits.
_WINDOW_MAX = 2**31 - 1


@dataclass(frozen=True, eq=False)
class Problem:
    """One operation as it was asked for.

    Parameters
    ----------
    driver : str
        benchdnn's name of the primitive, such as ``"conv"``.
    operands : dict
        Operand name -> NativeDesc, in the order of the C function; absent ones are None.
    params : dict
        Parameter name -> value.
    post_ops : tuple of PostOp
    fpmath : str or None
    """

    driver: str
    operands: dict[str, NativeDesc | None]
    params: dict[str, Any] = field(default_factory=dict)
    post_ops: tuple[PostOp, ...] = ()
    fpmath: str | None = None

    def __str__(self) -> str:
        operands = ", ".join(f"{name} {desc}" for name, desc in self.operands.items() if desc is not None)
        params = ", ".join(f"{name}={value}" for name, value in self.params.items() if value is not None)
        post_ops = " + ".join(f"{op.kind} {op.alg}".strip() for op in self.post_ops)
        return "; ".join(part for part in (operands, params, f"post-ops {post_ops}" if post_ops else "") if part)


def window(values: Sequence[int], what: str, data: NativeDesc) -> Array[c_int64]:
    """Return a C array with one entry per spatial axis of ``data``.

    Parameters
    ----------
    values : sequence of int
    what : str
        Name of the parameter, for the message.
    data : NativeDesc
        The tensor that the window slides over: axes 2 and up are spatial.

    Returns
    -------
    ctypes array

    Raises
    ------
    ShapeError
        If the number of entries is wrong (oneDNN would read beyond the array) or one is out of range.
    """
    spatial = len(data.dims) - 2
    if len(values) != spatial:
        raise ShapeError(f"{what} {list(values)}: {data} has {spatial} spatial axes, so {spatial} entries are needed")
    for value in values:
        if not -_WINDOW_MAX <= value <= _WINDOW_MAX:
            raise ShapeError(f"{what} {list(values)}: {value} is out of range (at most {_WINDOW_MAX})")
    return int64_array(values, what)


def checked_axis(axis: int, data: NativeDesc, what: str) -> int:
    """Return ``axis`` after checking that ``data`` has it.

    Raises
    ------
    ShapeError
        If it has not.
    """
    if not 0 <= axis < len(data.dims):
        raise ShapeError(f"{what}: axis {axis} is not one of {data} (0 to {len(data.dims) - 1})")
    return axis


def checked_size(value: int, what: str) -> int:
    """Return ``value`` after checking that it fits oneDNN's sizes.

    Raises
    ------
    ShapeError
        If it is not between 0 and 2**31 - 1.
    """
    if not 0 <= value <= _WINDOW_MAX:
        raise ShapeError(f"{what} {value} is out of range (0 to {_WINDOW_MAX})")
    return value
