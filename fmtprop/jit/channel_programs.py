"""Programs over the rows of channels-last tensors: one number for each channel, at one place after the other.

Rows are shared out, not channels: a kernel before or behind that goes through memory from front to back, as those for
SiLU do, has the same part of it in the cache of the same core.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from iced_x86 import Register

from fmtprop.jit.assembler import Assembler, Isa, at
from fmtprop.jit.channelwise import Arguments
from fmtprop.jit.frame import Frame

__all__ = ["PROGRAMS"]


def average(isa: Isa, group: int, *, bf16: bool) -> bytes:
    """Return the program that averages the places of each image: sums by thread, and then the sums of these.

    Parameters
    ----------
    isa : Isa
        For which machine.
    group : int
        How many vectors of channels are added up at a time; they divide the channels.
    bf16 : bool
        Whether the numbers are bf16 and not f32; with AVX-512 and bf16 only.
    """
    a = Assembler(isa)
    frame = Frame(a, Arguments)
    first, rows, image, sums, row, channels, left, groups = (
        *(Register.R8, Register.R9, Register.R10, Register.R11),
        *(Register.RAX, Register.RSI, Register.RDX, Register.RCX),
    )
    size = isa.nbytes_in_memory(bf16=bf16)
    frame.enter()
    frame.portions(first, rows, frame.argument("places"))
    a.emit("SUB_R64_RM64", rows, first)
    a.emit("MOV_R64_RM64", image, first)
    a.emit("IMUL_R64_RM64", image, frame.argument("row"))
    a.emit("ADD_R64_RM64", image, frame.argument("src"))
    a.emit("MOV_R64_RM64", sums, frame.argument("vectors"))
    a.immediate("SHL_RM64_IMM8", sums, _shift(isa.nbytes))
    a.emit("IMUL_R64_RM64", sums, Register.R12)
    a.emit("ADD_R64_RM64", sums, frame.argument("other"))
    a.emit("MOV_R64_RM64", Register.RDI, frame.argument("images"))
    a.label("image")
    a.emit("MOV_R64_RM64", channels, image)
    a.emit("MOV_R64_RM64", groups, frame.argument("groups"))
    a.label("group")
    for index in range(group):
        register = Register.XMM0 + index  # the whole register: what is above is set to zero
        a.emit("VEX_VXORPS_XMM_XMM_XMMM128", register, register, register)
    a.emit("MOV_R64_RM64", row, channels)
    a.emit("MOV_R64_RM64", left, rows)
    a.emit("TEST_RM64_R64", left, left)
    a.branch("JE_REL32_64", "none")
    a.label("row")
    for index in range(group):
        total, place = isa.register(index), at(row, index * size)
        if bf16:
            a.load(isa.register(group), place, bf16=True)
            a.v("VADDPS", total, total, isa.register(group))
        else:
            a.v("VADDPS", total, total, place)
    a.emit("ADD_R64_RM64", row, frame.argument("row"))
    a.emit("DEC_RM64", left)
    a.branch("JNE_REL32_64", "row")
    a.label("none")
    for index in range(group):
        a.store(at(sums, index * isa.nbytes), isa.register(index))
    a.immediate("ADD_RM64_IMM32", sums, group * isa.nbytes)
    a.immediate("ADD_RM64_IMM32", channels, group * size)
    a.emit("DEC_RM64", groups)
    a.branch("JNE_REL32_64", "group")
    a.emit("MOV_R64_RM64", row, frame.argument("row"))
    a.emit("IMUL_R64_RM64", row, frame.argument("places"))
    a.emit("ADD_R64_RM64", image, row)
    a.emit("DEC_RM64", Register.RDI)
    a.branch("JNE_REL32_64", "image")
    a.emit("VEX_VZEROUPPER")
    a.emit("CALL_RM64", frame.argument("barrier"))
    _gather(a, frame, size, bf16=bf16)
    frame.leave()
    return a.code()


def _gather(a: Assembler, frame: Frame, size: int, *, bf16: bool) -> None:
    """Add up the threads' sums, and divide: each thread some of the vectors."""
    vector, end, sums, step, place, left, dst = (
        *(Register.R8, Register.R9, Register.R10, Register.RSI),
        *(Register.RAX, Register.RCX, Register.RDI),
    )
    nbytes, total = a.isa.nbytes, a.vector()
    frame.portions(vector, end, frame.argument("vectors"))
    a.emit("CMP_R64_RM64", vector, end)
    a.branch("JAE_REL32_64", "done")
    a.emit("MOV_R64_RM64", sums, vector)
    a.immediate("SHL_RM64_IMM8", sums, _shift(nbytes))
    a.emit("ADD_R64_RM64", sums, frame.argument("other"))
    a.emit("MOV_R64_RM64", step, frame.argument("vectors"))
    a.immediate("SHL_RM64_IMM8", step, _shift(nbytes))
    a.emit("MOV_R64_RM64", dst, vector)
    a.immediate("SHL_RM64_IMM8", dst, _shift(size))
    a.emit("ADD_R64_RM64", dst, frame.argument("dst"))
    a.label("vector")
    a.load(total, at(sums))
    a.emit("MOV_R64_RM64", place, sums)
    a.emit("MOV_R64_RM64", left, Register.RBP)
    a.label("thread")
    a.emit("DEC_RM64", left)
    a.branch("JE_REL32_64", "divide")
    a.emit("ADD_R64_RM64", place, step)
    a.v("VADDPS", total, total, at(place))
    a.branch("JMP_REL32_64", "thread")
    a.label("divide")
    a.v("VDIVPS", total, total, frame.argument("divisor"))
    a.store(at(dst), total, bf16=bf16)
    a.immediate("ADD_RM64_IMM8", sums, nbytes)
    a.immediate("ADD_RM64_IMM8", dst, size)
    a.emit("INC_RM64", vector)
    a.emit("CMP_R64_RM64", vector, end)
    a.branch("JB_REL32_64", "vector")
    a.label("done")


