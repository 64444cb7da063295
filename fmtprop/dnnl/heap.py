"""The C heap: returning freed memory to the system. It is here because only this room calls C functions."""

from __future__ import annotations

import ctypes


def trim_heap() -> bool:
    """Return freed memory to the system.

    Packing weights frees tensors of many megabytes. glibc keeps this memory, but a plan needs no more large tensors.

    Returns
    -------
    bool
        Whether the C library has the function (glibc).

    References
    ----------
    ``malloc_trim(3)``.
    """
    function = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if function is None:
        return False
    function.argtypes, function.restype = (ctypes.c_size_t,), ctypes.c_int
    function(0)
    return True
