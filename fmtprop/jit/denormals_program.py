"""The machine code of :mod:`fmtprop.jit.denormals`: a thread's own mode is kept where POSIX keeps a thread's data."""

from __future__ import annotations

from dataclasses import dataclass

from iced_x86 import Code, Instruction, Register

from fmtprop.jit.assembler import Assembler, at
from fmtprop.jit.isa import AVX2

_STACK = Register.RSP


@dataclass(frozen=True)
class Functions:
    """Functions of the C library, and the key of a thread's record among the data that POSIX keeps for it."""

    #: `get`, `set`, `calloc`: addresses of ``pthread_getspecific``, ``pthread_setspecific`` and ``calloc``
    get: int
    set: int
    calloc: int
    key: int


#: a thread's record: its own mode and ours; whether ours is on; the function and the data of the parallel region that
#: it has begun; whether it has; and the number of regions that it has begun inside of that one
_OWN, _OURS, _ON, _FUNCTION, _DATA, _BEGUN, _INSIDE = 0, 4, 8, 16, 24, 32, 36

_RECORD_NBYTES = 64


class _Routine(Assembler):
    """A routine with room on the stack, which is aligned for calls."""

    def __init__(self, nbytes: int, *saved: int) -> None:
        super().__init__(AVX2, bf16=False)  # any instruction set: there are no vectors
        self._saved = saved
        self._nbytes = nbytes + (8 if (nbytes // 8 + len(saved)) % 2 == 0 else 0)
        for register in saved:
            self.emit("PUSH_R64", register)
        self.immediate("SUB_RM64_IMM8", _STACK, self._nbytes)

    def finished(self) -> bytes:
        """Add the return; give the machine code."""
        self.label("done")
        self.immediate("ADD_RM64_IMM8", _STACK, self._nbytes)
        for register in reversed(self._saved):
            self.emit("POP_R64", register)
        self.emit("RETNQ")
        return self.code()

    def clear(self, register: int) -> None:
        """Set a register of 32 bits to 0."""
        self.emit("XOR_R32_RM32", register, register)

    def record(self, functions: Functions) -> None:
        """Set RAX to the address of this thread's record, or to 0; the flags tell."""
        self.constant(Register.RDI, functions.key)
        self.call(functions.get)
        self.emit("TEST_RM64_R64", Register.RAX, Register.RAX)

    def mode(self, field: int) -> None:
        """Load a mode from the record that RBX points to."""
        self.emit("LDMXCSR_M32", at(Register.RBX, field))

    def put(self, field: int, value: int) -> None:
        """Set a field of this record."""
        self._add(Instruction.create_mem_i32(Code.MOV_RM32_IMM32, at(Register.RBX, field), value))

    def test(self, field: int) -> None:
        """Compare a field of this record with 0."""
        self._add(Instruction.create_mem_i32(Code.CMP_RM32_IMM8, at(Register.RBX, field), 0))


def begin(functions: Functions, flush: int) -> bytes:
    """Return ``int begin()``, which turns the bits `flush` of MXCSR on and returns 1; 0 if they are ours already."""
    a = _Routine(8, Register.RBX)
    a.record(functions)
    a.emit("MOV_R64_RM64", Register.RBX, Register.RAX)
    a.branch("JNE_REL32_64", "recorded")
    a.constant(Register.RDI, 1)
    a.constant(Register.RSI, _RECORD_NBYTES)
    a.call(functions.calloc)
    a.emit("MOV_R64_RM64", Register.RBX, Register.RAX)
    a.emit("TEST_RM64_R64", Register.RBX, Register.RBX)
    a.branch("JE_REL32_64", "none")  # no memory: the mode stays the caller's
    a.constant(Register.RDI, functions.key)
    a.emit("MOV_R64_RM64", Register.RSI, Register.RBX)
    a.call(functions.set)
    a.emit("TEST_RM32_R32", Register.EAX, Register.EAX)
    a.branch("JNE_REL32_64", "none")
    a.label("recorded")
    a.test(_ON)
    a.branch("JNE_REL32_64", "none")
    a.emit("STMXCSR_M32", at(Register.RBX, _OWN))
    a.emit("MOV_R32_RM32", Register.EAX, at(Register.RBX, _OWN))
    a.immediate("OR_RM32_IMM32", Register.EAX, flush)
    a.emit("MOV_RM32_R32", at(Register.RBX, _OURS), Register.EAX)
    a.put(_ON, 1)
    a.mode(_OURS)
    a.immediate("MOV_R32_IMM32", Register.EAX, 1)
    a.branch("JMP_REL32_64", "done")
    a.label("none")
    a.clear(Register.EAX)
    return a.finished()


def end(functions: Functions) -> bytes:
    """Return ``void end()``, which gives the thread its own mode back."""
    a = _Routine(8, Register.RBX)
    a.record(functions)
    a.emit("MOV_R64_RM64", Register.RBX, Register.RAX)
    a.branch("JE_REL32_64", "done")
    a.put(_ON, 0)
    a.mode(_OWN)
    return a.finished()


def mode() -> bytes:
    """Return ``unsigned mode()``, which reads MXCSR."""
    a = _Routine(8)
    a.emit("STMXCSR_M32", at(_STACK))
    a.emit("MOV_R32_RM32", Register.EAX, at(_STACK))
    return a.finished()


_GIVEN = (Register.RDI, Register.RSI, Register.RDX, Register.RCX)
_KEPT = (Register.RBP, Register.R12, Register.R13, Register.R14)


def _region(functions: Functions, begins: int, share: int) -> _Routine:
    """Return the beginning of a region: the runtime's function with our share, or with the caller's where RBX is 0.

    The runtime gets the thread's own mode back meanwhile: new threads inherit it.
    """
    a = _Routine(8, Register.RBX, *_KEPT)
    for kept, given in zip(_KEPT, _GIVEN, strict=True):
        a.emit("MOV_R64_RM64", kept, given)
    a.record(functions)
    a.emit("MOV_R64_RM64", Register.RBX, Register.RAX)
    a.branch("JE_REL32_64", "plain")
    a.test(_ON)
    a.branch("JE_REL32_64", "plain")
    a.test(_BEGUN)
    a.branch("JNE_REL32_64", "inside")
    a.emit("MOV_RM64_R64", at(Register.RBX, _FUNCTION), Register.RBP)
    a.emit("MOV_RM64_R64", at(Register.RBX, _DATA), Register.R12)
    a.put(_BEGUN, 1)
    a.mode(_OWN)
    a.constant(Register.RDI, share)
    a.emit("MOV_R64_RM64", Register.RSI, Register.RBX)
    a.emit("MOV_R64_RM64", Register.RDX, Register.R13)
    a.emit("MOV_R64_RM64", Register.RCX, Register.R14)
    a.call(begins)
    a.mode(_OURS)
    return a


def _plain(a: _Routine, begins: int) -> bytes:
    a.label("plain")
    for kept, given in zip(_KEPT, _GIVEN, strict=True):
        a.emit("MOV_R64_RM64", given, kept)
    a.call(begins)
    return a.finished()


def parallel(functions: Functions, begins: int, share: int) -> bytes:
    """Return ``GOMP_parallel`` (at address `begins`) with our mode in all threads, if it is on in this one."""
    a = _region(functions, begins, share)
    a.put(_BEGUN, 0)
    a.branch("JMP_REL32_64", "done")
    a.label("inside")
    return _plain(a, begins)


def start(functions: Functions, begins: int, share: int) -> bytes:
    """Return ``GOMP_parallel_start`` with our mode: the thread runs its own share afterwards, then ends the region."""
    a = _region(functions, begins, share)
    a.branch("JMP_REL32_64", "done")
    a.label("inside")
    a._add(Instruction.create_mem(Code.INC_RM32, at(Register.RBX, _INSIDE)))
    return _plain(a, begins)


def stop(functions: Functions, ends: int) -> bytes:
    """Return ``GOMP_parallel_end`` (at address `ends`) behind :func:`start`."""
    a = _Routine(8, Register.RBX)
    a.call(ends)
    a.record(functions)
    a.emit("MOV_R64_RM64", Register.RBX, Register.RAX)
    a.branch("JE_REL32_64", "done")
    a.test(_INSIDE)
    a.branch("JE_REL32_64", "outer")
    a._add(Instruction.create_mem(Code.DEC_RM32, at(Register.RBX, _INSIDE)))
    a.branch("JMP_REL32_64", "done")
    a.label("outer")
    a.put(_BEGUN, 0)
    return a.finished()


def share() -> bytes:
    """Return ``void share(record)``, which runs one thread's share of a region in our mode."""
    a = _Routine(8)
    a.emit("STMXCSR_M32", at(_STACK))
    a.emit("LDMXCSR_M32", at(Register.RDI, _OURS))
    a.emit("MOV_R64_RM64", Register.RAX, at(Register.RDI, _FUNCTION))
    a.emit("MOV_R64_RM64", Register.RDI, at(Register.RDI, _DATA))
    a.emit("CALL_RM64", Register.RAX)
    a.emit("LDMXCSR_M32", at(_STACK))
    return a.finished()
