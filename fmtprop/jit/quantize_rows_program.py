"""The programs of quantization by scales of the same run."""

from __future__ import annotations

import ctypes

from iced_x86 import Code, Instruction, MemoryOperand, Register

from fmtprop.jit.arguments import UNROLLED
from fmtprop.jit.assembler import at
from fmtprop.jit.isa import Isa
from fmtprop.jit.program import Program
from fmtprop.jit.quantize_rows import RANGE_NUMBERS, QuantizeRowsArguments

#: the thread's current row, and the row after its last; the work that is left within a row
_ITEM, _END, _LEFT = Register.R8, Register.R9, Register.RCX

_SRC, _DST, _SCALE, _ZERO, _PLACE = Register.RSI, Register.RDI, Register.R11, Register.RAX, Register.R10

#: a number in the red zone below the stack (System V AMD64 ABI); no function is called while it is in use
_NUMBER = -8

#: first registers of the least numbers, the largest ones and the largest magnitudes
_LOWS, _HIGHS, _MAGNITUDES = 0, UNROLLED, 2 * UNROLLED

#: free registers; then those that a row's numbers need
_X, _Y = 12, 13
_LOW, _HIGH, OFFSET, _FACTOR = 10, 11, 14, 15

#: predicates of comparisons
_EQUAL, _UNORDERED, _ORDERED = 0, 3, 7

#: rounding to the nearest integer, half to even
_NEAREST = 0


def quantize_rows(isa: Isa, dtype: str, *, symmetric: bool, of_pieces: bool, multiplies: bool, rounds: bool) -> bytes:
    """Return the program.

    `symmetric`: whether zeros are 0. `of_pieces`: whether rows are pieces of one, whose ranges are known. `multiplies`:
    whether numbers are multiplied by the reciprocal of the scale. `rounds`: whether scales are rounded to bf16.
    """
    p = QuantizedRows(isa, symmetric=symmetric)
    p.share(_ITEM, _END, "rows")
    p.move(_SCALE, p.argument("scale"))
    p.move(_ZERO, p.argument("zero"))
    if of_pieces:
        p.load_ranges()
        p.scale(multiplies=multiplies, rounds=rounds)
        with p.until(_ITEM, _END):
            p.find(_SRC, "src", 4)
            p.find(_DST, "dst", 4 if dtype == "f32" else 1)
            p.round(dtype, multiplies=multiplies)
        return p.finished()
    p.point(_SRC, "src", _ITEM, "row")
    p.point(_DST, "dst", _ITEM, "dst_row")
    for pointer in (_SCALE, _ZERO):
        p.emit("LEA_R64_M", pointer, at(pointer, 0, _ITEM, 4))
    with p.until(_ITEM, _END):
        p.move(_PLACE, _SRC)
        p.range(_PLACE)
        p.scale(multiplies=multiplies, rounds=rounds)
        p.round(dtype, multiplies=multiplies)
        p.advance(4, _SCALE, _ZERO)
    return p.finished()


def ranges(isa: Isa, *, symmetric: bool) -> bytes:
    """Return the program that finds the ranges of pieces of a row."""
    p = QuantizedRows(isa, symmetric=symmetric)
    p.share(_ITEM, _END, "rows")
    p.point(_DST, "ranges", _ITEM, 4 * RANGE_NUMBERS)
    with p.until(_ITEM, _END):
        p.find(_SRC, "src", 4)
        p.range(_SRC)
        for number, first in enumerate(p.parts):
            p.emit("VEX_VMOVSS_M32_XMM", at(_DST, 4 * number), _xmm(first))
        p.advance(4 * RANGE_NUMBERS, _DST)
    return p.finished()


