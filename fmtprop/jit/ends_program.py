"""What programs with quantized ends share: to load numbers or bytes, to round, and to store either."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping

from iced_x86 import Code, MemoryOperand, Register

from fmtprop.jit.arguments import UNROLLED
from fmtprop.jit.assembler import at
from fmtprop.jit.isa import Isa
from fmtprop.jit.program import Program

#: the work that is left within a row
LEFT = Register.RCX

#: free for the halves of a vector of bytes
_HALF = 15

#: types of real numbers, with their bytes
_FLOATS = {"f32": 4, "bf16": 2}


class EndsProgram(Program):
    """A program on rows of one type (f32, bf16, u8 or s8) with results of another; both are bf16 if one is.

    `rest` numbers of a row are behind its last whole vector.
    """

    def __init__(
        self, isa: Isa, arguments: type[ctypes.Structure], src: str, dst: str, *, rounds: bool, rest: int
    ) -> None:
        super().__init__(isa, arguments, bf16=src == "bf16")
        self.src, self.dst, self.rounds, self.rest = src, dst, rounds, rest

    def read(self, x: int, place: MemoryOperand) -> None:
        """Load numbers, or bytes as numbers."""
        if self.src in _FLOATS:
            self.load(x, place)
            return
        self.v("VPMOVSXBD" if self.src == "s8" else "VPMOVZXBD", x, place)
        self.v("VCVTDQ2PS", x, x)

    def write(self, place: MemoryOperand, x: int) -> None:
        """Round numbers in units of the step if they are to be rounded, and store them; x is lost."""
        if self.rounds:
            self.v("VMAXPS", x, x, self.argument("low"))  # of a NaN and a number, the second is the result
            self.v("VMINPS", x, x, self.argument("high"))
            self.v("VCVTPS2DQ", x, x)
        if self.dst in _FLOATS:
            if self.rounds:
                self.v("VCVTDQ2PS", x, x)
                self.v("VMULPS", x, x, self.argument("step"))
            self.store(place, x)
            return
        self.v("VPADDD", x, x, self.argument("zero"))
        if self.isa.nbytes == 64:
            self.emit("EVEX_VPMOVDB_XMMM128_K1Z_ZMM", place, x)
            return
        number = x - self.register(0)
        low, half = Register.XMM0 + number, Register.XMM0 + _HALF
        self.emit("VEX_VPSHUFB_YMM_YMM_YMMM256", x, x, self.argument("first_bytes"))
        self._half(Code.VEX_VEXTRACTI128_XMMM128_YMM_IMM8, half, x)
        self.emit("VEX_VPUNPCKLDQ_XMM_XMM_XMMM128", low, low, half)
        self.emit("VEX_VMOVQ_XMMM64_XMM", place, low)

    def over_row(self, body: Callable[[int, int, bool], None], pointers: Mapping[int, int]) -> None:
        """Add a loop over a row's vectors; the pointers, with the bytes of a number, move on.

        `body` adds the instructions of one vector: its number in a turn, the place of its first number from where the
        pointers are, and whether the first ones were in the vector before. Such a vector is the row's last.
        """
        for count in self.vectors(UNROLLED, LEFT):
            for index in range(count):
                body(index, index * self.isa.lanes, False)
            for register, nbytes in pointers.items():
                self.advance(count * self.isa.lanes * nbytes, register)
        if self.rest:
            body(0, self.rest - self.isa.lanes, True)
            for register, nbytes in pointers.items():
                self.advance(self.rest * nbytes, register)

    def only_new(self, x: int) -> None:
        """Set the numbers of a row's last vector that were in the one before to 0."""
        self.v("VANDPS", x, x, self.argument("keep"))

    def spread(self, x: int) -> None:
        """Fill a vector with the first number of register 0."""
        self.emit("VEX_VMOVSS_M32_XMM", at(Register.RSP, -8), Register.XMM0)  # red zone: no function is called
        self.v("VBROADCASTSS", x, at(Register.RSP, -8))

    @property
    def src_nbytes(self) -> int:
        """Bytes of a source's number."""
        return _FLOATS.get(self.src, 1)

    @property
    def dst_nbytes(self) -> int:
        """Bytes of a result's number."""
        return _FLOATS.get(self.dst, 1)
