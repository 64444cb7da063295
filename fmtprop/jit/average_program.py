"""The program of averages of all places of an image, with quantized ends."""

from __future__ import annotations

from iced_x86 import Register

from fmtprop.jit.assembler import at
from fmtprop.jit.average import AverageBytesArguments
from fmtprop.jit.ends_program import LEFT, EndsProgram
from fmtprop.jit.isa import Isa

#: the thread's current group of channels, and the group after its last
_ITEM, _END = Register.R8, Register.R9

_SRC, _DST, _START, _ROW = Register.RSI, Register.RDI, Register.R10, Register.R11


def average_bytes(isa: Isa, src: str, dst: str, *, rounds: bool, width: int) -> bytes:
    """Return the program; `width` vectors of channels are added up at a time, the last ones perhaps twice."""
    p = EndsProgram(isa, AverageBytesArguments, src, dst, rounds=rounds, rest=0)
    totals, x = [p.register(index) for index in range(width)], p.register(width)
    p.share(_ITEM, _END, "tasks")
    with p.until(_ITEM, _END):
        # image and group; a group's first channel; the place of that in src and in dst
        p.divide(_ITEM, p.argument("groups"))
        p.move(_START, Register.RDX)
        p.emit("IMUL_R64_RM64", _START, p.argument("width"))
        p.emit("CMP_R64_RM64", _START, p.argument("last"))
        p.emit("CMOVA_R64_RM64", _START, p.argument("last"))
        for pointer, name, image, nbytes in (
            (_SRC, "src", "image", p.src_nbytes),
            (_DST, "dst", "channels", p.dst_nbytes),
        ):
            p.move(_ROW, Register.RAX)
            p.emit("IMUL_R64_RM64", _ROW, p.argument(image))
            p.add(_ROW, _START)
            p.move(pointer, p.argument(name))
            p.emit("LEA_R64_M", pointer, at(pointer, 0, _ROW, nbytes))
        for total in totals:
            p.zero(total)
        with p.repeat(p.argument("places"), LEFT):
            for index, total in enumerate(totals):
                p.read(x, at(_SRC, index * isa.lanes * p.src_nbytes))
                p.v("VADDPS", total, total, x)
            p.add(_SRC, p.argument("row"))
        for index, total in enumerate(totals):
            p.v("VDIVPS", total, total, p.argument("divisor"))
            if src != "f32":
                p.v("VSUBPS", total, total, p.argument("src_zero"))
                p.v("VMULPS", total, total, p.argument("src_scale"))
            if rounds:
                p.v("VDIVPS", total, total, p.argument("step"))
            p.write(at(_DST, index * isa.lanes * p.dst_nbytes), total)
    return p.finished()
