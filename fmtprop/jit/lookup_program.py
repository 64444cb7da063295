"""The program of functions by a table of bytes."""

from __future__ import annotations

from iced_x86 import Register

from fmtprop.jit.assembler import at
from fmtprop.jit.isa import Isa
from fmtprop.jit.lookup import LINE_NBYTES, LookupArguments
from fmtprop.jit.program import Program

#: first and last line of the thread; then the bytes that are left, and where they are
_FIRST, _END, _SRC, _DST, _ENTRIES = Register.R8, Register.R9, Register.RSI, Register.RDI, Register.R10


def lookup(isa: Isa, *, by_vectors: bool) -> bytes:
    """Return the program.

    `by_vectors`: whether the CPU permutes bytes of two vectors (AVX512_VBMI).
    """
    p = Program(isa, LookupArguments, bf16=False)
    p.share(_FIRST, _END, "lines")
    for register in (_FIRST, _END):
        p.immediate("SHL_RM64_IMM8", register, LINE_NBYTES.bit_length() - 1)
    # the last line may be shorter
    p.emit("CMP_R64_RM64", _END, p.argument("count"))
    p.branch("JBE_REL32_64", "whole")
    p.move(_END, p.argument("count"))
    p.label("whole")
    for pointer, name in ((_SRC, "src"), (_DST, "dst")):
        p.move(pointer, _FIRST)
        p.add(pointer, p.argument(name))
    p.move(_ENTRIES, p.argument("entries"))
    p.emit("SUB_R64_RM64", _END, _FIRST)
    if by_vectors:
        _vectors(p)
    p.label("bytes")
    p.emit("TEST_RM64_R64", _END, _END)
    p.branch("JE_REL32_64", "done")
    p.emit("MOVZX_R32_RM8", Register.EAX, at(_SRC))
    p.emit("MOVZX_R32_RM8", Register.EAX, at(_ENTRIES, 0, Register.RAX))
    p.emit("MOV_RM8_R8", at(_DST), Register.AL)
    p.advance(1, _SRC, _DST)
    p.emit("DEC_RM64", _END)
    p.branch("JMP_REL32_64", "bytes")
    return p.finished()


def _vectors(p: Program) -> None:
    """Add the loop over whole vectors: both halves of the table, and the last bit of each byte chooses."""
    x, low, high, *table = (p.register(number) for number in range(7))
    for number, part in enumerate(table):
        p.v("VMOVUPS", part, at(_ENTRIES, number * LINE_NBYTES))
    p.label("vectors")
    p.immediate("CMP_RM64_IMM8", _END, LINE_NBYTES)
    p.branch("JB_REL32_64", "bytes")
    p.v("VMOVUPS", x, at(_SRC))
    p.v("VMOVUPS", low, x)
    p.v("VMOVUPS", high, x)
    p.emit("EVEX_VPMOVB2M_KR_ZMM", Register.K1, x)
    p.emit("EVEX_VPERMI2B_ZMM_K1Z_ZMM_ZMMM512", low, table[0], table[1])
    p.emit("EVEX_VPERMI2B_ZMM_K1Z_ZMM_ZMMM512", high, table[2], table[3])
    p.emit("EVEX_VPBLENDMB_ZMM_K1Z_ZMM_ZMMM512", low, low, high, mask=Register.K1)
    p.v("VMOVUPS <", at(_DST), low)
    p.advance(LINE_NBYTES, _SRC, _DST)
    p.immediate("SUB_RM64_IMM8", _END, LINE_NBYTES)
    p.branch("JMP_REL32_64", "vectors")