class QuantizedRows(Program):
    """The program under construction; a kernel that also quantizes has the arguments of a row, by the same names."""

    def __init__(self, isa: Isa, *, symmetric: bool, arguments: type[ctypes.Structure] = QuantizeRowsArguments) -> None:
        super().__init__(isa, arguments, bf16=False)
        self.symmetric = symmetric
        #: first register of each part of a range, and how two of it are joined
        self.parts = {_MAGNITUDES: "VPMAXSD"}
        if not symmetric:
            self.parts = {_LOWS: "VMINPS", _HIGHS: "VMAXPS", **self.parts}

    def find(self, pointer: int, name: str, nbytes: int) -> None:
        """Set a pointer to a piece; the last one overlaps the one before, so that all have the same length."""
        start = _PLACE
        self.move(start, _ITEM)
        self.emit("IMUL_R64_RM64", start, self.argument("length"))
        self.emit("CMP_R64_RM64", start, self.argument("start_of_last"))
        self.emit("CMOVA_R64_RM64", start, self.argument("start_of_last"))
        self.move(pointer, self.argument(name))
        self.emit("LEA_R64_M", pointer, at(pointer, 0, start, nbytes))

    def load_ranges(self) -> None:
        """Set the first register of each part to the range of all pieces."""
        self.move(_PLACE, self.argument("ranges"))
        for first in self.parts:
            self._four("VXORPS", first, first, _xmm(first))
        with self.repeat(self.argument("rows"), _LEFT):
            for number, (first, join) in enumerate(self.parts.items()):
                self.emit("VEX_VMOVSS_XMM_M32", _xmm(_X), at(_PLACE, 4 * number))
                self._four(join, first, first, _xmm(_X))
            self.advance(4 * RANGE_NUMBERS, _PLACE)

    def range(self, pointer: int) -> None:
        """Set the first register of each part to the range of a row and 0; the pointer moves on."""
        for first in self.parts:
            for chain in range(first, first + UNROLLED):
                self.zero(self.register(chain))
        for count in self.vectors(UNROLLED, _LEFT):
            for index in range(count):
                self.load(self.register(_X), at(pointer, index * self.vector_nbytes))
                self._take(index)
            self.advance(count * self.vector_nbytes, pointer)
        with self.repeat(self.argument("rest"), _LEFT):
            self.load_one(self.register(_X), at(pointer))
            self._take(0)
            self.advance(self.number_nbytes, pointer)
        for first, join in self.parts.items():
            for chain in range(first + 1, first + UNROLLED):
                self.v(join, *map(self.register, (first, first, chain)))
            self._join_across(first, join)

    def _take(self, chain: int) -> None:
        """Extend a chain's range; as integers, magnitudes keep a NaN."""
        x = self.register(_X)
        for first, join in self.parts.items():
            if first == _MAGNITUDES:
                self.v("VANDPS", x, x, self.argument("magnitude"))
            self.v(join, self.register(first + chain), self.register(first + chain), x)

    def _join_across(self, number: int, join: str) -> None:
        """Join the numbers of a vector; each of the first four becomes the result."""
        ymm, other = Register.YMM0 + number, Register.YMM0 + _Y
        if self.isa.nbytes == 64:
            self._half(Code.EVEX_VEXTRACTF64X4_YMMM256_K1Z_ZMM_IMM8, other, Register.ZMM0 + number)
            self.emit(f"VEX_{join}_YMM_YMM_YMMM256", ymm, ymm, other)
        self._half(Code.VEX_VEXTRACTF128_XMMM128_YMM_IMM8, _xmm(_Y), ymm)
        self._four(join, number, number, _xmm(_Y))
        for order in (0b01001110, 0b10110001):
            self._with_number("VEX_VPSHUFD_XMM_XMMM128_IMM8", _xmm(_Y), _xmm(number), value=order)
            self._four(join, number, number, _xmm(_Y))

    def scale(self, *, multiplies: bool, rounds: bool) -> None:
        """Store scale and zero of a range; set the registers that a row's numbers need."""
        one, span = self.argument("one"), _X
        if self.symmetric:
            self._four("VDIVPS", span, _MAGNITUDES, self.argument("divisor"))
        else:
            self._four("VSUBPS", span, _HIGHS, _xmm(_LOWS))
            self._four("VDIVPS", span, span, self.argument("divisor"))
        if rounds:  # to the nearest, half to even: the last bit that stays is added to nearly a half
            self._with_number("VEX_VPSLLD_XMM_XMM_IMM8", _xmm(_Y), _xmm(span), value=15)
            self._with_number("VEX_VPSRLD_XMM_XMM_IMM8", _xmm(_Y), _xmm(_Y), value=31)
            self._four("VPADDD", span, span, _xmm(_Y))
            self._four("VPADDD", span, span, self.argument("half"))
            self._with_number("VEX_VPSRLD_XMM_XMM_IMM8", _xmm(span), _xmm(span), value=16)
            self._with_number("VEX_VPSLLD_XMM_XMM_IMM8", _xmm(span), _xmm(span), value=16)
        if not self.symmetric:
            self._compare(_Y, _MAGNITUDES, _MAGNITUDES, _UNORDERED)
            self._four("VORPS", span, span, _xmm(_Y))  # a NaN makes the scale one
        self.emit("VEX_VMOVUPS_XMM_XMMM128", _xmm(_Y), self.argument("least"))
        self._four("VMAXPS", span, _Y, _xmm(span))  # of a NaN and a number, the second is the result
        self.emit("VEX_VMOVSS_M32_XMM", at(_SCALE), _xmm(span))
        self._four("VXORPS", _Y, _Y, _xmm(_Y))
        self._compare(_Y, span, _Y, _EQUAL)
        self._four("VANDPS", _Y, _Y, one)
        self._four("VORPS", span, span, _xmm(_Y))  # 1 where the scale is 0
        if self.symmetric:
            self._four("VXORPS", _Y, _Y, _xmm(_Y))
        else:
            self._four("VDIVPS", _Y, _LOWS, _xmm(span))
            self._with_number("VEX_VROUNDPS_XMM_XMMM128_IMM8", _xmm(_Y), _xmm(_Y), value=_NEAREST)
            self.emit("VEX_VMOVUPS_XMM_XMMM128", _xmm(OFFSET), self.argument("low"))
            self._four("VSUBPS", _Y, OFFSET, _xmm(_Y))
            self._four("VMAXPS", _Y, OFFSET, _xmm(_Y))
            self.emit("VEX_VMOVUPS_XMM_XMMM128", _xmm(OFFSET), self.argument("high"))
            self._four("VMINPS", _Y, OFFSET, _xmm(_Y))
            self._compare(OFFSET, _Y, _Y, _ORDERED)
            self._four("VANDPS", _Y, _Y, _xmm(OFFSET))  # 0 instead of NaN, as if it were an integer
        self.emit("VEX_VMOVSS_M32_XMM", at(_ZERO), _xmm(_Y))
        if multiplies:
            self.emit("VEX_VMOVUPS_XMM_XMMM128", _xmm(OFFSET), one)
            self._four("VDIVPS", span, OFFSET, _xmm(span))
        self.emit("VEX_VMOVSS_M32_XMM", at(Register.RSP, _NUMBER), _xmm(span))
        self.load_one(self.register(_FACTOR), at(Register.RSP, _NUMBER))
        if not self.symmetric:
            self.load_one(self.register(OFFSET), at(_ZERO))
        for number, name in ((_LOW, "low"), (_HIGH, "high")):
            self.v("VMOVUPS", self.register(number), self.argument(name))

    def round(self, dtype: str, *, multiplies: bool) -> None:
        """Round the numbers of a row; the pointers move on."""
        nbytes = 4 if dtype == "f32" else 1
        for count in self.vectors(UNROLLED, _LEFT):
            for index in range(count):
                x = self.register(index)
                self.load(x, at(_SRC, index * self.vector_nbytes))
                self._rounded(x, multiplies=multiplies)
                self._store(at(_DST, index * self.isa.lanes * nbytes), index, dtype)
            self.advance(count * self.vector_nbytes, _SRC)
            self.advance(count * self.isa.lanes * nbytes, _DST)
        with self.repeat(self.argument("rest"), _LEFT):
            x = self.register(0)
            self.load_one(x, at(_SRC))
            self._rounded(x, multiplies=multiplies)
            if dtype == "f32":
                self.store_one(at(_DST), x)
            else:
                self.emit("VEX_VCVTPS2DQ_XMM_XMMM128", _xmm(0), _xmm(0))
                self._add(Instruction.create_mem_reg_u32(Code.VEX_VPEXTRB_R32M8_XMM_IMM8, at(_DST), Register.XMM0, 0))
            self.advance(4, _SRC)
            self.advance(nbytes, _DST)

    def _rounded(self, x: int, *, multiplies: bool) -> None:
        low, high, offset, factor = map(self.register, (_LOW, _HIGH, OFFSET, _FACTOR))
        self.v("VMULPS" if multiplies else "VDIVPS", x, x, factor)
        self.v("VRNDSCALEPS" if self.isa.nbytes == 64 else "VROUNDPS", x, x, immediate=_NEAREST)
        if not self.symmetric:
            self.v("VADDPS", x, x, offset)
        self.v("VMAXPS", x, low, x)
        self.v("VMINPS", x, high, x)

    def _store(self, place: MemoryOperand, number: int, dtype: str) -> None:
        x = self.register(number)
        if dtype == "f32":
            self.v("VMOVUPS <", place, x)
        elif self.isa.nbytes == 64:
            self.emit("EVEX_VCVTPS2DQ_ZMM_K1Z_ZMMM512B32_ER", x, x)
            self.emit("EVEX_VPMOVDB_XMMM128_K1Z_ZMM", place, x)
        else:
            # the last byte of each number: a NaN becomes 0, as in PyTorch
            self.v("VCVTPS2DQ", x, x)
            self.emit("VEX_VPSHUFB_YMM_YMM_YMMM256", x, x, self.argument("bytes"))
            self._half(Code.VEX_VEXTRACTI128_XMMM128_YMM_IMM8, _xmm(_Y), x)
            self.emit("VEX_VPUNPCKLDQ_XMM_XMM_XMMM128", _xmm(number), _xmm(number), _xmm(_Y))
            self.emit("VEX_VMOVQ_XMMM64_XMM", place, _xmm(number))

    # ------------------------------------------------------------------ four numbers

    def _four(self, operation: str, result: int, first: int, second: int | MemoryOperand) -> None:
        self.emit(f"VEX_{operation}_XMM_XMM_XMMM128", _xmm(result), _xmm(first), second)

    def _compare(self, result: int, first: int, second: int, predicate: int) -> None:
        self._with_number("VEX_VCMPPS_XMM_XMM_XMMM128_IMM8", _xmm(result), _xmm(first), _xmm(second), value=predicate)

    def _with_number(self, code: str, *registers: int, value: int) -> None:
        create = getattr(Instruction, f"create_{'_'.join(['reg'] * len(registers))}_u32")
        self._add(create(getattr(Code, code), *registers, value))


def _xmm(number: int) -> int:
    return int(Register.XMM0) + number
