"""The program of softmax: the instructions for a thread's share of the rows."""

from __future__ import annotations

from functools import partial

from iced_x86 import Register

from fmtprop.jit.arguments import UNROLLED
from fmtprop.jit.assembler import at
from fmtprop.jit.ends_program import EndsProgram
from fmtprop.jit.functions import exp_of_negative
from fmtprop.jit.isa import Isa
from fmtprop.jit.program import THREAD, with_table
from fmtprop.jit.softmax import SoftmaxArguments

#: the thread's current row, and the row after its last
_ITEM, _END = Register.R8, Register.R9

_SRC, _DST, _AREA, _PLACE = Register.RSI, Register.RDI, Register.R11, Register.R10

#: where functions find their numbers
_TABLE = Register.RDX


def softmax(isa: Isa, src: str, dst: str, *, rounds: bool, rest: int) -> tuple[bytes, bytes]:
    """Return the program and its table of numbers; `rest` numbers of a row are behind its last whole vector."""
    return with_table(partial(_assembled, isa, src, dst, rounds, rest))


def _assembled(isa: Isa, src: str, dst: str, rounds: bool, rest: int, numbers: tuple[bytes, ...]) -> _Softmax:
    p = _Softmax(isa, SoftmaxArguments, src, dst, rounds=rounds, rest=rest)
    p.share(_ITEM, _END, "rows")
    p.point(_SRC, "src", _ITEM, "src_row")
    p.point(_DST, "dst", _ITEM, "dst_row")
    p.point(_AREA, "areas", THREAD, "area")
    with p.until(_ITEM, _END):
        p.find_largest()
        p.exponentials(numbers)
        p.divide_by_sum()
    return p


class _Softmax(EndsProgram):
    def find_largest(self) -> None:
        """Set all numbers of register 0 to the largest of a row."""
        chains, x = [self.register(index) for index in range(UNROLLED)], self.register(UNROLLED)
        for chain in chains:
            self.v("VMOVUPS", chain, self.argument("lowest"))

        def vector(index: int, start: int, overlaps: bool) -> None:
            self.read(x, at(_PLACE, start * self.src_nbytes))
            self.v("VMAXPS", chains[index], chains[index], x)

        self.move(_PLACE, _SRC)
        self.over_row(vector, {_PLACE: self.src_nbytes})
        self.across(chains, "VMAXPS")
        self.spread(chains[0])

    def exponentials(self, numbers: tuple[bytes, ...]) -> None:
        """Write the exponentials of a row to the thread's area; set register 0 to one over their sum."""
        self.move(_TABLE, self.argument("numbers"))
        self.load_numbers(numbers)
        self.release()
        most, total = self.vector(), self.vector()
        self.zero(total)

        def vector(index: int, start: int, overlaps: bool) -> None:
            self.release()
            self.vector(), self.vector()
            x = self.vector()
            self.read(x, at(_SRC, start * self.src_nbytes))
            self.v("VSUBPS", x, most, x)
            if self.src_nbytes == 1:
                self.v("VMULPS", x, x, self.argument("factor"))
            y = exp_of_negative(self, x)
            self.v("VMOVUPS <", at(_PLACE, 4 * start), y)
            if overlaps:
                self.only_new(y)
            self.v("VADDPS", total, total, y)

        self.move(_PLACE, _AREA)
        self.over_row(vector, {_SRC: self.src_nbytes, _PLACE: 4})
        self.across([total])
        self.spread(total)
        self.v("VMOVUPS", most, self.argument("one"))
        self.v("VDIVPS", most, most, total)

    def divide_by_sum(self) -> None:
        """Write the results of a row; the pointer to dst moves on to the next."""

        def vector(index: int, start: int, overlaps: bool) -> None:
            x = self.register(1 + index)
            self.v("VMULPS", x, self.register(0), at(_PLACE, 4 * start))
            self.write(at(_DST, start * self.dst_nbytes), x)

        self.move(_PLACE, _AREA)
        self.over_row(vector, {_PLACE: 4, _DST: self.dst_nbytes})
