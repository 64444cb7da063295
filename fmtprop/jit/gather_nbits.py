"""Kernels of embeddings in 4- or 8-bit codes: rows of a matrix of codes by their indices, of which each must exist.

A row is decoded as in front of a product, and indices are checked first, as those of :mod:`fmtprop.jit.gather`.
"""

from __future__ import annotations

from ctypes import addressof, c_byte
from dataclasses import dataclass
from typing import ClassVar

from fmtprop.jit.gather import checked
from fmtprop.jit.kernel import Kernel, isa, threads_for
from fmtprop.jit.nbits import DecodeKernel, NBitsArguments, levels_of, span
from fmtprop.jit.standalone import StandaloneWork, assembled


@dataclass(frozen=True)
class GatherNBitsKernel(DecodeKernel):
    """``dst[i, k] = (weights[indices[i], k] - zero point) * scale``."""

    stem = "gather_nbits"

    takes_any_numbers: ClassVar[bool] = False

    #: number of indices
    count: int = 1
    #: bytes of an index, 4 or 8
    index_nbytes: int = 8

    @property
    def is_offered(self) -> bool:
        """Whether this machine has such a kernel, for these sizes."""
        return super().is_offered and self.count > 0 and self.index_nbytes in (4, 8)

    def assembled(self) -> Kernel:
        """Return the code; tables that differ only in sizes share it."""
        how = self.bits, self.group, self.dst, self.has_zero_points
        kernel = GatherNBitsKernel(0, 0, *how, index_nbytes=self.index_nbytes)
        return assembled("gather_nbits_program", "gather_nbits", isa(), kernel)

    def work(self, threads: int) -> StandaloneWork:
        """Return the kernel with arguments; its tensors are set later."""
        data = (c_byte * (len(levels := levels_of(isa())))).from_buffer_copy(levels)
        row = self.depth * self.dst.nbytes
        arguments = NBitsArguments(
            data=addressof(data),
            count=self.count,
            reach=self.outputs,
            row=self.depth * self.bits // 8,
            dst_row=row,
            scales_row=self.depth // self.group * 4,
            groups=self.depth // span(self),
        )
        check = checked(self.index_nbytes, arguments, "indices")
        return StandaloneWork(self.kernel, arguments, threads_for(self.count * row, threads), data, check)
