"""Assembler of a program: x86-64 instructions, labels, and numbers that fill a vector.

iced-x86 encodes the instructions; this module is the notation of the kernels.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from iced_x86 import BlockEncoder, Code, Instruction, MemoryOperand, Register

from fmtprop.errors import GraphError
from fmtprop.jit.isa import Isa


def at(register: Any, offset: int = 0, index: Any = Register.NONE, step: int = 1) -> MemoryOperand:
    """Return the operand `offset` bytes, and `index` steps of 1, 2, 4 or 8 bytes, behind the address in a register."""
    return MemoryOperand(register, index, step, offset, 1 if offset else 0)  # one byte where that is enough


#: operands of the instructions that differ from most
_FORMS_512 = {
    "VMOVUPS": "ZMM_K1Z_ZMMM512",
    "VMINPS": "ZMM_K1Z_ZMM_ZMMM512B32_SAE",
    "VMAXPS": "ZMM_K1Z_ZMM_ZMMM512B32_SAE",
    "VRANGEPS": "ZMM_K1Z_ZMM_ZMMM512B32_IMM8_SAE",
    "VREDUCEPS": "ZMM_K1Z_ZMMM512B32_IMM8_SAE",
    "VRNDSCALEPS": "ZMM_K1Z_ZMMM512B32_IMM8_SAE",
    "VPERMI2PS": "ZMM_K1Z_ZMM_ZMMM512B32",
    "VPMOVZXWD": "ZMM_K1Z_YMMM256",
    "VPMOVZXBD": "ZMM_K1Z_XMMM128",
    "VPMOVSXBD": "ZMM_K1Z_XMMM128",
    "VPERMPS": "ZMM_K1Z_ZMM_ZMMM512B32",
    "VPSLLD": "ZMM_K1Z_ZMMM512B32_IMM8",
    "VPSRLD": "ZMM_K1Z_ZMMM512B32_IMM8",
    "VCVTNEPS2BF16": "YMM_K1Z_ZMMM512B32",
    "VBROADCASTSS": "ZMM_K1Z_XMMM32",
    "VBROADCASTSD": "ZMM_K1Z_XMMM64",
    "VBROADCASTF32X4": "ZMM_K1Z_M128",
    "VPBROADCASTD": "ZMM_K1Z_XMMM32",
    "VCVTDQ2PS": "ZMM_K1Z_ZMMM512B32_ER",
    "VPBROADCASTW": "ZMM_K1Z_XMMM16",
    "VANDPS": "ZMM_K1Z_ZMM_ZMMM512B32",
    "VXORPS": "ZMM_K1Z_ZMM_ZMMM512B32",
    "VPMAXSD": "ZMM_K1Z_ZMM_ZMMM512B32",
    "VSQRTPS": "ZMM_K1Z_ZMMM512B32_ER",
    "VDPBF16PS": "ZMM_K1Z_ZMM_ZMMM512B32",
    "VCVTNE2PS2BF16": "ZMM_K1Z_ZMM_ZMMM512B32",
    "VPERMW": "ZMM_K1Z_ZMM_ZMMM512",
    "VPERMILPS": "ZMM_K1Z_ZMMM512B32_IMM8",
    "VPORD": "ZMM_K1Z_ZMM_ZMMM512B32",
    "VMOVDQU16": "ZMM_K1Z_ZMMM512",
    "VPUNPCKLDQ": "ZMM_K1Z_ZMM_ZMMM512B32",
    "VPUNPCKHDQ": "ZMM_K1Z_ZMM_ZMMM512B32",
    "VPUNPCKLQDQ": "ZMM_K1Z_ZMM_ZMMM512B64",
    "VPUNPCKHQDQ": "ZMM_K1Z_ZMM_ZMMM512B64",
    "VSHUFF32X4": "ZMM_K1Z_ZMM_ZMMM512B32_IMM8",
    "VPDPBUSD": "ZMM_K1Z_ZMM_ZMMM512B32",
    "VPADDD": "ZMM_K1Z_ZMM_ZMMM512B32",
    "VPSUBD": "ZMM_K1Z_ZMM_ZMMM512B32",
    "VPMULLD": "ZMM_K1Z_ZMM_ZMMM512B32",
    "VPSRAD": "ZMM_K1Z_ZMMM512B32_IMM8",
    "VCVTPS2DQ": "ZMM_K1Z_ZMMM512B32_ER",
}
_FORMS_256 = {
    "VMOVUPS": "YMM_YMMM256",
    "VROUNDPS": "YMM_YMMM256_IMM8",
    "VCVTPS2DQ": "YMM_YMMM256",
    "VPSRAD": "YMM_YMM_IMM8",
    "VPSLLD": "YMM_YMM_IMM8",
    "VPSRLD": "YMM_YMM_IMM8",
    "VPMOVZXBD": "YMM_XMMM64",
    "VPMOVSXBD": "YMM_XMMM64",
    "VPMOVZXBW": "YMM_XMMM128",
    "VPMOVSXBW": "YMM_XMMM128",
    "VSHUFPS": "YMM_YMM_YMMM256_IMM8",
    "VPERMPD": "YMM_YMMM256_IMM8",
    "VPERM2F128": "YMM_YMM_YMMM256_IMM8",
    "VBROADCASTSS": "YMM_M32",
    "VPBROADCASTD": "YMM_XMMM32",
    "VCVTDQ2PS": "YMM_YMMM256",
    "VSQRTPS": "YMM_YMMM256",
    "VCMPPS": "YMM_YMM_YMMM256_IMM8",
    "VPERMILPS": "YMM_YMMM256_IMM8",
}


#: vector registers that a function can use for values other than constant numbers
_FREE_VECTORS = 8


class Assembler:
    """A list of instructions under construction.

    `bf16`: whether numbers in memory are bf16 instead of f32; requires AVX-512 with bf16. `number_nbytes`,
    `vector_nbytes`: bytes in memory of one number, and of the numbers of one vector.

    :meth:`vector` returns registers from 0 up. Constant numbers (:meth:`number`) keep the other registers, and stay in
    memory when these are used up. :meth:`load_numbers` loads them before the loop that uses them.
    """

    def __init__(self, isa: Isa, *, bf16: bool = False) -> None:
        self.isa, self.bf16 = isa, bf16
        self.number_nbytes = 2 if bf16 else 4
        self.vector_nbytes = isa.nbytes // 4 * self.number_nbytes
        self._instructions: list[Instruction] = []
        self._branches: list[tuple[Instruction, str]] = []
        self._labels: dict[str, int] = {}
        self._numbers: dict[bytes, int] = {}
        self._vectors = 0

    # ------------------------------------------------------------------ anything

    def register(self, number: int) -> int:
        """Return iced-x86's number of a vector register."""
        return int(getattr(Register, f"{'ZMM' if self.isa.nbytes == 64 else 'YMM'}{number}"))

    def form(self, name: str) -> int:
        """Return iced-x86's number of a vector instruction, such as ``"VMULPS"``, or ``"VMOVUPS <"`` of a store."""
        operation, _, store = name.partition(" ")
        if self.isa.nbytes == 64:
            form = "ZMMM512_K1Z_ZMM" if store else _FORMS_512.get(operation, "ZMM_K1Z_ZMM_ZMMM512B32_ER")
            return int(getattr(Code, f"EVEX_{operation}_{form}"))
        form = "YMMM256_YMM" if store else _FORMS_256.get(operation, "YMM_YMM_YMMM256")
        return int(getattr(Code, f"VEX_{operation}_{form}"))

    def emit(self, code: str, *operands: int | MemoryOperand, mask: int | None = None) -> None:
        """Add an instruction by iced-x86's name of its form; integers are registers.

        Positions that a mask register leaves out are not written.
        """
        kinds = "_".join("mem" if isinstance(operand, MemoryOperand) else "reg" for operand in operands)
        create = getattr(Instruction, f"create_{kinds}") if operands else Instruction.create
        instruction = create(getattr(Code, code), *operands)
        if mask is not None:
            instruction.op_mask = mask
        self._add(instruction)

    def immediate(self, code: str, register: Any, value: int) -> None:
        """Add an instruction on a register and a number."""
        self._add(Instruction.create_reg_i32(getattr(Code, code), register, value))

    def constant(self, register: Any, value: int) -> None:
        """Set a register to a number of 64 bits."""
        self._add(Instruction.create_reg_u64(Code.MOV_R64_IMM64, register, value))

    def call(self, address: int) -> None:
        """Call the function at an address; its result is in RAX, which loses its number."""
        self.constant(Register.RAX, address)
        self.emit("CALL_RM64", Register.RAX)

    def label(self, name: str) -> None:
        """Name the position of the next instruction."""
        self._labels[name] = len(self._instructions) + 1

    def branch(self, code: str, label: str) -> None:
        """Add a jump to a label."""
        instruction = Instruction.create_branch(getattr(Code, code), 0)
        self._branches.append((instruction, label))
        self._add(instruction)

    def code(self) -> bytes:
        """Return the machine code, which works at any address."""
        for instruction, label in self._branches:
            instruction.near_branch64 = self._labels[label]
        encoder = BlockEncoder(64)
        encoder.add_many(self._instructions)
        return bytes(encoder.encode(0))

    def _add(self, instruction: Instruction) -> None:
        instruction.ip = len(self._instructions) + 1  # branches find it by this number
        self._instructions.append(instruction)

    # ------------------------------------------------------------------ vectors

    def vector(self) -> int:
        """Return a free register."""
        if self._vectors == _FREE_VECTORS:
            raise GraphError(f"a function of {self.isa.name} asks for more than {_FREE_VECTORS} vectors at a time")
        self._vectors += 1
        return self.register(self._vectors - 1)

    def release(self) -> None:
        """Give back all registers."""
        self._vectors = 0

    def v(
        self, operation: str, *operands: int | MemoryOperand, immediate: int | None = None, mask: int | None = None,
        merge: bool = False, spread: bool = False,
    ) -> None:  # fmt: skip
        """Add a vector instruction; positions that a mask register leaves out become 0, or stay with `merge`.

        A masked load reads no memory there. With `spread`, the operand in memory is one number, for all positions.
        """
        kinds = "_".join("mem" if isinstance(operand, MemoryOperand) else "reg" for operand in operands)
        code = self.form(operation)
        if immediate is None:
            instruction = getattr(Instruction, f"create_{kinds}")(code, *operands)
        else:
            instruction = getattr(Instruction, f"create_{kinds}_u32")(code, *operands, immediate)
        if mask is not None:
            instruction.op_mask, instruction.zeroing_masking = mask, not merge
        instruction.is_broadcast = spread
        self._add(instruction)

    def load(self, x: int, place: MemoryOperand) -> None:
        """Load a vector of f32 numbers, or as many bf16 numbers converted to f32."""
        if not self.bf16:
            self.v("VMOVUPS", x, place)
            return
        self.v("VPMOVZXWD", x, place)
        self.v("VPSLLD", x, x, immediate=16)

    def store(self, place: MemoryOperand, x: int) -> None:
        """Store a vector as f32, or rounded to bf16; rounding destroys the vector."""
        if not self.bf16:
            self.v("VMOVUPS <", place, x)
            return
        half = Register.YMM0 + (x - Register.ZMM0)
        self.v("VCVTNEPS2BF16", half, x)
        self.emit("EVEX_VMOVUPS_YMMM256_K1Z_YMM", place, half)

    def load_one(self, x: int, place: MemoryOperand) -> None:
        """Load one f32 or bf16 number into all positions of a vector."""
        if not self.bf16:
            self.v("VBROADCASTSS", x, place)
            return
        self.v("VPBROADCASTW", x, place)
        self.v("VPSLLD", x, x, immediate=16)

    def store_one(self, place: MemoryOperand, x: int) -> None:
        """Store the first number of one of the first sixteen vector registers, as f32 or rounded to bf16."""
        first: Any = Register.XMM0 + (x - self.register(0))
        if not self.bf16:
            self.emit("VEX_VMOVSS_M32_XMM", place, first)
            return
        self.v("VCVTNEPS2BF16", Register.YMM0 + (x - Register.ZMM0), x)
        self._add(Instruction.create_mem_reg_u32(Code.VEX_VPEXTRW_R32M16_XMM_IMM8, place, first, 0))

    def number(self, value: float) -> int | MemoryOperand:
        """Return a vector that is filled with one f32 number: the last operand of an instruction."""
        return self._constant(struct.pack("<f", value))

    def integer(self, value: int) -> int | MemoryOperand:
        """Return a vector that is filled with one 32-bit integer."""
        return self._constant(struct.pack("<i", value))

    def lookup(self, values: Sequence[float]) -> int | MemoryOperand:
        """Return a vector of these f32 numbers, one for each position."""
        return self._constant(struct.pack(f"<{self.isa.lanes}f", *values))

    def integers(self, values: Sequence[int]) -> int | MemoryOperand:
        """Return a vector of these 32-bit integers, one for each position."""
        return self._constant(struct.pack(f"<{self.isa.lanes}i", *values))

    def places(self, values: Sequence[int]) -> int | MemoryOperand:
        """Return a vector of these 16-bit integers, one for each position."""
        return self._constant(struct.pack(f"<{self.isa.nbytes // 2}H", *values))

    def loaded(self, value: int | MemoryOperand) -> int:
        """Return the register of a vector; one that is in memory is loaded first."""
        if not isinstance(value, MemoryOperand):
            return value
        x = self.vector()
        self.v("VMOVUPS", x, value)
        return x

    def _constant(self, bits: bytes) -> int | MemoryOperand:
        index = self._numbers.setdefault(bits, len(self._numbers))
        if index < self._kept:
            return self.register(self.isa.registers - 1 - index)
        return self._row(index)

    @property
    def _kept(self) -> int:
        """Number of constants that stay in registers: all registers but those of vectors."""
        return self.isa.registers - _FREE_VECTORS

    def _row(self, index: int) -> MemoryOperand:
        return at(Register.RDX, index * self.isa.nbytes)

    def load_numbers(self, numbers: Sequence[bytes]) -> None:
        """Load constants into their registers from the table that RDX points to."""
        for index in range(min(len(numbers), self._kept)):
            self.v("VMOVUPS", self.register(self.isa.registers - 1 - index), self._row(index))

    @property
    def numbers(self) -> list[bytes]:
        """The constants in use, in the order of the table."""
        return list(self._numbers)

    @property
    def table(self) -> bytes:
        """The table of constants, each repeated to fill a vector."""
        return b"".join(bits * (self.isa.nbytes // len(bits)) for bits in self._numbers)
