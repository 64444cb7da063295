"""The program of a layer of an LSTM or a GRU: products of six steps with the input, then one step after another."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from iced_x86 import MemoryOperand, Register

from fmtprop.jit.arguments import UNROLLED
from fmtprop.jit.assembler import at
from fmtprop.jit.functions import sigmoid, tanh
from fmtprop.jit.isa import AVX2
from fmtprop.jit.program import THREAD, THREADS, Program, with_table
from fmtprop.jit.recurrent import GATES, STEPS, SUMS, RecurrentArguments

#: the task, which is a direction of a sequence (nothing asks for threads any more); this thread's area, with rows of
#: sums, the state, the next one, and an LSTM's cell
_TASK, _AREA = THREADS, THREAD

#: the numbers of a step in src and in dst; the state, and the next one; bytes from step to step of src
_SRC, _DST, _STATE, _NEXT, _STEP = Register.R8, Register.R9, Register.R10, Register.R11, Register.R13

#: of products: weights, numbers of the first step and of the fourth, blocks and numbers that are left, sums, bias
_WEIGHTS, _FROM, _FOURTH, _BLOCKS, _LEFT = Register.RSI, Register.RDI, Register.R14, Register.RCX, Register.R15
_SUMS, _BIAS = Register.RAX, Register.RDX

#: of functions: the sums of a step, the state, the next one and the cell at a block, and the constants
_ROW, _BEFORE, _AFTER, _CELL, _TABLE = Register.R14, Register.RSI, Register.RDI, Register.R15, Register.RDX

#: places in the frame: what the caller has in registers, and numbers of a task
_SAVED = {Register.R13: 0, Register.R14: 8, Register.R15: 16}
_END, _LAYER, _ITER, _BIASES, _DST_STEP, _LEFT_STEPS, _LEFT_TILES, _BLOCK_WEIGHTS = range(24, 88, 8)
_FRAME_NBYTES = 88

#: bytes of the sums of a block
_BLOCK_NBYTES = SUMS * AVX2.nbytes


def recurrent(kind: str, rest: int) -> tuple[bytes, bytes]:
    """Return the program, and the table of constants that it reads.

    `kind`: a key of `GATES`. `rest`: steps behind the last six.
    """
    return with_table(partial(_assembled, kind, rest))


def _assembled(kind: str, rest: int, numbers: tuple[bytes, ...]) -> _Recurrent:
    p = _Recurrent(kind, numbers)
    p.share(Register.RSI, Register.RDI, "tasks")
    p.advance(-_FRAME_NBYTES, Register.RSP)
    for register, place in _SAVED.items():
        p.keep(place, register)
    p.keep(_END, Register.RDI)
    p.point(_AREA, "areas", _AREA, "area")
    p.move(_TASK, Register.RSI)
    with p.until(_TASK, at(Register.RSP, _END)):
        p.sequence(rest)
    for register, place in _SAVED.items():
        p.move(register, at(Register.RSP, place))
    p.advance(_FRAME_NBYTES, Register.RSP)
    return p


class _Recurrent(Program):
    def __init__(self, kind: str, numbers: tuple[bytes, ...]) -> None:
        super().__init__(AVX2, RecurrentArguments, bf16=False)
        self._gates, self._constants, self._is_lstm = GATES[kind], numbers, kind == "lstm"
        #: for each gate, the place of its sum with the input, and with the state
        self._places = {"layer": range(self._gates), "iter": (0, 1, 2, 3) if self._is_lstm else (0, 1, 3)}

    def keep(self, place: int, register: Any) -> None:
        """Write a register to the frame."""
        self.emit("MOV_RM64_R64", at(Register.RSP, place), register)

    # ------------------------------------------------------------------ one direction of a sequence

    def sequence(self, rest: int) -> None:
        """Compute all steps of a task."""
        self._begin()
        cell = [("iter_c", _CELL)] if self._is_lstm else []
        self._point_to_cell()
        for name, pointer in (("iter", _STATE), *cell):
            self._of_task(Register.RSI, f"src_{name}")
            self._copy(pointer)
        with self.repeat(self.argument("tiles"), Register.RCX):
            self.keep(_LEFT_TILES, Register.RCX)
            self._inputs(STEPS)
            self._steps(STEPS)
            self.move(Register.RCX, at(Register.RSP, _LEFT_TILES))
        if rest:
            self._inputs(rest)
            self._steps(rest)
        self._point_to_cell()
        for name, pointer in (("iter", _STATE), *cell):
            self._of_task(Register.RDI, f"dst_{name}")
            self.move(Register.RSI, pointer)
            self._copy(Register.RDI)

    def _begin(self) -> None:
        """Point to the first step of the task, and to the weights of its direction."""
        self.divide(_TASK, self.argument("sequences"))  # the direction in RAX, the sequence in RDX
        for pointer, name in ((_SRC, "src"), (_DST, "dst")):
            self.move(pointer, Register.RDX)
            self.emit("IMUL_R64_RM64", pointer, self.argument(f"{name}_row"))
            self.add(pointer, self.argument(f"{name}_layer"))
            self.add(pointer, self._of_direction(f"{name}_first"))
        self.move(_STEP, self._of_direction("src_step"))
        self.move(Register.RCX, self._of_direction("dst_step"))
        self.keep(_DST_STEP, Register.RCX)
        for place, tensor, stride in (
            (_LAYER, "weights_layer", "layer_nbytes"),
            (_ITER, "weights_iter", "iter_nbytes"),
            (_BIASES, "bias", "row_nbytes"),
        ):
            self.point(Register.RCX, tensor, Register.RAX, stride)
            self.keep(place, Register.RCX)
        self.move(_STATE, _AREA)
        self.add(_STATE, self.argument("rows_nbytes"))
        self.move(_NEXT, _STATE)
        self.add(_NEXT, self.argument("padded_nbytes"))

    def _of_direction(self, name: str) -> MemoryOperand:
        """Return an argument of the direction in RAX."""
        return at(Register.RBX, getattr(RecurrentArguments, name).offset, Register.RAX, 8)

    def _of_task(self, pointer: Any, name: str) -> None:
        """Point to a state before or after the sequence."""
        self.point(pointer, name, _TASK, "state_nbytes")

    def _point_to_cell(self) -> None:
        self.move(_CELL, _AREA)
        self.add(_CELL, self.argument("cell"))

    def _copy(self, to: Any) -> None:
        """Copy a state from where RSI points to."""
        self.move(Register.RDI, to)
        self.move(Register.RCX, self.argument("state_nbytes"))
        self.copy_bytes()

    def _steps(self, count: int) -> None:
        """Go through steps whose sums with the input are there."""
        self.move(_ROW, _AREA)
        self.immediate("MOV_RM64_IMM32", Register.RCX, count)
        with self.repeat(Register.RCX, Register.RCX):
            self.keep(_LEFT_STEPS, Register.RCX)
            self._product("iter", _STATE, at(Register.RSP, _ITER))
            self._apply()
            self.move(Register.RSI, _NEXT)
            self._copy(_DST)
            self.add(_SRC, _STEP)
            self.add(_DST, at(Register.RSP, _DST_STEP))
            self.add(_ROW, self.argument("row_nbytes"))
            self.emit("XCHG_RM64_R64", _STATE, _NEXT)
            self.move(Register.RCX, at(Register.RSP, _LEFT_STEPS))

    # ------------------------------------------------------------------ products

    def _inputs(self, count: int) -> None:
        """Write sums of bias and products with the input, for some steps from this one on."""
        if count == 1:
            self.move(_ROW, _AREA)
            self.move(Register.RSI, at(Register.RSP, _BIASES))
            self.move(Register.RDI, _ROW)
            self.move(Register.RCX, self.argument("row_nbytes"))
            self.copy_bytes()
            self._product("layer", _SRC, at(Register.RSP, _LAYER))
            return
        self.move(_SUMS, _AREA)
        self.move(_BIAS, at(Register.RSP, _BIASES))
        self.move(_WEIGHTS, at(Register.RSP, _LAYER))
        with self.repeat(self.argument("blocks"), _BLOCKS):
            self.keep(_BLOCK_WEIGHTS, _WEIGHTS)
            for first in range(0, self._gates, 2):
                self._tile(range(first, min(first + 2, self._gates)), count)
            if self._gates < SUMS:
                self.v("VMOVUPS", self.register(0), self._at(_BIAS, self._gates))
                self._store(count, {self._gates: 0}, 0)
            self.move(_WEIGHTS, at(Register.RSP, _BLOCK_WEIGHTS))
            self.add(_WEIGHTS, self.argument("layer_block_nbytes"))
            self.advance(_BLOCK_NBYTES, _SUMS, _BIAS)

    def _tile(self, gates: range, count: int) -> None:
        """Write a block's sums of one gate or two, for some steps."""
        wide, (*loaded, number) = len(gates), (self.register(x) for x in (12, 13, 14))
        for column, gate in enumerate(gates):
            for row in range(count):
                bias = self._at(_BIAS, gate) if row == 0 else self.register(column)
                self.v("VMOVUPS", self.register(row * wide + column), bias)
        self.move(_FROM, _SRC)
        self.move(_FOURTH, _SRC)
        for _ in range(3):
            self.add(_FOURTH, _STEP)
        self.move(_WEIGHTS, at(Register.RSP, _BLOCK_WEIGHTS))
        for unit in self._units("layer", _FROM, _FOURTH):
            for column, gate in enumerate(gates):
                self.v("VMOVUPS", loaded[column], self._at(_WEIGHTS, unit * self._gates + gate))
            for row in range(count):
                self.v("VBROADCASTSS", number, self._numbers_of(row, 4 * unit))
                for column in range(wide):
                    self.v("VFMADD231PS", self.register(row * wide + column), number, loaded[column])
        self._store(count, {gate: column for column, gate in enumerate(gates)}, wide)

    def _units(self, name: str, *pointers: Any) -> Iterator[int]:
        """Add loops over the numbers of a step, to which there are pointers, and their weights; yield their places."""
        for part, units in (("blocks", UNROLLED), ("rest", 1)):
            with self.repeat(self.argument(f"{name}_{part}"), _LEFT):
                yield from range(units)
                self.advance(units * self._gates * AVX2.nbytes, _WEIGHTS)
                self.advance(4 * units, *pointers)

    def _numbers_of(self, row: int, nbytes: int) -> MemoryOperand:
        """Return a number of the step that is `row` steps away."""
        first, away = (_FROM, row) if row < 3 else (_FOURTH, row - 3)
        return at(first, nbytes, _STEP, away) if away else at(first, nbytes)

    def _store(self, count: int, places: dict[int, int], wide: int) -> None:
        """Write sums of some steps: from their places to the registers of the first step, `wide` before the next's."""
        self.move(_FROM, _SUMS)
        for row in range(count):
            for place, first in places.items():
                self.v("VMOVUPS <", self._at(_FROM, place), self.register(row * wide + first))
            self.add(_FROM, self.argument("row_nbytes"))

    def _product(self, name: str, numbers: Any, weights: MemoryOperand) -> None:
        """Add the products of one step's numbers to its sums, block by block."""
        self.move(_SUMS, _ROW)
        self.move(_WEIGHTS, weights)
        number = self.register(2 * SUMS)
        # two sums for each gate: an addition waits for the one before
        chains = [(self.register(2 * gate), self.register(2 * gate + 1)) for gate in range(self._gates)]
        with self.repeat(self.argument("blocks"), _BLOCKS):
            for (first, second), place in zip(chains, self._places[name], strict=True):
                self.v("VMOVUPS", first, self._at(_SUMS, place))
                self.zero(second)
            self.move(_FROM, numbers)
            for unit in self._units(name, _FROM):
                self.v("VBROADCASTSS", number, at(_FROM, 4 * unit))
                for gate, sums in enumerate(chains):
                    self.v("VFMADD231PS", sums[unit % 2], number, self._at(_WEIGHTS, unit * self._gates + gate))
            for (first, second), place in zip(chains, self._places[name], strict=True):
                self.v("VADDPS", first, first, second)
                self.v("VMOVUPS <", self._at(_SUMS, place), first)
            self.advance(_BLOCK_NBYTES, _SUMS)

    def _at(self, pointer: Any, vector: int) -> MemoryOperand:
        return at(pointer, vector * AVX2.nbytes)

    # ------------------------------------------------------------------ functions

    def _apply(self) -> None:
        """Compute the next state, and the cell, from the sums of a step."""
        self.move(_TABLE, self.argument("table"))
        self.load_numbers(self._constants)
        self.move(_SUMS, _ROW)
        self.move(_BEFORE, _STATE)
        self.move(_AFTER, _NEXT)
        self._point_to_cell()
        with self.repeat(self.argument("blocks"), _BLOCKS):
            (self._lstm if self._is_lstm else self._gru)()
            self.advance(_BLOCK_NBYTES, _SUMS)
            self.advance(AVX2.nbytes, _BEFORE, _AFTER, _CELL)

    def _function(self, place: int, *, is_tanh: bool) -> None:
        """Apply a function to a gate's sums, in place."""
        x = self._free()
        self.v("VMOVUPS", x, self._at(_SUMS, place))
        self.v("VMOVUPS <", self._at(_SUMS, place), tanh(self, x, 0.0, 0.0) if is_tanh else sigmoid(self, x))

    def _free(self) -> int:
        """Return a register; all others are free."""
        self.release()
        return self.vector()

    def _lstm(self) -> None:
        """Compute states from the sums of the gates input, forget, new and output."""
        for place in range(SUMS):
            self._function(place, is_tanh=place == 2)
        x, y = self._free(), self.vector()
        self.v("VMOVUPS", x, self._at(_SUMS, 1))
        self.v("VMULPS", x, x, at(_CELL))
        self.v("VMOVUPS", y, self._at(_SUMS, 0))
        self.v("VFMADD231PS", x, y, self._at(_SUMS, 2))
        self.v("VMOVUPS <", at(_CELL), x)
        z = tanh(self, self._free(), 0.0, 0.0)
        self.v("VMULPS", z, z, self._at(_SUMS, 3))
        self.v("VMOVUPS <", at(_AFTER), z)

    def _gru(self) -> None:
        """Compute states from the sums of the gates update, reset and new, of which the state's part is apart."""
        for place in range(2):
            self._function(place, is_tanh=False)
        x, y = self._free(), self.vector()
        self.v("VMOVUPS", x, self._at(_SUMS, 1))
        self.v("VMOVUPS", y, self._at(_SUMS, 3))
        self.v("VFMADD213PS", x, y, self._at(_SUMS, 2))
        new = tanh(self, self._free(), 0.0, 0.0)
        self.v("VMOVUPS <", self._at(_SUMS, 2), new)
        before = self._free()
        self.v("VMOVUPS", before, at(_BEFORE))
        self.v("VSUBPS", before, before, self._at(_SUMS, 2))
        self.v("VMULPS", before, before, self._at(_SUMS, 0))
        self.v("VADDPS", before, before, self._at(_SUMS, 2))
        self.v("VMOVUPS <", at(_AFTER), before)
