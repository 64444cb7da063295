"""Kernels: one function of one data type on this machine, run on rows of numbers by the threads that oneDNN uses too.

oneDNN applies such functions within its primitives, a vector at a time between the products. For SiLU that took three
times as long as a loop that does nothing else, the memory included (Zen 4, 1.2 million f32 numbers).
"""

from __future__ import annotations

import ctypes
from ctypes import c_uint, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache, cached_property
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from fmtprop.dnnl import lib
from fmtprop.jit.memory import no_code, place_code
from fmtprop.layout import DataType

if TYPE_CHECKING:
    from fmtprop.jit.assembler import Isa

__all__ = [
    "ALONE_NBYTES",
    "CHUNK_NBYTES",
    "RUNTIME",
    "Arguments",
    "Kernel",
    "Work",
    "isa",
    "kernel_for",
    "runtime_function",
    "takes",
    "unavailable",
]

#: what a row must be a multiple of: threads share it in such pieces
CHUNK_NBYTES = 64

#: bytes up to which a thread is faster than several
ALONE_NBYTES = 16 << 10

#: algorithm -> the parameter that its kernel computes with; None where it has none. Here, as the functions themselves
#: bring the assembler with them, which networks without any need not load
_ALPHAS = {"swish": 1.0, "gelu_erf": None}

RUNTIME = ("GOMP_parallel", "omp_get_num_threads", "omp_get_thread_num")


@dataclass(frozen=True)
class Kernel:
    """A function of one number, ready to run.

    Parameters
    ----------
    name : str
        The function, such as ``"swish"``.
    code : bytes
        What is executed.
    table : bytes
        The numbers that it reads.
    """

    name: str
    code: bytes
    table: bytes

    @property
    def fingerprint(self) -> str:
        """A hash of all that decides its results and its speed."""
        return sha256(self.code + self.table).hexdigest()[:16]

    @cached_property
    def address(self) -> int:
        """Where its code lies.

        Raises
        ------
        OSError
            The system allows no executable memory.
        """
        return place_code(self.code)

    @cached_property
    def rows(self) -> ctypes.Array[ctypes.c_char]:
        """The numbers that it reads, in memory."""
        return ctypes.create_string_buffer(self.table, len(self.table))


class Arguments(ctypes.Structure):
    """What the code finds its work by."""

    _fields_ = (
        ("data", c_void_p),
        ("chunks", c_uint64),
        ("threads", c_void_p),
        ("thread", c_void_p),
        ("table", c_void_p),
    )


class Work:
    """A kernel and the row of numbers that it changes.

    Parameters
    ----------
    kernel : Kernel
        What to run.
    nbytes : int
        Size of the row, a multiple of 64 bytes.
    pointer : int, optional
        Where it lies, if that is known.
    """

    def __init__(self, kernel: Kernel, nbytes: int, pointer: int | None = None) -> None:
        run, *asked = (runtime_function(name) for name in RUNTIME)
        threads, thread = (ctypes.cast(function, c_void_p).value for function in asked)
        self.kernel = kernel
        table = ctypes.addressof(kernel.rows)
        self._arguments = Arguments(pointer, nbytes // CHUNK_NBYTES, threads, thread, table)
        threads_wanted = c_uint(nbytes <= ALONE_NBYTES)  # 0: as many as oneDNN would use
        #: what to call, and with what
        self.call: tuple[Any, c_void_p, c_void_p, c_uint, c_uint] = (
            *(run, c_void_p(kernel.address), c_void_p(ctypes.addressof(self._arguments))),
            *(threads_wanted, c_uint(0)),
        )

    def set_data_handle(self, pointer: int) -> None:
        """Point it at other numbers."""
        self._arguments.data = pointer

    def run(self) -> None:
        """Change the numbers."""
        function, *arguments = self.call
        function(*arguments)


@cache
def runtime_function(name: str) -> Any:
    """Return a function of the OpenMP runtime, None where it has none of the name."""
    function = lib().runtime_function(name)
    if function is not None:
        function.restype = None  # and no argtypes: converting takes longer than calling
    return function


@cache
def isa() -> Isa:
    """Return what kernels are written for here."""
    from fmtprop.jit.assembler import AVX2, AVX512

    return AVX512 if "avx512" in lib().isa else AVX2


@cache
def unavailable() -> str:
    """Return why there are no kernels here; empty where there are."""
    library = lib()
    if "avx512" not in library.isa and "avx2" not in library.isa:
        return f"oneDNN uses {library.isa} here; kernels are written for AVX2 and AVX-512"
    if library.runtime != "OMP" or any(runtime_function(name) is None for name in RUNTIME):
        return f"oneDNN's threads here ({library.runtime}) are not those of an OpenMP runtime with {RUNTIME[0]}"
    return no_code()


def kernel_for(alg: str, alpha: float, dtype: DataType) -> Kernel | None:
    """Return the kernel for an element-wise function.

    Parameters
    ----------
    alg : str
        oneDNN's name without ``eltwise_``.
    alpha : float
        Its parameter.
    dtype : DataType
        Of the numbers; computed in f32.

    Returns
    -------
    Kernel or None
        None where there is none on this machine.
    """
    if alg not in _ALPHAS or _ALPHAS[alg] not in (alpha, None) or unavailable():
        return None
    return _kernel(alg, dtype) if takes(dtype) else None


def takes(dtype: DataType) -> bool:
    """Whether kernels can read and write numbers of a type here; they compute in f32."""
    if dtype is DataType.BF16:  # by the instruction that rounds: oneDNN has bf16 without it, too
        return "avx512" in lib().isa and any(name in lib().isa for name in ("bf16", "fp16", "amx"))
    return dtype is DataType.F32


@cache
def _kernel(alg: str, dtype: DataType) -> Kernel:
    from fmtprop.jit.functions import FUNCTIONS
    from fmtprop.jit.program import program

    return Kernel(alg, *program(isa(), FUNCTIONS[alg], bf16=dtype is DataType.BF16))
