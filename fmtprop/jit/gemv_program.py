"""The program of products of one row and a matrix: the instructions for a thread's share of the outputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final

from iced_x86 import Register

from fmtprop.jit.assembler import at
from fmtprop.jit.functions import FUNCTIONS
from fmtprop.jit.gemv import CHAINS, GemvArguments, Tail
from fmtprop.jit.isa import Isa
from fmtprop.jit.program import Program, with_table
from fmtprop.layout import DataType

__all__ = ["gemv"]

#: the thread's current task, and the task after its last
_ITEM, _END = Register.R8, Register.R9

#: the first output of a task; the outputs, then the vectors of a row, that are left
_FIRST, _LEFT, _LEFT_INSIDE = Register.R10, Register.RCX, Register.RAX

_ROW, _SRC, _WEIGHTS, _SUM, _PLACE = Register.RDX, Register.RSI, Register.RDI, Register.R11, Register.RAX

#: the sums of a task, and its item, in the red zone below the stack (System V AMD64 ABI): no function is called
_SUMS, _ITEM_OF_TASK = -64, -72

#: where functions expect their constants
_TABLE = Register.RDX

#: bytes between a load of weights and its prefetch to the second cache, a page: the hardware's own ends with a page.
#: On Zen 4, this reads 41 to 46 GB/s with two threads, as a sum of all numbers does; 26 to 37 without, 24 to 34 with a
#: prefetch to the first cache
_AHEAD_NBYTES: Final = 4096

_OPERATIONS = {"add": "VADDPS", "sub": "VSUBPS", "mul": "VMULPS", "div": "VDIVPS"}


def gemv(isa: Isa, dtype: DataType, dst: DataType, bias: DataType | None, tail: Sequence[Tail]) -> tuple[bytes, bytes]:
    """Return the program, and the table of constants that it reads.

    Parameters
    ----------
    isa : Isa
        For which machine.
    dtype, dst, bias, tail
        See :class:`fmtprop.jit.gemv.GemvKernel`.
    """
    return with_table(partial(_assembled, isa, dtype, dst, bias, tail))


def _assembled(
    isa: Isa,
    dtype: DataType,
    dst: DataType,
    bias: DataType | None,
    tail: Sequence[Tail],
    numbers: tuple[bytes, ...],
) -> _Gemv:
    p = _Gemv(isa, GemvArguments, bf16=dtype is DataType.BF16)
    p.share(_ITEM, _END, "tasks")
    p.move(_TABLE, p.argument("table"))
    p.load_numbers(numbers)
    with p.until(_ITEM, _END):
        p.sums()
        p.finish(dst, bias, tail)
    return p


class _Gemv(Program):
    def sums(self) -> None:
        """Compute the sums of a task; an item's last task may begin within the one before."""
        lanes = self.isa.lanes
        self.divide(_ITEM, self.argument("item"))
        self.emit("MOV_RM64_R64", at(Register.RSP, _ITEM_OF_TASK), Register.RAX)
        self.move(_FIRST, Register.RDX)
        self.immediate("SHL_RM64_IMM8", _FIRST, lanes.bit_length() - 1)
        self.emit("CMP_R64_RM64", _FIRST, self.argument("last"))
        self.emit("CMOVA_R64_RM64", _FIRST, self.argument("last"))
        self.point(_WEIGHTS, "weights", Register.RAX, "weights_item")
        self.point(_ROW, "src", Register.RAX, "src_item")
        self.move(_SRC, _FIRST)
        self.emit("IMUL_R64_RM64", _SRC, self.argument("row"))
        self.add(_WEIGHTS, _SRC)
        self.emit("LEA_R64_M", _SUM, at(Register.RSP, _SUMS))
        chains = [self.register(index) for index in range(CHAINS)]
        with self.repeat(self.argument("lanes"), _LEFT):
            for chain in chains:
                self.zero(chain)
            self.move(_SRC, _ROW)
            for count in self.vectors(CHAINS, _LEFT_INSIDE):
                for index, chain in enumerate(chains[:count]):
                    self._multiply(chain, self.register(CHAINS), index * self.isa.nbytes)
                self.advance(count * self.isa.nbytes, _SRC, _WEIGHTS)
            self.across(chains)
            self.emit("VEX_VMOVSS_M32_XMM", at(_SUM), Register.XMM0)
            self.advance(4, _SUM)
            self.add(_WEIGHTS, self.argument("gap"))

    def _multiply(self, total: int, x: int, offset: int) -> None:
        self.emit("PREFETCHT2_M8", at(_WEIGHTS, offset + _AHEAD_NBYTES))
        self.v("VMOVUPS", x, at(_SRC, offset))
        self.v("VDPBF16PS" if self.bf16 else "VFMADD231PS", total, x, at(_WEIGHTS, offset))

    def finish(self, dst: DataType, bias: DataType | None, tail: Sequence[Tail]) -> None:
        """Apply bias and post-ops to the sums of a task, and store them."""
        x, y = self.register(0), self.register(1)
        self.move(_TABLE, self.argument("table"))
        self.v("VMOVUPS", x, at(Register.RSP, _SUMS))
        if bias is not None:
            self._read(y, "bias", bias)
            self.v("VADDPS", x, x, y)
        for number, one in enumerate(tail):
            if one.dtype is None:
                self.release()
                self.v("VMOVUPS", x, FUNCTIONS[one.alg](self, self.vector(), one.alpha, one.beta))
            else:
                self._read(y, f"post_op_{number}", one.dtype, is_number=one.is_number)
                self.v(_OPERATIONS[one.alg], x, x, y)
        self._find("dst", dst)
        with self._numbers_of(dst):
            self.store(at(_PLACE), x)

    def _read(self, x: int, name: str, dtype: DataType, *, is_number: bool = False) -> None:
        """Load the numbers of a task's outputs, or one number for all."""
        self._find(name, dtype, is_number=is_number)
        with self._numbers_of(dtype):
            (self.load_one if is_number else self.load)(x, at(_PLACE))

    def _find(self, name: str, dtype: DataType, *, is_number: bool = False) -> None:
        """Point to a task's numbers of a tensor, or to its item's number."""
        self.move(_PLACE, at(Register.RSP, _ITEM_OF_TASK))
        self.emit("IMUL_R64_RM64", _PLACE, self.argument(f"{name}_item"))
        if not is_number:
            self.add(_PLACE, _FIRST)
        self.point(_PLACE, name, _PLACE, dtype.nbytes)

    @contextmanager
    def _numbers_of(self, dtype: DataType) -> Iterator[None]:
        """Let loads and stores of the block treat numbers in memory as this data type."""
        before, self.bf16 = self.bf16, dtype is DataType.BF16
        yield
        self.bf16 = before
