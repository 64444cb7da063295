"""The program that puts rows into a tensor: a thread's share of the tensors of a batch."""

from __future__ import annotations

from iced_x86 import Register

from fmtprop.jit.assembler import at
from fmtprop.jit.gather_program import PLACE, load_index
from fmtprop.jit.isa import Isa
from fmtprop.jit.program import Program
from fmtprop.jit.put import PutArguments

#: the thread's current tensor, and the one after its last; the row to write; its tensor in dst; rows that are left
_ITEM, _END, _ROW, _WHOLE, _LEFT = Register.R8, Register.R9, Register.R11, Register.RDX, Register.RAX

#: as the instruction that copies bytes has them
_SRC, _DST, _NBYTES = Register.RSI, Register.RDI, Register.RCX


def put(isa: Isa, index_nbytes: int) -> bytes:
    """Return the program.

    `index_nbytes`: bytes of an index, 4 or 8.
    """
    p = Program(isa, PutArguments, bf16=False)
    p.share(_ITEM, _END, "batch")
    with p.until(_ITEM, _END):
        p.point(_WHOLE, "dst", _ITEM, "whole")
        p.point(_SRC, "src_0", _ITEM, "whole")
        p.emit("CMP_R64_RM64", _SRC, _WHOLE)
        p.branch("JE_REL32_64", "in place")
        p.move(_DST, _WHOLE)
        p.move(_NBYTES, p.argument("whole"))
        p.copy_bytes()
        p.label("in place")
        p.point(_ROW, "starts", _ITEM, 8)
        p.move(_ROW, at(_ROW))
        p.add(_ROW, p.argument("src_2"))
        p.move(PLACE, p.argument("src_1"))
        with p.repeat(p.argument("count"), _LEFT):
            load_index(p, _DST, at(PLACE), index_nbytes)
            p.emit("IMUL_R64_RM64", _DST, p.argument("row"))
            p.add(_DST, _WHOLE)
            p.move(_SRC, _ROW)
            p.move(_NBYTES, p.argument("row"))
            p.copy_bytes()
            p.add(_ROW, p.argument("step"))
            p.advance(index_nbytes, PLACE)
    return p.finished()
