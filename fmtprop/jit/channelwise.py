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
from ctypes import c_float, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache

from fmtprop.jit.kernel import Kernel, isa, runtime_function, takes, unavailable
from fmtprop.jit.standalone import StandaloneKernel, StandaloneWork, address_of, threads_for
from fmtprop.layout import DataType

__all__ = ["ChannelKernel", "channel_kernel_for"]

#: vectors of channels that are added up at a time, at most
_GROUP = 12

#: bytes to which the sums of a thread are aligned
_LINE = 64

#: what of the OpenMP runtime the code calls
_ASKED = ("omp_get_num_threads", "omp_get_thread_num", "GOMP_barrier")

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
class ChannelKernel(StandaloneKernel):
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
    def stem(self) -> str:
        """What it does."""
        return self.alg

    @property
    def problem(self) -> str:
        """Its sizes."""
        return f"{self.images}x{self.channels}x{self.places} numbers, {self.dtype.value}"

    def assembled(self) -> Kernel:
        """Return the code, which others with such a number of channels share."""
        return _kernel(self.alg, _group(self.channels // _lanes()), self.dtype)

    def work(self, threads: int) -> StandaloneWork:
        """Return it with places for its tensors."""
        row = self.channels * self.dtype.nbytes
        threads = threads_for(self.images * self.places * row, threads)
        vectors = self.channels // _lanes()
        # "scale" asks by rows which factors it is at
        places = self.images * self.places if self.shared else self.places
        arguments = Arguments(
            *map(address_of, _ASKED),
            *(None, None, None),
            *(self.images, places, self.images * self.places, row),
            *(vectors // _group(vectors), self.images * vectors),
            (c_float * 16)(*[places] * 16),
        )
        sums = None
        if self.alg == "average":
            sums = (c_float * (threads * self.images * self.channels + _LINE // 4))()
            arguments.other = -(-ctypes.addressof(sums) // _LINE) * _LINE
        return StandaloneWork(self.kernel, arguments, _FIELDS[self.alg], threads, sums)


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
