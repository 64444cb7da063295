"""Kernel of dequantizations by one scale, which lies in memory: PyTorch takes three passes."""

from __future__ import annotations

from ctypes import c_uint64, c_void_p
from dataclasses import dataclass
from typing import Final

from fmtprop.jit.arguments import UNROLLED, Arguments
from fmtprop.jit.kernel import Kernel, isa, serves, threads_for
from fmtprop.jit.standalone import StandaloneKernel, StandaloneWork, assembled
from fmtprop.layout import DataType

#: numbers that are computed at a time: few enough for equal shares of threads
_PIECE: Final = 4096


class DequantizeArguments(Arguments):
    """Arguments of the code."""

    _fields_ = (
        *((name, c_void_p) for name in ("src", "scale", "zero_point", "dst")),
        *((name, c_uint64) for name in ("pieces", "piece", "last", "blocks", "vectors")),
    )


@dataclass(frozen=True)
class DequantizeKernel(StandaloneKernel):
    """``dst[i] = (src[i] - zero_point) · scale``."""

    stem = "dequantize"
    overwrites = False

    count: int
    #: u8 or s8, the type of the zero point, too
    src: DataType
    has_zero_point: bool

    @property
    def is_offered(self) -> bool:
        """Whether this machine has such a kernel, for these sizes."""
        return serves() and self.count >= isa().lanes

    @property
    def _piece(self) -> int:
        return min(self.count, _PIECE)

    def assembled(self) -> Kernel:
        """Return the code; problems of the same type and the same rest of a vector share it."""
        rest = self._piece % isa().lanes
        return assembled("dequantize_program", "dequantize", isa(), self.src.value, self.has_zero_point, rest)

    def work(self, threads: int) -> StandaloneWork:
        """Return the kernel with arguments; its tensors are set later."""
        vectors = self._piece // isa().lanes
        arguments = DequantizeArguments(
            pieces=-(-self.count // self._piece),
            piece=self._piece,
            last=self.count - self._piece,
            blocks=vectors // UNROLLED,
            vectors=vectors % UNROLLED,
        )
        return StandaloneWork(self.kernel, arguments, threads_for(4 * self.count, threads))
