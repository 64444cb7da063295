"""The program of layer and RMS normalization: the instructions for a thread's share of the rows."""

from __future__ import annotations

from iced_x86 import Register

from fmtprop.jit.arguments import UNROLLED
from fmtprop.jit.assembler import at
from fmtprop.jit.ends_program import EndsProgram
from fmtprop.jit.isa import Isa
from fmtprop.jit.row_norm import RowNormArguments

#: the thread's current row, and the row after its last
_ITEM, _END = Register.R8, Register.R9

_SRC, _DST, _SCALE, _SHIFT, _PLACE = Register.RSI, Register.RDI, Register.R11, Register.RDX, Register.R10

#: vector registers behind the sums
_X, _MEAN, _FACTOR = UNROLLED, UNROLLED + 1, UNROLLED + 2


def row_norm(isa: Isa, src: str, dst: str, *, centred: bool, shifted: bool, rounds: bool, rest: int) -> bytes:
    """Return the program; `rest` numbers of a row are behind its last whole vector."""
    p = _RowNorm(isa, RowNormArguments, src, dst, rounds=rounds, rest=rest)
    p.share(_ITEM, _END, "rows")
    p.point(_SRC, "src", _ITEM, "src_row")
    p.point(_DST, "dst", _ITEM, "dst_row")
    if shifted:
        p.v("VMOVUPS", p.register(_MEAN), p.argument("offset"))
    with p.until(_ITEM, _END):
        if centred:
            p.average(_MEAN, centred=False, squares=False)
        p.average(_FACTOR, centred=centred or shifted, squares=True)
        p.normalize(centred=centred or shifted, is_added=centred)
    return p.finished()


class _RowNorm(EndsProgram):
    def average(self, result: int, *, centred: bool, squares: bool) -> None:
        """Set a register to the mean of a row, or to one over the root of its mean of squares."""
        totals, x, found = [self.register(index) for index in range(UNROLLED)], self.register(_X), self.register(result)

        def vector(index: int, start: int, overlaps: bool) -> None:
            self.read(x, at(_PLACE, start * self.src_nbytes))
            if centred:
                self.v("VSUBPS", x, x, self.register(_MEAN))
            if overlaps:
                self.only_new(x)
            if squares:
                self.v("VFMADD231PS", totals[index], x, x)
            else:
                self.v("VADDPS", totals[index], totals[index], x)

        for total in totals:
            self.zero(total)
        self.move(_PLACE, _SRC)
        self.over_row(vector, {_PLACE: self.src_nbytes})
        self.across(totals)
        self.spread(found)
        self.v("VDIVPS", found, found, self.argument("divisor"))
        if squares:
            self.v("VADDPS", found, found, self.argument("epsilon"))
            self.v("VSQRTPS", x, found)
            self.v("VMOVUPS", found, self.argument("one"))
            self.v("VDIVPS", found, found, x)

    def normalize(self, *, centred: bool, is_added: bool) -> None:
        """Write the results of a row, to which shift is added or not; the pointers to src and dst move on."""
        self.move(_SCALE, self.argument("scale"))
        self.move(_SHIFT, self.argument("shift"))

        def vector(index: int, start: int, overlaps: bool) -> None:
            x = self.register(index)
            self.read(x, at(_SRC, start * self.src_nbytes))
            if centred:
                self.v("VSUBPS", x, x, self.register(_MEAN))
            self.v("VMULPS", x, x, self.register(_FACTOR))
            self.v("VMULPS", x, x, at(_SCALE, 4 * start))
            if is_added:
                self.v("VADDPS", x, x, at(_SHIFT, 4 * start))
            if self.rounds:
                self.v("VMULPS", x, x, self.argument("inverse"))
            self.write(at(_DST, start * self.dst_nbytes), x)

        self.over_row(vector, {_SRC: self.src_nbytes, _DST: self.dst_nbytes, _SCALE: 4, _SHIFT: 4})
