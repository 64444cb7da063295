"""The programs of matrices of codes: of their products with a few rows, and of their decoding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain, islice, product
from itertools import count as count_from
from typing import Final

from iced_x86 import MemoryOperand, Register

from fmtprop.jit.assembler import at
from fmtprop.jit.gemv_program import AHEAD_NBYTES, END, FIRST, ITEM, SRC_ROWS, SUM, SUMS, WEIGHTS, GemvProgram
from fmtprop.jit.isa import AVX512, Isa
from fmtprop.jit.nbits import INTEGERS, DecodeKernel, NBitsArguments, NBitsKernel, span, unit
from fmtprop.jit.program import THREAD, THREADS, with_table

#: places in the frame, beside that of the item: the rows of this thread, and the task after its last
_AREA, _LAST_TASK = 8, 16

#: the numbers of the rows, and the scales and zero points of the groups: nothing asks for threads any more
_X, _SCALES, _ZERO_POINTS = Register.RSI, THREADS, THREAD

#: numbers that 4-bit codes stand for
_LEVELS = Register.RDX

#: outputs, groups and parts of a group that are left
_OUTPUTS, _GROUPS, _PARTS = Register.RCX, Register.RAX, END

#: from the start of the program's data: the numbers of codes without a zero point; places of even and odd numbers, and
#: behind them those that put even and odd numbers in turn
_WITHOUT_ZERO_POINT, _EVEN_PLACES = 64, 128

#: bytes of a scale or zero point
_SCALE_NBYTES: Final = 4

#: vectors of sums of one row, if there are registers for them: one waits for four cycles for its last addition
_CHAINS: Final = 4

#: outputs that are computed side by side for several rows, as many as there are registers for: each vector of src,
#: which is in the second cache at best, is loaded once for all of them
_SIDE_BY_SIDE: Final = (4, 2)

#: most rows of a pass over the codes of a task: more leave no registers for a second output, and 16 rows take twice as
#: long in one pass as in two
_MOST_ROWS: Final = 8

#: first register of vectors of numbers, two for each output; those before it are free between two instructions
_DECODED: Final = 2

#: takes the place of a vector of codes in its part of a group, and the registers with the numbers of each output
Use = Callable[[int, Sequence[int]], None]


def nbits(isa: Isa, kernel: NBitsKernel) -> tuple[bytes, bytes]:
    """Return the program, and the table of constants that it reads."""
    return with_table(partial(_assembled, isa, kernel))


def _assembled(isa: Isa, kernel: NBitsKernel, numbers: Sequence[bytes]) -> _NBits:
    kind = _NBits if not kernel.multiplies_bytes else _Integers if kernel.rows == 1 else _IntegersOfRows
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
    p = _Decoding(isa, kernel)
    p.share(ITEM, END, "outputs")
    p.emit("PUSH_R64", END)
    for pointer, name, nbytes in ((WEIGHTS, "weights", "row"), (_X, "dst", "dst_row")):
        p.point(pointer, name, ITEM, nbytes)
    p.point_to_scales(ITEM)
    with p.until(ITEM, at(Register.RSP)), p.repeat(p.argument("groups"), _GROUPS):
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
        self._scales_pitch = kernel.depth // kernel.group * _SCALE_NBYTES
        self._has_levels = _has_levels(isa, kernel)
        #: the registers with the numbers of codes, or their scales; behind them their zero points
        self._factor = _DECODED + 2 * outputs
        self._shift = self._factor + outputs
        #: the first register that is free
        self.free = _first_free(isa, kernel, outputs)

    def point_to_scales(self, row: int) -> None:
        """Point to the scales and zero points of a row, and to the numbers of codes."""
        self.point(_SCALES, "scales", row, "scales_row")
        if self._codes.has_zero_points:
            self.point(_ZERO_POINTS, "zero_points", row, "scales_row")
        self.move(_LEVELS, self.argument("data"))
        if not (self._codes.has_zero_points or self._has_levels):
            self.v("VBROADCASTSS", self.register(self._shift), at(_LEVELS, _WITHOUT_ZERO_POINT + 8 * 4))

    def group(self, use: Use) -> None:
        """Decode a group of each output, and point to the next one."""
        codes = self._codes
        for output in self._outputs:
            place, factor = output * self._scales_pitch, self.register(self._factor + output)
            if not self._has_levels:
                self._of_groups(factor, at(_SCALES, place))
                if codes.has_zero_points:
                    self._of_groups(self.register(self._shift + output), at(_ZERO_POINTS, place))
                continue
            scale = self.register(0)
            self.v("VBROADCASTSS", scale, at(_SCALES, place))
            if codes.has_zero_points:
                self.v("VBROADCASTSS", self.register(1), at(_ZERO_POINTS, place))
                self.v("VMOVUPS", factor, at(_LEVELS, _WITHOUT_ZERO_POINT))
                self.v("VSUBPS", factor, factor, self.register(1))
                self.v("VMULPS", factor, factor, scale)
            else:
                self.v("VMULPS", factor, scale, at(_LEVELS))
        nbytes = span(codes) // codes.group * _SCALE_NBYTES
        self.advance(nbytes, _SCALES, *[_ZERO_POINTS] * codes.has_zero_points)
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
        self.v("VMOVUPS", halves, self.vector_of(_LEVELS, "halves"))
        self.v("VPERMPS", x, halves, both)

    def vector_of(self, pointer: int, name: str) -> MemoryOperand:
        """Return a vector of the data that a register points to."""
        return at(pointer, _EVEN_PLACES + (4 + [*INTEGERS].index(name)) * self.isa.nbytes)

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
        self.advance(2 * codes.units * machine.lanes * self._codes.number_nbytes, _X)

    def next_rows(self) -> None:
        """Point behind the rows of all outputs, from behind the first one."""
        others = len(self._outputs) - 1
        if others:
            self.advance(others * self._pitch, WEIGHTS)
            self.advance(others * self._scales_pitch, _SCALES, *[_ZERO_POINTS] * self._codes.has_zero_points)

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
            if shifted:
                self.v("VSUBPS", one, one, self.register(zero_point))
            self.v("VMULPS", one, one, self.register(self._factor + output))


class _Decoding(_Codes):
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
                self.v("VMOVUPS", one, at(_LEVELS, _EVEN_PLACES + (2 + index) * self.isa.nbytes))
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
            self.store(at(_X, place * self.isa.lanes * self._codes.number_nbytes), numbers)


class _NBits(_Codes):
    """Multiplies the rows of a matrix by the rows of src."""

    def __init__(self, isa: Isa, kernel: NBitsKernel) -> None:
        # one row reads one output after the other, as the matrix lies in memory
        passes = -(-kernel.rows // _MOST_ROWS)
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
        self.emit("MOV_RM64_R64", at(Register.RSP, _AREA), dst)
        self.move(SRC_ROWS, self.argument("src"))
        self.move(Register.RAX, self.argument("data"))
        x, y, nbytes = self.register(0), self.register(1), self.isa.lanes * self._kernel.src.nbytes
        step = self._kernel.rows * self.isa.nbytes
        for row in range(self._kernel.rows):
            self.move(src, SRC_ROWS)
            self.move(dst, at(Register.RSP, _AREA))
            self.advance(row * self.isa.nbytes, dst)
            with self.repeat(self.argument("units"), Register.RCX):
                with self.numbers_of(self._kernel.src):
                    self.load(x, at(src))
                    self.load(y, at(src, nbytes))
                both = self._parted(x, y) if self._kernel.bits == 4 else (x, y)
                for index, one in enumerate(both):
                    self.v("VMOVUPS <", at(dst, index * step), one)
                self.advance(2 * nbytes, src)
                self.advance(2 * step, dst)
            self.add(SRC_ROWS, self.argument("src_row"))

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
        for number, rows in enumerate(self._passes):
            if number:
                self.advance(-self.isa.lanes * self._pitch, WEIGHTS)
                self.advance(-self.isa.nbytes, SUM)
            self._sums_of_rows(rows)

    def _sums_of_rows(self, rows: range) -> None:
        """Compute the sums of some rows: each vector of codes is decoded once for all of them."""
        together = len(self._outputs)
        count = max(1, min(_CHAINS, (self.isa.registers - self.free) // (len(rows) * together)))
        free = map(self.register, count_from(self.free))
        sums = {row: [list(islice(free, count)) for _ in self._outputs] for row in rows}

        def multiply(place: int, numbers: Sequence[int]) -> None:
            for row, outputs in sums.items():
                x: MemoryOperand | int = at(_X, (place * self._kernel.rows + row) * self.isa.nbytes)
                if together > 1:
                    self.v("VMOVUPS", self.register(0), x)
                    x = self.register(0)
                for chains, one in zip(outputs, numbers, strict=True):
                    self.v("VFMADD231PS", chains[place % count], one, x)

        self.point_to_scales(FIRST)
        self.immediate("MOV_RM64_IMM32", _OUTPUTS, self.isa.lanes // together)
        with self.repeat(_OUTPUTS, _OUTPUTS):
            for one in chain(*chain(*sums.values())):
                self.zero(one)
            self.move(_X, at(Register.RSP, _AREA))
            with self.repeat(self.argument("groups"), _GROUPS):
                self.group(multiply)
            for row, outputs in sums.items():
                for output, chains in enumerate(outputs):
                    self.across(chains)
                    self.emit("VEX_VMOVSS_M32_XMM", at(SUM, row * self.isa.nbytes + output * 4), Register.XMM0)
            self.next_rows()
            self.advance(4 * together, SUM)


#: registers of the program on integers: what codes and zeros differ by, and the first of codes in bytes
_DIFFERENCE, _IN_BYTES = 2, 3

#: the scales, the zero points and behind them the transposed codes of a group; a scale on its way there
_TURNED, _ONE_SCALE = _OUTPUTS, Register.R9D

#: first register of numbers while rows are written
_NUMBERS: Final = 8

#: shuffles after which each number of a vector was beside each other one
_ROUND: Final = (("VSHUFF32X4", 0x4E), ("VSHUFF32X4", 0xB1), ("VPERMILPS", 0x4E), ("VPERMILPS", 0xB1))


class _Integers(_NBits):
    """Multiplies rows of bf16 numbers as integers of 16 bits, a high and a low byte, which share a scale in a group.

    A bf16 number has 8 bits: those above a 256th of the group's largest lose none, and the others less than the largest
    has lost when it was rounded to bf16. AVX-512 VNNI adds 64 products of bytes at a time. In a group, a row's area has
    for each vector of codes the high bytes and the low ones, then what the sum differs by since codes have no sign,
    then the scale, and with zero points the sum of the row's numbers.
    """

    def __init__(self, isa: Isa, kernel: NBitsKernel) -> None:
        super().__init__(isa, kernel)
        #: vectors of codes of a group, each with as many vectors of bytes as a byte has codes
        self._blocks, self._halves = kernel.group * kernel.bits // 8 // isa.nbytes, 8 // kernel.bits
        self._tail = 2 * kernel.group
        #: pointers to what a group has one of
        self._of_group = (_SCALES, _ZERO_POINTS) if kernel.has_zero_points else (_SCALES,)

    def _place(self, block: int, half: int, low: int) -> int:
        """Return where the bytes of a part of a group lie in a row's group."""
        return ((block * self._halves + half) * 2 + low) * self.isa.nbytes

    # ------------------------------------------------------------------ rows of src

    def fill_area(self) -> None:
        """Write the rows of src to this thread's area."""
        src, dst, data, kernel = Register.RSI, Register.RDI, Register.RAX, self._kernel
        self.point(dst, "areas", THREAD, "area")
        self.emit("MOV_RM64_R64", at(Register.RSP, _AREA), dst)
        self.move(SRC_ROWS, self.argument("src"))
        self.move(data, self.argument("data"))
        for row in range(kernel.rows):
            self.move(src, SRC_ROWS)
            self.move(dst, at(Register.RSP, _AREA))
            self.advance(row * kernel.group_nbytes, dst)
            with self.repeat(self.argument("groups"), Register.RCX):
                self._write_group(src, dst, data)
                self.advance(kernel.group * kernel.src.nbytes, src)
                self.advance(kernel.rows * kernel.group_nbytes, dst)
            self.add(SRC_ROWS, self.argument("src_row"))

    def _write_group(self, src: int, dst: int, data: int) -> None:
        """Write the bytes of a group, what its sums differ by, and its scale."""
        kernel, lanes = self._kernel, self.isa.lanes
        numbers = [self.register(_NUMBERS + index) for index in range(kernel.group // lanes)]
        largest, other, factor = self.register(0), self.register(1), self.register(4)
        self.zero(largest)
        for index, x in enumerate(numbers):
            with self.numbers_of(kernel.src):
                self.load(x, at(src, index * lanes * kernel.src.nbytes))
            self.v("VANDPS", other, x, self.vector_of(data, "magnitude"))
            self.v("VPMAXSD", largest, largest, other)  # as integers, NaN is the largest
        self._everywhere("VPMAXSD", largest, other)
        self.v("VPMAXSD", largest, largest, self.vector_of(data, "least"))
        self.v("VMOVUPS", other, self.vector_of(data, "largest"))
        self.v("VDIVPS", factor, other, largest)
        self.v("VMULPS", largest, largest, self.vector_of(data, "of largest"))
        self.v("VSUBPS", other, largest, largest)  # NaN of an infinity
        self.v("VADDPS", largest, largest, other)
        self.v("VMOVUPS <", at(dst, self._tail + self.isa.nbytes), largest)
        for first in range(0, len(numbers), 2):
            pair = numbers[first], numbers[first + 1]
            if kernel.bits == 4:  # low and high halves of the same bytes
                block, quarter = divmod(first, 8)
                for half, x in enumerate(self._parted(*pair)):
                    self._write_bytes(dst, data, x, self._place(block, half, 0) + quarter // 2 * lanes, factor)
                continue
            for index, x in enumerate(pair, first):
                block, quarter = divmod(index, 4)
                self._write_bytes(dst, data, x, self._place(block, 0, 0) + quarter * lanes, factor)
        high, low, zeros = self.register(0), self.register(1), self.register(2)
        self.v("VMOVUPS", zeros, self.vector_of(data, f"zero of {kernel.bits}"))
        for one in (high, low):
            self.zero(one)
        for part in range(self._blocks * self._halves):
            for index, one in enumerate((high, low)):
                self.v("VPDPBUSD", one, zeros, at(dst, (2 * part + index) * self.isa.nbytes))
        self.v("VPSLLD", high, high, immediate=8)
        self.v("VPADDD", low, low, high)
        if kernel.rows > 1:
            self._everywhere("VPADDD", low, high)
        self.zero(high)
        self.v("VPSUBD", high, high, low)
        self.v("VMOVUPS <", at(dst, self._tail), high)
        if kernel.has_zero_points:
            self.v("VCVTDQ2PS", high, high)
            self.v("VMULPS", high, high, self.vector_of(data, f"parts of zero of {kernel.bits}"))
            self.v("VMOVUPS <", at(dst, self._tail + 2 * self.isa.nbytes), high)

    def _everywhere(self, operation: str, x: int, other: int) -> None:
        """Join all numbers of a vector; each position has the result."""
        for shuffle, order in _ROUND:
            self.v(shuffle, other, *[x] * (2 if shuffle == "VSHUFF32X4" else 1), immediate=order)
            self.v(operation, x, x, other)

    def _write_bytes(self, dst: int, data: int, x: int, place: int, factor: int) -> None:
        """Write the high and low bytes of a vector of numbers."""
        whole, high = self.register(5), self.register(6)
        self.v("VMULPS", whole, x, factor)
        self.v("VCVTPS2DQ", whole, whole)
        self.v("VPADDD", high, whole, self.vector_of(data, "half"))
        self.v("VPSRAD", high, high, immediate=8)
        self.emit("EVEX_VPMOVDB_XMMM128_K1Z_ZMM", at(dst, place), high)
        self.v("VPSLLD", high, high, immediate=8)
        self.v("VPSUBD", whole, whole, high)
        self.emit("EVEX_VPMOVDB_XMMM128_K1Z_ZMM", at(dst, place + self.isa.nbytes), whole)

    # ------------------------------------------------------------------ sums

    def sums_of_codes(self) -> None:
        """Compute a row's sums of a task: bytes of each group as integers, and groups in f32."""
        kernel = self._kernel
        total, high, low = map(self.register, range(_IN_BYTES + 2, _IN_BYTES + 5))
        scale = self.register(1)
        self._begin_codes()
        self.immediate("MOV_RM64_IMM32", _OUTPUTS, self.isa.lanes)
        with self.repeat(_OUTPUTS, _OUTPUTS):
            self.zero(total)
            self.move(_X, at(Register.RSP, _AREA))
            with self.repeat(self.argument("groups"), _GROUPS):
                self.zero(high)
                self.v("VMOVUPS", low, at(_X, self._tail))
                for block in range(self._blocks):
                    place = block * self.isa.nbytes
                    self.emit("PREFETCHT2_M8", at(WEIGHTS, place + AHEAD_NBYTES))
                    for half, codes in enumerate(self._load_codes(at(WEIGHTS, place))):
                        for index, sums in enumerate((high, low)):
                            self.v("VPDPBUSD", sums, codes, at(_X, self._place(block, half, index)))
                self.v("VBROADCASTSS", scale, at(_SCALES))
                if kernel.has_zero_points:
                    self.v("VBROADCASTSS", self.register(0), at(_ZERO_POINTS))
                    self._shift_zero_points()
                self._add_group(total, high, low, self._tail, scale)
                self.advance(_SCALE_NBYTES, *self._of_group)
                self.advance(self._blocks * self.isa.nbytes, WEIGHTS)
                self.advance(kernel.group_nbytes, _X)
            self.across([total])
            self.emit("VEX_VMOVSS_M32_XMM", at(SUM), Register.XMM0)
            self.advance(4, SUM)

    def _begin_codes(self) -> None:
        """Point to the scales of a task, and load what makes bytes without sign of codes."""
        self.point_to_scales(FIRST)
        name = "low" if self._kernel.bits == 4 else "zero of 8"
        self.v("VMOVUPS", self.register(_DIFFERENCE), self.vector_of(_LEVELS, name))

    def _load_codes(self, place: MemoryOperand) -> list[int]:
        """Return the registers with a vector of codes, as bytes without sign."""
        difference, low, high = (self.register(_DIFFERENCE + number) for number in range(3))
        if self._kernel.bits == 8:
            self.v("VXORPS", low, difference, place)
            return [low]
        self.v("VMOVUPS", high, place)
        self.v("VANDPS", low, high, difference)
        self.v("VPSRLD", high, high, immediate=4)
        self.v("VANDPS", high, high, difference)
        return [low, high]

    def _shift_zero_points(self) -> None:
        """Make zero points, in register 0, relative to the usual one."""
        if self._kernel.bits == 4:
            self.v("VSUBPS", self.register(0), self.register(0), self.vector_of(_LEVELS, "usual zero of 4"))

    def _add_group(self, total: int, high: int, low: int, place: int, scale: int) -> None:
        """Add a group's sums of both kinds of bytes to a total; the row's scale is behind the place."""
        self.v("VPSLLD", high, high, immediate=8)
        self.v("VPADDD", high, high, low)
        self.v("VCVTDQ2PS", high, high)
        if self._kernel.has_zero_points:
            self.v("VFNMADD231PS", high, self.register(0), at(_X, place + 2 * self.isa.nbytes))
        self.v("VMULPS", high, high, at(_X, place + self.isa.nbytes))
        self.v("VFMADD231PS", total, high, scale)


class _IntegersOfRows(_Integers):
    """Multiplies several rows: a position of a vector of sums is an output, so that it needs one scale for a group.

    Codes of 16 outputs are transposed in registers, to vectors of four neighbouring codes of each output. They meet
    four bytes of each row, which the product itself spreads over a vector. The transposed codes of a group, 4 KB at
    most, lie behind the rows in the thread's area.
    """

    def sums_of_codes(self) -> None:
        """Compute the sums of a task."""
        kernel, nbytes = self._kernel, self.isa.nbytes
        self._begin_codes()
        self.move(_TURNED, at(Register.RSP, _AREA))
        self.advance(kernel.rows_nbytes, _TURNED)
        for number, rows in enumerate(self._passes):
            if number:
                self.advance(-self._pitch, WEIGHTS)
                self.advance(-self._scales_pitch, *self._of_group)
            free = map(self.register, count_from(_DIFFERENCE + 3))
            sums = {row: (next(free), next(free), next(free)) for row in rows}
            for total, *_ in sums.values():
                self.zero(total)
            self.move(_X, at(Register.RSP, _AREA))
            with self.repeat(self.argument("groups"), _GROUPS):
                self._turn_group([self.register(_DIFFERENCE), *(total for total, *_ in sums.values())])
                self._multiply_group(sums)
            for row, (total, *_) in sums.items():
                self.v("VMOVUPS <", at(SUM, row * nbytes), total)

    def _turn_group(self, taken: Sequence[int]) -> None:
        """Write a group's scales, zero points and transposed codes, through registers that are not taken."""
        lanes, nbytes = self.isa.lanes, self.isa.nbytes
        for (number, pointer), output in product(enumerate(self._of_group), range(lanes)):
            self.emit("MOV_R32_RM32", _ONE_SCALE, at(pointer, output * self._scales_pitch))
            self.emit("MOV_RM32_R32", at(_TURNED, number * nbytes + output * _SCALE_NBYTES), _ONE_SCALE)
        free = [one for one in map(self.register, range(self.isa.registers)) if one not in taken]
        for block in range(self._blocks):
            for output, one in enumerate(free[:lanes]):
                place = output * self._pitch + block * nbytes
                self.v("VMOVUPS", one, at(WEIGHTS, place))
                self.emit("PREFETCHT2_M8", at(WEIGHTS, place + lanes * self._pitch))  # the next task's
            for part, one in enumerate(self.transposed(free[:lanes], free[lanes])):
                self.v("VMOVUPS <", at(_TURNED, (2 + block * lanes + part) * nbytes), one)

    def _multiply_group(self, sums: Mapping[int, tuple[int, int, int]]) -> None:
        """Add a group's products with the rows to their totals."""
        kernel, lanes, nbytes = self._kernel, self.isa.lanes, self.isa.nbytes
        for row, (_, high, low) in sums.items():
            self.zero(high)
            self.v("VMOVUPS", low, at(_X, row * kernel.group_nbytes + self._tail))
        for block, part in product(range(self._blocks), range(lanes)):
            loaded = self._load_codes(at(_TURNED, (2 + block * lanes + part) * nbytes))
            for (row, (_, *both)), (half, codes) in product(sums.items(), enumerate(loaded)):
                for index, one in enumerate(both):
                    place = row * kernel.group_nbytes + self._place(block, half, index) + 4 * part
                    self.v("VPDPBUSD", one, codes, at(_X, place), spread=True)
        scale = self.register(1)
        self.v("VMOVUPS", scale, at(_TURNED))
        if kernel.has_zero_points:
            self.v("VMOVUPS", self.register(0), at(_TURNED, nbytes))
            self._shift_zero_points()
        for row, (total, high, low) in sums.items():
            self._add_group(total, high, low, row * kernel.group_nbytes + self._tail, scale)
        self.advance(_SCALE_NBYTES, *self._of_group)
        self.advance(self._blocks * nbytes, WEIGHTS)
        self.advance(kernel.rows * kernel.group_nbytes, _X)
