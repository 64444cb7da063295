"""The program of convolutions in groups of few channels: the instructions for a thread's share of the rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from iced_x86 import Register

from fmtprop.jit.assembler import at
from fmtprop.jit.functions import FUNCTIONS
from fmtprop.jit.gemv import Tail
from fmtprop.jit.grouped_convolution import ROW_ENTRIES, GroupedConvolutionArguments, Row
from fmtprop.jit.isa import Isa
from fmtprop.jit.program import THREAD, THREADS, Program, with_table

#: the thread's current row, and the row after its last
_ITEM, _END = Register.R8, Register.R9

#: where a piece of a row begins, and the weights of its blocks of outputs; the row's entries of the table
_SRC, _DST, _UNIT, _ENTRIES = Register.RSI, Register.R10, Register.RDI, Register.R11

#: where the work is in src and weights; rows of the window that are left
_PLACE, _WEIGHTS, _LEFT = Register.RCX, Register.RAX, Register.RDX

#: the bias of a unit, and blocks of inputs that are left: nothing asks for threads any more
_BIAS, _LEFT_OF_BLOCKS = THREAD, THREADS

#: pieces of a row that are left
_LEFT_OF_PIECES = Register.R13

#: most positions of a piece, however many registers there are
_MOST_POSITIONS = 14

#: entries of a row
_START, _FIRST, _COUNT, _REST, _REST_OF_WEIGHTS = (8 * index for index in range(5))


def grouped_convolution(
    isa: Isa,
    row: Row,
    side_by_side: int,
    plane: int,
    block: int,
    tail: Sequence[Tail],
    *,
    few: int,
    has_bias: bool,
) -> tuple[bytes, bytes]:
    """Return the program, and the table of constants that it reads.

    `few`: channels of a group where several groups share a block of channels; otherwise 0.
    """

    def make(numbers: tuple[bytes, ...]) -> _GroupedConvolution:
        p = _GroupedConvolution(isa, GroupedConvolutionArguments, bf16=False)
        p.share(_ITEM, _END, "tasks")
        p.emit("PUSH_R64", _LEFT_OF_PIECES)
        with p.until(_ITEM, _END):
            p.begin(has_bias=has_bias)
            for positions, taps, times in _pieces(row, _most_positions(isa, side_by_side)):
                p.immediate("MOV_RM64_IMM32", _LEFT_OF_PIECES, times)
                with p.repeat(_LEFT_OF_PIECES, _LEFT_OF_PIECES):
                    sums = [[p.register(b * positions + x) for x in range(positions)] for b in range(side_by_side)]
                    p.sums(row, sums, taps, block, few=few, has_bias=has_bias)
                    for index, own in enumerate(sums):
                        for position, one in enumerate(own):
                            p.v("VMOVUPS <", at(_DST, index * plane + position * isa.nbytes), one)
                    if tail:
                        p.finish(positions, [index * plane for index in range(side_by_side)], tail, numbers)
                    p.advance(positions * row.stride * isa.nbytes, _SRC)
                    p.advance(positions * isa.nbytes, _DST)
        p.emit("POP_R64", _LEFT_OF_PIECES)
        return p

    return with_table(make)


def _most_positions(isa: Isa, side_by_side: int) -> int:
    """Return the positions for which there are registers, besides those of weights and of a number of src."""
    return min((isa.registers - side_by_side - 1) // side_by_side, _MOST_POSITIONS)


def _pieces(row: Row, most: int) -> Iterator[tuple[int, tuple[tuple[bool, ...], ...], int]]:
    """Yield the pieces of a row: number of positions, those inside src at each tap, and equal ones in a row."""
    size = -(-row.dst // -(-row.dst // most))
    pieces = [range(first, min(first + size, row.dst)) for first in range(0, row.dst, size)]
    inside = [tuple(tuple(row.inside(x, tap) for x in piece) for tap in range(row.window)) for piece in pieces]
    for taps, equal in groupby(inside):
        yield len(taps[0]), taps, len(list(equal))


class _GroupedConvolution(Program):
    def begin(self, *, has_bias: bool) -> None:
        """Point to what a row reads and writes."""
        self.divide(_ITEM, self.argument("height"))
        self.point(_ENTRIES, "rows", Register.RDX, 8 * ROW_ENTRIES)
        self.point(_DST, "dst", Register.RDX, "dst_row")
        self.divide(Register.RAX, self.argument("units"))  # an image and a unit
        self.point(_SRC, "src", Register.RAX, "src_image")
        self.emit("IMUL_R64_RM64", Register.RAX, self.argument("dst_image"))
        self.add(_DST, Register.RAX)
        self.point(_PLACE, "sources", Register.RDX, 8)
        self.add(_SRC, at(_PLACE))
        self.add(_SRC, at(_ENTRIES, _START))
        self.point(_UNIT, "weights", Register.RDX, "weights_unit")
        self.add(_UNIT, at(_ENTRIES, _FIRST))
        if has_bias:
            self.point(_BIAS, "bias", Register.RDX, "bias_unit")
        self.emit("IMUL_R64_RM64", Register.RDX, self.argument("dst_unit"))
        self.add(_DST, Register.RDX)

    def sums(
        self,
        row: Row,
        sums: Sequence[Sequence[int]],
        taps: Sequence[Sequence[bool]],
        block: int,
        *,
        few: int,
        has_bias: bool,
    ) -> None:
        """Compute the sums of a piece: a vector of weights is loaded once for all its positions."""
        nbytes = self.isa.nbytes
        inputs, last = few or self.isa.lanes, self.isa.registers - 1
        number, weights = self.register(last), [self.register(last - 1 - index) for index in range(len(sums))]
        for index, own in enumerate(sums):
            for one in own:
                if has_bias:
                    self.v("VMOVUPS", one, at(_BIAS, index * nbytes))
                else:
                    self.zero(one)
        self.move(_PLACE, _SRC)
        self.move(_WEIGHTS, _UNIT)
        with self.repeat(self.argument("blocks"), _LEFT_OF_BLOCKS):
            with self.repeat(at(_ENTRIES, _COUNT), _LEFT):
                for tap, inside in enumerate(taps):
                    for channel in range(inputs):
                        for index, x in enumerate(weights):
                            self.v("VMOVUPS", x, at(_WEIGHTS, index * block + (tap * inputs + channel) * nbytes))
                        for position in (position for position, is_inside in enumerate(inside) if is_inside):
                            place = (position * row.stride - row.pad + tap * row.step) * nbytes
                            if few:
                                order = sum((lane // few * few + channel) << 2 * lane for lane in range(4))
                                self.v("VPERMILPS", number, at(_PLACE, place), immediate=order)
                            else:
                                self.v("VBROADCASTSS", number, at(_PLACE, place + channel * 4))
                            for own, x in zip(sums, weights, strict=True):
                                self.v("VFMADD231PS", own[position], number, x)
                self.add(_PLACE, self.argument("src_step"))
                self.advance(row.window * inputs * nbytes, _WEIGHTS)
            self.add(_PLACE, at(_ENTRIES, _REST))
            self.add(_WEIGHTS, at(_ENTRIES, _REST_OF_WEIGHTS))

    def finish(self, positions: int, planes: Sequence[int], tail: Sequence[Tail], numbers: tuple[bytes, ...]) -> None:
        """Apply the functions that follow to the results of a piece."""
        self.move(Register.RDX, self.argument("table"))
        self.load_numbers(numbers)
        for place in (plane + position * self.isa.nbytes for plane in planes for position in range(positions)):
            self.release()
            x = self.vector()
            self.v("VMOVUPS", x, at(_DST, place))
            for one in tail:
                y = FUNCTIONS[one.alg](self, x, one.alpha, one.beta)
                self.release()
                x = self.vector()
                self.v("VMOVUPS", x, y)
            self.v("VMOVUPS <", at(_DST, place), x)
