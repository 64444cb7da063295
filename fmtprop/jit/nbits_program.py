"""The programs of matrices of codes: of their products with a few rows, and of their decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, islice
from itertools import count as count_from
from typing import Final

from iced_x86 import MemoryOperand, Register

from fmtprop.jit.assembler import at
from fmtprop.jit.gemv_program import AHEAD_NBYTES, END, FIRST, ITEM, SRC_ROWS, SUM, SUMS, WEIGHTS, GemvProgram
from fmtprop.jit.isa import AVX512, Isa
from fmtprop.jit.nbits import INTEGERS, DecodeKernel, NBitsArguments, NBitsKernel, span, unit
from fmtprop.jit.program import THREAD, THREADS, with_table

#: places in the frame, beside that of the item: the rows of this thread, the task after its last, and whether a row has
#: numbers that sums of codes do not take
AREA, _LAST_TASK, _IS_SPECIAL = 8, 16, 24

#: the numbers of the rows, and the scales and zero points of the groups: nothing asks for threads any more
X, SCALES, ZERO_POINTS = Register.RSI, THREADS, THREAD

#: numbers that 4-bit codes stand for
LEVELS = Register.RDX

#: outputs, groups and parts of a group that are left
OUTPUTS, GROUPS, _PARTS = Register.RCX, Register.RAX, END

#: from the start of the program's data: the numbers of codes without a zero point; places of even and odd numbers, and
#: behind them those that put even and odd numbers in turn
_WITHOUT_ZERO_POINT, _EVEN_PLACES = 64, 128

#: bytes of a vector of constants behind them
_CONSTANT_NBYTES: Final = 64

#: bytes of a scale or zero point
SCALE_NBYTES: Final = 4

#: vectors of sums of one row, if there are registers for them: one waits for four cycles for its last addition
_CHAINS: Final = 4

#: vectors of a group for each vector of its sums: those of one group are added while the next ones are decoded
_VECTORS_OF_CHAIN: Final = 8

#: outputs that are computed side by side for several rows, as many as there are registers for: each vector of src,
#: which is in the second cache at best, is loaded once for all of them
_SIDE_BY_SIDE: Final = (4, 2)

#: most rows of a pass over the codes of a task: more leave no registers for a second output, and 16 rows take twice as
#: long in one pass as in two
MOST_ROWS: Final = 8

#: first register of vectors of numbers, two for each output; those before it are free between two instructions
_DECODED: Final = 2

#: takes the place of a vector of codes in its part of a group, and the registers with the numbers of each output
Use = Callable[[int, Sequence[int]], None]


def nbits(isa: Isa, kernel: NBitsKernel) -> tuple[bytes, bytes]:
    """Return the program, and the table of constants that it reads."""
    return with_table(partial(assembled, NBitsProgram, isa, kernel))


def assembled(kind: type[NBitsProgram], isa: Isa, kernel: NBitsKernel, numbers: Sequence[bytes]) -> NBitsProgram:
    """Return the program of a class, which tells how rows are kept and how sums of a task are computed."""
    p = kind(isa, kernel)
    p.share(ITEM, END, "tasks")
    frame = SUMS + kernel.rows * isa.nbytes
    p.advance(-frame, Register.RSP)
    p.emit("MOV_RM64_R64", at(Register.RSP, _LAST_TASK), END)
    p.fill_area()
    with p.until(ITEM, at(Register.RSP, _LAST_TASK)):
        p.begin()
        p.sums_of_codes()
        p.finish_rows(numbers, kernel.dst, kernel.bias, kernel.tail)
    p.advance(frame, Register.RSP)
    return p


def decode(isa: Isa, kernel: DecodeKernel) -> bytes:
    """Return the program that decodes a thread's share of a matrix's rows."""
    p = Decoding(isa, kernel)
    p.share(ITEM, END, "outputs")
    p.emit("PUSH_R64", END)
    for pointer, name, nbytes in ((WEIGHTS, "weights", "row"), (X, "dst", "dst_row")):
        p.point(pointer, name, ITEM, nbytes)
    p.point_to_scales(ITEM)
    with p.until(ITEM, at(Register.RSP)), p.repeat(p.argument("groups"), GROUPS):
        p.group(p.store_numbers)
    p.advance(8, Register.RSP)
    return p.finished()


def _has_levels(isa: Isa, kernel: NBitsKernel | DecodeKernel) -> bool:
    """Return whether a vector has the numbers of all codes, those of a group."""
    return kernel.bits == 4 and isa is AVX512 and kernel.group >= unit(isa)


def _first_free(isa: Isa, kernel: NBitsKernel | DecodeKernel, outputs: int) -> int:
    """Return the first register behind those with the numbers of some outputs, their scales and their zero points."""
    zero_points = 0 if _has_levels(isa, kernel) else outputs if kernel.has_zero_points else kernel.bits == 4
    return _DECODED + 3 * outputs + zero_points


class _Codes(GemvProgram):
    """Decodes the groups of some rows of a matrix, one after the other."""

    def __init__(self, isa: Isa, kernel: NBitsKernel | DecodeKernel, outputs: int = 1) -> None:
        super().__init__(isa, NBitsArguments, bf16=False)
        self._codes, self._outputs = kernel, range(outputs)
        #: bytes from row to row, of which only those of an output beside the first are in the code
        self._pitch = kernel.depth * kernel.bits // 8
        self._scales_pitch = kernel.depth // kernel.group * SCALE_NBYTES
        self._has_levels = _has_levels(isa, kernel)
        #: whether codes become numbers, and their sums are scaled later
        self._scales_sums = False
        #: the registers with the numbers of codes, or their scales; behind them their zero points
        self._factor = _DECODED + 2 * outputs
        self._shift = self._factor + outputs
        #: the first register that is free
        self.free = _first_free(isa, kernel, outputs)

    def point_to_scales(self, row: int) -> None:
        """Point to the scales and zero points of a row, and to the numbers of codes."""
        self.point(SCALES, "scales", row, "scales_row")
        if self._codes.has_zero_points:
            self.point(ZERO_POINTS, "zero_points", row, "scales_row")
        self.move(LEVELS, self.argument("data"))
        if not (self._codes.has_zero_points or self._has_levels):
            self.v("VBROADCASTSS", self.register(self._shift), at(LEVELS, _WITHOUT_ZERO_POINT + 8 * 4))

    def group(self, use: Use) -> None:
        """Decode a group of each output, and point to the next one."""
        codes = self._codes
        for output in self._outputs:
            place, factor = output * self._scales_pitch, self.register(self._factor + output)
            if not self._has_levels:
                self._of_groups(factor, at(SCALES, place))
                if codes.has_zero_points:
                    self._of_groups(self.register(self._shift + output), at(ZERO_POINTS, place))
                continue
            scale = self.register(0)
            self.v("VBROADCASTSS", scale, at(SCALES, place))
            if codes.has_zero_points:
                self.v("VBROADCASTSS", self.register(1), at(ZERO_POINTS, place))
                self.v("VMOVUPS", factor, at(LEVELS, _WITHOUT_ZERO_POINT))
                self.v("VSUBPS", factor, factor, self.register(1))
                self.v("VMULPS", factor, factor, scale)
            else:
                self.v("VMULPS", factor, scale, at(LEVELS))
        self._parts(use)

    def _parts(self, use: Use) -> None:
        """Decode the parts of a group, behind whose scales and zero points all pointers are then."""
        codes = self._codes
        nbytes = span(codes) // codes.group * SCALE_NBYTES
        self.advance(nbytes, SCALES, *[ZERO_POINTS] * codes.has_zero_points)
        parts = span(codes) // unit(self.isa) // codes.units
        if parts == 1:
            self._part(use)
            return
        self.immediate("MOV_RM64_IMM32", _PARTS, parts)
        with self.repeat(_PARTS, _PARTS):
            self._part(use)

    def _of_groups(self, x: int, place: MemoryOperand) -> None:
        """Load the scale or zero point of a group, or those of the two groups of a unit."""
        if span(self._codes) == self._codes.group:
            self.v("VBROADCASTSS", x, place)
            return
        both, halves = self.register(0), self.register(1)
        self.v("VBROADCASTSD", both, place)
        self.v("VMOVUPS", halves, self.vector_of(LEVELS, "halves"))
        self.v("VPERMPS", x, halves, both)

    def vector_of(self, pointer: int, name: str) -> MemoryOperand:
        """Return a vector of the data that a register points to."""
        return at(pointer, _EVEN_PLACES + 4 * self.isa.nbytes + [*INTEGERS].index(name) * _CONSTANT_NBYTES)

    def _part(self, use: Use) -> None:
        """Decode some units of a group of each output."""
        codes, machine = self._codes, self.isa
        nbytes = unit(machine) * codes.bits // 8
        decode = self._nibbles if codes.bits == 4 else self._bytes
        for number in range(codes.units):
            for output in self._outputs:
                place = output * self._pitch + number * nbytes
                if number * nbytes % 64 == 0:
                    self.emit("PREFETCHT2_M8", at(WEIGHTS, place + AHEAD_NBYTES))
                decode(output, place)
            for half in range(2):
                use(2 * number + half, [self._decoded(output)[half] for output in self._outputs])
        self.advance(codes.units * nbytes, WEIGHTS)
        self.advance(2 * codes.units * machine.lanes * self._codes.number_nbytes, X)

    def next_rows(self) -> None:
        """Point behind the rows of all outputs, from behind the first one."""
        others = len(self._outputs) - 1
        if others:
            self.advance(others * self._pitch, WEIGHTS)
            self.advance(others * self._scales_pitch, SCALES, *[ZERO_POINTS] * self._codes.has_zero_points)

    def _decoded(self, output: int) -> tuple[int, int]:
        """Return the registers with the numbers of an output's unit."""
        first = _DECODED + 2 * output
        return self.register(first), self.register(first + 1)

    def _nibbles(self, output: int, place: int) -> None:
        """Decode the low halves of a unit's bytes, and the high halves."""
        low, high = self._decoded(output)
        self.v("VPMOVZXBD", high, at(WEIGHTS, place))
        if self._has_levels:  # the codes are indices: of the numbers, higher bits do not count
            level = self.register(self._factor + output)
            self.v("VPERMPS", low, high, level)
            self.v("VPSRLD", high, high, immediate=4)
            self.v("VPERMPS", high, high, level)
            return
        if self._scales_sums:
            self.v("VPAND", low, high, self.register(self._factor))
        else:
            self.v("VPSLLD", low, high, immediate=28)
            self.v("VPSRLD", low, low, immediate=28)
        self.v("VPSRLD", high, high, immediate=4)
        self._scaled(output, shifted=True)

    def _bytes(self, output: int, place: int) -> None:
        """Decode a unit's bytes."""
        for index, one in enumerate(self._decoded(output)):
            self.v("VPMOVSXBD", one, at(WEIGHTS, place + index * self.isa.lanes))
        self._scaled(output, shifted=self._codes.has_zero_points)

    def _scaled(self, output: int, *, shifted: bool) -> None:
        """Make numbers of an output's codes."""
        zero_point = self._shift + (output if self._codes.has_zero_points else 0)
        for one in self._decoded(output):
            self.v("VCVTDQ2PS", one, one)
            if self._scales_sums:
                continue
            if shifted:
                self.v("VSUBPS", one, one, self.register(zero_point))
            self.v("VMULPS", one, one, self.register(self._factor + output))


