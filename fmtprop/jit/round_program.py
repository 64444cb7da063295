"""The program of roundings to a grid."""

from __future__ import annotations

from iced_x86 import Register

from fmtprop.jit.assembler import at
from fmtprop.jit.ends_program import EndsProgram
from fmtprop.jit.isa import Isa
from fmtprop.jit.round import RoundArguments

#: the thread's current row, and the row after its last
_ITEM, _END = Register.R8, Register.R9

_SRC, _DST, _START = Register.RSI, Register.RDI, Register.R10


def round_rows(isa: Isa, src: str, dst: str, *, rest: int) -> bytes:
    """Return the program; `rest` numbers of a row are behind its last whole vector."""
    p = EndsProgram(isa, RoundArguments, src, dst, rounds=True, rest=rest)

    def vector(index: int, start: int, overlaps: bool) -> None:
        x = p.register(index)
        p.read(x, at(_SRC, start * p.src_nbytes))
        if src != "f32":
            p.v("VSUBPS", x, x, p.argument("src_zero"))
            p.v("VMULPS", x, x, p.argument("src_scale"))
        p.v("VDIVPS", x, x, p.argument("step"))  # by a reciprocal, halves would be rounded elsewhere
        p.write(at(_DST, start * p.dst_nbytes), x)

    def find(pointer: int, name: str, pitch: str, nbytes: int) -> None:
        """Set a pointer to a row; the last piece of a tensor without gaps overlaps the one before."""
        p.move(_START, _ITEM)
        p.emit("IMUL_R64_RM64", _START, p.argument(pitch))
        p.emit("CMP_R64_RM64", _START, p.argument("last"))
        p.emit("CMOVA_R64_RM64", _START, p.argument("last"))
        p.move(pointer, p.argument(name))
        p.emit("LEA_R64_M", pointer, at(pointer, 0, _START, nbytes))

    p.share(_ITEM, _END, "rows")
    with p.until(_ITEM, _END):
        find(_SRC, "src", "pitch", p.src_nbytes)
        find(_DST, "dst", "length", p.dst_nbytes)
        p.over_row(vector, {_SRC: p.src_nbytes, _DST: p.dst_nbytes})
    return p.finished()
