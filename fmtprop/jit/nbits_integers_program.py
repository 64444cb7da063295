"""The programs of products of bf16 rows with codes where AVX-512 VNNI multiplies both as integers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import count as count_from
from itertools import product
from typing import Final

from iced_x86 import MemoryOperand, Register

from fmtprop.jit.assembler import at
from fmtprop.jit.gemv_program import AHEAD_NBYTES, END, FIRST, SRC_ROWS, SUM, WEIGHTS
from fmtprop.jit.isa import Isa
from fmtprop.jit.nbits import NBitsKernel
from fmtprop.jit.nbits_program import (
    AREA,
    GROUPS,
    LEVELS,
    OUTPUTS,
    SCALE_NBYTES,
    SCALES,
    ZERO_POINTS,
    NBitsProgram,
    X,
    assembled,
)
from fmtprop.jit.program import THREAD, with_table

#: registers of the program on integers: what codes and zeros differ by, and the first of codes in bytes
_DIFFERENCE, _IN_BYTES = 2, 3

#: parts of a group that are left; the scales, the zero points and behind them the transposed codes of a part
_PARTS, _TURNED = END, OUTPUTS

#: register of the places of groups' scales, and their names in the program's data by the number of groups
_PLACES: Final = 8
_SPREAD: Final = {2: "halves", 4: "quarters"}

#: shuffles that put the quarters of a group's sums everywhere, by the number of groups
_OF_GROUP: Final = {2: (0x44, 0xEE), 4: (0x00, 0x55, 0xAA, 0xFF)}

#: first register of numbers while rows are written
_NUMBERS: Final = 8

#: shuffles after which each number of a vector was beside each other one
_ROUND: Final = (("VSHUFF32X4", 0x4E), ("VSHUFF32X4", 0xB1), ("VPERMILPS", 0x4E), ("VPERMILPS", 0xB1))


def nbits_integers(isa: Isa, kernel: NBitsKernel) -> tuple[bytes, bytes]:
    """Return the program, and the table of constants that it reads."""
    return with_table(partial(assembled, _Integers if kernel.rows == 1 else _IntegersOfRows, isa, kernel))


class _Integers(NBitsProgram):
    """Multiplies rows of bf16 numbers as integers of 16 bits, a high and a low byte, which share a scale.

    Those of a part of a group do: the whole group, if it has no more than 256. A part of shorter groups than a vector
    of codes has two or four of them. A bf16 number has 8 bits: those above a 256th of the part's largest lose none, and
    the others less than the largest has lost when it was rounded to bf16. AVX-512 VNNI adds 64 products of bytes at a
    time. In a part, a row's area has for each vector of codes the high bytes and the low ones, then the scale, then
    what sums differ by since codes have no sign, and with zero points the sums of the row's numbers. Sums are one
    vector: a position is for four bytes that are multiplied there.
    """

    def __init__(self, isa: Isa, kernel: NBitsKernel) -> None:
        super().__init__(isa, kernel)
        #: vectors of codes of a part, each with as many vectors of bytes as a byte has codes
        self._blocks, self._halves = kernel.part * kernel.bits // 8 // isa.nbytes, 8 // kernel.bits
        self._tail = 2 * kernel.part
        #: groups of a part, and bytes from the last to the first one's sums of a row's numbers
        self._groups, self._sums_nbytes = kernel.groups_of_part, kernel.sums_of_part * isa.nbytes
        #: pointers to what a group has one of
        self._of_group = (SCALES, ZERO_POINTS) if kernel.has_zero_points else (SCALES,)

    def _place(self, block: int, half: int, low: int) -> int:
        """Return where the bytes that meet half of a vector of codes lie in a row's part."""
        return ((block * self._halves + half) * 2 + low) * self.isa.nbytes

    # ------------------------------------------------------------------ rows of src

    def fill_area(self) -> None:
        """Write the rows of src to this thread's area."""
        src, dst, data, kernel = Register.RSI, Register.RDI, Register.RAX, self._kernel
        self.point(dst, "areas", THREAD, "area")
        self.emit("MOV_RM64_R64", at(Register.RSP, AREA), dst)
        self.move(SRC_ROWS, self.argument("src"))
        self.move(data, self.argument("data"))
        for row in range(kernel.rows):
            self.move(src, SRC_ROWS)
            self.move(dst, at(Register.RSP, AREA))
            self.advance(row * kernel.part_nbytes, dst)
            with self.repeat(self.argument("units"), Register.RCX):
                self._write_part(src, dst, data)
                self.advance(kernel.part * kernel.src.nbytes, src)
                self.advance(kernel.rows * kernel.part_nbytes, dst)
            self.add(SRC_ROWS, self.argument("src_row"))

    def _write_part(self, src: int, dst: int, data: int) -> None:
        """Write the bytes of a part, what its sums differ by, and its scale."""
        kernel, lanes = self._kernel, self.isa.lanes
        numbers = [self.register(_NUMBERS + index) for index in range(kernel.part // lanes)]
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
        self.v("VMOVUPS <", at(dst, self._tail), largest)
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
        for group in range(kernel.sums_of_part):
            total = low
            if kernel.rows > 1:
                total = self._sum_of_group(low, group)
            place = self._place_of_difference(group)
            self.zero(high)
            self.v("VPSUBD", high, high, total)
            self.v("VMOVUPS <", at(dst, place), high)
            if kernel.has_zero_points:
                self.v("VCVTDQ2PS", high, high)
                self.v("VMULPS", high, high, self.vector_of(data, f"parts of zero of {kernel.bits}"))
                self.v("VMOVUPS <", at(dst, place + self._sums_nbytes), high)

    def _place_of_difference(self, group: int) -> int:
        """Return where a row's part has what a group's sum differs by."""
        return self._tail + (1 + group) * self.isa.nbytes

    def _sum_of_group(self, x: int, group: int) -> int:
        """Return the register with the sum of a group's positions of a vector, in each position."""
        total, other = self.register(3), self.register(5)
        if self._groups == 1:
            self.v("VMOVUPS", total, x)
        else:
            self.v("VSHUFF32X4", total, x, x, immediate=_OF_GROUP[self._groups][group])
        self._everywhere("VPADDD", total, other, _ROUND[self._groups.bit_length() - 1 :])
        return total

    def _everywhere(self, operation: str, x: int, other: int, around: Sequence[tuple[str, int]] = _ROUND) -> None:
        """Join all numbers of a vector; each position has the result."""
        for shuffle, order in around:
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
        """Compute a row's sums of a task: bytes of each part as integers, and parts in f32."""
        kernel = self._kernel
        total, high, low = map(self.register, range(_IN_BYTES + 2, _IN_BYTES + 5))
        scale, zero_points = self.register(1), self.register(0)
        self._begin_codes()
        self.immediate("MOV_RM64_IMM32", OUTPUTS, self.isa.lanes)
        with self.repeat(OUTPUTS, OUTPUTS):
            self.zero(total)
            self.move(X, at(Register.RSP, AREA))
            with self._each_part():
                self.zero(high)
                self.v("VMOVUPS", low, at(X, self._place_of_difference(0)))
                for block in range(self._blocks):
                    place = block * self.isa.nbytes
                    self.emit("PREFETCHT2_M8", at(WEIGHTS, place + AHEAD_NBYTES))
                    for half, codes in enumerate(self._load_codes(at(WEIGHTS, place))):
                        for index, sums in enumerate((high, low)):
                            self.v("VPDPBUSD", sums, codes, at(X, self._place(block, half, index)))
                self._load_of_groups(scale, at(SCALES))
                if kernel.has_zero_points:
                    self._load_of_groups(zero_points, at(ZERO_POINTS))
                    self._shift_zero_points()
                self._add_part(total, high, low, 0, 0, scale)
                self.advance(self._blocks * self.isa.nbytes, WEIGHTS)
                self.advance(kernel.part_nbytes, X)
            self.across([total])
            self.emit("VEX_VMOVSS_M32_XMM", at(SUM), Register.XMM0)
            self.advance(4, SUM)

    def _load_of_groups(self, x: int, place: MemoryOperand) -> None:
        """Load the scale or zero point of a part, or those of its groups, each where the group's sums are."""
        spreading = {1: "VBROADCASTSS", 2: "VBROADCASTSD", 4: "VBROADCASTF32X4"}[self._groups]
        self.v(spreading, x, place)
        if self._groups > 1:
            self.v("VPERMPS", x, self.register(_PLACES), x)

    def _begin_codes(self) -> None:
        """Point to the scales of a task, and load what makes bytes without sign of codes."""
        self.point_to_scales(FIRST)
        name = "low" if self._kernel.bits == 4 else "zero of 8"
        self.v("VMOVUPS", self.register(_DIFFERENCE), self.vector_of(LEVELS, name))
        if self._groups > 1:
            self.v("VMOVUPS", self.register(_PLACES), self.vector_of(LEVELS, _SPREAD[self._groups]))

    @contextmanager
    def _each_part(self) -> Iterator[None]:
        """Add loops over groups and their parts around the instructions of the block."""
        with self.repeat(self.argument("groups"), GROUPS):
            parts = max(1, self._kernel.group // self._kernel.part)
            self.immediate("MOV_RM64_IMM32", _PARTS, parts)
            with self.repeat(_PARTS, _PARTS) if parts > 1 else nullcontext():
                yield
            self.advance(self._groups * SCALE_NBYTES, *self._of_group)

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
            self.v("VSUBPS", self.register(0), self.register(0), self.vector_of(LEVELS, "usual zero of 4"))

    def _add_part(self, total: int, high: int, low: int, row: int, group: int, scale: int) -> None:
        """Add sums of both kinds of bytes to a total: those of a part, or of one of its groups."""
        place = row * self._kernel.part_nbytes
        self.v("VPSLLD", high, high, immediate=8)
        self.v("VPADDD", high, high, low)
        self.v("VCVTDQ2PS", high, high)
        if self._kernel.has_zero_points:
            of_numbers = place + self._place_of_difference(group) + self._sums_nbytes
            self.v("VFNMADD231PS", high, self.register(0), at(X, of_numbers))
        self.v("VMULPS", high, high, at(X, place + self._tail))
        self.v("VFMADD231PS", total, high, scale)


class _IntegersOfRows(_Integers):
    """Multiplies several rows: a position of a vector of sums is an output, so that it needs one scale for a group.

    Codes of 16 outputs are transposed in registers, to vectors of four neighbouring codes of each output. They meet
    four bytes of each row, which the product itself spreads over a vector. The transposed codes of a part, 4 KB at
    most, lie behind the rows in the thread's area.
    """

    def sums_of_codes(self) -> None:
        """Compute the sums of a task."""
        kernel, nbytes = self._kernel, self.isa.nbytes
        self._begin_codes()
        self.move(_TURNED, at(Register.RSP, AREA))
        self.advance(kernel.rows_nbytes, _TURNED)
        for number, rows in enumerate(self._passes):
            if number:
                self.advance(-self._pitch, WEIGHTS)
                self.advance(-self._scales_pitch, *self._of_group)
            free = map(self.register, count_from(_DIFFERENCE + 3))
            sums = {row: (next(free), next(free), next(free)) for row in rows}
            for total, *_ in sums.values():
                self.zero(total)
            self.move(X, at(Register.RSP, AREA))
            with self._each_part():
                self._turn_part([self.register(_DIFFERENCE), *(total for total, *_ in sums.values())])
                self._multiply_part(sums)
            for row, (total, *_) in sums.items():
                self.v("VMOVUPS <", at(SUM, row * nbytes), total)

    def _turn_part(self, taken: Sequence[int]) -> None:
        """Write a part's scales, zero points and transposed codes, through registers that are not taken."""
        lanes, nbytes = self.isa.lanes, self.isa.nbytes
        for (number, pointer), group, output in product(enumerate(self._of_group), range(self._groups), range(lanes)):
            place = (number * self._groups + group) * nbytes + output * SCALE_NBYTES
            source = output * self._scales_pitch + group * SCALE_NBYTES
            self.emit("VEX_VMOVSS_XMM_M32", Register.XMM0, at(pointer, source))
            self.emit("VEX_VMOVSS_M32_XMM", at(_TURNED, place), Register.XMM0)
        free = [one for one in map(self.register, range(self.isa.registers)) if one not in taken]
        for block in range(self._blocks):
            for output, one in enumerate(free[:lanes]):
                place = output * self._pitch + block * nbytes
                self.v("VMOVUPS", one, at(WEIGHTS, place))
                self.emit("PREFETCHT2_M8", at(WEIGHTS, place + lanes * self._pitch))  # the next task's
            for part, one in enumerate(self.transposed(free[:lanes], free[lanes])):
                self.v("VMOVUPS <", at(_TURNED, self._place_of_codes(block, part)), one)

    def _place_of_codes(self, block: int, part: int) -> int:
        """Return where four neighbouring codes of each output are."""
        return (2 * self._groups + block * self.isa.lanes + part) * self.isa.nbytes

    def _multiply_part(self, sums: Mapping[int, tuple[int, int, int]]) -> None:
        """Add a part's products with the rows to their totals."""
        for group in range(self._groups):
            self._multiply_group(group, sums)
        self.advance(self._blocks * self.isa.nbytes, WEIGHTS)
        self.advance(self._kernel.rows * self._kernel.part_nbytes, X)

    def _multiply_group(self, group: int, sums: Mapping[int, tuple[int, int, int]]) -> None:
        """Add the products of a part's group, or of all of a part."""
        kernel, nbytes, lanes = self._kernel, self.isa.nbytes, self.isa.lanes // self._groups
        for row, (_, high, low) in sums.items():
            self.zero(high)
            self.v("VMOVUPS", low, at(X, row * kernel.part_nbytes + self._place_of_difference(group)))
        for block, part in product(range(self._blocks), range(group * lanes, (group + 1) * lanes)):
            loaded = self._load_codes(at(_TURNED, self._place_of_codes(block, part)))
            for (row, (_, *both)), (half, codes) in product(sums.items(), enumerate(loaded)):
                for index, one in enumerate(both):
                    place = row * kernel.part_nbytes + self._place(block, half, index) + 4 * part
                    self.v("VPDPBUSD", one, codes, at(X, place), spread=True)
        scale = self.register(1)
        self.v("VMOVUPS", scale, at(_TURNED, group * nbytes))
        if kernel.has_zero_points:
            self.v("VMOVUPS", self.register(0), at(_TURNED, (self._groups + group) * nbytes))
            self._shift_zero_points()
        for row, (total, high, low) in sums.items():
            self._add_part(total, high, low, row, group, scale)
