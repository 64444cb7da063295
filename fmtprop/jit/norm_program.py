"""The program of group normalization: the instructions for a thread's share of the places."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from iced_x86 import Register

from fmtprop.jit.assembler import Isa, at
from fmtprop.jit.norms import BLOCK_PLACES, PIVOT_PLACES, SLOTS, GroupNormArguments
from fmtprop.jit.program import THREAD, THREADS, Program

__all__ = ["group_norm"]

#: this thread's next place of the image, in src and in dst; number of its places from there; images that are left
_SRC, _DST, _PLACES, _IMAGES = Register.R10, Register.R11, Register.R9, Register.R15

#: places of the present block; where the work is within its columns, in src and in dst
_BLOCK, _FROM, _TO = Register.R13, Register.RDX, Register.R14

#: where the work is within an area, and within a row of channels
_AREA, _CHANNELS = Register.RSI, Register.RAX

#: turns that are left, of an outer loop and of an inner one
_LEFT, _LEFT_INSIDE = Register.R8, Register.RCX

_FREE = Register.RDI

#: registers that the program must restore at its end
_SAVED = (_BLOCK, _TO, _IMAGES)

#: vectors of an area for each vector of channels: sum of the deviations from the pivot, then this thread's mean; sum of
#: their squares, then of the squared deviations from its mean; the pivot, then the group's mean; totals, then the
#: factor
_SUM, _SQUARES, _MEAN, _FACTOR = range(SLOTS)


def group_norm(isa: Isa, width: int, *, bf16: bool) -> bytes:
    """Return the program that normalizes groups of channels, image by image; dst may be src.

    Parameters
    ----------
    isa : Isa
        For which machine.
    width : int
        Number of vectors of channels that are treated at a time, at most 4; a divisor of the vectors of a row.
    bf16 : bool
        Whether src and dst are bf16 instead of f32; requires AVX-512 with bf16.
    """
    return _GroupNorm(isa, GroupNormArguments, bf16=bf16).program(width)


class _GroupNorm(Program):
    def program(self, width: int) -> bytes:
        with self._preserved(*_SAVED, _FREE):  # an even number: the stack is aligned for calls
            self.portions(_FREE, _PLACES, "places")
            self.emit("SUB_R64_RM64", _PLACES, _FREE)
            self.point(_SRC, "src", _FREE, "row")
            self.point(_DST, "dst", _FREE, "row")
            with self.repeat(self.argument("images"), _IMAGES):
                self._note_places()
                self._find_pivots(width)
                with self._preserved(_SRC, _PLACES):
                    self._add_up(width)
                self._settle()
                self._meet()
                self._total(_MEAN)
                self._combine(_MEAN)
                self._total(_FACTOR)
                self._combine(_FACTOR)
                self._meet()  # the next image's sums go where these are
                with self._preserved(_SRC, _DST, _PLACES):
                    self._normalize(width)
                for pointer in (_SRC, _DST):
                    self.add(pointer, self.argument("image"))
        return self.finished()

    # ------------------------------------------------------------------ this thread's sums

    def _note_places(self) -> None:
        """Write the number of this thread's places before its area."""
        self.point(_AREA, "areas", THREAD, "area")
        self.emit("VEX_VCVTSI2SS_XMM_XMM_RM64", Register.XMM0, Register.XMM0, _PLACES)
        self.emit("VEX_VMOVSS_M32_XMM", at(_AREA, -self.isa.nbytes), Register.XMM0)

    def _find_pivots(self, width: int) -> None:
        """Average the first places of each channel: this pivot is subtracted from all numbers, so squares stay small.

        As these places are among the others, the mean is at most so far from the pivot, in deviations, as the root of
        all places over these.
        """
        totals, x, places = self._registers(0, width), self.isa.register(width), self.isa.register(width + 1)
        self._bound(_BLOCK, PIVOT_PLACES)
        self.emit("VEX_VCVTSI2SS_XMM_XMM_RM64", Register.XMM0, Register.XMM0, _BLOCK)
        self._begin()
        self.emit("VEX_VMOVSS_M32_XMM", at(_AREA, self._slot(_SUM)), Register.XMM0)
        self.v("VBROADCASTSS", places, at(_AREA, self._slot(_SUM)))
        self.v("VMAXPS", places, places, self.argument("one"))
        self.move(_CHANNELS, _SRC)
        with self.repeat(self.argument("columns"), _LEFT):
            for total in totals:
                self.zero(total)
            self.move(_FROM, _CHANNELS)
            with self.repeat(_BLOCK, _LEFT_INSIDE):
                for index, total in enumerate(totals):
                    self.v("VADDPS", total, total, self.operand(x, at(_FROM, index * self.vector_nbytes)))
                self.add(_FROM, self.argument("row"))
            for index, total in enumerate(totals):
                self.v("VDIVPS", total, total, places)
                self.v("VMOVUPS <", at(_AREA, self._slot(_MEAN, index)), total)
                self.zero(x)
                for slot in (_SUM, _SQUARES):
                    self.v("VMOVUPS <", at(_AREA, self._slot(slot, index)), x)
            self.advance(width * self.vector_nbytes, _CHANNELS)
            self.advance(self._slot(0, width), _AREA)

    def _add_up(self, width: int) -> None:
        """Add up the deviations from the pivots, and their squares: first over a block of places."""
        pivots, sums, squares = (self._registers(first, width) for first in (0, width, 2 * width))
        x = self.isa.register(3 * width)
        with self._blocks(_SRC):
            self._begin()
            self.move(_CHANNELS, _SRC)
            with self.repeat(self.argument("columns"), _LEFT):
                for index, pivot in enumerate(pivots):
                    self.v("VMOVUPS", pivot, at(_AREA, self._slot(_MEAN, index)))
                    for register in (sums[index], squares[index]):
                        self.zero(register)
                self.move(_FROM, _CHANNELS)
                with self.repeat(_BLOCK, _LEFT_INSIDE):
                    for index, pivot in enumerate(pivots):
                        self.load(x, at(_FROM, index * self.vector_nbytes))
                        self.v("VSUBPS", x, x, pivot)
                        self.v("VADDPS", sums[index], sums[index], x)
                        self.v("VMULPS", x, x, x)
                        self.v("VADDPS", squares[index], squares[index], x)
                    self.add(_FROM, self.argument("row"))
                for slot, vectors in ((_SUM, sums), (_SQUARES, squares)):
                    for index, vector in enumerate(vectors):
                        place = at(_AREA, self._slot(slot, index))
                        self.v("VADDPS", vector, vector, place)
                        self.v("VMOVUPS <", place, vector)
                self.advance(width * self.vector_nbytes, _CHANNELS)
                self.advance(self._slot(0, width), _AREA)

    def _settle(self) -> None:
        """Turn the sums into this thread's mean and squared deviations from it, vector by vector."""
        places, mean, square, squares = self._registers(0, 4)
        self._begin()
        self.v("VBROADCASTSS", places, at(_AREA, -self.isa.nbytes))
        self.v("VMAXPS", places, places, self.argument("one"))  # a thread may have none
        with self.repeat(self.argument("vectors"), _LEFT):
            sums = at(_AREA, self._slot(_SUM))
            self.v("VMOVUPS", mean, sums)
            self.v("VMULPS", square, mean, mean)
            self.v("VDIVPS", square, square, places)
            self.v("VMOVUPS", squares, at(_AREA, self._slot(_SQUARES)))
            self.v("VSUBPS", squares, squares, square)
            self.v("VMOVUPS <", at(_AREA, self._slot(_SQUARES)), squares)
            self.v("VDIVPS", mean, mean, places)
            self.v("VADDPS", mean, mean, at(_AREA, self._slot(_MEAN)))
            self.v("VMOVUPS <", sums, mean)
            self.advance(self._slot(0, 1), _AREA)

    # ------------------------------------------------------------------ all threads' sums

    def _meet(self) -> None:
        with self._preserved(_SRC, _DST, _PLACES, _FREE):  # an even number again
            self.emit("VEX_VZEROUPPER")
            self.emit("CALL_RM64", self.argument("barrier"))

    def _total(self, slot: int) -> None:
        """Add up all threads' means times their places, or the squared deviations from the groups' means."""
        total, x, places = self._registers(0, 3)
        self._begin()
        self.zero(total)
        with self.repeat(self.argument("vectors"), _LEFT):
            self.v("VMOVUPS <", at(_AREA, self._slot(_FACTOR)), total)
            self.advance(self._slot(0, 1), _AREA)
        self.move(_FROM, self.argument("areas"))
        with self.repeat(THREADS, _LEFT_INSIDE):
            self.v("VBROADCASTSS", places, at(_FROM, -self.isa.nbytes))
            self._begin()
            self.move(_FREE, _FROM)
            with self.repeat(self.argument("vectors"), _LEFT):
                self.v("VMOVUPS", x, at(_FREE, self._slot(_SUM)))
                if slot == _FACTOR:
                    self.v("VSUBPS", x, x, at(_AREA, self._slot(_MEAN)))
                    self.v("VMULPS", x, x, x)
                self.v("VMULPS", x, x, places)
                if slot == _FACTOR:
                    self.v("VADDPS", x, x, at(_FREE, self._slot(_SQUARES)))
                self.v("VADDPS", x, x, at(_AREA, self._slot(_FACTOR)))
                self.v("VMOVUPS <", at(_AREA, self._slot(_FACTOR)), x)
                self.advance(self._slot(0, 1), _AREA, _FREE)
            self.add(_FROM, self.argument("area"))

    def _combine(self, slot: int) -> None:
        """Add up the totals of each group's channels; set their slot to the mean, or to one over the deviation."""
        total, x = self._registers(0, 2)
        self._begin()
        self.move(_CHANNELS, self.argument("table"))
        with self.repeat(self.argument("groups"), _LEFT):
            self.zero(total)
            self.move(_FROM, _CHANNELS)
            with self._members(_FROM):
                self.v("VBROADCASTSS", x, at(_FREE, self._slot(_FACTOR)))
                self.v("VADDPS", total, total, x)
            self.v("VDIVPS", total, total, self.argument("divisor"))
            if slot == _FACTOR:
                self.v("VADDPS", total, total, self.argument("epsilon"))
                self.v("VSQRTPS", total, total)
                self.v("VMOVUPS", x, self.argument("one"))
                self.v("VDIVPS", total, x, total)
            with self._members(_CHANNELS):
                self.emit("VEX_VMOVSS_M32_XMM", at(_FREE, self._slot(slot)), Register.XMM0)

    @contextmanager
    def _members(self, entry: int) -> Iterator[None]:
        """Add a loop over a group's channels: `_FREE` points to the channel in the area, `entry` to it in the table."""
        with self.repeat(self.argument("group"), _LEFT_INSIDE):
            self.move(_FREE, at(entry))
            self.add(_FREE, _AREA)
            yield
            self.advance(8, entry)

    # ------------------------------------------------------------------ the result

    def _normalize(self, width: int) -> None:
        factors, means, shifts = (self._registers(first, width) for first in (0, width, 2 * width))
        x, row = self.isa.register(3 * width), self.argument("row")
        with self._blocks(_SRC, _DST):
            self._begin()
            self.emit("XOR_R32_RM32", Register.EAX, Register.EAX)
            with self.repeat(self.argument("columns"), _LEFT):
                for name, vectors in (("scale", factors), ("shift", shifts)):
                    self.move(_FROM, self.argument(name))
                    self.add(_FROM, _CHANNELS)
                    for index, vector in enumerate(vectors):
                        self.v("VMOVUPS", vector, at(_FROM, index * self.isa.nbytes))
                for index in range(width):
                    self.v("VMULPS", factors[index], factors[index], at(_AREA, self._slot(_FACTOR, index)))
                    self.v("VMOVUPS", means[index], at(_AREA, self._slot(_MEAN, index)))
                # a channel's numbers are half as wide in bf16
                self.move(_FREE, _CHANNELS)
                if self.bf16:
                    self.immediate("SHR_RM64_IMM8", _FREE, 1)
                for pointer, start in ((_FROM, _SRC), (_TO, _DST)):
                    self.move(pointer, start)
                    self.add(pointer, _FREE)
                with self.repeat(_BLOCK, _LEFT_INSIDE):
                    for index in range(width):
                        self.load(x, at(_FROM, index * self.vector_nbytes))
                        self.v("VSUBPS", x, x, means[index])
                        self.v("VMULPS", x, x, factors[index])
                        self.v("VADDPS", x, x, shifts[index])
                        self.store(at(_TO, index * self.vector_nbytes), x)
                    for pointer in (_FROM, _TO):
                        self.add(pointer, row)
                self.advance(width * self.isa.nbytes, _CHANNELS)
                self.advance(self._slot(0, width), _AREA)

    # ------------------------------------------------------------------ helpers

    def _registers(self, first: int, count: int) -> list[int]:
        return [self.isa.register(first + index) for index in range(count)]

    def _slot(self, slot: int, index: int = 0) -> int:
        """Return the bytes from a vector of channels in an area to a slot of the one `index` further on."""
        return (index * SLOTS + slot) * self.isa.nbytes

    def _begin(self) -> None:
        self.point(_AREA, "areas", THREAD, "area")

    def _bound(self, register: int, most: int) -> None:
        """Set a register to the number of places that are left, or to a smaller number."""
        self.immediate("MOV_RM64_IMM32", register, most)
        self.emit("CMP_R64_RM64", _PLACES, register)
        self.emit("CMOVB_R64_RM64", register, _PLACES)

    @contextmanager
    def _blocks(self, *pointers: int) -> Iterator[None]:
        """Add a loop over blocks of this thread's places; it moves the pointers, and uses up `_PLACES`."""
        name = self._new_label()
        self.label(name)
        self.emit("TEST_RM64_R64", _PLACES, _PLACES)
        self.branch("JE_REL32_64", f"after {name}")
        self._bound(_BLOCK, BLOCK_PLACES)
        yield
        self.move(_FREE, _BLOCK)
        self.emit("IMUL_R64_RM64", _FREE, self.argument("row"))
        for pointer in pointers:
            self.add(pointer, _FREE)
        self.emit("SUB_R64_RM64", _PLACES, _BLOCK)
        self.branch("JMP_REL32_64", name)
        self.label(f"after {name}")

    @contextmanager
    def _preserved(self, *registers: int) -> Iterator[None]:
        for register in registers:
            self.emit("PUSH_R64", register)
        yield
        for register in reversed(registers):
            self.emit("POP_R64", register)
