"""The program of embeddings in codes: the instructions for a thread's share of the indices."""

from __future__ import annotations

from iced_x86 import Register

from fmtprop.jit.assembler import at
from fmtprop.jit.gather_nbits import GatherNBitsKernel
from fmtprop.jit.gather_program import PLACE, load_index
from fmtprop.jit.gemv_program import END, ITEM, WEIGHTS
from fmtprop.jit.isa import Isa
from fmtprop.jit.nbits_program import GROUPS, Decoding, X

#: the index of a row
_INDEX = Register.R11


def gather_nbits(isa: Isa, kernel: GatherNBitsKernel) -> bytes:
    """Return the program that decodes the rows of a thread's share of the indices."""
    p = Decoding(isa, kernel)
    p.share(ITEM, END, "count")
    p.emit("PUSH_R64", END)
    p.point(PLACE, "indices", ITEM, kernel.index_nbytes)
    p.point(X, "dst", ITEM, "dst_row")
    with p.until(ITEM, at(Register.RSP)):
        load_index(p, _INDEX, at(PLACE), kernel.index_nbytes)
        p.point(WEIGHTS, "weights", _INDEX, "row")
        p.point_to_scales(_INDEX)
        with p.repeat(p.argument("groups"), GROUPS):
            p.group(p.store_numbers)
        p.advance(kernel.index_nbytes, PLACE)
    p.advance(8, Register.RSP)
    return p.finished()
