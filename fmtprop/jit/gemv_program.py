"""The program of products of a few rows and a matrix: the instructions for a thread's share of the outputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, islice
from itertools import count as count_from
from typing import Final

from iced_x86 import MemoryOperand, Register

from fmtprop.jit.assembler import at
from fmtprop.jit.functions import FUNCTIONS
from fmtprop.jit.gemv import CHAINS, GemvArguments, Tail
from fmtprop.jit.isa import Isa
from fmtprop.jit.program import ARITHMETIC, THREAD, THREADS, Program, with_table
from fmtprop.layout import DataType

#: the thread's current task, and the task after its last
ITEM, END = Register.R8, Register.R9

#: the first output of a task; the outputs, then the vectors of a row, that are left
FIRST, _LEFT, _LEFT_INSIDE = Register.R10, Register.RCX, Register.RAX

SRC_ROWS, _SRC, WEIGHTS, SUM = Register.RDX, Register.RSI, Register.RDI, Register.R11

#: after the sums: the row, the place of one of its numbers, and the bytes to this place
_ROW, _PLACE, _STEP = Register.RCX, Register.RAX, Register.RSI

#: places in the frame: the item of a task, and its sums
_ITEM_OF_TASK, SUMS = 0, 64

#: where functions expect their constants
_TABLE = Register.RDX

#: bytes from row to row of the weights, and where the fourth of some rows is: nothing asks for threads any more
_PITCH, _FOURTH = THREADS, THREAD

#: outputs that are computed side by side for several rows, as many as there are registers for: each vector of src is
#: loaded once for all of them
_SIDE_BY_SIDE: Final = (4, 2)

#: bytes between a load of weights and its prefetch to the second cache, a page: the hardware's own ends with a page.
#: On Zen 4, this reads 41 to 46 GB/s with two threads, as a sum of all numbers does; 26 to 37 without, 24 to 34 with a
#: how far ahead is prefetched to the first cache: a page for each of the outputs that are computed side by side
AHEAD_NBYTES: Final = 4096


def gemv(
    isa: Isa,
    dtype: DataType,
    dst: DataType,
    bias: DataType | None,
    tail: Sequence[Tail],
    rows: Sequence[int],
) -> tuple[bytes, bytes]:
    """Return the program, and the table of constants that it reads.

    `rows`: where the rows of src start, in bytes behind the first.
    """
    return with_table(partial(_assembled, isa, dtype, dst, bias, tail, rows))


def _assembled(
    isa: Isa,
    dtype: DataType,
    dst: DataType,
    bias: DataType | None,
    tail: Sequence[Tail],
    rows: Sequence[int],
    numbers: tuple[bytes, ...],
) -> GemvProgram:
    p = GemvProgram(isa, GemvArguments, bf16=dtype is DataType.BF16)
    p.share(ITEM, END, "tasks")
    frame = SUMS + len(rows) * isa.nbytes
    p.advance(-frame, Register.RSP)
    with p.until(ITEM, END):
        p.begin()
        p.sums(rows)
        p.finish_rows(numbers, dst, bias, tail)
    p.advance(frame, Register.RSP)
    return p


class GemvProgram(Program):
    """The program under construction; kernels of other matrices compute the sums of a task in their own way."""

    def begin(self) -> None:
        """Point to the weights and rows of a task; an item's last task may begin within the one before."""
        self.divide(ITEM, self.argument("item"))
        self.emit("MOV_RM64_R64", at(Register.RSP, _ITEM_OF_TASK), Register.RAX)
        self.move(FIRST, Register.RDX)
        self.immediate("SHL_RM64_IMM8", FIRST, self.isa.lanes.bit_length() - 1)
        self.emit("CMP_R64_RM64", FIRST, self.argument("last"))
        self.emit("CMOVA_R64_RM64", FIRST, self.argument("last"))
        self.point(WEIGHTS, "weights", Register.RAX, "weights_item")
        self.point(SRC_ROWS, "src", Register.RAX, "src_item")
        self.move(_SRC, FIRST)
        self.emit("IMUL_R64_RM64", _SRC, self.argument("row"))
        self.add(WEIGHTS, _SRC)
        self.emit("LEA_R64_M", SUM, at(Register.RSP, SUMS))

    def sums(self, rows: Sequence[int]) -> None:
        """Compute the sums of a task: each vector of weights is loaded once, for all rows."""
        # the first register of sums, behind those of weights and of src
        first = {size: max(size, 2) + 1 for size in (*_SIDE_BY_SIDE, 1)}
        fits = (size for size in _SIDE_BY_SIDE if first[size] + len(rows) * size <= self.isa.registers)
        # one row reads one output after the other, as the matrix lies in memory
        outputs = next(fits) if len(rows) > 1 else 1
        count = min(CHAINS, (self.isa.registers - first[outputs]) // (len(rows) * outputs))
        free = map(self.register, count_from(first[outputs]))
        sums = [[list(islice(free, count)) for _ in range(outputs)] for _ in rows]
        self.move(_PITCH, self.argument("row"))
        self.emit("LEA_R64_M", _FOURTH, MemoryOperand(_PITCH, _PITCH, 2))
        self.add(_FOURTH, WEIGHTS)
        self.immediate("MOV_RM64_IMM32", _LEFT, self.isa.lanes // outputs)
        with self.repeat(_LEFT, _LEFT):
            for one in chain(*chain(*sums)):
                self.zero(one)
            self.move(_SRC, SRC_ROWS)
            for vectors in self.vectors(CHAINS, _LEFT_INSIDE):
                for vector in range(vectors):
                    own = [[one[vector % count] for one in row] for row in sums]
                    self._multiply(rows, own, vector * self.isa.nbytes)
                self.advance(vectors * self.isa.nbytes, _SRC, WEIGHTS, _FOURTH)
            for number, row in enumerate(sums):
                for output, own_sums in enumerate(row):
                    self.across(own_sums)
                    self.emit("VEX_VMOVSS_M32_XMM", at(SUM, number * self.isa.nbytes + output * 4), Register.XMM0)
            self.advance(4 * outputs, SUM)
            for pointer in (WEIGHTS, _FOURTH):
                self.add(pointer, self.argument("gap"))
                for _ in range(outputs - 1):
                    self.add(pointer, _PITCH)

    def _multiply(self, rows: Sequence[int], sums: Sequence[Sequence[int]], place: int) -> None:
        """Add the products of a vector of each row and the weights of each output."""
        multiply, outputs = "VDPBF16PS" if self.bf16 else "VFMADD231PS", len(sums[0])
        weights, src = [self.register(index) for index in range(outputs)], self.register(max(outputs, 2))
        for output, x in enumerate(weights):
            self.emit("PREFETCHT2_M8", _at_weights(output, place + AHEAD_NBYTES * outputs))
            if len(rows) > 1:
                self.v("VMOVUPS", x, _at_weights(output, place))
        for row, own in zip(rows, sums, strict=True):
            self.v("VMOVUPS", src, at(_SRC, row + place))
            for output, one in enumerate(own):
                self.v(multiply, one, src, weights[output] if len(rows) > 1 else _at_weights(output, place))

    def finish_rows(self, numbers: Sequence[bytes], dst: DataType, bias: DataType | None, tail: Sequence[Tail]) -> None:
        """Apply bias and post-ops to the sums of all rows of a task; they lie in the frame, a vector for each row."""
        self.move(_TABLE, self.argument("table"))
        self.load_numbers(numbers)
        self.emit("LEA_R64_M", SUM, at(Register.RSP, SUMS))
        self.emit("XOR_R32_RM32", Register.ECX, Register.ECX)
        with self.until(_ROW, self.argument("rows")):
            self.finish(dst, bias, tail)
            self.advance(self.isa.nbytes, SUM)

    def finish(self, dst: DataType, bias: DataType | None, tail: Sequence[Tail]) -> None:
        """Apply bias and post-ops to a row's sums of a task, and store them."""
        x, y = self.register(0), self.register(1)
        self.v("VMOVUPS", x, at(SUM))
        if bias is not None:
            self._read(y, "bias", bias)
            self.v("VADDPS", x, x, y)
        for number, one in enumerate(tail):
            if one.dtype is None:
                self.release()
                self.v("VMOVUPS", x, FUNCTIONS[one.alg](self, self.vector(), one.alpha, one.beta))
            else:
                self._read(y, f"post_op_{number}", one.dtype, is_number=one.is_number)
                self.v(ARITHMETIC[one.alg], x, x, y)
        self._find("dst", dst)
        with self.numbers_of(dst):
            self.store(at(_PLACE), x)

    def _read(self, x: int, name: str, dtype: DataType, *, is_number: bool = False) -> None:
        """Load the numbers of a task's outputs, or one number for all."""
        self._find(name, dtype, is_number=is_number)
        with self.numbers_of(dtype):
            (self.load_one if is_number else self.load)(x, at(_PLACE))

    def _find(self, name: str, dtype: DataType, *, is_number: bool = False) -> None:
        """Point to a row's numbers of a tensor, or to its one number."""
        self.move(_PLACE, at(Register.RSP, _ITEM_OF_TASK))
        self.emit("IMUL_R64_RM64", _PLACE, self.argument(f"{name}_item"))
        self.move(_STEP, _ROW)
        self.emit("IMUL_R64_RM64", _STEP, self.argument(f"{name}_row"))
        self.add(_PLACE, _STEP)
        if not is_number:
            self.add(_PLACE, FIRST)
        self.point(_PLACE, name, _PLACE, dtype.nbytes)

    @contextmanager
    def numbers_of(self, dtype: DataType) -> Iterator[None]:
        """Let loads and stores of the block treat numbers in memory as this data type."""
        before, self.bf16 = self.bf16, dtype is DataType.BF16
        yield
        self.bf16 = before


def _at_weights(output: int, place: int) -> MemoryOperand:
    """Return the operand `place` bytes behind the pointer to the weights of one of four outputs."""
    if output == 0:
        return at(WEIGHTS, place)
    return at(_FOURTH, place) if output == 3 else MemoryOperand(WEIGHTS, _PITCH, output, place, 8)
