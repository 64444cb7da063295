"""The programs of embeddings: a check of the indices, and the copy of a thread's share of the rows."""

from __future__ import annotations

from ctypes import Structure

from iced_x86 import MemoryOperand, Register

from fmtprop.jit.arguments import GatherArguments
from fmtprop.jit.assembler import Assembler, at
from fmtprop.jit.isa import AVX2, Isa
from fmtprop.jit.program import Program

#: the thread's current index, and the one after its last; where the index is
_ITEM, _END, PLACE = Register.R8, Register.R9, Register.R10

#: as the instruction that copies bytes has them
_SRC, _DST, _NBYTES = Register.RSI, Register.RDI, Register.RCX


def gather(isa: Isa, index_nbytes: int) -> bytes:
    """Return the program that copies rows.

    `index_nbytes`: bytes of an index, 4 or 8.
    """
    p = Program(isa, GatherArguments, bf16=False)
    p.share(_ITEM, _END, "count")
    p.point(PLACE, "src_1", _ITEM, index_nbytes)
    p.point(_DST, "dst", _ITEM, "row")
    with p.until(_ITEM, _END):
        load_index(p, _SRC, at(PLACE), index_nbytes)
        # a negative index counts from the end
        p.emit("MOV_R64_RM64", _NBYTES, _SRC)
        p.immediate("SAR_RM64_IMM8", _NBYTES, 63)
        p.emit("AND_R64_RM64", _NBYTES, p.argument("limit"))
        p.add(_SRC, _NBYTES)
        p.emit("IMUL_R64_RM64", _SRC, p.argument("pitch"))
        p.add(_SRC, p.argument("src_0"))
        p.move(_NBYTES, p.argument("row"))
        p.copy_bytes()
        p.advance(index_nbytes, PLACE)
    return p.finished()


def check(index_nbytes: int, arguments: type[Structure], indices: str) -> bytes:
    """Return ``int check(arguments)``: 1 if an index does not exist, else 0.

    `index_nbytes`: bytes of an index, 4 or 8. `arguments`: with `count`, `below` and `reach`. `indices`: their name.
    """
    a = Assembler(AVX2)  # any instruction set: there are no vectors

    def argument(name: str) -> MemoryOperand:
        return at(Register.RDI, getattr(arguments, name).offset)

    a.emit("MOV_R64_RM64", PLACE, argument(indices))
    a.emit("MOV_R64_RM64", _NBYTES, argument("count"))
    check_indices(a, index_nbytes, argument("below"), argument("reach"))
    return a.code()


def check_indices(a: Assembler, index_nbytes: int, below: MemoryOperand, reach: MemoryOperand) -> None:
    """Add a function's last instructions: return 1 if one of RCX indices at `PLACE` does not exist, else 0.

    `index_nbytes`: bytes of an index, 4 or 8. `below`, `reach`: number of negative indices that exist, and of all.
    """
    a.emit("XOR_R32_RM32", Register.EAX, Register.EAX)
    a.emit("TEST_RM64_R64", _NBYTES, _NBYTES)
    a.branch("JE_REL32_64", "checked")
    a.label("next")
    load_index(a, Register.RDX, at(PLACE), index_nbytes)
    a.emit("ADD_R64_RM64", Register.RDX, below)
    a.emit("CMP_R64_RM64", Register.RDX, reach)  # without sign: a negative number is a large one
    a.branch("JAE_REL32_64", "outside")
    a.immediate("ADD_RM64_IMM32", PLACE, index_nbytes)
    a.emit("DEC_RM64", _NBYTES)
    a.branch("JNE_REL32_64", "next")
    a.label("checked")
    a.emit("RETNQ")
    a.label("outside")
    a.emit("INC_RM32", Register.EAX)
    a.emit("RETNQ")


def load_index(a: Assembler, register: int, place: MemoryOperand, index_nbytes: int) -> None:
    """Load an index of 4 or 8 bytes."""
    a.emit("MOV_R64_RM64" if index_nbytes == 8 else "MOVSXD_R64_RM32", register, place)
