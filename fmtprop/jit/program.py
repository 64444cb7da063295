"""The skeleton of multi-threaded programs: each thread computes its share of the work and loops over it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, TypeVar

from iced_x86 import Code, Instruction, MemoryOperand, Register

from fmtprop.jit.assembler import Assembler, at
from fmtprop.jit.isa import Isa

#: operation -> its instruction
ARITHMETIC = {"add": "VADDPS", "sub": "VSUBPS", "mul": "VMULPS", "div": "VDIVPS"}

#: registers with the number of threads, and the number of this thread
THREADS, THREAD = Register.RBP, Register.R12

_ARGUMENTS = Register.RBX
_SAVED = (_ARGUMENTS, THREADS, THREAD)


class Program(Assembler):
    """A program that ``GOMP_parallel`` calls in every thread.

    `bf16`: whether tensors hold bf16 numbers instead of f32; requires AVX-512 with bf16.

    The program preserves RBX, RBP and R12. The computation of shares changes RAX and RDX. All vector registers are
    free (System V AMD64 ABI).
    """

    def __init__(self, isa: Isa, arguments: type[ctypes.Structure], *, bf16: bool) -> None:
        super().__init__(isa, bf16=bf16)
        self._arguments, self._names = arguments, count()
        for register in _SAVED:
            self.emit("PUSH_R64", register)  # together with the return address, they align the stack for the calls
        self.move(_ARGUMENTS, Register.RDI)
        for name, register in (("threads", Register.EBP), ("thread", Register.R12D)):
            self.emit("CALL_RM64", self.argument(name))
            self.emit("MOV_R32_RM32", register, Register.EAX)

    def finished(self) -> bytes:
        """Add the return to the caller, to which :meth:`share` jumps too; return the machine code."""
        self.label("done")
        self.emit("VEX_VZEROUPPER")
        for register in reversed(_SAVED):
            self.emit("POP_R64", register)
        self.emit("RETNQ")
        return self.code()

    # ------------------------------------------------------------------ integers

    def argument(self, name: str, nbytes: int = 0, index: Any = Register.NONE) -> MemoryOperand:
        """Return the operand of a named argument, or of the memory `nbytes`, and a register's, after its start."""
        return at(_ARGUMENTS, getattr(self._arguments, name).offset + nbytes, index)

    def move(self, register: int, value: int | MemoryOperand) -> None:
        """Set a register to the value of another register or of an operand in memory."""
        self.emit("MOV_R64_RM64", register, value)

    def add(self, register: int, value: int | MemoryOperand) -> None:
        """Add the value of another register or of an operand in memory."""
        self.emit("ADD_R64_RM64", register, value)

    def advance(self, nbytes: int, *pointers: int) -> None:
        """Add a number of bytes to pointers."""
        for pointer in pointers:
            self.immediate("ADD_RM64_IMM32", pointer, nbytes)

    def point(self, pointer: int, name: str, index: int | MemoryOperand, stride: str | int) -> None:
        """Set a pointer to an item: `index` strides behind the argument of a name."""
        self.move(pointer, index)
        if isinstance(stride, str):
            self.emit("IMUL_R64_RM64", pointer, self.argument(stride))
        else:
            self.immediate("SHL_RM64_IMM8", pointer, stride.bit_length() - 1)
        self.add(pointer, self.argument(name))

    def copy_bytes(self) -> None:
        """Copy RCX bytes from where RSI points to where RDI points; both point behind them afterwards."""
        self._add(Instruction.create_rep_movsb(64))

    def divide(self, value: int, divisor: int | MemoryOperand) -> None:
        """Set RAX to the quotient and RDX to the remainder."""
        self.move(Register.RAX, value)
        self.emit("XOR_R32_RM32", Register.EDX, Register.EDX)
        self.emit("DIV_RM64", divisor)

    # ------------------------------------------------------------------ shares and loops

    def portions(self, first: int, end: int, name: str) -> None:
        """Set registers to this thread's first item, and to the item after its last."""
        self._portion(first, name)
        self.emit("INC_RM64", THREAD)
        self._portion(end, name)
        self.emit("DEC_RM64", THREAD)

    def share(self, first: int, end: int, name: str) -> None:
        """Set registers as :meth:`portions` does; return from the program if this thread has no items."""
        self.portions(first, end, name)
        self.emit("CMP_R64_RM64", first, end)
        self.branch("JAE_REL32_64", "done")

    def _portion(self, register: int, name: str) -> None:
        self.move(register, THREAD)
        self.emit("IMUL_R64_RM64", register, self.argument(name))
        self.divide(register, THREADS)
        self.move(register, Register.RAX)

    @contextmanager
    def until(self, index: int, end: int | MemoryOperand, step: int = 1) -> Iterator[None]:
        """Add a loop around the instructions of the block: it runs at least once, while an index is below an end."""
        name = self._new_label()
        self.label(name)
        yield
        self.immediate("ADD_RM64_IMM8", index, step)
        self.emit("CMP_R64_RM64", index, end)
        self.branch("JB_REL32_64", name)

    @contextmanager
    def repeat(self, times: int | MemoryOperand, left: int) -> Iterator[None]:
        """Add a loop around the instructions of the block: it runs `times` times, maybe 0; register `left` counts."""
        name = self._new_label()
        self.move(left, times)
        self.emit("TEST_RM64_R64", left, left)
        self.branch("JE_REL32_64", f"after {name}")
        self.label(name)
        yield
        self.emit("DEC_RM64", left)
        self.branch("JNE_REL32_64", name)
        self.label(f"after {name}")

    def vectors(self, most: int, left: int) -> Iterator[int]:
        """Add a loop of the argument ``"blocks"`` over `most` vectors, then one of ``"vectors"``; yield their vectors.

        The instructions of a ``for`` statement's block are the loops' instructions; register `left` counts.
        """
        for name, number in (("blocks", most), ("vectors", 1)):
            with self.repeat(self.argument(name), left):
                yield number

    def _new_label(self) -> str:
        return f"loop {next(self._names)}"

    # ------------------------------------------------------------------ vectors

    def zero(self, x: int) -> None:
        """Set a vector to zeros."""
        self.v("VXORPS", x, x, x)

    def operand(self, free: int, place: MemoryOperand) -> int | MemoryOperand:
        """Return a vector in memory as the last operand of an instruction; bf16 is loaded to a free register first."""
        if not self.bf16:
            return place
        self.load(free, place)
        return free

    def across(self, chains: list[int], operation: str = "VADDPS") -> None:
        """Add up the numbers of vectors, or join them by ``"VMAXPS"``; the result is the first number of register 0.

        Register 1 is lost.
        """
        first, *others = chains
        total = self.register(0)
        if first != total and not others:
            self.v("VMOVUPS", total, first)
        for chain in others:
            self.v(operation, total, first, chain)
            first = total
        x, y = Register.XMM0, Register.XMM1
        if self.isa.nbytes == 64:
            self._half(Code.EVEX_VEXTRACTF64X4_YMMM256_K1Z_ZMM_IMM8, Register.YMM1, Register.ZMM0)
            self.emit(f"VEX_{operation}_YMM_YMM_YMMM256", Register.YMM0, Register.YMM0, Register.YMM1)
        self._half(Code.VEX_VEXTRACTF128_XMMM128_YMM_IMM8, y, Register.YMM0)
        self.emit(f"VEX_{operation}_XMM_XMM_XMMM128", x, x, y)
        if operation == "VADDPS":
            for _ in range(2):
                self.emit("VEX_VHADDPS_XMM_XMM_XMMM128", x, x, x)
            return
        for order in (0b01001110, 0b10110001):
            self._add(Instruction.create_reg_reg_u32(Code.VEX_VPSHUFD_XMM_XMMM128_IMM8, y, x, order))
            self.emit(f"VEX_{operation}_XMM_XMM_XMMM128", x, x, y)

    def transposed(self, rows: Sequence[int], free: int) -> list[int]:
        """Transpose 16 vectors of 16 numbers (AVX-512); return the registers with the columns, in order."""
        held = list(rows)
        steps = (("VPUNPCKLDQ", "VPUNPCKHDQ", 1), ("VPUNPCKLQDQ", "VPUNPCKHQDQ", 2), (0x88, 0xDD, 4), (0x88, 0xDD, 8))
        for low, high, distance in steps:
            for first in range(16):
                if first & distance:
                    continue
                a, b = held[first], held[first + distance]
                for way, into in ((low, free), (high, b)):
                    if isinstance(way, int):
                        self.v("VSHUFF32X4", into, a, b, immediate=way)
                    else:
                        self.v(str(way), into, a, b)
                held[first], held[first + distance], free = free, b, a
        # the first two steps leave columns 0, 2, 1, 3 of each four
        return [held[column & ~3 | (column & 1) << 1 | column >> 1 & 1] for column in range(16)]

    def sums_of(self, vectors: Sequence[int], free: int) -> int:
        """Add up the numbers of as many vectors as one has numbers; return the register with the sums, in their order.

        All other vectors are lost.
        """
        blocks = (("VSHUFF32X4", 0x88, 0xDD),) * 2 if self.isa.nbytes == 64 else (("VPERM2F128", 0x20, 0x31),)
        distance = 1
        for low, high in (("VPUNPCKLDQ", "VPUNPCKHDQ"), ("VPUNPCKLQDQ", "VPUNPCKHQDQ")):
            for first in range(0, len(vectors), 2 * distance):
                a, b = vectors[first], vectors[first + distance]
                self.v(low, free, a, b)
                self.v(high, b, a, b)
                self.v("VADDPS", a, free, b)
            distance *= 2
        for move, low_half, high_half in blocks:
            for first in range(0, len(vectors), 2 * distance):
                a, b = vectors[first], vectors[first + distance]
                self.v(move, free, a, b, immediate=low_half)
                self.v(move, b, a, b, immediate=high_half)
                self.v("VADDPS", a, free, b)
            distance *= 2
        return vectors[0]

    def _half(self, code: Any, half: Any, whole: Any) -> None:
        self._add(Instruction.create_reg_reg_u32(code, half, whole, 1))


AnyProgram = TypeVar("AnyProgram", bound=Program)


def with_table(make: Callable[[tuple[bytes, ...]], AnyProgram]) -> tuple[bytes, bytes]:
    """Return a program and the table of constants that it reads."""
    program = make(tuple(make(()).numbers))
    return program.finished(), program.table
