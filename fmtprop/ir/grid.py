"""Grids: the real numbers for which integers of one byte stand, so that a tensor may be stored in either form.

A quantized tensor means real numbers. Its numbers are multiples of a scale, between a lowest and a highest one; as
bytes they are these multiples, perhaps shifted. So int8 is one more format of the tensor, and a conversion between
bytes and reals loses nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, prod
from typing import Any

from fmtprop.errors import GraphError
from fmtprop.layout import DataType

#: integers of a byte
_BYTE = 256


def usual_limits(low: int, high: int) -> tuple[int, int]:
    """Return limits that kernels treat like these: one zero point stands for all that are not the byte 0.

    >>> usual_limits(-117, 138), usual_limits(0, 255), usual_limits(-128, 127), usual_limits(-32768, 32767)
    ((-100, 155), (0, 255), (-128, 127), (-32768, 32767))
    """
    is_shifted = high - low == _BYTE - 1 and low < 0 and (low < -_BYTE // 2 or high >= _BYTE // 2)
    return (-100, _BYTE - 101) if is_shifted else (low, high)


@dataclass(frozen=True)
class Grid:
    """The numbers ``scale · k`` for all integers ``low <= k <= high``.

    >>> relu, weights = Grid((0.5,), 0, 255), Grid((0.5, 0.25), -128, 127, (2, 1))
    >>> relu.stored.value, relu.zero, weights.stored.value, weights.zero
    ('u8', 0, 's8', 0)
    >>> Grid((0.5,), -117, 138).zero
    117
    """

    #: positive; one, or one for each index of the axes in which they vary, row-major
    scales: tuple[float, ...]
    #: `low`, `high`: smallest and largest multiple: the limits of the quantized type minus the zero point
    low: int
    high: int
    #: dims of the scales as they broadcast to the tensor; empty for one scale
    shape: tuple[int, ...] = ()
    #: whether bytes are signed even if the multiples are not: a second factor must be
    signed: bool = False
    #: steps that are added to the multiples of each scale. Such numbers are weights whose zero points differ; no bytes
    #: stand for them.
    shifts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not all(scale > 0 and isfinite(scale) for scale in self.scales):
            wrong = next(scale for scale in self.scales if not (scale > 0 and isfinite(scale)))
            raise GraphError(f"a scale of a grid is {wrong}, but must be positive and finite")
        if not self.low <= 0 <= self.high or self.high - self.low >= _BYTE:
            raise GraphError(f"a grid from {self.low} to {self.high} steps has no zero, or more than {_BYTE} numbers")
        if len(self.scales) != prod(self.shape):
            raise GraphError(f"a grid of shape {self.shape} has {len(self.scales)} scales")
        if self.shifts and len(self.shifts) != len(self.scales):
            raise GraphError(f"a grid has {len(self.scales)} scales but {len(self.shifts)} shifts")

    @property
    def scale(self) -> float:
        """The first scale; the only one unless scales vary."""
        return self.scales[0]

    @property
    def varies(self) -> bool:
        """Whether it has several scales."""
        return len(self.scales) > 1

    @property
    def axes(self) -> tuple[int, ...]:
        """The axes along which the scales vary."""
        return tuple(axis for axis, size in enumerate(self.shape) if size > 1)

    @property
    def form(self) -> object:
        """What decides about implementations: scales that vary are arguments of a primitive or a kernel, others not."""
        return (self.shape, self.low, self.high, self.signed) if self.shape else self

    @property
    def stored(self) -> DataType:
        """Type of the bytes: unsigned if no number is negative, or if the multiples are no signed bytes."""
        return DataType.S8 if self.signed or self._are_signed_bytes else DataType.U8

    @property
    def zero(self) -> int:
        """The byte that stands for 0."""
        if self._are_signed_bytes:
            return 0
        return -self.low - (_BYTE // 2 if self.signed else 0)

    @property
    def _are_signed_bytes(self) -> bool:
        return self.low < 0 and self.low >= -_BYTE // 2 and self.high < _BYTE // 2

    @property
    def is_full(self) -> bool:
        """Whether each byte stands for a number, so that saturation is the limit of the numbers."""
        return self.high - self.low == _BYTE - 1

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        plain = {"scales": list(self.scales), "low": self.low, "high": self.high, "shape": list(self.shape)}
        return (
            plain | ({"signed": True} if self.signed else {}) | ({"shifts": list(self.shifts)} if self.shifts else {})
        )

    @classmethod
    def from_json(cls, data: object) -> Grid:
        """Return the grid of plain data."""
        if not isinstance(data, Mapping) or data.keys() - {"signed", "shifts"} != {"scales", "low", "high", "shape"}:
            raise GraphError(f"a grid needs scales, low, high and shape, got {data!r}")
        scales, shape = _numbers(data["scales"], float), _numbers(data["shape"], int)
        low, high = _numbers([data["low"], data["high"]], int)
        return cls(scales, low, high, shape, data.get("signed") is True, _numbers(data.get("shifts", []), int))


def _numbers(data: object, kind: type) -> tuple[Any, ...]:
    allowed = (int, float) if kind is float else (int,)
    if not isinstance(data, Sequence) or any(type(one) not in allowed for one in data):
        raise GraphError(f"a grid needs a list of {kind.__name__} numbers, got {data!r}")
    return tuple(map(kind, data))
