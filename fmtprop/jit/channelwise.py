"""Kernels for channels-last tensors that run instead of a primitive: the average of each channel, a factor for each.

oneDNN shares out blocks of channels for an average, so that much of what a core reads is in another's cache, or one
core does it all where channels are few. In squeeze-and-excitation blocks these are short steps by the dozen.

References
----------
oneDNN v3.x, ``src/cpu/x64/jit_uni_pooling.cpp``, ``execute_forward`` for channels-last tensors.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import c_float, c_uint, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache, cached_property

from fmtprop.jit.calls import Call
from fmtprop.jit.kernel import ALONE_NBYTES, RUNTIME, Kernel, isa, runtime_function, takes, unavailable
from fmtprop.layout import DataType

__all__ = ["ChannelKernel", "ChannelWork", "Pointer", "channel_kernel_for"]

#: vectors of channels that are added up at a time, at most
_GROUP = 12

#: bytes to which the sums of a thread are aligned
_LINE = 64

_RUNTIME = (*RUNTIME, "GOMP_barrier")

#: algorithm -> operand or result -> argument
_FIELDS: Mapping[str, Mapping[str, str]] = {
    "average": {"src": "src", "dst": "dst"},
    "scale": {"src_0": "src", "src_1": "other", "dst": "dst"},
}


class Arguments(ctypes.Structure):
    """What the code finds its work by."""

    _fields_ = (
        *((name, c_void_p) for name in ("threads", "thread", "barrier", "src", "dst", "other")),
        *((name, c_uint64) for name in ("images", "places", "rows", "row", "groups", "vectors")),
        ("divisor", c_float * 16),
    )


@dataclass(frozen=True)
class ChannelKernel:
    """What a kernel does to a tensor [N, C, …] in a channels-last format.

    Parameters
    ----------
    alg : {"average", "scale"}
        ``dst[n, c] = mean(src[n, c, …])``, or ``dst[n, c, …] = src[n, c, …] * other[n, c]``.
    images, places, channels : int
        N, the product of the spatial sizes, and C; all at least 1.
    dtype : DataType
        Of all tensors; computed in f32.
    shared : bool
        Whether all images have the same factors.
    """

    alg: str
    images: int
    places: int
    channels: int
    dtype: DataType
    shared: bool = False

    @property
    def impl(self) -> str:
        """What it is called in plans and reports."""
        return f"{self.alg}:{isa().name}"

    @property
    def repro(self) -> str:
        """What it is called where oneDNN has a command line that reproduces."""
        sizes = f"{self.images}x{self.channels}x{self.places}"
        return f"fmtprop.jit kernel {self.impl} on {sizes} numbers, {self.dtype.value}"

    @property
    def scratchpad_nbytes(self) -> int:
        """Bytes of the plan's that it needs to work: none, each work has its own."""
        return 0

    @cached_property
    def kernel(self) -> Kernel:
        """The code, which others with such a number of channels share."""
        return _kernel(self.alg, _group(self.channels // _lanes()), self.dtype)

    @property
    def fingerprint(self) -> str:
        """A hash of all that decides its results and its speed."""
        return self.kernel.fingerprint


class Pointer:
    """Where a work finds a tensor.

    Parameters
    ----------
    arguments : Arguments
        The work's.
    field : str
        Which of them.
    """

    __slots__ = ("_arguments", "_field")

    def __init__(self, arguments: Arguments, field: str) -> None:
        self._arguments, self._field = arguments, field

    def set_data_handle(self, pointer: int) -> None:
        """Point it at other numbers."""
        setattr(self._arguments, self._field, pointer)


class ChannelWork:
    """A kernel with its tensors, for one thread of Python at a time.

    Parameters
    ----------
    what : ChannelKernel
        What to run.
    threads : int
        How many there will be, at most.
    """

    def __init__(self, what: ChannelKernel, threads: int) -> None:
        row = what.channels * what.dtype.nbytes
        nbytes = what.images * what.places * row
        threads = 1 if nbytes <= ALONE_NBYTES else threads
        run, *asked = (runtime_function(name) for name in _RUNTIME)
        vectors = what.channels // _lanes()
        # "scale" asks by rows which factors it is at
        places = what.images * what.places if what.shared else what.places
        self._arguments = Arguments(
            *(ctypes.cast(function, c_void_p).value for function in asked),
            *(None, None, None),
            *(what.images, places, what.images * what.places, row),
            *(vectors // _group(vectors), what.images * vectors),
            (c_float * 16)(*[what.places] * 16),
        )
        #: where it finds its operands and the result, by their names in oneDNN
        self.pointers: Mapping[str, Pointer] = {
            name: Pointer(self._arguments, field) for name, field in _FIELDS[what.alg].items()
        }
        if what.alg == "average":
            self._sums = (c_float * (threads * what.images * what.channels + _LINE // 4))()
            self._arguments.other = -(-ctypes.addressof(self._sums) // _LINE) * _LINE
        #: what to call, and with what
        self.call: Call = (
            *(run, c_void_p(what.kernel.address), c_void_p(ctypes.addressof(self._arguments))),
            *(c_uint(threads), c_uint(0)),
        )

    def run(self) -> None:
        """Compute."""
        function, *arguments = self.call
        function(*arguments)


def channel_kernel_for(
    alg: str, images: int, places: int, channels: int, dtype: DataType, *, shared: bool = False
) -> ChannelKernel | None:
    """Return a kernel, None where there is none on this machine or for so many channels.

    Parameters
    ----------
    alg, images, places, channels, dtype, shared
        See :class:`ChannelKernel`.
    """
    if unavailable() or runtime_function("GOMP_barrier") is None or 0 in (images, places, channels):
        return None
    if not takes(dtype) or channels % _lanes():
        return None
    return ChannelKernel(alg, images, places, channels, dtype, shared)


def _lanes() -> int:
    return isa().nbytes // 4


def _group(vectors: int) -> int:
    """Return into how many vectors at a time so many can be divided."""
    return next(size for size in range(_GROUP, 0, -1) if vectors % size == 0)


@cache
def _kernel(alg: str, group: int, dtype: DataType) -> Kernel:
    from fmtprop.jit.channel_programs import PROGRAMS

    return Kernel(alg, PROGRAMS[alg](isa(), group, bf16=dtype is DataType.BF16), b"")
