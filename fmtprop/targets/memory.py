"""Memory of primitives' operands, and torch views of it."""

from __future__ import annotations

import mmap

import numpy as np
import torch

from fmtprop.errors import PlanError
from fmtprop.ir.tensors import torch_dtype
from fmtprop.layout import MemoryDesc
from fmtprop.ops.pytorch import nbytes_of_blocks
from fmtprop.system.machine import memory_nbytes

#: bytes of a cache line, and of the widest vector register
ALIGNMENT_NBYTES = 64

_PAGE = mmap.PAGESIZE

#: bytes of a transparent huge page
HUGE_PAGE_NBYTES = 2 << 20

#: bytes that any process with PyTorch may use: a smaller request is not compared with the system's limits, which takes
#: 40 us
_LITTLE_NBYTES = 1 << 20


def check_fits(nbytes: int, what: str) -> None:
    """Refuse a request for more memory than this process may use, before the system kills it."""
    if nbytes > _LITTLE_NBYTES and nbytes > (total := memory_nbytes()):
        raise PlanError(
            f"{what} needs {nbytes / 1e9:.1f} GB of memory at once, this machine has {total / 1e9:.1f} GB; compile for "
            "smaller inputs"
        )


def align(nbytes: int) -> int:
    """Round up to the alignment.

    >>> align(1), align(64), align(65)
    (64, 64, 128)
    """
    return -(-nbytes // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES


def aligned_bytes(nbytes: int) -> torch.Tensor:
    """Return flat uint8 memory, aligned to 64 bytes."""
    check_fits(nbytes, "a tensor")
    # NumPy requests huge pages for large arrays: they are available in two thirds of the time of small pages
    raw = torch.from_numpy(np.empty(nbytes + ALIGNMENT_NBYTES, np.uint8))
    return raw[-raw.data_ptr() % ALIGNMENT_NBYTES :][:nbytes]


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a row-major copy of a tensor where a plan can read it."""
    return aligned_bytes(tensor.nbytes).view(tensor.dtype).view(tensor.shape).copy_(tensor)


class HugePages:
    """Addresses of an arena, on transparent huge pages if the system grants them; :meth:`write` makes them memory.

    `most`: bytes of addresses. ``memory``: flat uint8 over all of them; what was never written is zeros.
    """

    def __init__(self, most: int) -> None:
        self._written = 0
        if most == 0:
            self.memory = torch.zeros(0, dtype=torch.uint8, device="cpu")
            return
        size = -(-most // HUGE_PAGE_NBYTES) * HUGE_PAGE_NBYTES + HUGE_PAGE_NBYTES
        # private: a forked child would write shared pages too, and shared pages are not huge
        self._pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        raw = torch.frombuffer(self._pages, dtype=torch.uint8)
        self._start = -raw.data_ptr() % HUGE_PAGE_NBYTES
        self.memory = raw[self._start :][:most]

    def advise(self, nbytes: int) -> None:
        """Ask for huge pages for the first bytes, and for none behind them."""
        if nbytes and hasattr(mmap, "MADV_HUGEPAGE"):
            end = self._start + huge_part(nbytes)
            self._pages.madvise(mmap.MADV_HUGEPAGE, self._start, end - self._start)
            if hasattr(mmap, "MADV_NOHUGEPAGE"):  # where the system gives all memory huge pages
                self._pages.madvise(mmap.MADV_NOHUGEPAGE, end)

    def write(self, nbytes: int) -> None:
        """Have at least the first bytes in memory.

        Every page is written here, because reads of unwritten pages would all read one shared page of zeros.
        """
        if nbytes > self._written:
            self.advise(nbytes)
            self.memory[-(-self._written // _PAGE) * _PAGE : nbytes : _PAGE] = 0
            self._written = nbytes


def huge_bytes(nbytes: int) -> torch.Tensor:
    """Return flat uint8 memory of zeros, on transparent huge pages if the system grants them, all written."""
    pages = HugePages(nbytes)
    pages.write(nbytes)
    return pages.memory


def huge_part(nbytes: int) -> int:
    """Return how many bytes of an arena are on huge pages: the last page only if most of it is used.

    A model has an arena for each shape.

    >>> [huge_part(size) >> 20 for size in (100, 5 << 20, (5 << 20) - 1)]
    [2, 6, 4]
    """
    whole, rest = divmod(nbytes, HUGE_PAGE_NBYTES)
    return (whole + (not whole or 2 * rest >= HUGE_PAGE_NBYTES)) * HUGE_PAGE_NBYTES


def numbers(nbytes: int) -> torch.Tensor:
    """Return flat uint8 memory, as `huge_bytes` does, full of numbers for primitives that run on any numbers.

    They are between -1 and 1 and no denormals, in every floating-point type.
    """
    pages = HugePages(align(nbytes))
    pages.advise(align(nbytes))
    memory = pages.memory
    generator = torch.Generator().manual_seed(0)
    pattern = (torch.rand(1 << 16, generator=generator) * 2 - 1).bfloat16().view(torch.uint8)
    done = min(pattern.numel(), memory.numel())
    memory[:done] = pattern[:done]
    while done < memory.numel():
        more = min(done, memory.numel() - done)
        memory[done : done + more] = memory[:more]
        done += more
    return memory


#: bits of a word of two bf16 or f16 numbers, or of one f32 number: signs and mantissas, mantissas alone, and exponents
#: that make every number normal: 0.5 to 1 in f32 and bf16, 1.75 to 2 in f16
_SIGNS_AND_MANTISSAS, _MANTISSAS, _EXPONENTS = 0x807F807F - (1 << 32), 0x007F007F, 0x3F003F00


def renew(words: torch.Tensor, *, positive: bool = False) -> None:
    """Write memory again, whatever was in it, with numbers that are normal in f32, bf16 and f16 at once.

    Results that become sources, and sources that become results, decay to denormal numbers, infinities and NaN. An
    operation on a denormal number takes a hundred times as long on Intel's cores.

    >>> words = torch.tensor([1e-40, float("inf"), -3.0, 0.0]).view(torch.int32)
    >>> renew(words)
    >>> [round(number, 2) for number in words.view(torch.float32).tolist()]
    [0.5, 0.5, -0.75, 0.5]
    """
    words.bitwise_and_(_MANTISSAS if positive else _SIGNS_AND_MANTISSAS).bitwise_or_(_EXPONENTS)


def nbytes_of(tensor: torch.Tensor) -> int:
    """Return the bytes that a tensor's numbers take: one without strides has blocks of its own."""
    if tensor.is_mkldnn:
        return nbytes_of_blocks(tensor)
    return tensor.numel() * tensor.element_size()


def view(memory: torch.Tensor, desc: MemoryDesc, start: int = 0) -> torch.Tensor:
    """Return the torch tensor that a plain descriptor describes in flat bytes."""
    dtype, size = torch_dtype(desc.dtype), desc.dtype.nbytes
    if 0 in desc.dims:
        return torch.empty_strided(desc.dims, desc.strides, dtype=dtype, device="cpu")
    reach = 1 + sum((dim - 1) * stride for dim, stride in zip(desc.dims, desc.strides, strict=True))
    begin = start + desc.offset0 * size
    # a storage of its own, of exactly these bytes: some of PyTorch's operators copy the whole storage (slice_scatter)
    elements = torch.from_numpy(memory.numpy()[begin : begin + reach * size]).view(dtype)
    return elements.as_strided(desc.dims, desc.strides)


def view_of_tensor(tensor: torch.Tensor, desc: MemoryDesc) -> torch.Tensor:
    """Return another plain view of a tensor's memory, counted from its first element."""
    return tensor.as_strided(desc.dims, desc.strides, tensor.storage_offset() + desc.offset0)


def copied(tensor: torch.Tensor, desc: MemoryDesc) -> torch.Tensor:
    """Return a copy of a dense tensor in a plain format."""
    copy = torch.empty_strided(desc.dims, desc.strides, dtype=torch_dtype(desc.dtype), device="cpu")
    return copy.copy_(tensor)


def laid_out(tensor: torch.Tensor, desc: MemoryDesc | None) -> torch.Tensor:
    """Return a tensor with the descriptor's strides: itself or a copy; without a descriptor, itself."""
    if desc is None or all(n == 1 or a == b for n, a, b in zip(desc.dims, tensor.stride(), desc.strides, strict=True)):
        return tensor
    return copied(tensor, desc)
