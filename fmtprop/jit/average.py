"""Kernel of averages of all places of an image, with quantized ends: channels are innermost.

Squeeze-and-excitation networks have one such step for each block, between two quantized layers.
"""

from __future__ import annotations

from ctypes import c_uint64, c_void_p
from dataclasses import dataclass
from typing import Final

from fmtprop.jit.arguments import Arguments, FloatVector, filled
from fmtprop.jit.ends import ROUNDING_FIELDS, Quantized, Rounding, ends
from fmtprop.jit.kernel import Kernel, isa, serves, threads_for
from fmtprop.jit.standalone import StandaloneKernel, StandaloneWork, assembled
from fmtprop.layout import DataType

#: most vectors of channels that are added up at a time
_VECTORS: Final = 4

#: most places of an image: sums of so many bytes are exact in f32
_MOST_PLACES: Final = 1 << 16


class AverageBytesArguments(Arguments):
    """Arguments of the code."""

    _fields_ = (
        *((name, c_void_p) for name in ("src", "dst")),
        *((name, c_uint64) for name in ("tasks", "groups", "width", "last", "image", "channels", "places", "row")),
        *((name, FloatVector) for name in ("divisor", "src_zero", "src_scale")),
        *ROUNDING_FIELDS,
    )


@dataclass(frozen=True)
class AverageBytesKernel(StandaloneKernel):
    """``dst[n, c] = mean over p of src[n, p, c]``, of bytes, or rounded."""

    stem = "average_bytes"
    overwrites = False

    images: int
    places: int
    channels: int
    #: what the bytes of src mean; None for f32
    src: Quantized | None
    #: bytes or f32
    dst: DataType
    rounding: Rounding | None = None

    @property
    def is_offered(self) -> bool:
        """Whether this machine has such a kernel, for these sizes."""
        return serves() and self.images > 0 and 0 < self.places <= _MOST_PLACES and self.channels >= isa().lanes

    @property
    def _width(self) -> int:
        """Vectors of channels that are added up at a time."""
        return min(_VECTORS, self.channels // isa().lanes)

    def assembled(self) -> Kernel:
        """Return the code; problems of the same types and the same number of vectors at a time share it."""
        src = "f32" if self.src is None else self.src.dtype.value
        rounds = self.rounding is not None
        return assembled(
            "average_program", "average_bytes", isa(), src, self.dst.value, rounds=rounds, width=self._width
        )

    def work(self, threads: int) -> StandaloneWork:
        """Return the kernel with arguments; its tensors are set later."""
        width, meaning = self._width * isa().lanes, self.src or Quantized(DataType.F32, 1.0, 0)
        groups = -(-self.channels // width)
        arguments = AverageBytesArguments(
            tasks=self.images * groups,
            groups=groups,
            width=width,
            last=self.channels - width,
            image=self.places * self.channels,
            channels=self.channels,
            places=self.places,
            row=self.channels * meaning.dtype.nbytes,
            divisor=filled(self.places),
            src_zero=filled(meaning.zero),
            src_scale=filled(meaning.scale),
            **ends(self.rounding, 0, isa()),
        )
        nbytes = self.images * self.places * self.channels * meaning.dtype.nbytes
        return StandaloneWork(self.kernel, arguments, threads_for(nbytes, threads))
