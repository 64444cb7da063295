"""The program of dequantizations by one scale."""

from __future__ import annotations

from iced_x86 import Register

from fmtprop.jit.assembler import at
from fmtprop.jit.dequantize import DequantizeArguments
from fmtprop.jit.ends_program import EndsProgram
from fmtprop.jit.isa import Isa

#: the thread's current piece, and the piece after its last
_ITEM, _END = Register.R8, Register.R9

_SRC, _DST, _START = Register.RSI, Register.RDI, Register.R10

#: registers of the scale and of the zero point, behind those of a turn
_SCALE, _ZERO = 8, 9


def dequantize(isa: Isa, src: str, has_zero_point: bool, rest: int) -> bytes:
    """Return the program; `rest` numbers of a piece are behind its last whole vector."""
    p = EndsProgram(isa, DequantizeArguments, src, "f32", rounds=False, rest=rest)
    scale, zero = p.register(_SCALE), p.register(_ZERO)

    def vector(index: int, start: int, overlaps: bool) -> None:
        x = p.register(index)
        p.read(x, at(_SRC, start))
        if has_zero_point:
            p.v("VSUBPS", x, x, zero)
        p.v("VMULPS", x, x, scale)
        p.write(at(_DST, start * p.dst_nbytes), x)

    p.share(_ITEM, _END, "pieces")
    p.move(_SRC, p.argument("scale"))
    p.v("VBROADCASTSS", scale, at(_SRC))
    if has_zero_point:
        p.move(_SRC, p.argument("zero_point"))
        p.emit("MOVSX_R32_RM8" if src == "s8" else "MOVZX_R32_RM8", Register.EAX, at(_SRC))
        p.emit("VEX_VCVTSI2SS_XMM_XMM_RM32", Register.XMM0, Register.XMM0, Register.EAX)
        p.spread(zero)
    with p.until(_ITEM, _END):
        # the last piece overlaps the one before
        p.move(_START, _ITEM)
        p.emit("IMUL_R64_RM64", _START, p.argument("piece"))
        p.emit("CMP_R64_RM64", _START, p.argument("last"))
        p.emit("CMOVA_R64_RM64", _START, p.argument("last"))
        for pointer, name, nbytes in ((_SRC, "src", 1), (_DST, "dst", p.dst_nbytes)):
            p.move(pointer, p.argument(name))
            p.emit("LEA_R64_M", pointer, at(pointer, 0, _START, nbytes))
        p.over_row(vector, {_SRC: 1, _DST: p.dst_nbytes})
    return p.finished()
