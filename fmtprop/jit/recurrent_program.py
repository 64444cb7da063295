"""The program of a layer of an LSTM or a GRU: products of six steps with the input, then one step after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from iced_x86 import MemoryOperand, Register

from fmtprop.jit.arguments import UNROLLED
from fmtprop.jit.assembler import at
from fmtprop.jit.functions import sigmoid, tanh
from fmtprop.jit.isa import Isa
from fmtprop.jit.program import THREAD, THREADS, Program, with_table
from fmtprop.jit.recurrent import GATES, STEPS, SUMS, RecurrentArguments

#: the task, which is a direction of a group of sequences (nothing asks for threads any more); this thread's area, with
#: the sums of steps, a row for each sequence, the states, the next ones, and an LSTM's cells
_TASK, _AREA = THREADS, THREAD

#: the numbers of a step of the first sequence in src and in dst; the states, and the next ones
_SRC, _DST, _STATE, _NEXT = Register.R8, Register.R9, Register.R10, Register.R11

#: of products: weights, numbers of the first row and of the fourth, bytes from row to row, blocks and numbers that are
#: left, sums, bias
_WEIGHTS, _FROM, _FOURTH, _AWAY = Register.RSI, Register.RDI, Register.R14, Register.R13
_BLOCKS, _LEFT, _SUMS, _BIAS = Register.RCX, Register.R15, Register.RAX, Register.RDX

#: of functions: the states, the next ones and the cells at a block, and the constants
_BEFORE, _AFTER, _CELL, _TABLE = Register.RSI, Register.RDI, Register.R15, Register.RDX

#: places in the frame: what the caller has in registers, and numbers of a task
_SAVED = {Register.R13: 0, Register.R14: 8, Register.R15: 16}
_END, _STATES, _LAYER, _ITER, _BIASES, _SRC_STEP, _DST_STEP = range(24, 80, 8)
_LEFT_TILES, _LEFT_ROWS, _LEFT_BLOCKS, _NUMBERS, _FIRST_SUMS, _BLOCK_WEIGHTS = range(80, 128, 8)
#: of products with the state: where the sums of the first block are, and bytes from block to block; a step goes one
#: way, and the next one the other way
_OFFSET, _WEIGHTS_STEP, _SUMS_STEP = range(128, 152, 8)
_FRAME_NBYTES = 152


def recurrent(kind: str, rest: int, rows: int, isa: Isa) -> tuple[bytes, bytes]:
    """Return the program, and the table of constants that it reads.

    `kind`: a key of `GATES`. `rest`: steps behind the last six. `rows`: sequences of a group.
    """
    return with_table(partial(_assembled, kind, rest, rows, isa))


def _assembled(kind: str, rest: int, rows: int, isa: Isa, numbers: tuple[bytes, ...]) -> _Recurrent:
    p = _Recurrent(kind, rows, isa, numbers)
    p.share(Register.RSI, Register.RDI, "tasks")
    p.advance(-_FRAME_NBYTES, Register.RSP)
    for register, place in _SAVED.items():
        p.keep(place, register)
    p.keep(_END, Register.RDI)
    p.point(_AREA, "areas", _AREA, "area")
    p.move(_TASK, Register.RSI)
    with p.until(_TASK, kept(_END)):
        p.group(rest)
    for register, place in _SAVED.items():
        p.move(register, kept(place))
    p.advance(_FRAME_NBYTES, Register.RSP)
    return p


def kept(place: int) -> MemoryOperand:
    """Return what stands at a place of the frame."""
    return at(Register.RSP, place)


class _Recurrent(Program):
    def __init__(self, kind: str, rows: int, isa: Isa, numbers: tuple[bytes, ...]) -> None:
        super().__init__(isa, RecurrentArguments, bf16=False)
        self._gates, self._rows, self._constants, self._is_lstm = GATES[kind], rows, numbers, kind == "lstm"
        #: for each gate, the place of its sum with the input, and with the state
        self._places = {"layer": range(self._gates), "iter": (0, 1, 2, 3) if self._is_lstm else (0, 1, 3)}

    def keep(self, place: int, register: Any) -> None:
        """Write a register to the frame."""
        self.emit("MOV_RM64_R64", kept(place), register)

    # ------------------------------------------------------------------ one direction of a group

    def group(self, rest: int) -> None:
        """Compute all steps of a task."""
        self._begin()
        states = [("iter", "state"), *([("iter_c", "cell")] if self._is_lstm else [])]
        for name, place in states:
            self.point(Register.RSI, f"src_{name}", kept(_STATES), "state_nbytes")
            self._in_area(Register.RDI, place)
            for _ in range(self._rows):
                self._copy_state()
                self.add(Register.RDI, self.argument("padding_nbytes"))
        with self.repeat(self.argument("tiles"), Register.RCX):
            self.keep(_LEFT_TILES, Register.RCX)
            self._inputs(STEPS)
            self._steps(STEPS)
            self.move(Register.RCX, kept(_LEFT_TILES))
        if rest:
            self._inputs(rest)
            self._steps(rest)
        for (name, _), pointer in zip(states, (_STATE, _CELL), strict=False):
            if pointer == _CELL:
                self._in_area(_CELL, "cell")
            self.point(Register.RDI, f"dst_{name}", kept(_STATES), "state_nbytes")
            self.move(Register.RSI, pointer)
            for _ in range(self._rows):
                self._copy_state()
                self.add(Register.RSI, self.argument("padding_nbytes"))

    def _begin(self) -> None:
        """Point to the first step of the task, and to the weights of its direction."""
        self.divide(_TASK, self.argument("groups"))  # the direction in RAX, the group in RDX
        self.emit("IMUL_R64_RM64", Register.RDX, self.argument("rows"))
        self.emit("CMP_R64_RM64", Register.RDX, self.argument("last_group"))
        self.emit("CMOVA_R64_RM64", Register.RDX, self.argument("last_group"))  # now the first sequence
        self.move(Register.RCX, Register.RAX)
        self.emit("IMUL_R64_RM64", Register.RCX, self.argument("sequences"))
        self.add(Register.RCX, Register.RDX)
        self.keep(_STATES, Register.RCX)
        for pointer, name in ((_SRC, "src"), (_DST, "dst")):
            self.move(pointer, Register.RDX)
            self.emit("IMUL_R64_RM64", pointer, self.argument(f"{name}_row"))
            self.add(pointer, self.argument(f"{name}_layer"))
            self.add(pointer, self._of_direction(f"{name}_first"))
        for place, name in ((_SRC_STEP, "src_step"), (_DST_STEP, "dst_step")):
            self.move(Register.RCX, self._of_direction(name))
            self.keep(place, Register.RCX)
        for place, tensor, stride in (
            (_LAYER, "weights_layer", "layer_nbytes"),
            (_ITER, "weights_iter", "iter_nbytes"),
            (_BIASES, "bias", "row_nbytes"),
        ):
            self.point(Register.RCX, tensor, Register.RAX, stride)
            self.keep(place, Register.RCX)
        self.move(Register.RCX, self.argument("iter_block_nbytes"))
        self.keep(_WEIGHTS_STEP, Register.RCX)
        for place, nbytes in ((_SUMS_STEP, SUMS * self.isa.nbytes), (_OFFSET, 0)):
            self.immediate("MOV_RM64_IMM32", Register.RCX, nbytes)
            self.keep(place, Register.RCX)
        self._in_area(_STATE, "state")
        self._in_area(_NEXT, "next_state")

    def _of_direction(self, name: str) -> MemoryOperand:
        """Return an argument of the direction in RAX."""
        return at(Register.RBX, getattr(RecurrentArguments, name).offset, Register.RAX, 8)

    def _in_area(self, pointer: Any, name: str) -> None:
        """Point to a part of the area."""
        self.move(pointer, _AREA)
        self.add(pointer, self.argument(name))

    def _copy_state(self) -> None:
        """Copy a state from where RSI points to where RDI points."""
        self.move(Register.RCX, self.argument("state_nbytes"))
        self.copy_bytes()

    def _steps(self, count: int) -> None:
        """Go through steps whose sums with the input are there."""
        self.keep(_FIRST_SUMS, _AREA)
        self.immediate("MOV_RM64_IMM32", Register.RCX, count)
        with self.repeat(Register.RCX, Register.RCX):
            self.keep(_LEFT_ROWS, Register.RCX)
            self.keep(_NUMBERS, _STATE)
            self.move(_AWAY, self.argument("padded_nbytes"))
            self._with_state()
            self._apply()
            self.move(Register.RSI, _NEXT)
            self.move(Register.RAX, _DST)
            for _ in range(self._rows):
                self.move(Register.RDI, Register.RAX)
                self._copy_state()
                self.add(Register.RSI, self.argument("padding_nbytes"))
                self.add(Register.RAX, self.argument("dst_row"))
            self.add(_SRC, kept(_SRC_STEP))
            self.add(_DST, kept(_DST_STEP))
            self.emit("XCHG_RM64_R64", _STATE, _NEXT)
            self._next_row(_FIRST_SUMS, self.argument("step_nbytes"))
            self.move(Register.RCX, kept(_LEFT_ROWS))

    def _next_row(self, place: int, nbytes: MemoryOperand) -> None:
        """Move a pointer of the frame on."""
        self.move(Register.RAX, kept(place))
        self.add(Register.RAX, nbytes)
        self.keep(place, Register.RAX)

    # ------------------------------------------------------------------ products

    def _inputs(self, count: int) -> None:
        """Write sums of bias and products with the input, for some steps from this one on.

        A product's rows are steps of a sequence, or the sequences of a step where these are more. All rows go through a
        block of weights before the next one, so weights that are too many for the second cache are read once.
        """
        steps = (count, kept(_SRC_STEP), "step_nbytes")
        sequences = (self._rows, self.argument("src_row"), "row_nbytes")
        within, over = (steps, sequences) if count >= self._rows else (sequences, steps)
        rows, away, distance = within
        times, src_nbytes, sums_nbytes = over
        self.move(_AWAY, away)
        self.move(_SUMS, _AREA)
        self.move(_BIAS, kept(_BIASES))
        self.move(_WEIGHTS, kept(_LAYER))
        with self.repeat(self.argument("blocks"), _BLOCKS):
            self.keep(_LEFT_BLOCKS, _BLOCKS)
            self.keep(_BLOCK_WEIGHTS, _WEIGHTS)
            self.keep(_FIRST_SUMS, _SUMS)
            self.keep(_NUMBERS, _SRC)
            self.immediate("MOV_RM64_IMM32", Register.RCX, times)
            with self.repeat(Register.RCX, Register.RCX):
                self.keep(_LEFT_ROWS, Register.RCX)
                self._block("layer", rows, distance)
                if self._gates < SUMS:
                    self.v("VMOVUPS", self.register(0), self._at(_BIAS, self._gates))
                    self._at_rows(rows, distance, lambda _: self._store(self._gates, self.register(0)))
                self.add(_SUMS, self.argument(sums_nbytes))
                self.move(Register.RCX, kept(_NUMBERS))
                self.add(Register.RCX, src_nbytes)
                self.keep(_NUMBERS, Register.RCX)
                self.move(Register.RCX, kept(_LEFT_ROWS))
            self.move(_BLOCKS, kept(_LEFT_BLOCKS))
            self.move(_SUMS, kept(_FIRST_SUMS))
            self.move(_WEIGHTS, kept(_BLOCK_WEIGHTS))
            self.add(_WEIGHTS, self.argument("layer_block_nbytes"))
            self.advance(SUMS * self.isa.nbytes, _SUMS, _BIAS)

    def _with_state(self) -> None:
        """Add products of the states of a step to its sums.

        Every other step begins with the last block: its weights are still in the cache.
        """
        self.move(_SUMS, kept(_FIRST_SUMS))
        self.add(_SUMS, kept(_OFFSET))
        self.move(_WEIGHTS, kept(_ITER))
        with self.repeat(self.argument("blocks"), _BLOCKS):
            self.keep(_BLOCK_WEIGHTS, _WEIGHTS)
            self._block("iter", self._rows, "row_nbytes")
            self.move(_WEIGHTS, kept(_BLOCK_WEIGHTS))
            self.add(_WEIGHTS, kept(_WEIGHTS_STEP))
            self.add(_SUMS, kept(_SUMS_STEP))
        for pointer, start, step in ((_WEIGHTS, _ITER, _WEIGHTS_STEP), (_SUMS, _OFFSET, _SUMS_STEP)):
            self.emit("SUB_R64_RM64", pointer, kept(step))
            if pointer == _SUMS:
                self.emit("SUB_R64_RM64", pointer, kept(_FIRST_SUMS))
            self.keep(start, pointer)
            self.emit("NEG_RM64", kept(step))

    def _block(self, name: str, rows: int, distance: str) -> None:
        """Add products of some rows of numbers to a block's sums, which begin with the bias in case of the input."""
        #: gates whose sums, weights and one number find room in the registers
        wide = next(x for x in (self._gates, 2) if (rows + 1) * x < self.isa.registers)
        for first in range(0, self._gates, wide):
            self._tile(name, range(first, min(first + wide, self._gates)), rows, distance)

    def _tile(self, name: str, gates: range, rows: int, distance: str) -> None:
        """Write a block's sums of some gates, for some rows."""
        wide, places = len(gates), [self._places[name][gate] for gate in gates]
        # two sums where there are few: an addition waits for the one before
        chains = 2 if rows == 1 else 1
        sums = [
            [[self.register((row * wide + x) * chains + chain) for chain in range(chains)] for x in range(wide)]
            for row in range(rows)
        ]
        free = rows * wide * chains
        number, loaded = self.register(free), [self.register(free + 1 + x) for x in range(wide)]

        def begin(row: int) -> None:
            for column, (first, *others) in enumerate(sums[row]):
                self.v("VMOVUPS", first, self._at(_BIAS if name == "layer" else _FROM, places[column]))
                for other in others:
                    self.zero(other)

        def end(row: int) -> None:
            for column, (first, *others) in enumerate(sums[row]):
                for other in others:
                    self.v("VADDPS", first, first, other)
                self._store(places[column], first)

        self._at_rows(rows, distance, begin)
        self.move(_FROM, kept(_NUMBERS))
        self.move(_FOURTH, _FROM)
        for _ in range(3 if rows > 3 else 0):
            self.add(_FOURTH, _AWAY)
        self.move(_WEIGHTS, kept(_BLOCK_WEIGHTS))
        for unit in self._units(name):
            weights: list[int | MemoryOperand] = [self._at(_WEIGHTS, unit * self._gates + gate) for gate in gates]
            if rows > 1:
                for column in range(wide):
                    self.v("VMOVUPS", loaded[column], weights[column])
                weights = [*loaded]
            for row in range(rows):
                self.v("VBROADCASTSS", number, self._numbers_of(row, 4 * unit))
                for column in range(wide):
                    self.v("VFMADD231PS", sums[row][column][unit % chains], number, weights[column])
        self._at_rows(rows, distance, end)

    def _units(self, name: str) -> Iterator[int]:
        """Add loops over the numbers of rows and their weights; yield their places."""
        for part, units in (("blocks", UNROLLED), ("rest", 1)):
            with self.repeat(self.argument(f"{name}_{part}"), _LEFT):
                yield from range(units)
                self.advance(units * self._gates * self.isa.nbytes, _WEIGHTS)
                self.advance(4 * units, _FROM, _FOURTH)

    def _numbers_of(self, row: int, nbytes: int) -> MemoryOperand:
        """Return a number of the row that is `row` rows away."""
        first, away = (_FROM, row) if row < 3 else (_FOURTH, row - 3)
        return at(first, nbytes, _AWAY, away) if away else at(first, nbytes)

    def _at_rows(self, rows: int, distance: str, use: Callable[[int], None]) -> None:
        """Go through rows of a block's sums, to which `_FROM` points."""
        self.move(_FROM, _SUMS)
        for row in range(rows):
            use(row)
            self.add(_FROM, self.argument(distance))

    def _store(self, place: int, x: int) -> None:
        self.v("VMOVUPS <", self._at(_FROM, place), x)

    def _at(self, pointer: Any, vector: int) -> MemoryOperand:
        return at(pointer, vector * self.isa.nbytes)

    # ------------------------------------------------------------------ functions

    def _apply(self) -> None:
        """Compute the next state, and the cell, from the sums of a step."""
        self.move(_TABLE, self.argument("table"))
        self.load_numbers(self._constants)
        self.move(_SUMS, kept(_FIRST_SUMS))
        self.move(_BEFORE, _STATE)
        self.move(_AFTER, _NEXT)
        self._in_area(_CELL, "cell")
        with self.repeat(self.argument("vectors"), _BLOCKS):
            (self._lstm if self._is_lstm else self._gru)()
            self.advance(SUMS * self.isa.nbytes, _SUMS)
            self.advance(self.isa.nbytes, _BEFORE, _AFTER, _CELL)

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
