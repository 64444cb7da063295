"""The programs of batch normalization in training and of its gradient, each with the function behind it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from iced_x86 import Code, Instruction, Register

from fmtprop.jit.assembler import at
from fmtprop.jit.batch_norms import BatchNormArguments, BatchNormGradientArguments
from fmtprop.jit.channel_program import (
    AREA,
    BLOCK,
    CHANNELS,
    DST,
    FACTOR,
    FREE,
    FROM,
    LEFT,
    LEFT_INSIDE,
    MEAN,
    MORE,
    PLACES,
    SAVED,
    SRC,
    SUM,
    TO,
    ChannelProgram,
)
from fmtprop.jit.isa import Isa
from fmtprop.jit.program import THREADS

#: this thread's next place in diff_dst
_DIFF = MORE

#: vectors of an area of the gradient for each vector of channels: sums of the gradient, and of its products with the
#: deviations from the mean; the mean; the factor and the summand of the normalization; the number subtracted from the
#: gradient, and the factor of the deviation
_PRODUCTS, _MEANS, _FACTORS, _SHIFTS, _LESS, _LESS_TIMES = range(1, 7)

#: registers for numbers in the making, before those that hold slots
_FREE_REGISTERS = 5

#: predicates of a comparison that NaN fulfils: neither less nor equal; neither greater nor equal
_NOT_LESS_OR_EQUAL, _NOT_GREATER_OR_EQUAL = 0x16, 0x19


def batch_norm(isa: Isa, width: int, *, limited: bool, bf16: bool) -> bytes:
    """Return the program that normalizes each channel by its own mean and deviation, and writes these; dst may be src.

    `width`: number of vectors of channels that are treated at a time, at most 4; a divisor of the vectors of a row.
    """
    return _BatchNorm(isa, BatchNormArguments, bf16=bf16).program(width, limited)


def batch_norm_gradient(isa: Isa, width: int, *, limited: bool, bf16: bool) -> bytes:
    """Return the program of the gradients by src, scale and shift; diff_src may be diff_dst.

    `width`: number of vectors of channels that are treated at a time, at most 4, or 2 on AVX2.
    """
    return _Gradient(isa, BatchNormGradientArguments, bf16=bf16).program(width, limited)


class _BatchNorm(ChannelProgram):
    def program(self, width: int, limited: bool) -> bytes:
        with self.preserved(*SAVED, FREE):  # an even number: the stack is aligned for calls
            self.portions(FREE, PLACES, "places")
            self.emit("SUB_R64_RM64", PLACES, FREE)
            self.point(SRC, "src", FREE, "row")
            self.point(DST, "dst", FREE, "dst_row")
            self.find_means(width)
            self._average("mean", MEAN)
            self.total(FACTOR)
            self._average("variance", FACTOR)
            self.normalize(width, "dst_row", ("low", "high") if limited else None)
        return self.finished()

    def _average(self, name: str, slot: int) -> None:
        """Divide the totals; write the result to an argument, and the mean, or one over the deviation, to a slot."""
        total, one = self.registers(0, 2)
        self.begin()
        self.move(TO, self.argument(name))
        with self.repeat(self.argument("vectors"), LEFT):
            self.v("VMOVUPS", total, at(AREA, self.slot(FACTOR)))
            self.v("VDIVPS", total, total, self.argument("divisor"))
            self.v("VMOVUPS <", at(TO), total)  # all threads write the same numbers
            if slot == FACTOR:
                self.invert(total, one)
            self.v("VMOVUPS <", at(AREA, self.slot(slot)), total)
            self.advance(self.isa.nbytes, TO)
            self.advance(self.slot(0, 1), AREA)


class _Gradient(ChannelProgram):
    slots = 8

    def program(self, width: int, limited: bool) -> bytes:
        with self.preserved(*SAVED, FREE):
            self.portions(FREE, PLACES, "places")
            self.emit("SUB_R64_RM64", PLACES, FREE)
            self.point(SRC, "src", FREE, "row")
            self.point(_DIFF, "diff_dst", FREE, "diff_row")
            self.point(DST, "diff_src", FREE, "dst_row")
            self._prepare()
            with self.preserved(SRC, _DIFF, PLACES):
                self._add_up(width, limited)
            self.meet()
            self._gather()
            self._write(width, limited)
        return self.finished()

    def _prepare(self) -> None:
        """Fill this thread's area: no sums yet, and the normalization of each channel."""
        x, one = self.registers(0, 2)
        self.begin()
        self.emit("XOR_R32_RM32", Register.EAX, Register.EAX)
        with self.repeat(self.argument("vectors"), LEFT):
            self.zero(x)
            for slot in (SUM, _PRODUCTS):
                self.v("VMOVUPS <", at(AREA, self.slot(slot)), x)
            for name, slot in (("mean", _MEANS), ("shift", _SHIFTS)):
                self._vector(x, name)
                self.v("VMOVUPS <", at(AREA, self.slot(slot)), x)
            self._inverse(x, one)
            self._vector(one, "scale")
            self.v("VMULPS", x, x, one)
            self.v("VMOVUPS <", at(AREA, self.slot(_FACTORS)), x)
            self.advance(self.isa.nbytes, CHANNELS)
            self.advance(self.slot(0, 1), AREA)

    def _vector(self, x: int, name: str) -> None:
        """Load the present channels of an argument."""
        self.move(FROM, self.argument(name))
        self.add(FROM, CHANNELS)
        self.v("VMOVUPS", x, at(FROM))

    def _inverse(self, x: int, one: int) -> None:
        """Set a vector to one over the deviation of the present channels."""
        self._vector(x, "variance")
        self.invert(x, one)

    def _add_up(self, width: int, limited: bool) -> None:
        """Add up the gradient, and its products with the deviations."""
        known = self._known(width, _MEANS, _FACTORS, _SHIFTS, SUM, _PRODUCTS)
        with self._columns(known, kept=(SUM, _PRODUCTS)):
            for index in range(width):
                x, diff = self._loaded(index, known, limited)
                self.v("VADDPS", known[SUM][index], known[SUM][index], diff)
                self.v("VFMADD231PS", known[_PRODUCTS][index], diff, x)

    def _gather(self) -> None:
        """Add up the sums of all threads; write the gradients by scale and shift."""
        total, products, inverse, one = self.registers(0, 4)
        self.begin()
        self.move(TO, self.argument("areas"))
        self.emit("XOR_R32_RM32", Register.EAX, Register.EAX)
        with self.repeat(self.argument("vectors"), LEFT):
            for register in (total, products):
                self.zero(register)
            self.move(FREE, TO)
            with self.repeat(THREADS, LEFT_INSIDE):
                for register, slot in ((total, SUM), (products, _PRODUCTS)):
                    self.v("VADDPS", register, register, at(FREE, self.slot(slot)))
                self.add(FREE, self.argument("area"))
            self._inverse(inverse, one)
            self.v("VMULPS", products, products, inverse)
            for name, register in (("diff_shift", total), ("diff_scale", products)):  # all threads write the same
                self.move(FROM, self.argument(name))
                self.add(FROM, CHANNELS)
                self.v("VMOVUPS <", at(FROM), register)
            self.v("VMULPS", products, products, inverse)
            for register, slot in ((total, _LESS), (products, _LESS_TIMES)):
                self.v("VDIVPS", register, register, self.argument("divisor"))
                self.v("VMOVUPS <", at(AREA, self.slot(slot)), register)
            self.advance(self.isa.nbytes, CHANNELS)
            self.advance(self.slot(0, 1), AREA, TO)

    def _write(self, width: int, limited: bool) -> None:
        """Write the gradient by src."""
        known = self._known(width, _MEANS, _FACTORS, _SHIFTS, _LESS, _LESS_TIMES)
        with self._columns(known, (DST, "dst_row")):
            for index in range(width):
                x, diff = self._loaded(index, known, limited)
                self.v("VSUBPS", diff, diff, known[_LESS][index])
                self.v("VFNMADD231PS", diff, x, known[_LESS_TIMES][index])
                self.v("VMULPS", diff, diff, known[_FACTORS][index])
                self.store(at(FREE, index * self.vector_nbytes), diff)

    # ------------------------------------------------------------------ places and channels

    def _known(self, width: int, *slots: int) -> dict[int, list[int]]:
        """Return registers for slots of an area; the first ones are free."""
        return {slot: self.registers(_FREE_REGISTERS + n * width, width) for n, slot in enumerate(slots)}

    @contextmanager
    def _columns(
        self, known: Mapping[int, Sequence[int]], *written: tuple[int, str], kept: Sequence[int] = ()
    ) -> Iterator[None]:
        """Add loops over places and channels: `FROM` points into src, `TO` into diff_dst, `FREE` into diff_src.

        `*written`: the pointer to the result, and the argument with its bytes from place to place.
        """
        width, moving = len(next(iter(known.values()))), ((SRC, "row"), (_DIFF, "diff_row"), *written)
        for register, name in zip(self.registers(3, 2), ("low", "high"), strict=True):
            self.v("VMOVUPS", register, self.argument(name))
        with self.blocks(*moving):
            self.begin()
            self.emit("XOR_R32_RM32", Register.EAX, Register.EAX)
            with self.repeat(self.argument("columns"), LEFT):
                for slot, registers in known.items():
                    for index, register in enumerate(registers):
                        self.v("VMOVUPS", register, at(AREA, self.slot(slot, index)))
                inside = list(zip((FROM, TO, FREE), moving, strict=False))
                for pointer, (start, _) in inside:
                    self.move(pointer, start)
                    self.add(pointer, CHANNELS)
                with self.repeat(BLOCK, LEFT_INSIDE):
                    yield
                    for pointer, (_, row) in inside:
                        self.add(pointer, self.argument(row))
                for slot in kept:
                    for index, register in enumerate(known[slot]):
                        self.v("VMOVUPS <", at(AREA, self.slot(slot, index)), register)
                self.advance(width * self.vector_nbytes, CHANNELS)
                self.advance(self.slot(0, width), AREA)

    def _loaded(self, index: int, known: Mapping[int, Sequence[int]], limited: bool) -> tuple[int, int]:
        """Load deviations from the mean, and the gradient: 0 where the normalized number was limited."""
        x, y, diff, low, high = self.registers(0, 5)
        self.load(x, at(FROM, index * self.vector_nbytes))
        self.v("VSUBPS", x, x, known[_MEANS][index])
        self.load(diff, at(TO, index * self.vector_nbytes))
        if limited:  # rounded as in the forward pass
            self.v("VMULPS", y, x, known[_FACTORS][index])
            self.v("VADDPS", y, y, known[_SHIFTS][index])
            self._select(diff, y, ((low, _NOT_LESS_OR_EQUAL), (high, _NOT_GREATER_OR_EQUAL)))
        return x, diff

    def _select(self, x: int, y: int, comparisons: Iterable[tuple[int, int]]) -> None:
        """Set a vector to 0 where another one fails one of the comparisons."""
        if self.isa.nbytes == 64:
            create: Any = Instruction
            mask = Register.NONE
            for limit, predicate in comparisons:
                code = Code.EVEX_VCMPPS_KR_K1_ZMM_ZMMM512B32_IMM8_SAE
                compare = create.create_reg_reg_reg_u32(code, Register.K1, y, limit, predicate)
                compare.op_mask = mask
                self._add(compare)
                mask = Register.K1
            select = create.create_reg_reg(self.form("VMOVUPS"), x, x)
            select.op_mask, select.zeroing_masking = mask, True
            self._add(select)
            return
        inside = self.register(self.isa.registers - 1)
        for limit, predicate in comparisons:
            self.v("VCMPPS", inside, y, limit, immediate=predicate)
            self.v("VANDPS", x, x, inside)
