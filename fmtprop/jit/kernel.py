"""Kernels: machine code and its arguments, run by oneDNN's threads; and the kernels of element-wise functions.

oneDNN applies such functions inside its primitives, one vector at a time between the products. For SiLU this took
three times as long as a separate loop, memory traffic included (Zen 4, 1.2 million f32 numbers).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from ctypes import c_uint, c_void_p
from dataclasses import dataclass
from functools import cache, cached_property
from hashlib import sha256
from typing import TYPE_CHECKING

from fmtprop.dnnl import lib
from fmtprop.jit.arguments import CHUNK_NBYTES, Arguments, FunctionArguments, runtime_function
from fmtprop.jit.calls import Call, CallList
from fmtprop.jit.denormals import parallel
from fmtprop.jit.isa import AVX2, AVX512, Isa
from fmtprop.jit.memory import no_code, place_code
from fmtprop.layout import DataType

if TYPE_CHECKING:
    from fmtprop.jit.assembler import Assembler

#: up to this size, one thread is faster than several
ALONE_NBYTES = 16 << 10

#: algorithm -> whether a kernel is written for its parameters. The functions are in another module because they import
#: the assembler, which networks without kernels need not load
_WRITTEN: Mapping[str, Callable[[float, float], bool]] = {
    "swish": lambda alpha, beta: alpha == 1.0,
    "gelu_erf": lambda alpha, beta: True,
    "gelu_tanh": lambda alpha, beta: True,
    "relu": lambda alpha, beta: alpha == 0.0,
    "clip": lambda alpha, beta: alpha <= 0.0 <= beta,
    "hardswish": lambda alpha, beta: True,
    "linear": lambda alpha, beta: beta == 0.0,
    "tanh": lambda alpha, beta: True,
}

#: algorithms that take longer inside a primitive than in a kernel behind it, or alone (tanh 2.4 times as long, SiLU 3,
#: GELU 1.3: 98 304 numbers, Zen 4); the others' kernels keep NaN, which oneDNN loses (PyTorch's GELU of inf is NaN, in
#: contrast to the kernel's)
_SLOW_INSIDE = frozenset({"swish", "gelu_erf", "tanh"})

#: functions of the OpenMP runtime that every kernel needs
_RUNTIME = ("GOMP_parallel", "omp_get_num_threads", "omp_get_thread_num")


@dataclass(frozen=True)
class Kernel:
    """Machine code, ready to run."""

    #: name of the operation, such as ``"swish"``
    name: str
    code: bytes
    table: bytes = b""

    @property
    def is_faster(self) -> bool:
        """Whether it serves speed; otherwise it gives PyTorch's special values where oneDNN's function does not."""
        return self.name in _SLOW_INSIDE

    @property
    def fingerprint(self) -> str:
        """A hash of everything that decides the kernel's results and speed."""
        return sha256(self.code + self.table).hexdigest()[:16]

    @cached_property
    def address(self) -> int:
        """Address of the code.

        Raises OSError if the system allows no executable memory.
        """
        return place_code(self.code)

    @cached_property
    def rows(self) -> ctypes.Array[ctypes.c_char]:
        """The constants that it reads, in memory."""
        return ctypes.create_string_buffer(self.table, len(self.table))


class BoundKernel:
    """A kernel with its arguments, for one Python thread at a time.

    `threads`: number of threads; 0 for oneDNN's number.
    """

    def __init__(self, kernel: Kernel, arguments: Arguments, threads: int) -> None:
        self._kernel, self._arguments = kernel, arguments
        #: the function to call, with its arguments
        self.call: Call = (
            *(parallel(), c_void_p(kernel.address), c_void_p(ctypes.addressof(arguments))),
            *(c_uint(threads), c_uint(0)),
        )

    def run(self) -> None:
        """Compute."""
        function, *arguments = self.call
        function(*arguments)


class Work(BoundKernel):
    """A kernel of an element-wise function, with the row of numbers that it changes in place.

    `nbytes`: bytes of the row, a multiple of 64.
    """

    def __init__(self, kernel: Kernel, nbytes: int) -> None:
        table = ctypes.addressof(kernel.rows)
        arguments = FunctionArguments(chunks=nbytes // CHUNK_NBYTES, table=table)
        super().__init__(kernel, arguments, threads_for(nbytes, 0))

    def set_data_handle(self, pointer: int) -> None:
        """Set the address of the row."""
        self._arguments.data = pointer


def threads_for(nbytes: int, threads: int) -> int:
    """Return the best number of threads for a number of bytes."""
    return 1 if nbytes <= ALONE_NBYTES else threads


def on_one_thread(calls: Sequence[Call], restored: int) -> CallList:
    """Return calls during which the calling thread has one OpenMP thread; `restored` is its number afterwards."""
    first, last = ((runtime_function("omp_set_num_threads"), c_uint(n), None, None, None) for n in (1, restored))
    return CallList([first, *calls, last])


@cache
def isa() -> Isa:
    """Return the instruction set of kernels on this machine."""
    return AVX512 if lib().includes("avx512_core") else AVX2


@cache
def unavailable() -> str:
    """Return the reason why kernels cannot run here; empty if they can."""
    library = lib()
    if not library.includes("avx2"):
        return f"oneDNN uses {library.isa} here; kernels are written for AVX2 and AVX-512"
    if library.runtime != "OMP" or any(runtime_function(name) is None for name in _RUNTIME):
        return f"oneDNN's threads here ({library.runtime}) are not those of an OpenMP runtime with {_RUNTIME[0]}"
    return no_code()


def kernel_for(alg: str, alpha: float, beta: float, dtype: DataType) -> Kernel | None:
    """Return the kernel of an element-wise function.

    `alg`: oneDNN's name without ``eltwise_``.
    """
    return _kernel(alg, alpha, beta, dtype) if writes(alg, alpha, beta) and serves(dtype) else None


def writes(alg: str, alpha: float, beta: float) -> bool:
    """Return whether a function is written for its parameters."""
    return alg in _WRITTEN and _WRITTEN[alg](alpha, beta)


def is_slow_inside(alg: str, alpha: float, beta: float) -> bool:
    """Return whether oneDNN's code of a function, which is the same alone, is slower than what is written for it."""
    return alg in _SLOW_INSIDE and writes(alg, alpha, beta)


def takes(dtype: DataType) -> bool:
    """Return whether kernels can read and write a data type here; they compute in f32."""
    if dtype is DataType.BF16:  # kernels need the rounding instruction; oneDNN has bf16 without it, too
        return lib().includes("avx512_core_bf16")
    return dtype is DataType.F32


def serves(*dtypes: DataType, meeting: bool = False) -> bool:
    """Return whether kernels run here on these data types: also those with threads that wait for each other."""
    ready = not unavailable() and all(map(takes, dtypes))
    return ready and (not meeting or runtime_function("GOMP_barrier") is not None)


@cache
def _kernel(alg: str, alpha: float, beta: float, dtype: DataType) -> Kernel:
    from fmtprop.jit.functions import FUNCTIONS
    from fmtprop.jit.programs import function

    def apply(a: Assembler, x: int) -> int:
        return FUNCTIONS[alg](a, x, alpha, beta)

    return Kernel(alg, *function(isa(), apply, bf16=dtype is DataType.BF16))