class Decoding(_Codes):
    """Writes the numbers of a matrix."""

    def store_numbers(self, place: int, numbers: Sequence[int]) -> None:
        """Store a vector of numbers; those of low and high halves of bytes are put in turn."""
        if self._codes.bits == 8:
            self._store(place, numbers[0])
        elif place % 2:
            for half, one in enumerate(self._in_turn(*self._decoded(0))):
                self._store(place - 1 + half, one)

    def _in_turn(self, even: int, odd: int) -> tuple[int, int]:
        first, second = self.register(self.free), self.register(self.free + 1)
        if self.isa is AVX512:
            for index, one in enumerate((first, second)):
                self.v("VMOVUPS", one, at(LEVELS, _EVEN_PLACES + (2 + index) * self.isa.nbytes))
                self.v("VPERMI2PS", one, even, odd)
            return first, second
        low, high = self.register(self.free + 2), self.register(self.free + 3)
        self.v("VUNPCKLPS", low, even, odd)
        self.v("VUNPCKHPS", high, even, odd)
        self.v("VPERM2F128", first, low, high, immediate=0x20)
        self.v("VPERM2F128", second, low, high, immediate=0x31)
        return first, second

    def _store(self, place: int, numbers: int) -> None:
        with self.numbers_of(self._codes.dst):
            self.store(at(X, place * self.isa.lanes * self._codes.number_nbytes), numbers)


