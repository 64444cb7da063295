"""The parts of programs that normalize channels of channels-last tensors: sums of each channel, and the result.

Each thread has some places (pixels), and an area of memory with some vectors for each vector of channels.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from iced_x86 import Register

from fmtprop.jit.assembler import at
from fmtprop.jit.norms import BLOCK_PLACES, PIVOT_PLACES, SLOTS
from fmtprop.jit.program import THREAD, THREADS, Program

#: this thread's next place, in src and in dst; number of its places from there; one more value of a program
SRC, DST, PLACES, MORE = Register.R10, Register.R11, Register.R9, Register.R15

#: places of the present block; where the work is within its columns, in src and in dst
BLOCK, FROM, TO = Register.R13, Register.RDX, Register.R14

#: where the work is within an area, and within a row of channels
AREA, CHANNELS = Register.RSI, Register.RAX

#: turns that are left, of an outer loop and of an inner one
LEFT, LEFT_INSIDE = Register.R8, Register.RCX

FREE = Register.RDI

#: registers that a program must restore at its end
SAVED = (BLOCK, TO, MORE)

#: vectors of an area for each vector of channels: sum of the deviations from the pivot, then this thread's mean; sum of
#: their squares, then of the squared deviations from its mean; the pivot, then the mean of all; totals, then the factor
SUM, SQUARES, MEAN, FACTOR = range(SLOTS)


class ChannelProgram(Program):
    """A program on channels; see :class:`fmtprop.jit.norms.GroupNormArguments` for the arguments that it reads."""

    #: vectors of an area for each vector of channels
    slots: ClassVar[int] = SLOTS

    # ------------------------------------------------------------------ this thread's sums

    def note_places(self) -> None:
        """Write the number of this thread's places before its area."""
        self.point(AREA, "areas", THREAD, "area")
        self.emit("VEX_VCVTSI2SS_XMM_XMM_RM64", Register.XMM0, Register.XMM0, PLACES)
        self.emit("VEX_VMOVSS_M32_XMM", at(AREA, -self.isa.nbytes), Register.XMM0)

    def find_pivots(self, width: int) -> None:
        """Average the first places of each channel: this pivot is subtracted from all numbers, so squares stay small.

        As these places are among the others, the mean is at most so far from the pivot, in deviations, as the root of
        all places over these. Infinities are no pivots: their mean is infinite, not NaN.
        """
        totals, (x, places, free) = self.registers(0, width), self.registers(width, 3)
        self.bound(BLOCK, PIVOT_PLACES)
        self.emit("VEX_VCVTSI2SS_XMM_XMM_RM64", Register.XMM0, Register.XMM0, BLOCK)
        self.begin()
        self.emit("VEX_VMOVSS_M32_XMM", at(AREA, self.slot(SUM)), Register.XMM0)
        self.v("VBROADCASTSS", places, at(AREA, self.slot(SUM)))
        self.v("VMAXPS", places, places, self.argument("one"))
        self.move(CHANNELS, SRC)
        with self.repeat(self.argument("columns"), LEFT):
            for total in totals:
                self.zero(total)
            self.move(FROM, CHANNELS)
            with self.repeat(BLOCK, LEFT_INSIDE):
                for index, total in enumerate(totals):
                    self.v("VADDPS", total, total, self.operand(x, at(FROM, index * self.vector_nbytes)))
                self.add(FROM, self.argument("row"))
            self.zero(x)
            for index, total in enumerate(totals):
                self.v("VDIVPS", total, total, places)
                self.v("VMULPS", free, total, x)
                self.v("VADDPS", total, total, free)  # NaN if infinite
                self.v("VMAXPS", free, total, x)  # 0 if NaN, as the minimum
                self.v("VMINPS", total, total, x)
                self.v("VADDPS", total, total, free)
                self.v("VMOVUPS <", at(AREA, self.slot(MEAN, index)), total)
                for slot in (SUM, SQUARES):
                    self.v("VMOVUPS <", at(AREA, self.slot(slot, index)), x)
            self.advance(width * self.vector_nbytes, CHANNELS)
            self.advance(self.slot(0, width), AREA)

    def add_up(self, width: int) -> None:
        """Add up the deviations from the pivots, and their squares: first over a block of places."""
        pivots, sums, squares = (self.registers(first, width) for first in (0, width, 2 * width))
        x = self.register(3 * width)
        with self.blocks((SRC, "row")):
            self.begin()
            self.move(CHANNELS, SRC)
            with self.repeat(self.argument("columns"), LEFT):
                for index, pivot in enumerate(pivots):
                    self.v("VMOVUPS", pivot, at(AREA, self.slot(MEAN, index)))
                    for register in (sums[index], squares[index]):
                        self.zero(register)
                self.move(FROM, CHANNELS)
                with self.repeat(BLOCK, LEFT_INSIDE):
                    for index, pivot in enumerate(pivots):
                        self.load(x, at(FROM, index * self.vector_nbytes))
                        self.v("VSUBPS", x, x, pivot)
                        self.v("VADDPS", sums[index], sums[index], x)
                        self.v("VMULPS", x, x, x)
                        self.v("VADDPS", squares[index], squares[index], x)
                    self.add(FROM, self.argument("row"))
                for slot, vectors in ((SUM, sums), (SQUARES, squares)):
                    for index, vector in enumerate(vectors):
                        place = at(AREA, self.slot(slot, index))
                        self.v("VADDPS", vector, vector, place)
                        self.v("VMOVUPS <", place, vector)
                self.advance(width * self.vector_nbytes, CHANNELS)
                self.advance(self.slot(0, width), AREA)

    def settle(self) -> None:
        """Turn the sums into this thread's mean and squared deviations from it, vector by vector."""
        places, mean, square, squares = self.registers(0, 4)
        self.begin()
        self.v("VBROADCASTSS", places, at(AREA, -self.isa.nbytes))
        self.v("VMAXPS", places, places, self.argument("one"))  # a thread may have none
        with self.repeat(self.argument("vectors"), LEFT):
            sums = at(AREA, self.slot(SUM))
            self.v("VMOVUPS", mean, sums)
            self.v("VMULPS", square, mean, mean)
            self.v("VDIVPS", square, square, places)
            self.v("VMOVUPS", squares, at(AREA, self.slot(SQUARES)))
            self.v("VSUBPS", squares, squares, square)
            self.v("VMOVUPS <", at(AREA, self.slot(SQUARES)), squares)
            self.v("VDIVPS", mean, mean, places)
            self.v("VADDPS", mean, mean, at(AREA, self.slot(MEAN)))
            self.v("VMOVUPS <", sums, mean)
            self.advance(self.slot(0, 1), AREA)

    # ------------------------------------------------------------------ all threads' sums

    def find_means(self, width: int) -> None:
        """Average this thread's places, and total the means of all threads."""
        self.note_places()
        self.find_pivots(width)
        with self.preserved(SRC, PLACES):
            self.add_up(width)
        self.settle()
        self.meet()
        self.total(MEAN)

    def meet(self) -> None:
        """Wait until all threads are here."""
        with self.preserved(SRC, DST, PLACES, FREE):  # an even number again
            self.emit("VEX_VZEROUPPER")
            self.emit("CALL_RM64", self.argument("barrier"))

    def total(self, slot: int) -> None:
        """Add up all threads' means times their places, or the squared deviations from the groups' means."""
        total, x, places = self.registers(0, 3)
        self.begin()
        self.zero(total)
        with self.repeat(self.argument("vectors"), LEFT):
            self.v("VMOVUPS <", at(AREA, self.slot(FACTOR)), total)
            self.advance(self.slot(0, 1), AREA)
        self.move(FROM, self.argument("areas"))
        with self.repeat(THREADS, LEFT_INSIDE):
            self.v("VBROADCASTSS", places, at(FROM, -self.isa.nbytes))
            self.begin()
            self.move(FREE, FROM)
            with self.repeat(self.argument("vectors"), LEFT):
                self.v("VMOVUPS", x, at(FREE, self.slot(SUM)))
                if slot == FACTOR:
                    self.v("VSUBPS", x, x, at(AREA, self.slot(MEAN)))
                    self.v("VMULPS", x, x, x)
                self.v("VMULPS", x, x, places)
                if slot == FACTOR:
                    self.v("VADDPS", x, x, at(FREE, self.slot(SQUARES)))
                self.v("VADDPS", x, x, at(AREA, self.slot(FACTOR)))
                self.v("VMOVUPS <", at(AREA, self.slot(FACTOR)), x)
                self.advance(self.slot(0, 1), AREA, FREE)
            self.add(FROM, self.argument("area"))

    def invert(self, variance: int, one: int) -> None:
        """Turn a vector of variances into one over the deviations."""
        self.v("VADDPS", variance, variance, self.argument("epsilon"))
        self.v("VSQRTPS", variance, variance)
        self.v("VMOVUPS", one, self.argument("one"))
        self.v("VDIVPS", variance, one, variance)

    # ------------------------------------------------------------------ the result

    def normalize(self, width: int, dst_row: str = "row", limits: tuple[str, str] | None = None) -> None:
        """Write the result: ``(src - mean) * factor * scale + shift``.

        `dst_row`: argument with the bytes of dst from place to place.
        """
        x, low, high = self.registers(0, 3)
        factors, means, shifts = (self.registers(3 + n * width, width) for n in range(3))
        for register, name in zip((low, high), limits or (), strict=False):
            self.v("VMOVUPS", register, self.argument(name))
        with self.blocks((SRC, "row"), (DST, dst_row)):
            self.begin()
            self.emit("XOR_R32_RM32", Register.EAX, Register.EAX)
            with self.repeat(self.argument("columns"), LEFT):
                for name, vectors in (("scale", factors), ("shift", shifts)):
                    self.move(FROM, self.argument(name))
                    self.add(FROM, CHANNELS)
                    for index, vector in enumerate(vectors):
                        self.v("VMOVUPS", vector, at(FROM, index * self.isa.nbytes))
                for index in range(width):
                    self.v("VMULPS", factors[index], factors[index], at(AREA, self.slot(FACTOR, index)))
                    self.v("VMOVUPS", means[index], at(AREA, self.slot(MEAN, index)))
                # a channel's numbers are half as wide in bf16
                self.move(FREE, CHANNELS)
                if self.bf16:
                    self.immediate("SHR_RM64_IMM8", FREE, 1)
                for pointer, start in ((FROM, SRC), (TO, DST)):
                    self.move(pointer, start)
                    self.add(pointer, FREE)
                with self.repeat(BLOCK, LEFT_INSIDE):
                    for index in range(width):
                        self.load(x, at(FROM, index * self.vector_nbytes))
                        self.v("VSUBPS", x, x, means[index])
                        self.v("VMULPS", x, x, factors[index])
                        self.v("VADDPS", x, x, shifts[index])
                        if limits:  # of two operands, NaN among them, the last is the result
                            self.v("VMAXPS", x, low, x)
                            self.v("VMINPS", x, high, x)
                        self.store(at(TO, index * self.vector_nbytes), x)
                    for pointer, row in ((FROM, "row"), (TO, dst_row)):
                        self.add(pointer, self.argument(row))
                self.advance(width * self.isa.nbytes, CHANNELS)
                self.advance(self.slot(0, width), AREA)

    # ------------------------------------------------------------------ helpers

    def registers(self, first: int, count: int) -> list[int]:
        """Return consecutive vector registers."""
        return [self.register(first + index) for index in range(count)]

    def slot(self, slot: int, index: int = 0) -> int:
        """Return the bytes from a vector of channels in an area to a slot of the one `index` further on."""
        return (index * self.slots + slot) * self.isa.nbytes

    def begin(self) -> None:
        """Go to the start of this thread's area."""
        self.point(AREA, "areas", THREAD, "area")

    def bound(self, register: int, most: int) -> None:
        """Set a register to the number of places that are left, or to a smaller number."""
        self.immediate("MOV_RM64_IMM32", register, most)
        self.emit("CMP_R64_RM64", PLACES, register)
        self.emit("CMOVB_R64_RM64", register, PLACES)

    @contextmanager
    def blocks(self, *moving: tuple[int, str]) -> Iterator[None]:
        """Add a loop over blocks of this thread's places; it uses up `PLACES`.

        `*moving`: pointers that the loop moves, each with the argument that has its bytes from place to place.
        """
        name = self._new_label()
        self.label(name)
        self.emit("TEST_RM64_R64", PLACES, PLACES)
        self.branch("JE_REL32_64", f"after {name}")
        self.bound(BLOCK, BLOCK_PLACES)
        yield
        for pointer, row in moving:
            self.move(FREE, BLOCK)
            self.emit("IMUL_R64_RM64", FREE, self.argument(row))
            self.add(pointer, FREE)
        self.emit("SUB_R64_RM64", PLACES, BLOCK)
        self.branch("JMP_REL32_64", name)
        self.label(f"after {name}")

    @contextmanager
    def preserved(self, *registers: int) -> Iterator[None]:
        """Restore registers after the instructions of the block."""
        for register in registers:
            self.emit("PUSH_R64", register)
        yield
        for register in reversed(registers):
            self.emit("POP_R64", register)
