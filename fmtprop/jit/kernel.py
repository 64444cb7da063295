"""Kernels: machine code with its work, run by the threads that oneDNN uses too; and those of one function of a number.

oneDNN applies such functions within its primitives, a vector at a time between the products. For SiLU that took three
times as long as a loop that does nothing else, the memory included (Zen 4, 1.2 million f32 numbers).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_uint, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache, cached_property
from hashlib import sha256
from typing import TYPE_CHECKING, Any, ClassVar

from fmtprop.dnnl import lib
from fmtprop.jit.calls import Call
from fmtprop.jit.memory import no_code, place_code
from fmtprop.layout import DataType

if TYPE_CHECKING:
    from fmtprop.jit.assembler import Isa

__all__ = [
    "CHUNK_NBYTES",
    "Arguments",
    "BoundKernel",
    "FunctionArguments",
    "Kernel",
    "Work",
    "address_of",
    "isa",
    "kernel_for",
    "runtime_function",
    "takes",
    "threads_for",
    "unavailable",
]

#: what a row must be a multiple of: threads share it in such pieces
CHUNK_NBYTES = 64

#: bytes up to which a thread is faster than several
ALONE_NBYTES = 16 << 10

#: algorithm -> the parameter that its kernel computes with; None where it has none. The functions themselves are in
#: another module: they import the assembler, which networks without kernels need not load
_ALPHAS = {"swish": 1.0, "gelu_erf": None}

#: functions of the OpenMP runtime that every kernel needs
_RUNTIME = ("GOMP_parallel", "omp_get_num_threads", "omp_get_thread_num")


@dataclass(frozen=True)
class Kernel:
    """Machine code, ready to run.

    Parameters
    ----------
    name : str
        What it computes, such as ``"swish"``.
    code : bytes
        What is executed.
    table : bytes, optional
        The numbers that it reads.
    """

    name: str
    code: bytes
    table: bytes = b""

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
    """What a kernel's code finds its work by; each program adds fields of its own."""

    _fields_: ClassVar[Sequence[tuple[str, Any]]] = (("threads", c_void_p), ("thread", c_void_p))

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self.threads, self.thread = address_of("omp_get_num_threads"), address_of("omp_get_thread_num")


class FunctionArguments(Arguments):
    """What a function's code finds its work by."""

    _fields_ = (("data", c_void_p), ("chunks", c_uint64), ("table", c_void_p))


class BoundKernel:
    """A kernel with its work, for one thread of Python at a time.

    Parameters
    ----------
    kernel : Kernel
        What to run.
    arguments : Arguments
        What it finds its work by.
    threads : int
        How many run it; 0 for as many as oneDNN would use.
    """

    def __init__(self, kernel: Kernel, arguments: Arguments, threads: int) -> None:
        self._kernel, self._arguments = kernel, arguments
        #: what to call, and with what
        self.call: Call = (
            *(runtime_function("GOMP_parallel"), c_void_p(kernel.address), c_void_p(ctypes.addressof(arguments))),
            *(c_uint(threads), c_uint(0)),
        )

    def run(self) -> None:
        """Compute."""
        function, *arguments = self.call
        function(*arguments)


class Work(BoundKernel):
    """A function and the row of numbers that it changes.

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
        table = ctypes.addressof(kernel.rows)
        arguments = FunctionArguments(data=pointer, chunks=nbytes // CHUNK_NBYTES, table=table)
        super().__init__(kernel, arguments, threads_for(nbytes, 0))

    def set_data_handle(self, pointer: int) -> None:
        """Point it at other numbers."""
        self._arguments.data = pointer


def threads_for(nbytes: int, threads: int) -> int:
    """Return by how many threads so many bytes are best worked on."""
    return 1 if nbytes <= ALONE_NBYTES else threads


def address_of(name: str) -> int | None:
    """Return where a function of the OpenMP runtime lies."""
    return ctypes.cast(runtime_function(name), c_void_p).value


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
    if library.runtime != "OMP" or any(runtime_function(name) is None for name in _RUNTIME):
        return f"oneDNN's threads here ({library.runtime}) are not those of an OpenMP runtime with {_RUNTIME[0]}"
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
    from fmtprop.jit.programs import function

    return Kernel(alg, *function(isa(), FUNCTIONS[alg], bf16=dtype is DataType.BF16))
