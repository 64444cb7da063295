"""Kernels of layer and RMS normalization: each row is read once from memory, then from the nearest cache.

Rows may be bytes, and results may be rounded: one pass over bytes, in place of a conversion, a normalization and a
rounding. A normalization of bytes needs their scale in epsilon alone, and their zero point only without a mean.
"""

from __future__ import annotations

from ctypes import addressof, c_float, c_uint64, c_void_p
from dataclasses import dataclass

from fmtprop.jit.arguments import UNROLLED, Arguments, FloatVector, filled
from fmtprop.jit.ends import ROUNDING_FIELDS, Rounding, ends
from fmtprop.jit.kernel import Kernel, isa, serves, threads_for
from fmtprop.jit.standalone import StandaloneKernel, StandaloneWork, assembled
from fmtprop.layout import DataType


class RowNormArguments(Arguments):
    """Arguments of the code."""

    _fields_ = (
        *((name, c_void_p) for name in ("src", "scale", "shift", "dst")),
        *((name, c_uint64) for name in ("rows", "src_row", "dst_row", "blocks", "vectors")),
        *((name, FloatVector) for name in ("divisor", "epsilon", "one", "offset")),
        *ROUNDING_FIELDS,
    )


@dataclass(frozen=True)
class RowNormKernel(StandaloneKernel):
    """``dst[r, c] = (src[r, c] - mean[r]) / deviation[r] * scale[c] + shift[c]``; without mean and shift for RMS."""

    rows: int
    columns: int
    #: added to the variance, or to the mean of squares; in units of src's numbers in memory
    epsilon: float
    #: bytes, f32, or bf16 for both; computed in f32, as scale and shift are
    src: DataType
    dst: DataType
    #: whether the mean is subtracted
    centred: bool
    #: subtracted otherwise: the byte that stands for 0
    offset: float = 0.0
    rounding: Rounding | None = None

    @property
    def overwrites(self) -> bool:  # type: ignore[override]  # computed
        """Whether dst may be src: not if a row's last vector overlaps the one before, which is written then."""
        return self.src is self.dst and self.columns % isa().lanes == 0

    @property
    def stem(self) -> str:
        """The operation."""
        return "layer_norm" if self.centred else "rms_norm"

    @property
    def is_offered(self) -> bool:
        """Whether this machine has such a kernel, for these sizes."""
        floats = [dtype for dtype in (self.src, self.dst) if dtype.is_floating]
        return serves(*floats) and self.rows > 0 and self.columns >= isa().lanes

    def assembled(self) -> Kernel:
        """Return the code; problems of the same types and the same rest of a vector share it."""
        return assembled(
            *("row_norm_program", "row_norm", isa(), self.src.value, self.dst.value),
            name=self.stem,
            centred=self.centred,
            shifted=self.offset != 0.0,
            rounds=self.rounding is not None,
            rest=self.columns % isa().lanes,
        )

    def work(self, threads: int) -> StandaloneWork:
        """Return the kernel with arguments; its tensors are set later, scale and shift if there are any."""
        ones, zeros = ((c_float * self.columns)(*[number] * self.columns) for number in (1.0, 0.0))
        vectors, rest = divmod(self.columns, isa().lanes)
        arguments = RowNormArguments(
            scale=addressof(ones),
            shift=addressof(zeros),
            rows=self.rows,
            src_row=self.columns * self.src.nbytes,
            dst_row=self.columns * self.dst.nbytes,
            blocks=vectors // UNROLLED,
            vectors=vectors % UNROLLED,
            divisor=filled(self.columns),
            epsilon=filled(self.epsilon),
            one=filled(1.0),
            offset=filled(self.offset),
            **ends(self.rounding, rest, isa()),
        )
        nbytes = self.rows * self.columns * self.src.nbytes
        return StandaloneWork(self.kernel, arguments, threads_for(nbytes, threads), (ones, zeros))
