"""The program that makes the factors and summands of a batch normalization from its statistics."""

from __future__ import annotations

from iced_x86 import Register

from fmtprop.jit.assembler import at
from fmtprop.jit.given_norm import FactorArguments
from fmtprop.jit.isa import Isa
from fmtprop.jit.program import Program

#: bytes of the channels that are done, and a vector of an operand or result
_DONE, _VECTOR = Register.RCX, Register.RAX


def factors(isa: Isa, *, has_scale: bool, has_shift: bool) -> bytes:
    """Return the program; the last vector overlaps another where the channels are no whole vectors."""
    p = Program(isa, FactorArguments, bf16=False)

    def vector(name: str) -> int:
        p.move(_VECTOR, _DONE)
        p.add(_VECTOR, p.argument(name))
        return _VECTOR

    deviation, factor, summand = (p.register(index) for index in range(3))
    p.emit("XOR_R32_RM32", Register.ECX, Register.ECX)
    p.label("vector")
    p.v("VMOVUPS", deviation, at(vector("variance")))
    p.v("VADDPS", deviation, deviation, p.argument("epsilon"))
    p.v("VSQRTPS", deviation, deviation)
    p.v("VMOVUPS", factor, at(vector("scale")) if has_scale else p.argument("one"))
    p.v("VDIVPS", factor, factor, deviation)
    p.v("VMOVUPS <", at(vector("factors")), factor)
    p.zero(summand)
    if has_shift:
        p.v("VMOVUPS", summand, at(vector("shift")))
    p.v("VFNMADD231PS", summand, factor, at(vector("mean")))
    p.v("VMOVUPS <", at(vector("summands")), summand)
    p.emit("CMP_R64_RM64", _DONE, p.argument("last"))
    p.branch("JAE_REL32_64", "done")
    p.advance(isa.nbytes, _DONE)
    p.emit("CMP_R64_RM64", _DONE, p.argument("last"))
    p.emit("CMOVA_R64_RM64", _DONE, p.argument("last"))
    p.branch("JMP_REL32_64", "vector")
    return p.finished()
