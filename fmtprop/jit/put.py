"""The kernel that puts rows into a tensor at their indices, as a decoder's step puts keys and values into its cache.

A call checks all indices first, so that nothing is written outside; then threads share the tensors of a batch.
"""

from __future__ import annotations

from ctypes import addressof, c_int64, c_uint64, c_void_p
from dataclasses import dataclass
from itertools import product
from typing import ClassVar

from fmtprop.jit.arguments import GATHERED, Arguments
from fmtprop.jit.gather import checked
from fmtprop.jit.kernel import Kernel, isa, serves, threads_for
from fmtprop.jit.standalone import StandaloneKernel, StandaloneWork, assembled


class PutArguments(Arguments):
    """Arguments of the code; the first ones are those of the check."""

    _fields_ = (
        *GATHERED,
        *((name, c_void_p) for name in ("src_2", "starts")),
        *((name, c_uint64) for name in ("batch", "whole", "step")),
    )


@dataclass(frozen=True)
class PutKernel(StandaloneKernel):
    """``dst = src_0; dst[:, src_1[i]] = src_2[:, i]``; where dst is src_0, the rows alone are written."""

    stem = "put"

    takes_any_numbers: ClassVar[bool] = False
    changes: ClassVar[bool] = True

    #: `count`, `limit`: number of indices, and of rows of a tensor of the batch
    count: int
    limit: int
    row_nbytes: int
    #: size of each axis of the batch, and bytes from one to the next in src_2
    batch: tuple[tuple[int, int], ...]
    #: bytes from row to row of src_2
    step_nbytes: int
    #: bytes of an index, 4 or 8
    index_nbytes: int

    @property
    def is_offered(self) -> bool:
        """Whether this machine has such a kernel, for these sizes."""
        sizes = (self.count, self.limit, self.row_nbytes, *(size for size, _ in self.batch))
        return serves() and 0 not in sizes and self.index_nbytes in (4, 8)

    def assembled(self) -> Kernel:
        """Return the code; all problems with indices of a size share it."""
        return assembled("put_program", "put", isa(), self.index_nbytes)

    def work(self, threads: int) -> StandaloneWork:
        """Return the kernel with arguments; its tensors are set later."""
        starts = [sum(place) for place in product(*([i * step for i in range(size)] for size, step in self.batch))]
        table = (c_int64 * len(starts))(*starts)
        arguments = PutArguments(
            count=self.count,
            limit=self.limit,
            reach=self.limit,
            row=self.row_nbytes,
            starts=addressof(table),
            batch=len(starts),
            whole=self.limit * self.row_nbytes,
            step=self.step_nbytes,
        )
        threads = threads_for(len(starts) * self.count * self.row_nbytes, threads)
        return StandaloneWork(self.kernel, arguments, threads, table, check=checked(self.index_nbytes, arguments))
