"""Ends of kernels that compute with real numbers: tensors of f32, or of bytes that stand for numbers of a grid."""

from __future__ import annotations

from ctypes import c_int32
from dataclasses import dataclass
from typing import Any, Final

from fmtprop.jit.arguments import BitVector, FloatVector, filled
from fmtprop.jit.isa import Isa
from fmtprop.layout import DataType

#: arguments that an end of a program reads
ROUNDING_FIELDS: Final = (
    *((name, FloatVector) for name in ("low", "high", "step", "inverse")),
    ("zero", c_int32 * 16),
    *((name, BitVector) for name in ("first_bytes", "keep")),
)


@dataclass(frozen=True)
class Quantized:
    """What the bytes of a tensor mean: ``(byte - zero) · scale``."""

    #: signed or unsigned bytes
    dtype: DataType
    scale: float
    #: the byte that stands for 0
    zero: int


@dataclass(frozen=True)
class Rounding:
    """How results are rounded: to ``scale · k`` for ``low <= k <= high``."""

    scale: float
    low: int
    high: int
    #: the byte that stands for 0
    zero: int


def ends(rounding: Rounding | None, rest: int, isa: Isa) -> dict[str, Any]:
    """Return the arguments of a program's ends; `rest` numbers of a row are behind its last whole vector.

    The row's last vector has these, and others before them.
    """
    kept = [0xFFFFFFFF * (lane >= isa.lanes - rest) for lane in range(isa.lanes)] + [0] * (16 - isa.lanes)
    keep = BitVector(*kept)
    if rounding is None:
        return {"keep": keep}
    return {
        "low": filled(rounding.low),
        "high": filled(rounding.high),
        "step": filled(rounding.scale),
        "inverse": filled(1 / rounding.scale),
        "zero": (c_int32 * 16)(*[rounding.zero] * 16),
        "first_bytes": BitVector(*[0x0C080400] * 16),
        "keep": keep,
    }