def scale(isa: Isa, group: int, *, bf16: bool) -> bytes:
    """Return the program that multiplies each row with factors, the same ones for so many rows; dst may be src.

    Parameters
    ----------
    isa, group, bf16
        As of :func:`average`.
    """
    a = Assembler(isa)
    frame = Frame(a, Arguments)
    row, end, factors, left, place, groups, src, dst = (
        *(Register.R8, Register.R9, Register.R10, Register.R11),
        *(Register.RAX, Register.RCX, Register.RSI, Register.RDI),
    )
    size = isa.nbytes_in_memory(bf16=bf16)
    frame.enter()
    frame.portions(row, end, frame.argument("rows"))
    a.emit("CMP_R64_RM64", row, end)
    a.branch("JAE_REL32_64", "done")
    for pointer, name in ((src, "src"), (dst, "dst")):
        a.emit("MOV_R64_RM64", pointer, row)
        a.emit("IMUL_R64_RM64", pointer, frame.argument("row"))
        a.emit("ADD_R64_RM64", pointer, frame.argument(name))
    a.emit("MOV_R64_RM64", Register.RAX, row)
    a.emit("XOR_R32_RM32", Register.EDX, Register.EDX)
    a.emit("DIV_RM64", frame.argument("places"))  # which factors, and for how many rows they were used
    a.emit("MOV_R64_RM64", left, frame.argument("places"))
    a.emit("SUB_R64_RM64", left, Register.RDX)
    a.emit("IMUL_R64_RM64", Register.RAX, frame.argument("row"))
    a.emit("ADD_R64_RM64", Register.RAX, frame.argument("other"))
    a.emit("MOV_R64_RM64", factors, Register.RAX)
    a.label("row")
    a.emit("MOV_R64_RM64", place, factors)
    a.emit("MOV_R64_RM64", groups, frame.argument("groups"))
    a.label("group")
    for offset in range(0, group * size, size):
        a.release()
        x = a.vector()
        a.load(x, at(src, offset), bf16=bf16)
        if bf16:
            factor = a.vector()
            a.load(factor, at(place, offset), bf16=True)
            a.v("VMULPS", x, x, factor)
        else:
            a.v("VMULPS", x, x, at(place, offset))
        a.store(at(dst, offset), x, bf16=bf16)
    for pointer in (src, dst, place):
        a.immediate("ADD_RM64_IMM32", pointer, group * size)
    a.emit("DEC_RM64", groups)
    a.branch("JNE_REL32_64", "group")
    a.emit("DEC_RM64", left)
    a.branch("JNE_REL32_64", "same")
    a.emit("MOV_R64_RM64", factors, place)  # the next ones begin where these ended
    a.emit("MOV_R64_RM64", left, frame.argument("places"))
    a.label("same")
    a.emit("INC_RM64", row)
    a.emit("CMP_R64_RM64", row, end)
    a.branch("JB_REL32_64", "row")
    a.label("done")
    frame.leave()
    return a.code()


def _shift(nbytes: int) -> int:
    return nbytes.bit_length() - 1


#: name -> what assembles it
PROGRAMS: Mapping[str, Callable[..., bytes]] = {"average": average, "scale": scale}
