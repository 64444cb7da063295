"""The program of depthwise convolutions: the instructions for a thread's share of the blocks of all rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby, pairwise

from iced_x86 import MemoryOperand, Register

from fmtprop.jit.assembler import at
from fmtprop.jit.depthwise import ROW_ENTRIES, DepthwiseArguments
from fmtprop.jit.functions import FUNCTIONS
from fmtprop.jit.gemv import Tail
from fmtprop.jit.grouped_convolution import Row
from fmtprop.jit.isa import Isa
from fmtprop.jit.program import THREAD, THREADS, Program

#: the current block of channels, and the one after the last of this row
_BLOCK, _END = Register.R8, Register.R14

#: where the current piece of a row is in src and dst, pieces that are left, and the row's entries of the table
_SRC_PIECE, _DST_PIECE, _LEFT_OF_PIECES, _ENTRIES = Register.R10, Register.R11, Register.R9, Register.R13

#: a block of a piece; its weights and bias: nothing asks for threads any more
_SRC, _DST, _WEIGHTS, _BIAS = Register.RSI, Register.RDI, THREADS, THREAD

#: where the work is in src and weights; rows of the window that are left
_PLACE, _TAP, _LEFT_OF_ROWS = Register.RCX, Register.RAX, Register.R15

#: the table of constants
_TABLE = Register.RDX

_SAVED = (_ENTRIES, _END, _LEFT_OF_ROWS)

#: on the stack: the current row, its first block, and blocks that are left for this thread
_ROW, _FIRST_BLOCK, _LEFT = (at(Register.RSP, 8 * index) for index in range(3))
_STACK_NBYTES = 24

#: vector registers of functions; before them, of weights and numbers of src
_FUNCTION_VECTORS = 8

#: most positions of a piece, however many registers there are
_MOST_POSITIONS = 14

#: entries of a row
_START, _FIRST, _COUNT = (8 * index for index in range(3))

#: the half of a word that has the channel of odd number
_ODD = -0x10000

#: positions inside src at each tap
_Inside = tuple[tuple[bool, ...], ...]


def depthwise(
    isa: Isa, row: Row, pixel: int, tail: Sequence[Tail], *, bf16: bool, has_bias: bool, wide: bool = False
) -> tuple[bytes, bytes]:
    """Return the program, and the table of constants that it reads."""
    p = _Depthwise(isa, row, pixel, tail, bf16=bf16, has_bias=has_bias, wide=wide)
    p.share(_BLOCK, _LEFT_OF_PIECES, "tasks")
    for register in _SAVED:
        p.emit("PUSH_R64", register)
    p.advance(-_STACK_NBYTES, Register.RSP)
    p.begin()
    p.label("row")
    p.begin_row()
    for positions, inside, times in _pieces(row, p.most_positions):
        p.immediate("MOV_RM64_IMM32", _LEFT_OF_PIECES, times)
        with p.repeat(_LEFT_OF_PIECES, _LEFT_OF_PIECES):
            p.piece(positions, inside)
    p.end_row()
    p.branch("JNE_REL32_64", "row")
    p.advance(_STACK_NBYTES, Register.RSP)
    for register in reversed(_SAVED):
        p.emit("POP_R64", register)
    return p.finished(), p.table


def _pieces(row: Row, most: int) -> Iterator[tuple[int, _Inside, int]]:
    """Yield the pieces of a row: number of positions, those inside src at each tap, and equal ones in a row."""
    count = -(-row.dst // most)
    firsts = [row.dst * index // count for index in range(count + 1)]
    pieces = [range(first, end) for first, end in pairwise(firsts)]
    inside = [tuple(tuple(row.inside(x, tap) for x in piece) for tap in range(row.window)) for piece in pieces]
    for taps, equal in groupby(inside):
        yield len(taps[0]), taps, len(list(equal))


class _Depthwise(Program):
    """The program of one row; see :func:`depthwise`."""

    def __init__(
        self, isa: Isa, row: Row, pixel: int, tail: Sequence[Tail], *, bf16: bool, has_bias: bool, wide: bool
    ) -> None:
        super().__init__(isa, DepthwiseArguments, bf16=bf16)
        self.row, self.pixel, self.tail, self.has_bias, self.wide = row, pixel, tail, has_bias, wide

    @property
    def _kept(self) -> int:
        """Constants stay in memory: sums have the registers."""
        return 0

    @property
    def most_positions(self) -> int:
        """Positions of a piece for which there are registers."""
        return min(block.most_positions for block in self.kinds)

    @property
    def kinds(self) -> tuple[_Block, ...]:
        """The kinds of blocks, from the first in a row."""
        return (_Pair(self), _Single(self)) if self.bf16 else (_Single(self),)

    def begin(self) -> None:
        """Remember this thread's first row, the first block of it, and the number of blocks."""
        self.emit("SUB_R64_RM64", _LEFT_OF_PIECES, _BLOCK)
        self.put(_LEFT, _LEFT_OF_PIECES)
        self.divide(_BLOCK, self.argument("blocks"))
        self.put(_ROW, Register.RAX)
        self.put(_FIRST_BLOCK, Register.RDX)

    def begin_row(self) -> None:
        """Point to what a row of dst reads and writes, and to the block after its last."""
        self.move(_DST_PIECE, _ROW)
        self.divide(_DST_PIECE, self.argument("height"))
        self.emit("IMUL_R64_RM64", _DST_PIECE, self.argument("dst_row"))
        self.add(_DST_PIECE, self.argument("dst"))
        self.point(_ENTRIES, "rows", Register.RDX, 8 * ROW_ENTRIES)
        self.point(_SRC_PIECE, "src", Register.RAX, "src_image")
        self.add(_SRC_PIECE, at(_ENTRIES, _START))
        self.move(_TABLE, self.argument("table"))
        self.move(_END, _FIRST_BLOCK)
        self.add(_END, _LEFT)
        self.emit("CMP_R64_RM64", _END, self.argument("blocks"))
        self.emit("CMOVA_R64_RM64", _END, self.argument("blocks"))

    def end_row(self) -> None:
        """Go to the next row; the flag of zero says that nothing is left."""
        self.emit("INC_RM64", _ROW)
        self.move(_BLOCK, _FIRST_BLOCK)
        self.emit("SUB_R64_RM64", _END, _BLOCK)
        self.emit("XOR_R32_RM32", Register.R8D, Register.R8D)
        self.put(_FIRST_BLOCK, _BLOCK)
        self.emit("SUB_RM64_R64", _LEFT, _END)

    def piece(self, positions: int, inside: _Inside) -> None:
        """Add the instructions of a piece of a row: of each block of channels."""
        name = self._new_label()
        self.move(_BLOCK, _FIRST_BLOCK)
        self.label(name)
        self.begin_block()
        *pairs, single = self.kinds
        for block in pairs:
            self.emit("CMP_R64_RM64", _BLOCK, self.argument("pairs"))
            self.branch("JAE_REL32_64", f"single {name}")
            self.compute(block, positions, inside)
            self.branch("JMP_REL32_64", f"next {name}")
            self.label(f"single {name}")
        self.compute(single, positions, inside)
        self.label(f"next {name}")
        self.emit("INC_RM64", _BLOCK)
        self.emit("CMP_R64_RM64", _BLOCK, _END)
        self.branch("JB_REL32_64", name)
        self.advance(positions * self.row.stride * self.pixel, _SRC_PIECE)
        self.advance(positions * self.pixel, _DST_PIECE)

    def begin_block(self) -> None:
        """Point to the channels of a block."""
        self.point(_TAP, "channels", _BLOCK, 8)
        self.move(_TAP, at(_TAP))
        for pointer, start in ((_SRC, _SRC_PIECE), (_DST, _DST_PIECE)):
            self.move(pointer, start)
            self.add(pointer, _TAP)
        self._channel(_WEIGHTS, "weights", wide=self.wide)
        self.add(_WEIGHTS, at(_ENTRIES, _FIRST))
        if self.has_bias:
            self._channel(_BIAS, "bias", wide=True)

    def _channel(self, pointer: int, name: str, *, wide: bool) -> None:
        """Point to the channels of a block, f32 or as those of src."""
        self.move(pointer, self.argument(name))
        for _ in range(4 // self.number_nbytes if wide else 1):
            self.add(pointer, _TAP)

    def compute(self, block: _Block, positions: int, inside: _Inside) -> None:
        """Add the instructions of a block of channels of a piece."""
        block.start(positions)
        with self._rows():
            for tap in range(self.row.window):
                block.load_weights(tap, at(_TAP, tap * self.pixel))
            self._columns(block, inside)
        block.finish(positions)

    def put(self, place: MemoryOperand, register: int) -> None:
        """Store a register."""
        self.emit("MOV_RM64_R64", place, register)

    @contextmanager
    def _rows(self) -> Iterator[None]:
        """Add a loop over the rows of the window around the instructions of the block."""
        self.move(_PLACE, _SRC)
        self.move(_TAP, _WEIGHTS)
        with self.repeat(at(_ENTRIES, _COUNT), _LEFT_OF_ROWS):
            yield
            self.add(_PLACE, self.argument("src_step"))
            self.advance(self.row.window * self.pixel, _TAP)

    def _columns(self, block: _Block, inside: _Inside) -> None:
        """Add what a row of src contributes: each of its positions is loaded once."""
        row = self.row
        readers: dict[int, list[tuple[int, int]]] = {}
        for tap, positions in enumerate(inside):
            for position in (position for position, is_inside in enumerate(positions) if is_inside):
                readers.setdefault(position * row.stride - row.pad + tap * row.step, []).append((position, tap))
        for column in sorted(readers):
            block.load(at(_PLACE, column * self.pixel))
            for position, tap in readers[column]:
                block.multiply(position, tap)


class _Block:
    """Channels that are computed together: registers and instructions of their numbers."""

    #: vectors of f32 numbers
    vectors = 1

    def __init__(self, program: _Depthwise) -> None:
        self.p = program
        weights = program.row.window * self.vectors
        self.first = max(weights + self.vectors, _FUNCTION_VECTORS)
        self.numbers = [program.register(weights + index) for index in range(self.vectors)]

    @property
    def most_positions(self) -> int:
        """Positions for whose sums there are registers."""
        return min((self.last - self.first) // self.vectors, _MOST_POSITIONS)

    @property
    def last(self) -> int:
        """The register behind those of sums."""
        return self.p.isa.registers

    def sums(self, position: int) -> list[int]:
        """Return the registers of the sums of a position."""
        first = self.first + position * self.vectors
        return [self.p.register(first + index) for index in range(self.vectors)]

    def weights(self, tap: int) -> list[int]:
        """Return the registers of the weights of a tap."""
        return [self.p.register(tap * self.vectors + index) for index in range(self.vectors)]

    def start(self, positions: int) -> None:
        """Set all sums to the bias or to 0."""
        if self.p.has_bias:
            self.load_wide(self.sums(0), _BIAS)
        for position in range(positions):
            for one, bias in zip(self.sums(position), self.sums(0), strict=True):
                if not self.p.has_bias:
                    self.p.zero(one)
                elif position:
                    self.p.v("VMOVUPS", one, bias)

    def load_wide(self, vectors: Sequence[int], pointer: int) -> None:
        """Load f32 numbers of the channels."""
        self.p.v("VMOVUPS", vectors[0], at(pointer))

    def load_weights(self, tap: int, place: MemoryOperand) -> None:
        """Load the weights of a tap."""
        if self.p.wide:
            self.load_wide(self.weights(tap), _TAP)
        else:
            self.widen(self.weights(tap), place)

    def load(self, place: MemoryOperand) -> None:
        """Load a position of src."""
        self.widen(self.numbers, place)

    def widen(self, vectors: Sequence[int], place: MemoryOperand) -> None:
        """Load numbers as f32."""
        self.p.load(vectors[0], place)

    def multiply(self, position: int, tap: int) -> None:
        """Add the products of the loaded numbers to the sums of a position."""
        for one, number, weights in zip(self.sums(position), self.numbers, self.weights(tap), strict=True):
            self.p.v("VFMADD231PS", one, number, weights)

    def finish(self, positions: int) -> None:
        """Apply the functions that follow, and store."""
        for position in range(positions):
            sums = self.sums(position)
            for one in sums:
                for function in self.p.tail:
                    y = FUNCTIONS[function.alg](self.p, one, function.alpha, function.beta)
                    self.p.v("VMOVUPS", one, y)
                    self.p.release()
            self.store(at(_DST, position * self.p.pixel), sums)

    def store(self, place: MemoryOperand, sums: Sequence[int]) -> None:
        """Store the sums of a position."""
        self.p.store(place, sums[0])


class _Single(_Block):
    """A vector of channels."""


class _Pair(_Block):
    """Two vectors of bf16 channels: those of even numbers, and those of odd ones."""

    vectors = 2

    def __init__(self, program: _Depthwise) -> None:
        super().__init__(program)
        self.mask = program.register(self.last)

    @property
    def last(self) -> int:
        """The register behind those of sums; it has the mask."""
        return self.p.isa.registers - 1

    def start(self, positions: int) -> None:
        """Set all sums to the bias or to 0."""
        super().start(positions)
        self.p.v("VMOVUPS", self.mask, self.p.integer(_ODD))

    def load_wide(self, vectors: Sequence[int], pointer: int) -> None:
        """Load f32 numbers of the channels: those of even and of odd number."""
        lanes, halves = self.p.isa.lanes, [self.p.register(_FUNCTION_VECTORS - 1 - index) for index in range(2)]
        for half, x in enumerate(halves):
            self.p.v("VMOVUPS", x, at(pointer, half * self.p.isa.nbytes))
        for odd, one in enumerate(vectors):
            self.p.v("VMOVUPS", one, self.p.integers(tuple(range(odd, 2 * lanes, 2))))
            self.p.v("VPERMI2PS", one, *halves)

    def widen(self, vectors: Sequence[int], place: MemoryOperand) -> None:
        """Load numbers as f32: the channels of even and of odd number."""
        even, odd = vectors
        self.p.v("VPSLLD", even, place, immediate=16)
        self.p.v("VANDPS", odd, self.mask, place)

    def store(self, place: MemoryOperand, sums: Sequence[int]) -> None:
        """Store the sums of a position, rounded, in the order of channels."""
        even, odd = sums
        lanes, order = self.p.isa.lanes, self.p.register(0)
        self.p.v("VCVTNE2PS2BF16", even, odd, even)
        self.p.v("VMOVUPS", order, self.p.places(tuple(lane // 2 + lane % 2 * lanes for lane in range(2 * lanes))))
        self.p.v("VPERMW", even, order, even)
        self.p.v("VMOVUPS <", place, even)
