"""The program around a function: each thread finds its share of the row, and changes it 64 bytes at a time."""

from __future__ import annotations

from collections.abc import Callable

from iced_x86 import Register

from fmtprop.jit.assembler import Assembler, Isa, at
from fmtprop.jit.frame import Frame
from fmtprop.jit.kernel import CHUNK_NBYTES, Arguments

__all__ = ["program"]


def program(isa: Isa, function: Callable[[Assembler, int], int], *, bf16: bool) -> tuple[bytes, bytes]:
    """Return the machine code of a kernel, and the table of numbers that it reads.

    Parameters
    ----------
    isa : Isa
        For which machine.
    function : callable
        Adds the instructions for one vector of numbers.
    bf16 : bool
        Whether the numbers are bf16 and not f32; with AVX-512 and bf16 only.
    """
    _, numbers = _assembled(isa, function, bf16, ())
    code, _ = _assembled(isa, function, bf16, tuple(numbers.numbers))
    return code, numbers.table


def _assembled(
    isa: Isa, function: Callable[[Assembler, int], int], bf16: bool, numbers: tuple[bytes, ...]
) -> tuple[bytes, Assembler]:
    """Assemble everything; which numbers the function needs is known when it has been assembled once."""
    a = Assembler(isa)
    frame = Frame(a, Arguments)
    frame.enter()
    _share(a, frame, Register.RSI)
    a.emit("INC_RM64", Register.R12)
    _share(a, frame, Register.RCX)
    a.emit("MOV_R64_RM64", Register.RDX, frame.argument("table"))
    a.emit("CMP_R64_RM64", Register.RSI, Register.RCX)
    a.branch("JAE_REL32_64", "done")
    a.load_numbers(numbers)
    a.label("loop")
    size = isa.nbytes_in_memory(bf16=bf16)
    for offset in range(0, CHUNK_NBYTES, size):
        a.release()
        x, place = a.vector(), at(Register.RSI, offset)
        a.load(x, place, bf16=bf16)
        a.store(place, function(a, x), bf16=bf16)
    a.immediate("ADD_RM64_IMM8", Register.RSI, CHUNK_NBYTES)
    a.emit("CMP_R64_RM64", Register.RSI, Register.RCX)
    a.branch("JB_REL32_64", "loop")
    a.label("done")
    frame.leave()
    return a.code(), a


def _share(a: Assembler, frame: Frame, register: int) -> None:
    """Set a register to where the share of thread R12 begins."""
    frame.portion(register, frame.argument("chunks"))
    a.immediate("SHL_RM64_IMM8", register, CHUNK_NBYTES.bit_length() - 1)
    a.emit("ADD_R64_RM64", register, frame.argument("data"))
