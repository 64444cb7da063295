"""Kernel of softmax along rows: the exponentials of a row stay in the nearest cache until their sum is known.

Rows may be bytes, and results may be rounded, as in :mod:`fmtprop.jit.row_norm`.
"""

from __future__ import annotations

from ctypes import addressof, c_byte, c_uint64, c_void_p
from dataclasses import dataclass
from math import inf

from fmtprop.jit.arguments import UNROLLED, Arguments, FloatVector, filled
from fmtprop.jit.ends import ROUNDING_FIELDS, Rounding, ends
from fmtprop.jit.kernel import Kernel, isa, serves, threads_for
from fmtprop.jit.standalone import StandaloneKernel, StandaloneWork, assembled
from fmtprop.layout import DataType

#: alignment of a thread's exponentials
_LINE_NBYTES = 64


class SoftmaxArguments(Arguments):
    """Arguments of the code."""

    _fields_ = (
        *((name, c_void_p) for name in ("src", "dst", "areas", "numbers")),
        *((name, c_uint64) for name in ("rows", "src_row", "dst_row", "area", "blocks", "vectors")),
        *((name, FloatVector) for name in ("lowest", "factor", "one")),
        *ROUNDING_FIELDS,
    )


@dataclass(frozen=True)
class SoftmaxKernel(StandaloneKernel):
    """``dst[r, c] = e^(factor · src[r, c]) / sum over c of e^(factor · src[r, c])``, but for NaN and infinities."""

    stem = "softmax"

    rows: int
    columns: int
    #: the scale of src's bytes; 1 for real numbers
    factor: float
    #: bytes, f32, or bf16 for both
    src: DataType
    dst: DataType
    rounding: Rounding | None = None

    @property
    def overwrites(self) -> bool:  # type: ignore[override]  # computed
        """Whether dst may be src: the row is in the thread's area before it is written."""
        return self.src is self.dst

    @property
    def is_offered(self) -> bool:
        """Whether this machine has such a kernel, for these sizes."""
        floats = [dtype for dtype in (self.src, self.dst) if dtype.is_floating]
        return serves(*floats) and self.rows > 0 and self.columns >= isa().lanes

    def assembled(self) -> Kernel:
        """Return the code; problems of the same types and the same rest of a vector share it."""
        return assembled(
            *("softmax_program", "softmax", isa(), self.src.value, self.dst.value),
            rounds=self.rounding is not None,
            rest=self.columns % isa().lanes,
        )

    def work(self, threads: int) -> StandaloneWork:
        """Return the kernel with arguments; its tensors are set later."""
        threads = threads_for(self.rows * self.columns * 4, threads)
        area = -(-4 * self.columns // _LINE_NBYTES) * _LINE_NBYTES
        block = (c_byte * (max(threads, 1) * area + _LINE_NBYTES))()
        vectors, rest = divmod(self.columns, isa().lanes)
        arguments = SoftmaxArguments(
            areas=-(-addressof(block) // _LINE_NBYTES) * _LINE_NBYTES,
            numbers=addressof(self.kernel.rows),
            rows=self.rows,
            src_row=self.columns * self.src.nbytes,
            dst_row=self.columns * self.dst.nbytes,
            area=area,
            blocks=vectors // UNROLLED,
            vectors=vectors % UNROLLED,
            lowest=filled(-inf),
            factor=filled(self.factor),
            one=filled(1.0 if self.rounding is None else 1 / self.rounding.scale),
            **ends(self.rounding, rest, isa()),
        )
        return StandaloneWork(self.kernel, arguments, threads, block)
