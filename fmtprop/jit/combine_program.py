"""The program of sums, differences and products of bytes."""

from __future__ import annotations

from iced_x86 import MemoryOperand, Register

from fmtprop.jit.arguments import UNROLLED
from fmtprop.jit.assembler import at
from fmtprop.jit.combine import VECTORS, CombineArguments
from fmtprop.jit.isa import Isa
from fmtprop.jit.program import ARITHMETIC, Program

#: the thread's current row, the one after its last, and the vectors that are left of a row
_ITEM, _END, _LEFT = Register.R8, Register.R9, Register.RCX

_SRC, _OTHER, _DST, _START = Register.RSI, Register.R11, Register.RDI, Register.R10

#: register of the first constant vector
_CONSTANTS = 16


def combine(isa: Isa, alg: str, signed: tuple[bool, bool], *, shared: bool) -> bytes:
    """Return the program, for AVX-512.

    `signed`: whether the bytes of each source have a sign. `shared`: whether a row is combined with one number of
    src_1.
    """
    p = Program(isa, CombineArguments, bf16=False)
    constants = {name: p.register(_CONSTANTS + number) for number, name in enumerate(VECTORS)}
    x, y = p.register(0), p.register(1)

    def real(number: int, vector: int) -> None:
        """Make real numbers of the integers of a source."""
        p.v("VCVTDQ2PS", vector, vector)
        p.v("VSUBPS", vector, vector, constants[f"zero_{number}"])
        p.v("VMULPS", vector, vector, constants[f"scale_{number}"])

    def widened(number: int, vector: int, place: MemoryOperand, mask: int | None) -> None:
        p.v("VPMOVSXBD" if signed[number] else "VPMOVZXBD", vector, place, mask=mask)
        real(number, vector)

    def vector(offset: int, mask: int | None = None) -> None:
        """Combine one vector of numbers."""
        widened(0, x, at(_SRC, offset), mask)
        if not shared:
            widened(1, y, at(_OTHER, offset), mask)
        p.v(ARITHMETIC[alg], x, x, y)
        p.v("VDIVPS", x, x, constants["step"])  # by a reciprocal, halves would be rounded elsewhere
        p.v("VMAXPS", x, x, constants["low"])
        p.v("VMINPS", x, x, constants["high"])
        p.emit("EVEX_VCVTPS2DQ_ZMM_K1Z_ZMMM512B32_ER", x, x)
        p.emit("EVEX_VPADDD_ZMM_K1Z_ZMM_ZMMM512B32", x, x, constants["zero"])
        p.emit("EVEX_VPMOVDB_XMMM128_K1Z_ZMM", at(_DST, offset), x, mask=mask)

    p.share(_ITEM, _END, "rows")
    p.point(_SRC, "src_0", _ITEM, "pitch")
    p.point(_DST, "dst", _ITEM, "row")
    p.point(_START, "table", _ITEM, 8)
    for name, register in constants.items():
        p.v("VMOVUPS", register, p.argument(name))
    p.emit("VEX_KMOVW_KR_KM16", Register.K1, p.argument("mask"))
    with p.until(_ITEM, _END):
        p.move(_OTHER, at(_START))
        p.add(_OTHER, p.argument("src_1"))
        if shared:
            p.emit("MOVSX_R32_RM8" if signed[1] else "MOVZX_R32_RM8", Register.EAX, at(_OTHER))
            p.emit("EVEX_VPBROADCASTD_ZMM_K1Z_R32", y, Register.EAX)
            real(1, y)
        for count in p.vectors(UNROLLED, _LEFT):
            for index in range(count):
                vector(index * isa.lanes)
            p.advance(count * isa.lanes, _SRC, _DST, _OTHER)
        with p.repeat(p.argument("rest"), _LEFT):
            vector(0, Register.K1)
        p.add(_SRC, p.argument("gap"))
        p.add(_DST, p.argument("left"))
        p.advance(8, _START)
    return p.finished()
