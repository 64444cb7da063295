"""Instruction sets as the kernels use them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Isa:
    """An instruction set."""

    name: str
    nbytes: int
    registers: int

    @property
    def lanes(self) -> int:
        """Number of f32 numbers in a vector."""
        return self.nbytes // 4


AVX2, AVX512 = Isa("avx2", 32, 16), Isa("avx512_core", 64, 32)

#: AVX-512 with tiles (:mod:`fmtprop.jit.tiles`)
AMX = Isa("avx512_core_amx", 64, 32)
