"""The program of attention for bf16 numbers: each lane has a pair of them, and sums are f32.

The pairs of a query and of a key follow one another in memory. Values, and the weights that they are multiplied by, are
pairs of two keys: values are interleaved once for all blocks of queries of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from iced_x86 import MemoryOperand, Register

from fmtprop.jit.arguments import VECTORS
from fmtprop.jit.assembler import at
from fmtprop.jit.attention_program import FRAME, KEYS, VALUE, AttentionProgram
from fmtprop.jit.functions import exp_of_negative

_A, _B, _C, _D, _E = Register.RAX, Register.RSI, Register.RDI, Register.RCX, Register.R11

#: further places in the frame: the values that are interleaved, where they are then, and their pairs
_INTERLEAVED, _PAIRS, _COUNT = 96, 104, 112


class HalfAttentionProgram(AttentionProgram):
    """The program for bf16 numbers, with AVX-512 and bf16.

    The depth is even. Behind the scores there is one row more, of minus infinity, for the last pair of an odd number of
    keys.
    """

    bf16 = True
    accumulate = "VDPBF16PS"
    values, count = _PAIRS, _COUNT

    def _room(self, nbytes: int) -> None:
        p = self.p
        super()._room(nbytes)
        p.immediate("ADD_RM64_IMM32", nbytes, self.row)
        p.move(_C, p.argument("keys"))
        self._halve(_C)
        p.immediate("MOV_R32_IMM32", Register.R11D, self.value_row)
        p.emit("IMUL_R64_RM64", _C, _E)
        p.add(nbytes, _C)

    def _halve(self, number: int) -> None:
        """Divide a number by two and round it up."""
        self.p.immediate("ADD_RM64_IMM32", number, 1)
        self.p.immediate("SHR_RM64_IMM8", number, 1)

    def _enter(self) -> None:
        p = self.p
        super()._enter()
        p.emit("XOR_R32_RM32", Register.EAX, Register.EAX)
        self._keep(_INTERLEAVED, _A)
        p.move(_A, p.argument("keys"))
        p.immediate("ADD_RM64_IMM32", _A, 1)
        p.immediate("SHL_RM64_IMM8", _A, self.row.bit_length() - 1)
        p.immediate("ADD_RM64_IMM32", _A, self.scores)
        p.add(_A, FRAME)
        self._keep(_PAIRS, _A)

    def _begin(self) -> None:
        super()._begin()
        self._interleave()

    def _interleave(self) -> None:
        """Make pairs of the values of two keys, if these are not the values of the block before."""
        p = self.p
        first, second = self.register(0), self.register(1)
        p.move(_B, at(FRAME, VALUE))
        p.emit("CMP_R64_RM64", _B, at(FRAME, _INTERLEAVED))
        p.branch("JE_REL32_64", "interleaved")
        self._keep(_INTERLEAVED, _B)
        p.move(_C, at(FRAME, _PAIRS))
        p.move(_D, p.argument("keys"))
        p.immediate("SHR_RM64_IMM8", _D, 1)
        with p.repeat(_D, _E):
            for column in self._columns():
                p.v("VPMOVZXWD", first, at(_B, 2 * column))
                p.load(second, at(_B, self.shape.value_row + 2 * column))
                p.v("VPORD", first, first, second)
                self._put(at(_C, 4 * column), first)
            p.advance(2 * self.shape.value_row, _B)
            p.advance(self.value_row, _C)
        p.move(_D, p.argument("keys"))
        p.immediate("AND_RM64_IMM8", _D, 1)
        p.branch("JE_REL32_64", "interleaved")
        for column in self._columns():
            p.v("VPMOVZXWD", first, at(_B, 2 * column))
            self._put(at(_C, 4 * column), first)
        p.label("interleaved")

    def _pack_lane(self, place: MemoryOperand, number: MemoryOperand) -> None:
        """Store a pair of numbers of a query."""
        self.p.emit("MOV_R32_RM32", Register.EAX, number)
        self.p.emit("MOV_RM32_R32", place, Register.EAX)

    def _products(self, totals: Sequence[Sequence[int]], first: int) -> None:
        super()._products(totals, first)
        scale = self.register(VECTORS * self.keys)
        self.p.v("VBROADCASTSS", scale, self.p.argument("scale"))
        for total in chain.from_iterable(totals):
            self.p.v("VMULPS", total, total, scale)

    def _exponentials(self) -> None:
        """Replace the scores by pairs of their exponentials; keep the inverse of each query's sum."""
        p, lowest = self.p, self.register(0)
        p.v("VBROADCASTSS", lowest, p.argument("start"))
        p.move(_A, at(FRAME, KEYS))
        p.move(_B, _A)
        p.immediate("SHL_RM64_IMM8", _B, self.row.bit_length() - 1)
        p.add(_B, FRAME)
        for v in range(VECTORS):
            self._put(at(_B, self.scores + v * self.nbytes), lowest)
        self._halve(_A)
        self._keep(_COUNT, _A)
        p.move(Register.RDX, p.argument("numbers"))
        p.load_numbers(self.numbers)
        for v in range(VECTORS):
            most, total = self._two_vectors()
            self._get(most, at(FRAME, self.largest + v * self.nbytes))
            p.zero(total)
            for pointer in (_B, _C):
                self._point(pointer, self.scores + v * self.nbytes)
            with p.repeat(at(FRAME, _COUNT), _D):
                for key in (0, self.row):
                    self._two_vectors()
                    x = p.vector()
                    p.v("VSUBPS", x, most, at(_B, key))
                    y = exp_of_negative(p, x)
                    p.v("VADDPS", total, total, y)
                    if key == 0:
                        self._put(at(_B), y)
                p.v("VCVTNE2PS2BF16", y, y, at(_B))
                p.v("VPERMW", y, self._alternating(), y)
                self._put(at(_C), y)
                p.advance(2 * self.row, _B)
                p.advance(self.row, _C)
            self._keep_inverse(v, most, total)

    def _two_vectors(self) -> tuple[int, int]:
        """Return the first two registers, and give back all others."""
        self.p.release()
        return self.p.vector(), self.p.vector()

    def _alternating(self) -> int | MemoryOperand:
        """Return the places of numbers of both halves in turns."""
        return self.p.places([place + self.lanes * second for place in range(self.lanes) for second in (0, 1)])