class NBitsProgram(_Codes):
    """Multiplies the rows of a matrix by the rows of src."""

    def __init__(self, isa: Isa, kernel: NBitsKernel) -> None:
        # one row reads one output after the other, as the matrix lies in memory
        passes = -(-kernel.rows // MOST_ROWS)
        rows = -(-kernel.rows // passes)
        fits = (n for n in _SIDE_BY_SIDE if _first_free(isa, kernel, n) + rows * n <= isa.registers)
        super().__init__(isa, kernel, next(fits, 1) if kernel.rows > 1 else 1)
        self._kernel = kernel
        #: the rows of each pass
        self._passes = [range(first, min(first + rows, kernel.rows)) for first in range(0, kernel.rows, rows)]

    # ------------------------------------------------------------------ rows of src

    def fill_area(self) -> None:
        """Write the rows of src to this thread's area, as f32; for 4 bits, even places of a unit before odd ones.

        The same vector of all rows lies side by side: rows of 2 ** n bytes would compete for a few lines of the cache.
        """
        src, dst = Register.RSI, Register.RDI
        self.point(dst, "areas", THREAD, "area")
        self.emit("MOV_RM64_R64", at(Register.RSP, AREA), dst)
        self.move(SRC_ROWS, self.argument("src"))
        self.move(Register.RAX, self.argument("data"))
        if self._kernel.scales_sums:
            self._fill_area_of_row(src, dst)
            return
        step = self._kernel.rows * self.isa.nbytes
        for row in range(self._kernel.rows):
            self.move(src, SRC_ROWS)
            self.move(dst, at(Register.RSP, AREA))
            self.advance(row * self.isa.nbytes, dst)
            with self.repeat(self.argument("units"), Register.RCX):
                self._copy_unit(src, dst, step)
            self.add(SRC_ROWS, self.argument("src_row"))

    def _copy_unit(self, src: int, dst: int, step: int) -> tuple[int, int]:
        """Copy a unit of a row, and point behind it; return the registers with its numbers."""
        x, y, nbytes = self.register(0), self.register(1), self.isa.lanes * self._kernel.src.nbytes
        with self.numbers_of(self._kernel.src):
            self.load(x, at(src))
            self.load(y, at(src, nbytes))
        both = self._parted(x, y) if self._kernel.bits == 4 else (x, y)
        for index, one in enumerate(both):
            self.v("VMOVUPS <", at(dst, index * step), one)
        self.advance(2 * nbytes, src)
        self.advance(2 * step, dst)
        return both

    def _fill_area_of_row(self, src: int, dst: int) -> None:
        """Write the one row, with the negative sums of each group before it; note whether numbers are special."""
        group, units = 4 * self._kernel.group, self._kernel.group // unit(self.isa)
        magnitude, largest, sums, limit = map(self.register, range(4, 8))
        self.v("VMOVUPS", magnitude, self.vector_of(Register.RAX, "magnitude"))
        self.v("VMOVUPS", limit, self.vector_of(Register.RAX, "too large"))
        self.zero(largest)
        self.move(src, SRC_ROWS)
        with self.repeat(self.argument("groups"), GROUPS):
            self.zero(sums)
            self.advance(self._kernel.sums_nbytes, dst)
            self.immediate("MOV_RM64_IMM32", OUTPUTS, units)
            with self.repeat(OUTPUTS, OUTPUTS):
                for one in self._copy_unit(src, dst, self.isa.nbytes):
                    self.v("VSUBPS", sums, sums, one)
                    self.v("VANDPS", one, one, magnitude)
                    self.v("VPMAXSD", largest, largest, one)  # as integers: NaN is above all numbers
            if self._kernel.sums_nbytes:
                self.v("VMOVUPS <", at(dst, -group - self._kernel.sums_nbytes), sums)
        self.v("VPCMPGTD", largest, largest, limit)
        self.emit("VEX_VMOVMSKPS_R32_YMM", Register.EAX, largest)
        self.emit("MOV_RM64_R64", at(Register.RSP, _IS_SPECIAL), Register.RAX)

    def _parted(self, x: int, y: int) -> tuple[int, int]:
        """Return the numbers at even places of two vectors, and those at odd places."""
        even, odd = self.register(2), self.register(3)
        if self.isa is AVX512:
            for index, one in enumerate((even, odd)):
                self.v("VMOVUPS", one, at(Register.RAX, _EVEN_PLACES + index * self.isa.nbytes))
                self.v("VPERMI2PS", one, x, y)
            return even, odd
        for one, pairs in ((even, 0x88), (odd, 0xDD)):
            self.v("VSHUFPS", one, x, y, immediate=pairs)
            self.v("VPERMPD", one, one, immediate=0xD8)
        return even, odd

    # ------------------------------------------------------------------ sums

    def sums_of_codes(self) -> None:
        """Compute the sums of a task."""
        if self._kernel.scales_sums:
            self.move(Register.RAX, at(Register.RSP, _IS_SPECIAL))
            self.emit("TEST_RM64_R64", Register.RAX, Register.RAX)
            self.branch("JNE_REL32_64", "special numbers")
            self._sums_of_row()
            self.branch("JMP_REL32_64", "sums")
            self.label("special numbers")
            self._sums_of_rows(range(1))
            self.label("sums")
            return
        for number, rows in enumerate(self._passes):
            if number:
                self.advance(-self.isa.lanes * self._pitch, WEIGHTS)
                self.advance(-self.isa.nbytes, SUM)
            self._sums_of_rows(rows)

    def _sums_of_row(self) -> None:
        """Compute the sums of the one row: those of a group are scaled together."""
        kernel = self._kernel
        count = max(1, min(_CHAINS, kernel.group // self.isa.lanes // _VECTORS_OF_CHAIN))
        first, *others = chains = [self.register(self.free + index) for index in range(count)]
        scale, shift, total = self.register(0), self.register(self._shift), self.register(self.free + _CHAINS)

        def multiply(place: int, numbers: Sequence[int]) -> None:
            self.v("VFMADD231PS", chains[place % count], numbers[0], at(X, place * self.isa.nbytes))

        self._scales_sums = True
        self.point_to_scales(FIRST)
        if kernel.bits == 4:
            self.v("VMOVUPS", self.register(self._factor), self.vector_of(LEVELS, "low"))
        self.immediate("MOV_RM64_IMM32", OUTPUTS, self.isa.lanes)
        with self.repeat(OUTPUTS, OUTPUTS):
            self.zero(total)
            self.move(X, at(Register.RSP, AREA))
            with self.repeat(self.argument("groups"), GROUPS):
                for one in others if kernel.sums_nbytes else chains:
                    self.zero(one)
                if kernel.has_zero_points:
                    self.v("VBROADCASTSS", shift, at(ZERO_POINTS))
                if kernel.sums_nbytes:
                    self.v("VMULPS", first, shift, at(X))
                    self.advance(kernel.sums_nbytes, X)
                self._parts(multiply)
                for one in others:
                    self.v("VADDPS", first, first, one)
                self.v("VBROADCASTSS", scale, at(SCALES, -SCALE_NBYTES))
                self.v("VFMADD231PS", total, first, scale)
            self.across([total])
            self.emit("VEX_VMOVSS_M32_XMM", at(SUM), Register.XMM0)
            self.advance(4, SUM)
        self._scales_sums = False

    def _sums_of_rows(self, rows: range) -> None:
        """Compute the sums of some rows: each vector of codes is decoded once for all of them."""
        together = len(self._outputs)
        count = max(1, min(_CHAINS, (self.isa.registers - self.free) // (len(rows) * together)))
        free = map(self.register, count_from(self.free))
        sums = {row: [list(islice(free, count)) for _ in self._outputs] for row in rows}

        def multiply(place: int, numbers: Sequence[int]) -> None:
            for row, outputs in sums.items():
                x: MemoryOperand | int = at(X, (place * self._kernel.rows + row) * self.isa.nbytes)
                if together > 1:
                    self.v("VMOVUPS", self.register(0), x)
                    x = self.register(0)
                for chains, one in zip(outputs, numbers, strict=True):
                    self.v("VFMADD231PS", chains[place % count], one, x)

        self.point_to_scales(FIRST)
        self.immediate("MOV_RM64_IMM32", OUTPUTS, self.isa.lanes // together)
        with self.repeat(OUTPUTS, OUTPUTS):
            for one in chain(*chain(*sums.values())):
                self.zero(one)
            self.move(X, at(Register.RSP, AREA))
            with self.repeat(self.argument("groups"), GROUPS):
                self.advance(self._kernel.sums_nbytes, *[X] * self._kernel.scales_sums)
                self.group(multiply)
            for row, outputs in sums.items():
                for output, chains in enumerate(outputs):
                    self.across(chains)
                    self.emit("VEX_VMOVSS_M32_XMM", at(SUM, row * self.isa.nbytes + output * 4), Register.XMM0)
            self.next_rows()
            self.advance(4 * together, SUM)
