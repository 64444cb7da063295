"""The program of RMS normalization: the instructions for a thread's share of the rows."""

from __future__ import annotations

from iced_x86 import Register

from fmtprop.jit.arguments import UNROLLED
from fmtprop.jit.assembler import at
from fmtprop.jit.isa import Isa
from fmtprop.jit.program import Program
from fmtprop.jit.rms_norm import RmsNormArguments

#: the thread's current row, and the row after its last; the work that is left within a row
_ITEM, _END, _LEFT = Register.R8, Register.R9, Register.RCX

_SRC, _DST, _SCALE, _PLACE = Register.RSI, Register.RDI, Register.R11, Register.R10

#: a number in the red zone below the stack (System V AMD64 ABI); no function is called while it is in use
_NUMBER = -8


def rms_norm(isa: Isa, *, bf16: bool) -> bytes:
    """Return the program that normalizes rows; dst may be src."""
    p = Program(isa, RmsNormArguments, bf16=bf16)
    totals, x = [p.register(index) for index in range(UNROLLED)], p.register(UNROLLED)
    p.share(_ITEM, _END, "rows")
    p.point(_SRC, "src", _ITEM, "row")
    p.point(_DST, "dst", _ITEM, "row")
    with p.until(_ITEM, _END):
        for total in totals:
            p.zero(total)
        p.move(_PLACE, _SRC)
        for count in p.vectors(UNROLLED, _LEFT):
            for index, total in enumerate(totals[:count]):
                p.load(x, at(_PLACE, index * p.vector_nbytes))
                p.v("VFMADD231PS", total, x, x)
            p.advance(count * p.vector_nbytes, _PLACE)
        p.across(totals)
        p.emit("VEX_VMOVSS_M32_XMM", at(Register.RSP, _NUMBER), Register.XMM0)
        factor, root = totals[0], totals[1]
        p.v("VBROADCASTSS", root, at(Register.RSP, _NUMBER))
        p.v("VDIVPS", root, root, p.argument("divisor"))
        p.v("VADDPS", root, root, p.argument("epsilon"))
        p.v("VSQRTPS", root, root)
        p.v("VMOVUPS", factor, p.argument("one"))
        p.v("VDIVPS", factor, factor, root)
        p.move(_SCALE, p.argument("scale"))
        for count in p.vectors(UNROLLED, _LEFT):
            for index in range(count):
                p.load(x, at(_SRC, index * p.vector_nbytes))
                p.v("VMULPS", x, x, factor)
                p.v("VMULPS", x, x, at(_SCALE, index * isa.nbytes))
                p.store(at(_DST, index * p.vector_nbytes), x)
            p.advance(count * p.vector_nbytes, _SRC, _DST)
            p.advance(count * isa.nbytes, _SCALE)
    return p.finished()
