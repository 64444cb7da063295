"""Kernel of quantization by scales of the same run: a row is read for its range, and from the cache to be rounded.

A tensor with one scale takes two calls: the first finds the ranges of its pieces, and each thread of the second joins
these ranges before it rounds its pieces.
"""

from __future__ import annotations

from ctypes import addressof, c_float, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Final

from fmtprop.jit.arguments import UNROLLED, Arguments, BitVector, FloatVector, filled
from fmtprop.jit.kernel import BoundKernel, Kernel, isa, serves, threads_for
from fmtprop.jit.standalone import StandaloneKernel, StandaloneWork, assembled
from fmtprop.layout import DataType

#: numbers of a piece of a tensor with one scale: few enough for equal shares of threads, 16 KB stay in the first cache
_PIECE: Final = 4096

#: numbers of a piece's range in memory: its least and largest number, its largest magnitude, and one that is free
RANGE_NUMBERS: Final = 4


class QuantizeRowsArguments(Arguments):
    """Arguments of the code."""

    _fields_ = (
        *((name, c_void_p) for name in ("src", "dst", "scale", "zero", "ranges")),
        *((name, c_uint64) for name in ("rows", "row", "dst_row", "length", "start_of_last")),
        *((name, c_uint64) for name in ("blocks", "vectors", "rest")),
        *((name, FloatVector) for name in ("divisor", "least", "one", "low", "high")),
        *((name, BitVector) for name in ("magnitude", "bytes", "half")),
    )


@dataclass(frozen=True)
class QuantizeRowsKernel(StandaloneKernel):
    """``dst[r, c] = clamp(round(src[r, c] / scale[r]) + zero[r], low, high)`` with scales of the rows' ranges."""

    stem = "quantize_rows"
    overwrites = False

    rows: int
    columns: int
    low: int
    high: int
    #: `divisor`, `least`: the scale is the range over `divisor`, and at least `least`
    divisor: float
    least: float
    symmetric: bool
    multiplies: bool
    #: whether scales are rounded to bf16
    rounds: bool
    #: type of dst: u8, s8 or f32
    dtype: DataType

    @property
    def is_offered(self) -> bool:
        """Whether this machine has such a kernel, for these sizes."""
        return serves() and 0 not in (self.rows, self.columns)

    @property
    def pieces(self) -> int:
        """Pieces of the one row; 0 if rows are whole."""
        return -(-self.columns // _PIECE) if self.rows == 1 and self.columns > _PIECE else 0

    def assembled(self) -> Kernel:
        """Return the code; problems that differ in sizes and limits share it."""
        return assembled(
            *("quantize_rows_program", "quantize_rows", isa(), self.dtype.value),
            symmetric=self.symmetric,
            of_pieces=self.pieces > 0,
            multiplies=self.multiplies,
            rounds=self.rounds,
        )

    @property
    def _ranges(self) -> Kernel:
        """The code that finds the ranges of pieces."""
        return assembled("quantize_rows_program", "ranges", isa(), symmetric=self.symmetric)

    @property
    def fingerprint(self) -> str:
        """A hash of everything that decides the kernel's results and speed."""
        return super().fingerprint + (self._ranges.fingerprint if self.pieces else "")

    def work(self, threads: int) -> StandaloneWork:
        """Return the kernel with arguments; its tensors are set later."""
        length, rows = (_PIECE, self.pieces) if self.pieces else (self.columns, self.rows)
        vectors, rest = divmod(length, isa().lanes)
        ranges = (c_float * (rows * RANGE_NUMBERS))() if self.pieces else None
        threads = threads_for(self.rows * self.columns * 4, threads)
        arguments = QuantizeRowsArguments(
            ranges=None if ranges is None else addressof(ranges),
            rows=rows,
            row=4 * length,
            dst_row=length * self.dtype.nbytes,
            length=length,
            start_of_last=self.columns - length,
            blocks=vectors // UNROLLED,
            vectors=vectors % UNROLLED,
            rest=rest,
            divisor=filled(self.divisor),
            least=filled(self.least),
            one=filled(1.0),
            low=filled(self.low),
            high=filled(self.high),
            magnitude=BitVector(*[0x7FFFFFFF] * 16),
            bytes=BitVector(*[0x0C080400] * 16),
            half=BitVector(*[0x7FFF] * 16),
        )
        work = StandaloneWork(self.kernel, arguments, threads, ranges)
        if self.pieces:
            work.calls = (BoundKernel(self._ranges, arguments, threads).call, *work.calls)
        return work
