"""Executable memory: it is written first and made executable afterwards, never both at a time."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from functools import cache

#: kept as long as the process lives, because plans hold addresses of code
_PAGES: list[mmap.mmap] = []


def place_code(code: bytes) -> int:
    """Copy code to executable memory and return its address."""
    pages = mmap.mmap(-1, len(code), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.write(code)
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    if _protect()(address, len(code), mmap.PROT_READ | mmap.PROT_EXEC):
        number = ctypes.get_errno()
        raise OSError(number, "mprotect refuses to make code executable")
    _PAGES.append(pages)
    return address


@cache
def _protect() -> Callable[[int, int, int], int]:
    """Return the C function that changes what a process may do with its pages."""
    function = ctypes.CDLL(None, use_errno=True).mprotect
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function


@cache
def no_code() -> str:
    """Return the reason why generated code cannot run here; empty if it can."""
    try:
        import iced_x86  # noqa: F401
    except ImportError as error:
        return f"{error}; install iced-x86"
    try:
        place_code(b"\xc3")
    except OSError as error:
        return f"no executable memory: {error}"
    return ""
