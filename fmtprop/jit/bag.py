"""Kernels of embedding bags: sums, means or maxima of a table's rows, a bag of them for each row of the result.

A call checks offsets and indices first, so that nothing is read outside the table; then threads share the bags.
"""

from __future__ import annotations

from ctypes import CFUNCTYPE, addressof, c_int, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

from fmtprop.jit.arguments import BagArguments
from fmtprop.jit.isa import AVX2, Isa
from fmtprop.jit.kernel import Kernel, isa, serves, threads_for
from fmtprop.jit.memory import place_code
from fmtprop.jit.standalone import StandaloneKernel, StandaloneWork, assembled
from fmtprop.layout import DataType

#: a program has instructions for each vector of a row
_MOST_COLUMNS = 4096

#: a table of more bytes is not in the nearest caches
_NEAR_NBYTES = 1 << 20


@dataclass(frozen=True)
class BagKernel(StandaloneKernel):
    """``dst[b] = sum of table[indices[i]] * factors[i]``, or the mean or the maximum, for i from offsets[b] on."""

    stem = "embedding_bag"

    takes_any_numbers: ClassVar[bool] = False

    #: `count`, `starts`, `limit`: number of indices, of offsets, and of rows of the table
    count: int
    starts: int
    limit: int
    columns: int
    #: bytes from row to row of the table
    pitch_nbytes: int
    #: bytes of an index and of an offset, 4 or 8
    index_nbytes: int
    #: data type of table, factors and dst; computed in f32
    dtype: DataType = DataType.F32
    #: ``"sum"``, ``"mean"`` or ``"max"``
    mode: str = "sum"
    #: index that is left out; negative if there is none
    padding: int = -1
    #: whether the last offset is the end of the last bag; otherwise all indices are
    has_last: bool = False
    has_factors: bool = False

    @property
    def is_offered(self) -> bool:
        """Whether this machine has such a kernel, for these sizes."""
        sized = self.bags > 0 and 0 < self.columns <= _MOST_COLUMNS and self.index_nbytes in (4, 8)
        return serves(self.dtype) and sized

    @property
    def bags(self) -> int:
        """Rows of the result."""
        return self.starts - self.has_last

    def assembled(self) -> Kernel:
        """Return the code; problems that differ in numbers of bags, indices and rows share it."""
        how = self._isa, self.columns, self.index_nbytes, self.mode
        far = self.limit * self.pitch_nbytes > _NEAR_NBYTES
        flags = {"padded": self.padding >= 0, "weighted": self.has_factors, "far": far}
        return assembled("bag_program", "bag", *how, **flags, bf16=self.dtype is DataType.BF16)

    @property
    def _isa(self) -> Isa:
        """The instruction set whose vectors fit in a row."""
        return AVX2 if self.columns < isa().lanes and self.dtype is DataType.F32 else isa()

    def work(self, threads: int) -> StandaloneWork:
        """Return the kernel with arguments; its tensors are set later."""
        sizes = {"bags": self.bags, "starts": self.starts, "count": self.count, "reach": self.limit}
        row_nbytes = self.columns * self.dtype.nbytes
        arguments = BagArguments(**sizes, padding=max(self.padding, 0), pitch=self.pitch_nbytes, row=row_nbytes)
        check = (_check(self.index_nbytes, self.has_last), c_void_p(addressof(arguments)), None, None, None)
        threads = threads_for(self.count * row_nbytes, threads)
        return StandaloneWork(self.kernel, arguments, threads, check=check)


@cache
def _check(index_nbytes: int, has_last: bool) -> Any:
    """Return the function that checks offsets and indices."""
    from fmtprop.jit.bag_program import check

    return CFUNCTYPE(c_int, *[c_void_p] * 4)(place_code(check(index_nbytes, has_last)))
