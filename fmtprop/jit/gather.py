"""Kernels of embeddings and of indexing: rows of a table by their indices, of which each must exist.

A call checks all indices first, so that nothing is read outside the table; then threads share the rows.
"""

from __future__ import annotations

from ctypes import CFUNCTYPE, addressof, c_int, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

from fmtprop.jit.arguments import Arguments, GatherArguments
from fmtprop.jit.calls import Call
from fmtprop.jit.kernel import Kernel, isa, serves, threads_for
from fmtprop.jit.memory import place_code
from fmtprop.jit.standalone import StandaloneKernel, StandaloneWork, assembled


@dataclass(frozen=True)
class GatherKernel(StandaloneKernel):
    """``dst[i] = src_0[src_1[i]]`` for rows of a table."""

    stem = "gather"

    takes_any_numbers: ClassVar[bool] = False

    #: `count`, `limit`: number of indices, and of rows of the table
    count: int
    limit: int
    #: `row_nbytes`, `pitch_nbytes`: bytes of a row, and from row to row of the table
    row_nbytes: int
    pitch_nbytes: int
    #: bytes of an index, 4 or 8
    index_nbytes: int
    #: whether a negative index counts from the end of the table; otherwise there is none
    from_end: bool = False

    @property
    def is_offered(self) -> bool:
        """Whether this machine has such a kernel, for these sizes."""
        return serves() and self.count > 0 and self.row_nbytes > 0 and self.index_nbytes in (4, 8)

    def assembled(self) -> Kernel:
        """Return the code; all problems with indices of a size share it."""
        return assembled("gather_program", "gather", isa(), self.index_nbytes)

    def work(self, threads: int) -> StandaloneWork:
        """Return the kernel with arguments; its tensors are set later."""
        below = self.limit if self.from_end else 0
        sizes = {"count": self.count, "limit": self.limit, "below": below, "reach": self.limit + below}
        arguments = GatherArguments(**sizes, row=self.row_nbytes, pitch=self.pitch_nbytes)
        threads = threads_for(self.count * self.row_nbytes, threads)
        return StandaloneWork(self.kernel, arguments, threads, check=checked(self.index_nbytes, arguments))


def checked(index_nbytes: int, arguments: Arguments, indices: str = "src_1") -> Call:
    """Return the call that checks the indices of arguments, which tell their `count`, `below` and `reach`."""
    return _check(index_nbytes, type(arguments), indices), c_void_p(addressof(arguments)), None, None, None


@cache
def _check(index_nbytes: int, arguments: type[Arguments], indices: str) -> Any:
    """Return the function that checks the indices."""
    from fmtprop.jit.gather_program import check

    return CFUNCTYPE(c_int, *[c_void_p] * 4)(place_code(check(index_nbytes, arguments, indices)))
