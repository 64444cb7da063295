"""Tiles of AMX: whether this process may use them, and their configuration.

A tile has up to 16 rows of up to 64 bytes. :mod:`fmtprop.jit.tile_program` has the instructions.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Sequence
from functools import cache

from fmtprop.dnnl import lib

#: sizes of a whole tile, and the number of tiles
ROWS, ROW_NBYTES, TILES = 16, 64, 8

#: bytes that describe the tiles to the processor
CONFIGURATION_NBYTES = 64

#: the kind of description; how many tiles it has room for
_PALETTE, _ROOM = 1, 16

#: a request of Linux: the system call, its function, and the state that has the numbers of tiles
_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XTILEDATA = 158, 0x1023, 18


@cache
def no_tiles() -> str:
    """Return the reason why programs cannot use tiles here; empty if they can.

    Linux gives tiles only to a process that asks for them. Its permission holds for all threads, those that run already
    too, and for processes that are forked later.
    """
    library = lib()
    if not library.includes("avx512_core_amx"):
        return f"oneDNN uses {library.isa} here, which has no AMX"
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    syscall.argtypes = (ctypes.c_long,) * 3
    if syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XTILEDATA):
        number = ctypes.get_errno()
        return f"the system gives this process no tiles: {os.strerror(number)} ({errno.errorcode.get(number, number)})"
    return ""


def configuration(shapes: Sequence[tuple[int, int]] = ((ROWS, ROW_NBYTES),) * TILES) -> bytes:
    """Return the description of tiles: rows of each, and bytes of its rows; by default, all are whole.

    >>> len(configuration())
    64
    """
    rows, nbytes = zip(*shapes, strict=True)
    unused = (0,) * (_ROOM - len(shapes))
    return struct.pack(f"<BB14x{_ROOM}H{_ROOM}B", _PALETTE, 0, *nbytes, *unused, *rows, *unused)
