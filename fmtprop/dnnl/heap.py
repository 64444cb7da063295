"""The C heap: giving back what was freed. Here because only this room speaks C."""

from __future__ import annotations

import ctypes


def trim_heap() -> bool:
    """Return freed memory to the system.

    Packing weights frees tensors of many megabytes, which glibc keeps for later; a plan needs no more of that size.

    Returns
    -------
    bool
        Whether the C library could do it (glibc).

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
