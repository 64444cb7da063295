"""Memory of the process: it is returned to the system, or kept. It is here because only this room calls C functions."""

from __future__ import annotations

import ctypes
import mmap
import re
from collections.abc import Iterable
from pathlib import Path

#: ``MADV_COLLAPSE`` of ``madvise(2)``, since Linux 6.1: Python has no name for it
_COLLAPSE = 25

#: bytes of a huge page, and the least bytes for which it is worth while to ask the system: half of the memory lies in
#: whole huge pages
_HUGE_NBYTES = 2 << 20
_LEAST_NBYTES = 2 * _HUGE_NBYTES

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_MAPPINGS = Path("/proc/self/smaps")
#: the first line of a mapping: its addresses, its offset in a file, and the file's number, 0 for none
_MAPPING = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ (\d+)")

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


def use_huge_pages(blocks: Iterable[tuple[int, int]]) -> None:
    """Move memory that a plan reads in place to huge pages, where the system has them: its contents stay.

    PyTorch's own memory lies in pages of 4 KiB. A product of one row with weights there takes 1.2 times as long as with
    weights in huge pages. Memory of files, and memory that another process shares since a fork, is left as it is: it
    would be in memory twice.

    `blocks`: addresses and bytes. ``MADV_COLLAPSE`` in ``madvise(2)``; older systems refuse it, and nothing changes.
    """
    wanted = [(address, address + nbytes) for address, nbytes in blocks if nbytes >= _LEAST_NBYTES]
    if not wanted or not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    try:
        if "[never]" in _HUGE_PAGES.read_text():
            return
        own = list(_own_mappings(_MAPPINGS.read_text()))
    except OSError:
        return
    function = ctypes.CDLL(None).madvise
    function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
    for begin, end in wanted:
        begin, end = -(-begin // _HUGE_NBYTES) * _HUGE_NBYTES, end // _HUGE_NBYTES * _HUGE_NBYTES
        if any(first <= begin and end <= last for first, last in own):
            function(begin, end - begin, _COLLAPSE)


def _own_mappings(text: str) -> Iterable[tuple[int, int]]:
    r"""Yield the addresses of mappings without a file, of which no other process has a page.

    >>> private = "7f00000-7f90000 rw-p 0 0:0 0 \nShared_Clean: 0 kB\nShared_Dirty: 0 kB\n"
    >>> list(_own_mappings(private)), list(_own_mappings(private.replace("Dirty: 0", "Dirty: 4")))
    ([(133169152, 133758976)], [])
    """
    found: tuple[int, int] | None = None
    for line in text.splitlines():
        if (mapping := _MAPPING.match(line)) is not None:
            if found is not None:
                yield found
            is_own = mapping[3] == "rw-p" and mapping[4] == "0"
            found = (int(mapping[1], 16), int(mapping[2], 16)) if is_own else None
        elif line.startswith("Shared_") and line.split()[1] != "0":
            found = None
    if found is not None:
        yield found
