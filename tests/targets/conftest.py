"""Memory with forbidden pages on both sides: who reads or writes far outside of an operand ends the process.

A kernel that does so gives right results as long as its neighbours are mapped, so comparisons do not see it.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator

import pytest
import torch

from fmtprop.runtime import selfcheck
from fmtprop.targets.memory import align

#: forbidden bytes on each side: a stride past the end, of the small operands of tests, ends within them
_GUARD_NBYTES = 16 * mmap.PAGESIZE

#: no right to read or write, in the numbers of mprotect(2)
_NONE = 0


class _Room(selfcheck._Room):
    """Memory of one check, each operand with its own pages, its last cache line before the forbidden ones."""

    def __init__(self) -> None:
        super().__init__()
        self._pages: list[mmap.mmap] = []

    def clear(self) -> None:
        self._pages.clear()  # unmapped when the last tensor is gone

    def take(self, nbytes: int) -> torch.Tensor:
        used = max(align(nbytes), 1)
        inside = -(-used // mmap.PAGESIZE) * mmap.PAGESIZE
        pages = mmap.mmap(-1, inside + 2 * _GUARD_NBYTES)
        start = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        for guard in (start, start + _GUARD_NBYTES + inside):
            _forbid(guard, _GUARD_NBYTES)
        self._pages.append(pages)
        whole = torch.frombuffer(pages, dtype=torch.uint8)
        return whole[_GUARD_NBYTES + inside - used :][:nbytes]


def _forbid(address: int, nbytes: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), _NONE):
        raise OSError(ctypes.get_errno(), "mprotect")


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give checks of nodes memory with forbidden pages around each operand."""
    monkeypatch.setattr(selfcheck, "_Room", _Room)
    yield
