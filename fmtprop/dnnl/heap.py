"""Memory of the process: it is returned to the system, or kept. It is here because only this room calls C functions."""

from __future__ import annotations

import ctypes
import mmap

#: a little less than the largest block after which glibc adapts its thresholds
_SETTLING_NBYTES = (32 << 20) - (64 << 10)


def trim_heap() -> bool:
    """Return freed memory to the system.

    Packing weights frees tensors of many megabytes. glibc keeps this memory, but a plan needs no more large tensors.

    ``malloc_trim(3)``.
    """
    function = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if function is None:
        return False
    function.argtypes, function.restype = (ctypes.c_size_t,), ctypes.c_int
    function(0)
    return True


def keep_heap() -> None:
    """Have the C library keep freed memory, as in a process that has run for long.

    glibc returns freed memory at the end of its heap to the system, and the next tensor there causes page faults. This
    begins at a size that depends on the largest block that the process has freed. One freed block of 32 MiB sets it to
    its maximum, 64 MiB. Until then a run may have thousands of page faults or none, by its order of tensors alone, and
    times of two ways to run a model do not compare.

    ``M_MMAP_THRESHOLD`` in ``mallopt(3)``.
    """
    library = ctypes.CDLL(None)
    library.malloc.argtypes, library.malloc.restype = (ctypes.c_size_t,), ctypes.c_void_p
    library.free.argtypes, library.free.restype = (ctypes.c_void_p,), None
    library.free(library.malloc(_SETTLING_NBYTES))


def drop_pages(address: int, nbytes: int) -> None:
    """Return whole pages of private memory to the system; the next access to one finds zeros, or its file's bytes."""
    if hasattr(mmap, "MADV_DONTNEED"):
        function = ctypes.CDLL(None).madvise
        function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
        function(address, nbytes, mmap.MADV_DONTNEED)
