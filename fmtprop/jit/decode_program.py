"""The program that decodes a matrix of codes into the blocks in which products of many rows read it (AVX-512)."""

from __future__ import annotations

from typing import Final

from iced_x86 import Register

from fmtprop.jit.assembler import at
from fmtprop.jit.isa import Isa
from fmtprop.jit.nbits import BLOCK, ROWS, DecodeKernel, NBitsArguments, unit
from fmtprop.jit.program import THREAD, THREADS, Program
from fmtprop.layout import DataType

#: the thread's current rows; units of a group, and groups, that are left
_ITEM, _UNITS, _GROUPS = Register.R8, Register.R9, Register.RAX

#: where the results of a unit begin, and the numbers of codes
_X, _LEVELS = Register.RDX, Register.RCX

#: codes, scales and zero points: of the first row, and of the present one; nothing asks for threads any more
_FIRST: Final = {"weights": Register.RDI, "scales": Register.R10, "zero_points": THREADS}
_PRESENT: Final = {"weights": Register.RSI, "scales": Register.R11, "zero_points": THREAD}

#: from the start of the program's data: the numbers of codes without a zero point
_WITHOUT_ZERO_POINT: Final = 64

#: bytes of a number of a column, and of the next 16: a block has vectors of as many neighbouring rows
_COLUMN_NBYTES: Final = 4 * BLOCK


def decode_blocked(isa: Isa, kernel: DecodeKernel) -> bytes:
    """Return the program that decodes a thread's share of the matrix."""
    p = _Blocks(isa, kernel)
    p.share(_ITEM, _UNITS, "tasks")
    p.emit("PUSH_R64", _UNITS)
    with p.until(_ITEM, at(Register.RSP)):
        p.begin()
        with p.repeat(p.argument("groups"), _GROUPS):
            p.group()
    p.advance(8, Register.RSP)
    return p.finished()


class _Blocks(Program):
    """Decodes a unit of 16 rows into as many vectors, and writes their columns.

    A position of a vector has one f32 number, or two neighbouring ones of bf16, as the products read them.
    """

    def __init__(self, isa: Isa, kernel: DecodeKernel) -> None:
        super().__init__(isa, NBitsArguments, bf16=False)
        self._kernel = kernel
        self._steps = {"weights": "row", "scales": "scales_row"}
        if kernel.has_zero_points:
            self._steps["zero_points"] = "scales_row"
        self._levels, self._scale, self._other = (self.register(number) for number in (17, 18, 19))

    def begin(self) -> None:
        """Point to the rows of a task, and to their results."""
        first = Register.RSI
        self.move(first, _ITEM)
        self.immediate("SHR_RM64_IMM8", first, (BLOCK // ROWS).bit_length() - 1)
        self.point(_X, "dst", first, "dst_row")
        self.move(first, _ITEM)
        self.immediate("AND_RM64_IMM8", first, BLOCK // ROWS - 1)
        self.immediate("SHL_RM64_IMM8", first, self.isa.nbytes.bit_length() - 1)
        self.add(_X, first)
        self.move(first, _ITEM)
        self.immediate("SHL_RM64_IMM8", first, ROWS.bit_length() - 1)
        for name, step in self._steps.items():
            self.point(_FIRST[name], name, first, step)
        self.move(_LEVELS, self.argument("data"))
        self.v("VMOVUPS", self._levels, at(_LEVELS, _WITHOUT_ZERO_POINT if self._kernel.has_zero_points else 0))

    def group(self) -> None:
        """Decode a group of each row, and point to the next one."""
        kernel, count = self._kernel, unit(self.isa)
        halves = range(2 if kernel.dst is DataType.F32 else 1)
        self.immediate("MOV_RM64_IMM32", _UNITS, kernel.group // count)
        with self.repeat(_UNITS, _UNITS):
            for half in halves:
                for name in self._steps:
                    self.move(_PRESENT[name], _FIRST[name])
                rows = [self.register(row) for row in range(ROWS)]
                for row in rows:
                    self._decode(row, half)
                    for name, step in self._steps.items():
                        self.add(_PRESENT[name], self.argument(step))
                for column, numbers in enumerate(self.transposed(rows, self.register(ROWS))):
                    self.v("VMOVUPS <", at(_X, self._place(half, column)), numbers)
            self.advance(count * kernel.bits // 8, _FIRST["weights"])
            self.advance(len(halves) * ROWS * _COLUMN_NBYTES, _X)
        self.advance(4, *(_FIRST[name] for name in self._steps if name != "weights"))

    def _place(self, half: int, column: int) -> int:
        """Return where a column of a unit's first or second half lies; low and high halves of bytes take turns."""
        if self._kernel.dst is DataType.BF16:
            return column * _COLUMN_NBYTES
        return (2 * column + half if self._kernel.bits == 4 else ROWS * half + column) * _COLUMN_NBYTES

    def _decode(self, x: int, half: int) -> None:
        """Decode a unit of a row: all of it to bf16, or half of it to f32."""
        self.v("VBROADCASTSS", self._scale, at(_PRESENT["scales"]))
        if self._kernel.bits == 8:
            self._bytes(x, half)
            return
        numbers, levels = self._scale, self._levels
        if self._kernel.has_zero_points:
            self.v("VBROADCASTSS", self._other, at(_PRESENT["zero_points"]))
            self.v("VSUBPS", self._other, levels, self._other)
            levels = self._other
        self.v("VMULPS", numbers, levels, self._scale)
        self.v("VPMOVZXBD", x, at(_PRESENT["weights"]))
        # codes are indices, of which higher bits do not count
        if self._kernel.dst is DataType.F32:
            if half:
                self.v("VPSRLD", x, x, immediate=4)
            self.v("VPERMPS", x, x, numbers)
            return
        self.v("VCVTNE2PS2BF16", numbers, numbers, numbers)
        self.v("VPSLLD", self._other, x, immediate=12)  # the high half of a byte is the index of the second number
        self.v("VPORD", x, x, self._other)
        self.v("VPERMW", x, x, numbers)

    def _bytes(self, x: int, half: int) -> None:
        both = (half,) if self._kernel.dst is DataType.F32 else (0, 1)
        for part, one in zip(both, (x, self._other), strict=False):
            self.v("VPMOVSXBD", one, at(_PRESENT["weights"], part * self.isa.lanes))
            self.v("VCVTDQ2PS", one, one)
            if self._kernel.has_zero_points:
                self.v("VBROADCASTSS", self._levels, at(_PRESENT["zero_points"]))
                self.v("VSUBPS", one, one, self._levels)
            self.v("VMULPS", one, one, self._scale)
        if len(both) > 1:
            self.v("VCVTNE2PS2BF16", x, self._other, x)
