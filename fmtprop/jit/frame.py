"""What programs that several threads run have in common: each begins by asking which of how many it is."""

from __future__ import annotations

import ctypes

from iced_x86 import MemoryOperand, Register

from fmtprop.jit.assembler import Assembler, at

__all__ = ["Frame"]

_SAVED = (Register.RBX, Register.RBP, Register.R12)


class Frame:
    """The beginning and the end of a program that ``GOMP_parallel`` calls in every thread.

    Parameters
    ----------
    a : Assembler
        Takes the instructions.
    arguments : type of Structure
        What the program finds its work by; with the addresses of ``omp_get_num_threads`` and ``omp_get_thread_num`` as
        ``threads`` and ``thread``.

    Notes
    -----
    Between the two, RBX has the arguments, RBP the number of threads and R12 that of this one (System V AMD64 ABI: all
    vector registers are the callee's to change).
    """

    def __init__(self, a: Assembler, arguments: type[ctypes.Structure]) -> None:
        self._a, self._arguments = a, arguments

    def enter(self) -> None:
        """Ask for the threads."""
        a = self._a
        for register in _SAVED:
            a.emit("PUSH_R64", register)  # and with the return address, the stack is aligned for the calls
        a.emit("MOV_R64_RM64", Register.RBX, Register.RDI)
        a.emit("CALL_RM64", self.argument("threads"))
        a.emit("MOV_R32_RM32", Register.EBP, Register.EAX)
        a.emit("CALL_RM64", self.argument("thread"))
        a.emit("MOV_R32_RM32", Register.R12D, Register.EAX)

    def leave(self) -> None:
        """Return to the caller."""
        a = self._a
        a.emit("VEX_VZEROUPPER")
        for register in reversed(_SAVED):
            a.emit("POP_R64", register)
        a.emit("RETNQ")

    def argument(self, name: str) -> MemoryOperand:
        """Return the argument of a name."""
        return at(Register.RBX, getattr(self._arguments, name).offset)

    def portion(self, register: int, count: MemoryOperand) -> None:
        """Set a register to the first of so many things that is thread R12's; changes RAX and RDX."""
        a = self._a
        a.emit("MOV_R64_RM64", Register.RAX, count)
        a.emit("IMUL_R64_RM64", Register.RAX, Register.R12)
        a.emit("XOR_R32_RM32", Register.EDX, Register.EDX)
        a.emit("DIV_RM64", Register.RBP)
        a.emit("MOV_R64_RM64", register, Register.RAX)

    def portions(self, first: int, end: int, count: MemoryOperand) -> None:
        """Set registers to the first of so many things that is this thread's, and behind the last; as `portion`."""
        self.portion(first, count)
        self._a.emit("INC_RM64", Register.R12)
        self.portion(end, count)
        self._a.emit("DEC_RM64", Register.R12)
