"""The program of a layer of an LSTM whose state is rounded to bytes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain, product
from itertools import count as count_from

from iced_x86 import Code, Instruction, MemoryOperand, Register

from fmtprop.jit.arguments import UNROLLED
from fmtprop.jit.assembler import at
from fmtprop.jit.functions import sigmoid, tanh
from fmtprop.jit.isa import AVX2, Isa
from fmtprop.jit.lstm_bytes import BLOCK, DEPTH, GATES, LstmBytesArguments
from fmtprop.jit.program import THREAD, THREADS, with_table
from fmtprop.jit.quantize_rows_program import OFFSET, QuantizedRows

#: the steps that are left; the numbers of a step in src and in dst (nothing asks for threads any more)
_TIMES, _SRC_NOW, _DST_NOW = Register.R8, Register.R9, THREADS

#: bytes to a block's first state, and to the state of a sequence; the weights of the block
_STATE, _SEQUENCE, _WEIGHTS = THREAD, Register.R10, Register.R11

#: places of products: weights, and the codes of a state; what is left
_PLACE, _CODES, _LEFT = Register.RSI, Register.RDI, Register.RCX

#: where rounding finds numbers and puts its results
_FROM, _TO, _SCALE, _ZERO, _READ = Register.RSI, Register.RDI, Register.R11, Register.RAX, Register.R10

#: of a sequence's gates: their sums, and other numbers
_SUM, _NUMBERS = Register.RSI, Register.RAX

#: where functions expect their constants
_TABLE = Register.RDX

#: places in the frame: a sequence's numbers in src and in dst, the zero of the state, and sums
_SRC_ROW, _DST_ROW, _ZEROS, _SUMS = 0, 8, 64, 128

#: the gates in the order of the weights
_INPUT, _OUTPUT, _FORGET, _CELL = range(GATES)

#: bytes between a load of weights and its prefetch: steps of 256 to 768 states take 0.9 of the time (Zen 3)
_AHEAD_NBYTES = 1024

#: first registers of weights, and of sums
_LOADED, _FIRST = 4, 8


def lstm_bytes(isa: Isa, rows: int, states: int, group: int, symmetric_weights: bool) -> tuple[bytes, bytes]:
    """Return the program, and the table of constants that it reads.

    `group`: sequences that share a load of weights. `symmetric_weights`: whether no weight is -128.
    """
    return with_table(partial(_assembled, isa, rows, states, group, symmetric_weights))


def _assembled(
    isa: Isa, rows: int, states: int, group: int, symmetric_weights: bool, numbers: tuple[bytes, ...]
) -> _LstmBytes:
    p = _LstmBytes(isa, rows, states, group, symmetric_weights, numbers)
    frame = _SUMS + GATES * group * BLOCK * 4
    p.advance(-frame, Register.RSP)
    p.layer()
    p.advance(frame, Register.RSP)
    return p


class _LstmBytes(QuantizedRows):
    def __init__(
        self, isa: Isa, rows: int, states: int, group: int, symmetric_weights: bool, numbers: tuple[bytes, ...]
    ) -> None:
        super().__init__(isa, symmetric=False, arguments=LstmBytesArguments)
        self._rows, self._states, self._group, self._constants = rows, states, group, numbers
        #: whether weights get the signs of codes that are less by 128
        self._signs_weights = isa is AVX2 and symmetric_weights

    def layer(self) -> None:
        """Compute all steps; the states lie in results from the start."""
        for name in ("h", "c"):
            self.move(_FROM, self.argument(f"src_{name}"))
            self.move(_TO, self.argument(f"dst_{name}"))
            self.move(_LEFT, self.argument("state_nbytes"))
            self.copy_bytes()
        for register, name in ((_SRC_NOW, "src"), (_DST_NOW, "dst")):
            self.move(register, self.argument(name))
            self.add(register, self.argument(f"{name}_first"))
        with self.repeat(self.argument("times"), _TIMES):
            self._round_state()
            self._blocks()
            self.add(_SRC_NOW, self.argument("src_step"))
            self.add(_DST_NOW, self.argument("dst_step"))

    def _round_state(self) -> None:
        """Write the codes of the state, their scale and their zero."""
        self.move(_READ, self.argument("dst_h"))
        self.range(_READ)
        self.move(_SCALE, self.argument("scale"))
        self.move(_ZERO, self.argument("zero"))
        self.scale(multiplies=False, rounds=False)
        self.v("VCVTPS2DQ", self.register(0), self.register(OFFSET))
        if self._signs_weights:
            self.v("VPSUBD", self.register(0), self.register(0), self.argument("middle"))
        self.v("VMOVUPS <", at(Register.RSP, _ZEROS), self.register(0))
        self.move(_FROM, self.argument("dst_h"))
        self.move(_TO, self.argument("codes"))
        self.round("u8", multiplies=False)
        if self.isa is AVX2:
            self._part_codes()

    def _blocks(self) -> None:
        """Compute a step, block by block: the weights of one are read once for all sequences."""
        self.move(_TABLE, self.argument("table"))
        self.move(_WEIGHTS, self.argument("weights"))
        self.emit("XOR_R32_RM32", Register.R12D, Register.R12D)
        with self.until(_STATE, self.argument("states"), 4 * BLOCK):
            for slot, now in ((_SRC_ROW, _SRC_NOW), (_DST_ROW, _DST_NOW)):
                self.move(_LEFT, now)
                self.add(_LEFT, _STATE)
                self.emit("MOV_RM64_R64", at(Register.RSP, slot), _LEFT)
            self.emit("XOR_R32_RM32", Register.R10D, Register.R10D)
            whole, rest = divmod(self._rows, self._group)
            if whole > 1:
                with self.until(_SEQUENCE, self.argument("whole_groups"), 0):
                    self._sequences(self._group)
            elif whole:
                self._sequences(self._group)
            if rest:
                self._sequences(rest)
            self.advance(self._states * BLOCK, _WEIGHTS)

    def _sequences(self, count: int) -> None:
        """Compute the states of some sequences."""
        self.move(_PLACE, _WEIGHTS)
        self.move(_CODES, _SEQUENCE)
        self.immediate("SHR_RM64_IMM8", _CODES, 2)  # a state has four bytes, a code has one
        self.add(_CODES, self.argument("codes"))
        if self.isa.nbytes == 64:
            self._multiply(count)
        elif self._signs_weights:
            self._multiply_signed(count)
        else:
            self._multiply_split(count)
        self.emit("LEA_R64_M", _SUM, at(Register.RSP, _SUMS))
        self.load_numbers(self._constants)
        self.immediate("MOV_RM64_IMM32", _LEFT, count)
        with self.repeat(_LEFT, _LEFT):
            self._gates()

    # ------------------------------------------------------------------ products

    def _multiply(self, count: int) -> None:
        """Write the sums of some sequences' gates: products of bytes without sign and with one, by VNNI."""
        # two sums for each gate of one sequence: an addition waits for the one before
        chains = 2 if count == 1 else 1
        sums = [
            [[self._sum(number, row, gate) for number in range(chains)] for gate in range(GATES)]
            for row in range(count)
        ]
        for one in chain(*chain(*sums)):
            self.zero(one)
        self.immediate("MOV_RM64_IMM32", _LEFT, self._states // (DEPTH * UNROLLED))
        with self.repeat(_LEFT, _LEFT):
            for unit in range(UNROLLED):
                for row in range(count):
                    self.v("VPBROADCASTD", self.register(row), at(_CODES, row * self._states + unit * DEPTH))
                for gate in range(GATES):
                    place = self._weights(gate, unit)
                    if count > 1:
                        self.v("VMOVUPS", self.register(_LOADED + gate), place)
                    for row in range(count):
                        read = self.register(_LOADED + gate) if count > 1 else place
                        self.v("VPDPBUSD", sums[row][gate][unit % chains], self.register(row), read)
            self.advance(UNROLLED * DEPTH * BLOCK, _PLACE)
            self.advance(UNROLLED * DEPTH, _CODES)
        for row in range(count):
            for gate, (first, *others) in enumerate(sums[row]):
                for other in others:
                    self.v("VPADDD", first, first, other)
                self.v("VMOVUPS <", at(Register.RSP, _SUMS + (row * GATES + gate) * self.isa.nbytes), first)

    def _sum(self, chain: int, row: int, gate: int) -> int:
        return self.register(_FIRST + (chain + row) * GATES + gate)

    def _multiply_split(self, count: int) -> None:
        """Write the sums of some sequences' gates: the upper bits of codes twice, and their last bits.

        A pair of products has 16 bits then, also after the last bits of a turn were added. The weights of a gate are
        read as they lie in memory, for both halves of the block.
        """
        bits, words, twice = (self.register(number) for number in range(3))
        halves, free = range(BLOCK // self.isa.lanes), count_from(3)
        sums, lasts = ([[self.register(next(free)) for _ in halves] for _ in range(count)] for _ in range(2))
        self.v("VMOVUPS", twice, self.argument("twice"))
        for gate in range(GATES):
            for one in chain(*sums):
                self.zero(one)
            self.immediate("MOV_RM64_IMM32", _LEFT, self._states // (DEPTH * UNROLLED))
            with self.repeat(_LEFT, _LEFT):
                for unit, row in product(range(UNROLLED), range(count)):
                    first = unit * len(halves) * self.isa.nbytes
                    if row == 0:
                        self.emit("PREFETCHT0_M8", at(_PLACE, first + _AHEAD_NBYTES))
                    weights = [at(_PLACE, first + half * self.isa.nbytes) for half in halves]
                    self.v("VPBROADCASTD", bits, at(_CODES, row * self._states + unit * DEPTH))
                    for half, one in enumerate(sums[row]):
                        self.v("VPMADDUBSW", words, bits, weights[half])
                        self.v("VPMADDWD", words, words, twice)
                        self.v("VPADDD", one, one, words)
                    self.v("VPBROADCASTD", bits, at(_CODES, (self._rows + row) * self._states + unit * DEPTH))
                    for half, one in enumerate(lasts[row]):
                        self.v("VPMADDUBSW", words if unit else one, bits, weights[half])
                        if unit:
                            self.v("VPADDW", one, one, words)
                for one, of_last in zip(chain(*sums), chain(*lasts), strict=True):
                    self.v("VPMADDWD", words, of_last, self.argument("once"))
                    self.v("VPADDD", one, one, words)
                self.advance(UNROLLED * DEPTH * BLOCK, _PLACE)
                self.advance(UNROLLED * DEPTH, _CODES)
            self._end_gate(gate, sums)

    def _multiply_signed(self, count: int) -> None:
        """Write the sums of some sequences' gates: magnitudes of codes by weights that have the codes' signs.

        A pair of products, of at most 128 * 127 each, has 16 bits.
        """
        magnitude, signs, products, once = (self.register(number) for number in range(4))
        halves, free = range(BLOCK // self.isa.lanes), count_from(4)
        weights = [self.register(next(free)) for _ in halves]
        sums = [[self.register(next(free)) for _ in halves] for _ in range(count)]
        self.v("VMOVUPS", once, self.argument("once"))
        for gate in range(GATES):
            for one in chain(*sums):
                self.zero(one)
            self.immediate("MOV_RM64_IMM32", _LEFT, self._states // (DEPTH * UNROLLED))
            with self.repeat(_LEFT, _LEFT):
                for unit in range(UNROLLED):
                    first = unit * len(halves) * self.isa.nbytes
                    self.emit("PREFETCHT0_M8", at(_PLACE, first + _AHEAD_NBYTES))
                    for half in halves:
                        self.v("VMOVUPS", weights[half], at(_PLACE, first + half * self.isa.nbytes))
                    for row in range(count):
                        place = row * self._states + unit * DEPTH
                        self.v("VPBROADCASTD", magnitude, at(_CODES, place))
                        self.v("VPBROADCASTD", signs, at(_CODES, self._rows * self._states + place))
                        for half in halves:
                            self.v("VPSIGNB", products, weights[half], signs)
                            self.v("VPMADDUBSW", products, magnitude, products)
                            self.v("VPMADDWD", products, products, once)
                            self.v("VPADDD", sums[row][half], sums[row][half], products)
                self.advance(UNROLLED * DEPTH * BLOCK, _PLACE)
                self.advance(UNROLLED * DEPTH, _CODES)
            self._end_gate(gate, sums)

    def _end_gate(self, gate: int, sums: Sequence[Sequence[int]]) -> None:
        """Write the sums of a gate, and go on to the next one's weights."""
        self.advance(self._states**2 - self._states * BLOCK, _PLACE)
        self.advance(-self._states, _CODES)
        for row, halves in enumerate(sums):
            for half, one in enumerate(halves):
                place = (row * len(halves) + half) * GATES + gate
                self.v("VMOVUPS <", at(Register.RSP, _SUMS + place * self.isa.nbytes), one)

    def _part_codes(self) -> None:
        """Write the parts of codes that are multiplied: magnitudes and signs, or upper bits and last ones."""
        self.move(_CODES, self.argument("codes"))
        count = self._rows * self._states
        self.immediate("MOV_RM64_IMM32", _LEFT, count // BLOCK)
        with self.repeat(_LEFT, _LEFT):
            x, y = Register.XMM0, Register.XMM1
            self.emit("VEX_VMOVUPS_XMM_XMMM128", x, at(_CODES))
            if self._signs_weights:
                self.emit("VEX_VPXOR_XMM_XMM_XMMM128", x, x, self.argument("top"))
                self.emit("VEX_VPABSB_XMM_XMMM128", y, x)
            else:
                self._add(Instruction.create_reg_reg_u32(Code.VEX_VPSRLD_XMM_XMM_IMM8, y, x, 1))
                self.emit("VEX_VPAND_XMM_XMM_XMMM128", y, y, self.argument("upper"))
                self.emit("VEX_VPAND_XMM_XMM_XMMM128", x, x, self.argument("last"))
            self.emit("VEX_VMOVUPS_XMMM128_XMM", at(_CODES), y)
            self.emit("VEX_VMOVUPS_XMMM128_XMM", at(_CODES, count), x)
            self.advance(BLOCK, _CODES)

    def _weights(self, gate: int, unit: int) -> MemoryOperand:
        return at(_PLACE, gate * self._states**2 + unit * DEPTH * BLOCK)

    # ------------------------------------------------------------------ gates

    def _gates(self) -> None:
        """Compute a sequence's states from its sums; the pointers move on to the next sequence."""
        for first in range(0, 4 * BLOCK, self.isa.nbytes):
            if first:
                self.advance(GATES * self.isa.nbytes, _SUM)
            self._states_from(first)
        for slot, name in ((_SRC_ROW, "src_row"), (_DST_ROW, "dst_row")):
            self.move(_NUMBERS, self.argument(name))
            self.emit("ADD_RM64_R64", at(Register.RSP, slot), _NUMBERS)
        self.advance(4 * self._states, _SEQUENCE)
        self.advance(GATES * self.isa.nbytes, _SUM)

    def _states_from(self, first: int) -> None:
        """Compute a vector of states, so many bytes behind the block's first one."""
        x, y = self.register(0), self.register(1)
        for gate in range(GATES):
            self._reals(gate, first)
            self.release()
            self.vector()
            self.v("VMOVUPS <", self._gate(gate), tanh(self, x, 0.0, 0.0) if gate == _CELL else sigmoid(self, x))
        self._point("dst_c")
        self.v("VMOVUPS", x, self._gate(_FORGET))
        self.v("VMULPS", x, x, at(_NUMBERS, first))
        self.v("VMOVUPS", y, self._gate(_INPUT))
        self.v("VFMADD231PS", x, y, self._gate(_CELL))
        self.v("VMOVUPS <", at(_NUMBERS, first), x)
        self.release()
        self.vector()
        z = tanh(self, x, 0.0, 0.0)
        self.v("VMULPS", z, z, self._gate(_OUTPUT))
        self._point("dst_h")
        self.v("VMOVUPS <", at(_NUMBERS, first), z)
        self.move(_NUMBERS, at(Register.RSP, _DST_ROW))
        self.v("VMOVUPS <", at(_NUMBERS, first), z)

    def _reals(self, gate: int, first: int) -> None:
        """Set register 0 to the argument of a gate's function."""
        x, y, place = self.register(0), self.register(1), 4 * gate * self._states + first
        self.move(_NUMBERS, self.argument("sums"))
        self.add(_NUMBERS, _STATE)
        self.v("VMOVUPS", y, at(Register.RSP, _ZEROS))
        self.v("VPMULLD", y, y, at(_NUMBERS, place))
        self.v("VMOVUPS", x, self._gate(gate))
        self.v("VPSUBD", x, x, y)
        self.v("VCVTDQ2PS", x, x)
        self.move(_NUMBERS, self.argument("scale"))
        self.load_one(y, at(_NUMBERS))
        self.move(_NUMBERS, self.argument("scales"))
        self.add(_NUMBERS, _STATE)
        self.v("VMULPS", y, y, at(_NUMBERS, place))
        self.move(_NUMBERS, at(Register.RSP, _SRC_ROW))
        self.v("VFMADD213PS", x, y, at(_NUMBERS, place))

    def _gate(self, gate: int) -> MemoryOperand:
        return at(_SUM, gate * self.isa.nbytes)

    def _point(self, name: str) -> None:
        """Point to the states of a sequence."""
        self.move(_NUMBERS, self.argument(name))
        self.add(_NUMBERS, _SEQUENCE)
        self.add(_NUMBERS, _STATE)
