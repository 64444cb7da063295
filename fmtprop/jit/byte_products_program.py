"""The program of products of bytes that are widened to 16 bits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from iced_x86 import Code, Instruction, MemoryOperand, Register

from fmtprop.jit.arguments import UNROLLED
from fmtprop.jit.assembler import at
from fmtprop.jit.byte_products import BLOCK, MOST_OPERANDS, ByteProductsArguments, TailOperand, TailStep
from fmtprop.jit.functions import FUNCTIONS
from fmtprop.jit.isa import AVX2
from fmtprop.jit.program import ARITHMETIC, THREAD, THREADS, Program, with_table
from fmtprop.layout import DataType

#: the thread's current task, and the task after its last
_TASK, _END = Register.R8, Register.R9

#: the block of 16 outputs, and its weights
_PANEL, _WEIGHTS = Register.R10, Register.R11

#: the positions of a tile's row before a block (nothing asks for threads any more), and the first number that it reads
_POSITION, _FIRST = THREADS, THREAD

#: places of products; what is left of them
_X, _W, _LEFT, _ROWS_LEFT, _TAPS_LEFT = Register.RSI, Register.RDI, Register.RCX, Register.RAX, Register.RDX

#: of a tile: where it is read and written, the row of src, and rows that are left; a number
_FROM, _TO, _ROW, _HEIGHT, _NUMBER = Register.RSI, Register.RDI, Register.R11, THREADS, Register.RAX

#: of results: where they are written, where an operand is read; where functions expect their constants; the sums
_DST, _OPERAND, _TABLE, _SUM = Register.RDI, Register.RAX, Register.RDX, Register.RSI

#: places in the frame: this thread's area, the tile, the block after the last one; what a row of the tile has before,
#: inside and behind the image; the rows that are now read and written; then pointers to operands, and sums
_SLOTS = (
    *("area", "image", "x", "y", "panels", "before", "inside", "behind", "src_row", "area_row", "dst_row", "rows"),
    *("factors", "bias", *(f"post_op_{number}" for number in range(MOST_OPERANDS))),
)
_SUMS = -(-8 * len(_SLOTS) // 32) * 32

#: registers of weights, of a pair of inputs, and of a product; the first one of sums
_PAIR, _PRODUCT, _FIRST_SUM = 2, 3, 4

#: halves of 16 outputs, a vector each
_HALVES = range(2)


def byte_products(
    positions: int,
    step: int,
    pairs: int,
    has_taps: bool,
    rest: int,
    src: DataType,
    weights: DataType,
    dst: DataType,
    has_zero: bool,
    has_weights_zero: bool,
    has_bias: bool,
    tail: Sequence[TailStep],
    limits: tuple[float, float] | None,
) -> tuple[bytes, bytes]:
    """Return the program, and the table of constants that it reads.

    `step`: bytes from position to position in the area. `pairs`: pairs of inputs that follow one another. `has_taps`:
    whether the positions of a window's row do not. `rest`: outputs behind the last whole block. `limits`: of bytes.
    """
    ends = (src, weights, dst, has_zero, has_weights_zero, has_bias, tail, limits)
    return with_table(partial(_assembled, positions, step, pairs, has_taps, rest, *ends))


def _assembled(*arguments: object) -> _ByteProducts:
    p = _ByteProducts(*arguments)  # type: ignore[arg-type]
    p.share(_TASK, _END, "tasks")
    frame = _SUMS + p.positions * len(_HALVES) * AVX2.nbytes
    p.advance(-frame, Register.RSP)
    p.begin()
    with p.until(_TASK, _END):
        p.task()
    p.advance(frame, Register.RSP)
    return p


class _ByteProducts(Program):
    def __init__(
        self, positions: int, step: int, pairs: int, has_taps: bool, rest: int, src: DataType, weights: DataType,
        dst: DataType, has_zero: bool, has_weights_zero: bool, has_bias: bool, tail: Sequence[TailStep],
        limits: tuple[float, float] | None, constants: tuple[bytes, ...],
    ) -> None:  # fmt: skip
        super().__init__(AVX2, ByteProductsArguments, bf16=False)
        self.positions, self._step, self._pairs, self._has_taps, self._rest = positions, step, pairs, has_taps, rest
        self._src, self._weights, self._dst = src, weights, dst
        self._has_zero, self._has_weights_zero, self._has_bias = has_zero, has_weights_zero, has_bias
        self._tail, self._limits, self._constants = tail, limits, constants

    # ------------------------------------------------------------------ a task

    def begin(self) -> None:
        """Point to this thread's area."""
        self.point(_TO, "areas", THREAD, "area")
        self._keep("area", _TO)

    def task(self) -> None:
        """Compute some outputs of a tile."""
        self.divide(_TASK, self.argument("groups"))
        self.move(_PANEL, Register.RDX)
        self.emit("IMUL_R64_RM64", _PANEL, self.argument("group"))
        self.move(_FROM, _PANEL)
        self.add(_FROM, self.argument("group"))
        self._limit(_FROM, "panels")
        self._keep("panels", _FROM)
        for slot, count, size, last in (("x", "across", "width", "last_x"), ("y", "down", "height", "last_y")):
            self.move(_FROM, Register.RAX)
            self.divide(_FROM, self.argument(count))
            self.emit("IMUL_R64_RM64", Register.RDX, self.argument(size))
            self._limit(Register.RDX, last)
            self._keep(slot, Register.RDX)
        self._keep("image", Register.RAX)
        self._find_tile()
        self._widen()
        with self.until(_PANEL, self._slot("panels")):
            self.point(_WEIGHTS, "weights", _PANEL, "panel")
            self._rows()

    def _rows(self) -> None:
        """Compute a block of outputs at all positions of the tile."""
        self.move(_NUMBER, self._slot("image"))
        for axis, slot in (("dst_height", "y"), ("dst_width", "x")):
            self.emit("IMUL_R64_RM64", _NUMBER, self.argument(axis))
            self.add(_NUMBER, self._slot(slot))
        self._keep("dst_row", _NUMBER)
        for slot, first in (("area_row", self._slot("area")), ("rows", self.argument("height"))):
            self.move(_NUMBER, first)
            self._keep(slot, _NUMBER)
        self.label("row")
        self.emit("XOR_R32_RM32", Register.EBP, Register.EBP)
        self.label("block")
        self.move(_FIRST, _POSITION)
        self._times(_FIRST, self._step)
        self.add(_FIRST, self._slot("area_row"))
        self._multiply()
        self._finish()
        # the next block, or the last one, which may begin within the one before
        self.emit("CMP_R64_RM64", _POSITION, self.argument("last_block"))
        self.branch("JAE_REL32_64", "end of row")
        self.advance(self.positions, _POSITION)
        self._limit(_POSITION, "last_block")
        self.branch("JMP_REL32_64", "block")
        self.label("end of row")
        for slot, step in (("area_row", "tile_step"), ("dst_row", "dst_width")):
            self.move(_NUMBER, self.argument(step))
            self.emit("ADD_RM64_R64", self._slot(slot), _NUMBER)
        self.emit("DEC_RM64", self._slot("rows"))
        self.branch("JNE_REL32_64", "row")

    # ------------------------------------------------------------------ the tile, widened

    def _find_tile(self) -> None:
        """Find what the tile reads: its first row of src, and what its rows have inside and outside of the image."""
        first, behind = _NUMBER, Register.RDX
        self.move(first, self._slot("x"))
        self.emit("IMUL_R64_RM64", first, self.argument("stride_x"))
        self.emit("SUB_R64_RM64", first, self.argument("pad_x"))
        self.move(_LEFT, first)
        self.emit("NEG_RM64", _LEFT)
        self.move(behind, first)
        self.add(behind, self.argument("tile_width"))
        self.emit("SUB_R64_RM64", behind, self.argument("src_width"))
        self.move(_TO, self.argument("tile_width"))
        for one in (_LEFT, behind, first):
            self.emit("TEST_RM64_R64", one, one)
            self.emit("CMOVS_R64_RM64", one, self.argument("nothing"))
        for one in (_LEFT, behind):
            self.emit("SUB_R64_RM64", _TO, one)
        for slot, one in (("before", _LEFT), ("inside", _TO), ("behind", behind)):
            self.emit("IMUL_R64_RM64", one, self.argument("pixel"))
            self._keep(slot, one)
        self.emit("IMUL_R64_RM64", first, self.argument("pixel"))
        self.move(_FROM, self._slot("image"))
        self.emit("IMUL_R64_RM64", _FROM, self.argument("image"))
        self.add(_FROM, first)
        self.move(_ROW, self._slot("y"))
        self.emit("IMUL_R64_RM64", _ROW, self.argument("stride_y"))
        self.emit("SUB_R64_RM64", _ROW, self.argument("pad_y"))
        self.move(_NUMBER, _ROW)
        self.emit("IMUL_R64_RM64", _NUMBER, self.argument("src_row"))
        self.add(_FROM, _NUMBER)
        self.add(_FROM, self.argument("src"))
        self._keep("src_row", _FROM)

    def _widen(self) -> None:
        """Write the part of the image that the tile reads to the area, as 16 bits, with zeros around the image."""
        self.move(_TO, self._slot("area"))
        with self.repeat(self.argument("tile_height"), _HEIGHT):
            # a row above the image has a negative number: a large one, without sign
            self.emit("CMP_R64_RM64", _ROW, self.argument("src_height"))
            self.branch("JAE_REL32_64", "outside")
            self._zeros(self._slot("before"))
            self._widen_row()
            self._zeros(self._slot("behind"))
            self.branch("JMP_REL32_64", "next row")
            self.label("outside")
            self._zeros(self.argument("tile_words"))
            self.label("next row")
            self.emit("INC_RM64", _ROW)
            self.move(_NUMBER, self.argument("src_row"))
            self.emit("ADD_RM64_R64", self._slot("src_row"), _NUMBER)

    def _widen_row(self) -> None:
        """Widen what a row of the tile has inside the image."""
        x, size, rest = self.register(0), self.isa.nbytes // 2, Register.RDX
        self.move(_FROM, self._slot("src_row"))
        self.move(rest, self._slot("inside"))
        self.move(_LEFT, rest)
        self.immediate("SHR_RM64_IMM8", _LEFT, size.bit_length() - 1)
        with self.repeat(_LEFT, _LEFT):
            self.v(_widening(self._src), x, at(_FROM))
            if self._has_zero:
                self.v("VPSUBW", x, x, self.argument("zero"))
            self.v("VMOVUPS <", at(_TO), x)
            self.advance(size, _FROM)
            self.advance(2 * size, _TO)
        self.immediate("AND_RM64_IMM8", rest, size - 1)
        with self.repeat(rest, _LEFT):
            self.emit("MOVSX_R32_RM8" if self._src is DataType.S8 else "MOVZX_R32_RM8", Register.EAX, at(_FROM))
            self.emit("SUB_R32_RM32", Register.EAX, self.argument("zero"))  # only the lower 16 bits count
            self.emit("MOV_RM16_R16", at(_TO), Register.AX)
            self.advance(1, _FROM)
            self.advance(2, _TO)

    def _zeros(self, count: MemoryOperand) -> None:
        """Write so many zeros of 16 bits; the pointer is behind them then."""
        name = self._new_label()
        self.move(_LEFT, count)
        self.emit("TEST_RM64_R64", _LEFT, _LEFT)
        self.branch("JE_REL32_64", name)
        self.emit("XOR_R32_RM32", Register.EAX, Register.EAX)
        self._add(Instruction.create_rep_stosw(64))
        self.label(name)

    # ------------------------------------------------------------------ products

    def _multiply(self) -> None:
        """Write the sums of a block of outputs at some positions to the frame."""
        sums = [self.register(_FIRST_SUM + number) for number in range(self.positions * len(_HALVES))]
        for one in sums:
            self.zero(one)
        self.move(_X, _FIRST)
        self.move(_W, _WEIGHTS)
        with self.repeat(self.argument("window_height"), _ROWS_LEFT):
            if self._has_taps:
                with self.repeat(self.argument("window_width"), _TAPS_LEFT):
                    self._add_pairs(sums)
                    self.add(_X, self.argument("tap"))
            else:
                self._add_pairs(sums)
            self.add(_X, self.argument("tap_row"))
        for number, one in enumerate(sums):
            self.v("VMOVUPS <", at(Register.RSP, _SUMS + number * self.isa.nbytes), one)

    def _add_pairs(self, sums: Sequence[int]) -> None:
        """Add the products of inputs that follow one another."""
        turns, rest = divmod(self._pairs, UNROLLED)
        if turns:
            self.immediate("MOV_RM64_IMM32", _LEFT, turns)
            with self.repeat(_LEFT, _LEFT):
                self._add_products(sums, UNROLLED)
        if rest:
            self._add_products(sums, rest)

    def _add_products(self, sums: Sequence[int], pairs: int) -> None:
        weights = [self.register(half) for half in _HALVES]
        pair, products = self.register(_PAIR), self.register(_PRODUCT)
        for number in range(pairs):
            for half, one in enumerate(weights):
                self.v(_widening(self._weights), one, at(_W, (number * len(_HALVES) + half) * BLOCK))
                if self._has_weights_zero:
                    self.v("VPSUBW", one, one, self.argument("weights_zero"))
            for position in range(self.positions):
                self.v("VPBROADCASTD", pair, at(_X, number * 4 + position * self._step))
                for half, (one, into) in enumerate(zip(weights, (products, pair), strict=True)):
                    total = sums[position * len(_HALVES) + half]
                    self.v("VPMADDWD", into, pair, one)
                    self.v("VPADDD", total, total, into)
        self.advance(pairs * 4, _X)
        self.advance(pairs * 2 * BLOCK, _W)

    # ------------------------------------------------------------------ results

    def _finish(self) -> None:
        """Make results of a block's sums, and store them."""
        position = _W  # in all of dst
        self.move(_TABLE, self.argument("table"))
        self.load_numbers(self._constants)
        self.move(position, _POSITION)
        self.add(position, self._slot("dst_row"))
        constant = TailOperand(DataType.F32, 0, is_number=False)
        for name, operand in {"factors": constant, **({"bias": constant} if self._has_bias else {})}.items():
            self._point_to(name, operand)
            self._keep(name, _OPERAND)
        for name, operand in self._operands():
            self._point_to(name, operand, position)
            self._keep(name, _OPERAND)
        self._point_to("dst", constant._replace(dtype=self._dst), position)
        self.move(_DST, _OPERAND)
        if not self._rest:
            self._store_results(2 * self.isa.lanes)
            return
        self.move(_NUMBER, self.argument("panels"))
        self.emit("DEC_RM64", _NUMBER)
        self.emit("CMP_R64_RM64", _PANEL, _NUMBER)
        self.branch("JE_REL32_64", "last panel")
        self._store_results(2 * self.isa.lanes)
        self.branch("JMP_REL32_64", "finished")
        self.label("last panel")
        self._store_results(self._rest)
        self.label("finished")

    def _operands(self) -> list[tuple[str, TailOperand]]:
        return [(f"post_op_{one.number}", one.operand) for one in self._tail if one.operand is not None]

    def _point_to(self, name: str, operand: TailOperand, position: int | None = None) -> None:
        """Point to the numbers of a tensor at the block's outputs, and at a position."""
        self.move(_OPERAND, self.argument(name))
        if position is not None:
            self.move(_LEFT, position)
            self.emit("IMUL_R64_RM64", _LEFT, self.argument(f"{name}_row"))
            self.add(_OPERAND, _LEFT)
        if not operand.is_number:
            self.move(_LEFT, _PANEL)
            self.immediate("SHL_RM64_IMM8", _LEFT, (BLOCK * operand.dtype.nbytes).bit_length() - 1)
            self.add(_OPERAND, _LEFT)

    def _store_results(self, outputs: int) -> None:
        """Make results of the first outputs of a block, position by position."""
        x, y = self.register(0), self.register(1)
        self.emit("LEA_R64_M", _SUM, at(Register.RSP, _SUMS))
        self.immediate("MOV_RM64_IMM32", _LEFT, self.positions)
        with self.repeat(_LEFT, _LEFT):
            for half in _HALVES:
                if half * self.isa.lanes >= outputs:
                    continue
                keep = self.argument(f"keep_{half}") if outputs < (half + 1) * self.isa.lanes else None
                place, start = at(_SUM, half * self.isa.nbytes), half * self.isa.lanes
                self.v("VCVTDQ2PS", x, place)
                self.move(_OPERAND, self._slot("factors"))
                self.v("VMULPS", x, x, at(_OPERAND, half * self.isa.nbytes))
                if self._has_bias:
                    self._read(y, "bias", start, TailOperand(DataType.F32, 0, is_number=False), keep)
                    self.v("VADDPS", x, x, y)
                for number, one in enumerate(self._tail):
                    self._apply(number, one, start, keep)
                if self._limits is None:
                    self._store_numbers(at(_DST, half * self.isa.nbytes), x, keep)
                    continue
                self._to_integers(x)
                if half == 0:
                    self.v("VMOVUPS <", place, x)
                else:
                    self.v("VMOVUPS", y, at(_SUM))
                    self._store_bytes(at(_DST), y, x)
            self.advance(len(_HALVES) * self.isa.nbytes, _SUM)
            self.add(_DST, self.argument("dst_row"))
            for name, _ in self._operands():
                self.move(_OPERAND, self.argument(f"{name}_row"))
                self.emit("ADD_RM64_R64", self._slot(name), _OPERAND)

    def _apply(self, number: int, step: TailStep, start: int, keep: MemoryOperand | None) -> None:
        """Apply a step to register 0, which has the outputs from `start` on."""
        x, y = self.register(0), self.register(1)
        if step.operand is not None:
            self._read(y, f"post_op_{step.number}", start, step.operand, keep)
            self.v(ARITHMETIC[step.alg], x, x, y)
        elif step.alg == "round":
            self.v("VROUNDPS", x, x, immediate=0)
        elif step.alg == "linear":
            self.v("VMOVUPS", y, self.argument(f"alpha_{number}"))
            self.v("VFMADD213PS", x, y, self.argument(f"beta_{number}"))
        elif step.alg == "clip":
            for operation, name in (("VMAXPS", "alpha"), ("VMINPS", "beta")):
                self.v("VMOVUPS", y, self.argument(f"{name}_{number}"))
                self.v(operation, x, y, x)  # if an operand is NaN, the last one is returned
        else:
            self.release()
            self.v("VMOVUPS", x, FUNCTIONS[step.alg](self, self.vector(), step.alpha, step.beta))

    def _read(self, x: int, name: str, start: int, operand: TailOperand, keep: MemoryOperand | None) -> None:
        """Load an operand's numbers at the outputs from `start` on."""
        self.move(_OPERAND, self._slot(name))
        place = at(_OPERAND, 0 if operand.is_number else start * operand.dtype.nbytes)
        if operand.is_number:
            self.v("VBROADCASTSS", x, place)
        elif operand.dtype is not DataType.F32:
            self.v("VPMOVSXBD" if operand.dtype is DataType.S8 else "VPMOVZXBD", x, place)
            self.v("VCVTDQ2PS", x, x)
        elif keep is None:
            self.v("VMOVUPS", x, place)
        else:
            self.v("VMOVUPS", x, keep)
            self.emit("VEX_VMASKMOVPS_YMM_YMM_M256", x, x, place)

    def _store_numbers(self, place: MemoryOperand, x: int, keep: MemoryOperand | None) -> None:
        if keep is None:
            self.v("VMOVUPS <", place, x)
            return
        mask = self.register(1)
        self.v("VMOVUPS", mask, keep)
        self.emit("VEX_VMASKMOVPS_M256_YMM_YMM", place, mask, x)

    def _to_integers(self, x: int) -> None:
        """Round numbers, those beyond the limits to these."""
        y = self.register(1)
        assert self._limits is not None
        for operation, limit in zip(("VMAXPS", "VMINPS"), self._limits, strict=True):
            self.v("VMOVUPS", y, self.number(limit))
            self.v(operation, x, y, x)  # if an operand is NaN, the last one is returned
        self.v("VCVTPS2DQ", x, x)

    def _store_bytes(self, place: MemoryOperand, low: int, high: int) -> None:
        """Store two vectors of integers as bytes; they are lost."""
        self.v("VPACKSSDW", low, low, high)
        self.v("VPERMPD", low, low, immediate=0b11011000)
        first, second = (Register.XMM0 + (one - self.register(0)) for one in (low, high))
        self._half(Code.VEX_VEXTRACTI128_XMMM128_YMM_IMM8, second, low)
        pack = "VPACKUSWB" if self._dst is DataType.U8 else "VPACKSSWB"
        self.emit(f"VEX_{pack}_XMM_XMM_XMMM128", first, first, second)
        self.emit("VEX_VMOVUPS_XMMM128_XMM", place, first)

    # ------------------------------------------------------------------ integers

    def _keep(self, slot: str, register: int) -> None:
        """Write a register to the frame."""
        self.emit("MOV_RM64_R64", self._slot(slot), register)

    @staticmethod
    def _slot(slot: str) -> MemoryOperand:
        return at(Register.RSP, 8 * _SLOTS.index(slot))

    def _limit(self, register: int, name: str) -> None:
        """Set a register to the smaller one of its number and an argument."""
        self.emit("CMP_R64_RM64", register, self.argument(name))
        self.emit("CMOVA_R64_RM64", register, self.argument(name))

    def _times(self, register: Any, factor: int) -> None:
        self._add(Instruction.create_reg_reg_i32(Code.IMUL_R64_RM64_IMM32, register, register, factor))


def _widening(dtype: DataType) -> str:
    return "VPMOVSXBW" if dtype is DataType.S8 else "VPMOVZXBW"
