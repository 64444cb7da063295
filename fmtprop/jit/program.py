"""The program around a function: each thread finds its share of the row, and changes it 64 bytes at a time."""

from __future__ import annotations

from collections.abc import Callable

from iced_x86 import MemoryOperand, Register

from fmtprop.jit.assembler import Assembler, Isa, at
from fmtprop.jit.kernel import CHUNK_NBYTES, Arguments

__all__ = ["program"]

_SAVED = (Register.RBX, Register.RBP, Register.R12)


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

    Notes
    -----
    The code is the function that ``GOMP_parallel`` calls in every thread (System V AMD64 ABI): all vector registers
    are the callee's to change.
    """
    _, numbers = _assembled(isa, function, bf16, ())
    code, _ = _assembled(isa, function, bf16, tuple(numbers.numbers))
    return code, numbers.table


def _assembled(
    isa: Isa, function: Callable[[Assembler, int], int], bf16: bool, numbers: tuple[bytes, ...]
) -> tuple[bytes, Assembler]:
    """Assemble everything; which numbers the function needs is known when it has been assembled once."""
    a = Assembler(isa)
    for register in _SAVED:
        a.emit("PUSH_R64", register)  # and with the return address, the stack is aligned for the calls
    a.emit("MOV_R64_RM64", Register.RBX, Register.RDI)
    a.emit("CALL_RM64", _argument("threads"))
    a.emit("MOV_R32_RM32", Register.EBP, Register.EAX)
    a.emit("CALL_RM64", _argument("thread"))
    a.emit("MOV_R32_RM32", Register.R12D, Register.EAX)
    _share(a, Register.RSI)
    a.emit("INC_RM64", Register.R12)
    _share(a, Register.RCX)
    a.emit("MOV_R64_RM64", Register.RDX, _argument("table"))
    a.emit("CMP_R64_RM64", Register.RSI, Register.RCX)
    a.branch("JAE_REL32_64", "done")
    a.load_numbers(numbers)
    a.label("loop")
    size = isa.nbytes // 2 if bf16 else isa.nbytes
    for offset in range(0, CHUNK_NBYTES, size):
        a.release()
        x, place = a.vector(), at(Register.RSI, offset)
        if bf16:
            a.v("VPMOVZXWD", x, place)
            a.v("VPSLLD", x, x, immediate=16)
            y = function(a, x)
            half = Register.YMM0 + (y - Register.ZMM0)
            a.v("VCVTNEPS2BF16", half, y)
            a.emit("VEX_VMOVUPS_YMMM256_YMM", place, half)
        else:
            a.v("VMOVUPS", x, place)
            a.v("VMOVUPS <", place, function(a, x))
    a.immediate("ADD_RM64_IMM8", Register.RSI, CHUNK_NBYTES)
    a.emit("CMP_R64_RM64", Register.RSI, Register.RCX)
    a.branch("JB_REL32_64", "loop")
    a.label("done")
    a.emit("VEX_VZEROUPPER")
    for register in reversed(_SAVED):
        a.emit("POP_R64", register)
    a.emit("RETNQ")
    return a.code(), a


def _share(a: Assembler, register: int) -> None:
    """Set a register to where the share of thread R12 of RBP begins."""
    a.emit("MOV_R64_RM64", Register.RAX, _argument("chunks"))
    a.emit("IMUL_R64_RM64", Register.RAX, Register.R12)
    a.emit("XOR_R32_RM32", Register.EDX, Register.EDX)
    a.emit("DIV_RM64", Register.RBP)
    a.emit("MOV_R64_RM64", register, Register.RAX)
    a.immediate("SHL_RM64_IMM8", register, CHUNK_NBYTES.bit_length() - 1)
    a.emit("ADD_R64_RM64", register, _argument("data"))


def _argument(name: str) -> MemoryOperand:
    """Return the argument of a name."""
    return at(Register.RBX, getattr(Arguments, name).offset)
