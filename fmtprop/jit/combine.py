"""Kernel of sums, differences and products of two quantized tensors, with a quantized result.

Bytes become real numbers in registers, and the result is rounded as it is stored: one pass over bytes, in place of four
over f32. The second operand may be broadcast, such as the factors of squeeze-and-excitation.
"""

from __future__ import annotations

from ctypes import addressof, c_int32, c_int64, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Final

from fmtprop.jit.arguments import UNROLLED, Arguments, FloatVector, filled
from fmtprop.jit.ends import Quantized
from fmtprop.jit.isa import AVX512
from fmtprop.jit.kernel import Kernel, isa, serves, threads_for
from fmtprop.jit.rows import BroadcastKernel
from fmtprop.jit.standalone import StandaloneKernel, StandaloneWork, assembled
from fmtprop.layout import DataType

#: operations without special values
COMBINATIONS: Final = ("add", "sub", "mul")

#: constant vectors of the arguments, in the order of registers
VECTORS: Final = ("zero_0", "scale_0", "zero_1", "scale_1", "step", "low", "high", "zero")


class CombineArguments(Arguments):
    """Arguments of the code."""

    _fields_ = (
        *((name, c_void_p) for name in ("src_0", "src_1", "dst", "table")),
        *((name, c_uint64) for name in ("rows", "row", "pitch", "gap", "blocks", "vectors", "rest", "left", "mask")),
        *((name, FloatVector) for name in VECTORS[:-1]),
        ("zero", c_int32 * 16),
    )


@dataclass(frozen=True)
class CombineKernel(StandaloneKernel):
    """``dst[row, i] = src_0[row, i] alg src_1[start of row, i or 0]`` for bytes."""

    shape: BroadcastKernel
    #: `src_0`, `src_1`, `dst`: what the bytes mean
    src_0: Quantized
    src_1: Quantized
    dst: Quantized
    #: `low`, `high`: least and largest multiple of dst's scale
    low: int
    high: int

    @property
    def stem(self) -> str:
        """The operation."""
        return f"combine_{self.shape.alg}"

    @property
    def is_offered(self) -> bool:
        """Whether this machine has such a kernel, for these sizes."""
        return serves() and isa() is AVX512 and self.shape.alg in COMBINATIONS and self.shape.length >= AVX512.lanes

    def assembled(self) -> Kernel:
        """Return the code; problems of the same types share it."""
        signed = tuple(one.dtype is DataType.S8 for one in (self.src_0, self.src_1))
        return assembled("combine_program", "combine", isa(), self.shape.alg, signed, shared=self.shape.shared)

    def work(self, threads: int) -> StandaloneWork:
        """Return the kernel with arguments; its tensors are set later."""
        shape, starts = self.shape, [0]
        for count, step in shape.outer:
            starts = [start + index * step for start in starts for index in range(count)]
        table = (c_int64 * len(starts))(*starts)
        vectors, rest = divmod(shape.length, isa().lanes)
        arguments = CombineArguments(
            table=addressof(table),
            rows=len(starts),
            row=shape.length,
            pitch=shape.pitch,
            gap=shape.pitch - shape.length + rest,
            blocks=vectors // UNROLLED,
            vectors=vectors % UNROLLED,
            rest=int(rest > 0),
            left=rest,
            mask=(1 << rest) - 1,
            zero_0=filled(self.src_0.zero),
            scale_0=filled(self.src_0.scale),
            zero_1=filled(self.src_1.zero),
            scale_1=filled(self.src_1.scale),
            step=filled(self.dst.scale),
            low=filled(self.low),
            high=filled(self.high),
            zero=(c_int32 * 16)(*[self.dst.zero] * 16),
        )
        return StandaloneWork(self.kernel, arguments, threads_for(2 * len(starts) * shape.length, threads), table)
