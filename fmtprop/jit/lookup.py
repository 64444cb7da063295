"""Kernel of functions by a table of 256 bytes.

With AVX-512's permutations of bytes, the table lies in four registers, and a vector of 64 bytes takes four
instructions. Elsewhere bytes are looked up one by one, in about a cycle each.
"""

from __future__ import annotations

from ctypes import addressof, c_ubyte, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache

from fmtprop.jit.arguments import Arguments
from fmtprop.jit.isa import AVX512
from fmtprop.jit.kernel import Kernel, isa, serves, threads_for
from fmtprop.jit.standalone import StandaloneKernel, StandaloneWork, assembled
from fmtprop.system.machine import cpu_fields

#: bytes of a cache line and of a vector: threads share lines
LINE_NBYTES = 64


class LookupArguments(Arguments):
    """Arguments of the code."""

    _fields_ = (*((name, c_void_p) for name in ("src", "dst", "entries")), *((n, c_uint64) for n in ("lines", "count")))


@dataclass(frozen=True)
class LookupKernel(StandaloneKernel):
    """``dst[i] = table[src[i]]`` for bytes."""

    stem = "lookup"

    count: int
    #: 256 bytes
    table: tuple[int, ...]

    @property
    def is_offered(self) -> bool:
        """Whether this machine has such a kernel, for these sizes."""
        return serves() and self.count > 0

    def assembled(self) -> Kernel:
        """Return the code; all problems share it."""
        return assembled("lookup_program", "lookup", isa(), by_vectors=_permutes_bytes())

    def work(self, threads: int) -> StandaloneWork:
        """Return the kernel with arguments; its tensors are set later."""
        entries = (c_ubyte * len(self.table))(*self.table)
        arguments = LookupArguments(entries=addressof(entries), lines=-(-self.count // LINE_NBYTES), count=self.count)
        return StandaloneWork(self.kernel, arguments, threads_for(self.count, threads), entries)


@cache
def _permutes_bytes() -> bool:
    """Return whether the CPU has AVX512_VBMI; oneDNN has no name for it."""
    return isa() is AVX512 and "avx512vbmi" in cpu_fields().get("flags", "").replace("_", "").split()
