"""Kernels of RMS normalization: each row is read twice, the second time from the nearest cache."""

from __future__ import annotations

from ctypes import addressof, c_float, c_uint64, c_void_p
from dataclasses import dataclass

from fmtprop.jit.arguments import UNROLLED, Arguments, FloatVector, filled
from fmtprop.jit.kernel import Kernel, isa, serves, threads_for
from fmtprop.jit.standalone import StandaloneKernel, StandaloneWork, assembled
from fmtprop.layout import DataType


class RmsNormArguments(Arguments):
    """Arguments of the code."""

    _fields_ = (
        *((name, c_void_p) for name in ("src", "scale", "dst")),
        *((name, c_uint64) for name in ("rows", "row", "blocks", "vectors")),
        *((name, FloatVector) for name in ("divisor", "epsilon", "one")),
    )


@dataclass(frozen=True)
class RmsNormKernel(StandaloneKernel):
    """``dst[r, c] = src[r, c] / sqrt(mean over c of src[r, c]² + epsilon) * scale[c]``; dst may be src."""

    stem = "rms_norm"

    rows: int
    columns: int
    epsilon: float
    #: data type of src and dst; computed in f32, as scale is
    dtype: DataType

    @property
    def is_offered(self) -> bool:
        """Whether this machine has such a kernel, for these sizes."""
        return serves(self.dtype) and 0 not in (self.rows, self.columns) and self.columns % isa().lanes == 0

    def assembled(self) -> Kernel:
        """Return the code; all problems of a data type share it."""
        return assembled("rms_norm_program", "rms_norm", isa(), bf16=self.dtype is DataType.BF16)

    def work(self, threads: int) -> StandaloneWork:
        """Return the kernel with arguments; its tensors are set later, scale if there is one."""
        row, ones = self.columns * self.dtype.nbytes, (c_float * self.columns)(*[1.0] * self.columns)
        blocks, vectors = divmod(self.columns // isa().lanes, UNROLLED)
        arguments = RmsNormArguments(
            scale=addressof(ones),
            rows=self.rows,
            row=row,
            blocks=blocks,
            vectors=vectors,
            divisor=filled(self.columns),
            epsilon=filled(self.epsilon),
            one=filled(1.0),
        )
        return StandaloneWork(self.kernel, arguments, threads_for(self.rows * row, threads), ones)
