"""Denormal numbers are zero during a run: the calling thread's mode, and that of the threads that help it.

A CPU takes some hundred cycles for an operation on a number below 1.2e-38, so a network whose activations fade can
take four times as long. The mode (FTZ and DAZ in MXCSR) belongs to a thread, and it must be the caller's again
afterwards, in all threads: OpenMP's threads serve the caller's other work, too. So they get the mode for the length of
one parallel region. Regions of our kernels begin by :func:`parallel`, those of oneDNN too: its table of imported
functions gets it.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Container, Iterator
from contextlib import contextmanager
from ctypes import CFUNCTYPE, c_int, c_uint, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from fmtprop.dnnl import lib
from fmtprop.errors import LoadError
from fmtprop.jit.memory import no_code, place_code
from fmtprop.system.locks import ProcessLock

#: bits of MXCSR: results below the smallest normal number are zero, and so are operands
FLUSH = 0x8000 | 0x0040

_HOOKING = ProcessLock()


@contextmanager
def flushed() -> Iterator[None]:
    """Let denormal numbers be zero in this thread, and in the parallel regions of oneDNN and of our kernels.

    PyTorch's operators inside the block have the mode in this thread alone. Without executable memory, nothing changes.
    """
    routines = _routines()
    began = routines is not None and routines.begin()
    try:
        yield
    finally:
        if routines is not None and began:
            routines.end()


def mode() -> int:
    """Return this thread's MXCSR; 0 where it cannot be read."""
    routines = _routines()
    return int(routines.mode()) if routines is not None else 0


def parallel() -> Any:
    """Return the function that begins a parallel region: ``GOMP_parallel``, in the mode of the calling thread."""
    routines = _routines()
    return _runtimes() if routines is None or routines.parallel is None else routines.parallel


def brackets() -> tuple[int, int] | None:
    """Return the addresses of ``int begin()`` and ``void end()``; None without executable memory.

    `begin` returns 0 if the mode is on already; then there must be no `end`.
    """
    routines = _routines()
    if routines is None:
        return None
    return _address(routines.begin), _address(routines.end)


@dataclass(frozen=True)
class _Routines:
    begin: Any
    end: Any
    mode: Any
    parallel: Any


@cache
def _routines() -> _Routines | None:
    if no_code():
        return None
    with _HOOKING.current:
        from fmtprop.jit import denormals_program as program

        own, key = ctypes.CDLL(None), c_uint()
        if own.pthread_key_create(ctypes.byref(key), own.free):
            return None
        get, put, calloc = map(_address, (own.pthread_getspecific, own.pthread_setspecific, own.calloc))
        functions = program.Functions(get, put, calloc, key.value)
        begin = CFUNCTYPE(c_int)(place_code(program.begin(functions, FLUSH)))
        end = CFUNCTYPE(None)(place_code(program.end(functions)))
        return _Routines(begin, end, CFUNCTYPE(c_uint)(place_code(program.mode())), _hooked(functions))


def _hooked(functions: Any) -> Any:
    """Return our beginning of parallel regions, after oneDNN has it; None if it has another threading runtime.

    Compilers before GCC 4.9 begin a region by ``GOMP_parallel_start`` and end it by ``GOMP_parallel_end``.
    """
    from fmtprop.jit import denormals_program as program

    runtimes = _runtimes()
    if runtimes is None:
        return None
    share = place_code(program.share())
    address = place_code(program.parallel(functions, _address(runtimes), share))
    ours = {b"GOMP_parallel": address}
    start, end = map(lib().runtime_function, ("GOMP_parallel_start", "GOMP_parallel_end"))
    if start is not None and end is not None:
        ours[b"GOMP_parallel_start"] = place_code(program.start(functions, _address(start), share))
        ours[b"GOMP_parallel_end"] = place_code(program.stop(functions, _address(end)))
    for slot, name in _imported(lib().handle, ours.keys()):
        _write(slot, ours[name])
    return CFUNCTYPE(None, *[c_void_p] * 2, *[c_uint] * 2)(address)


def _runtimes() -> Any:
    try:
        library = lib()
    except LoadError:  # PyTorch's operators run all
        return None
    function = library.runtime_function("GOMP_parallel") if library.runtime == "OMP" else None
    if function is not None:
        function.restype = None
    return function


def _address(function: Any) -> int:
    return ctypes.cast(function, c_void_p).value or 0


class _LinkMap(ctypes.Structure):
    """What the dynamic loader says of a library; a library's handle points to it (glibc and musl, ``link.h``)."""

    _fields_ = (("base", c_void_p), ("name", ctypes.c_char_p), ("dynamic", c_void_p))


#: tags of a library's dynamic entries (``elf.h``): its names, its symbols, two tables of relocations with their sizes
_STRINGS, _SYMBOLS, _TABLES = 5, 6, ((23, 2), (7, 8))

_RELOCATION = np.dtype([("place", "<u8"), ("kind", "<u4"), ("symbol", "<u4"), ("summand", "<i8")])

#: relocations of a pointer to a function that the library imports
_POINTERS = (6, 7)

_SYMBOL_NBYTES = 24


def _imported(handle: int, names: Container[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield the addresses of a library's pointers to functions that it imports, with the names of these."""
    link = _LinkMap.from_address(handle)
    base, entries, at = link.base or 0, {}, link.dynamic or 0
    while (tag := ctypes.c_int64.from_address(at).value) != 0:
        entries[tag] = ctypes.c_uint64.from_address(at + 8).value
        at += 16

    def place(tag: int) -> int:
        return entries[tag] if entries[tag] >= base else base + entries[tag]

    for table, size in _TABLES:
        if table not in entries:
            continue
        relocations = np.frombuffer(ctypes.string_at(place(table), entries[size]), _RELOCATION)
        for one in relocations[np.isin(relocations["kind"], _POINTERS)]:
            start = ctypes.c_uint32.from_address(place(_SYMBOLS) + int(one["symbol"]) * _SYMBOL_NBYTES).value
            name = ctypes.string_at(place(_STRINGS) + start)
            if name in names:
                yield base + int(one["place"]), name


def _write(slot: int, value: int) -> None:
    """Write a pointer into a page that the loader may have made read-only; a refusal leaves it as it is."""
    protect = ctypes.CDLL(None).mprotect
    protect.argtypes = (c_void_p, ctypes.c_size_t, c_int)
    page = slot // mmap.PAGESIZE * mmap.PAGESIZE
    is_open = _is_writable(page)
    if not is_open and protect(page, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE):
        return
    ctypes.c_uint64.from_address(slot).value = value
    if not is_open:
        protect(page, mmap.PAGESIZE, mmap.PROT_READ)


def _is_writable(page: int) -> bool:
    with open("/proc/self/maps") as maps:
        for line in maps:
            span, rights, *_ = line.split()
            start, stop = (int(number, 16) for number in span.split("-"))
            if start <= page < stop:
                return "w" in rights
    return False
