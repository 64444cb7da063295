"""The program of attention: the instructions for a thread's blocks of queries.

Scores are transposed: one row for each key, one column for each query of the block. A row is two vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

from iced_x86 import MemoryOperand, Register

from fmtprop.jit.arguments import VECTORS, AttentionArguments
from fmtprop.jit.assembler import at
from fmtprop.jit.functions import exp_of_negative
from fmtprop.jit.isa import Isa
from fmtprop.jit.program import Program, with_table

#: vectors of results that a row of queries has at a time, at most
_COLUMNS = 4

_ITEM, _END, FRAME = Register.R8, Register.R9, Register.R10
_A, _B, _C, _D = Register.RAX, Register.RSI, Register.RDI, Register.RCX
_E, _F, _G = Register.R11, Register.RBP, Register.R12

#: places in the frame, in bytes: addresses and numbers of the task, then vectors
_STACK, _SRC, _KEY, VALUE, _DST, _ROWS, KEYS, _STEP = range(0, 64, 8)
_MASKS, _LAST, _NUMBER, _VECTORS = 64, 80, 88, 128


@dataclass(frozen=True)
class AttentionSizes:
    """The sizes that the code depends on."""

    depth: int
    width: int
    #: number of keys with scores that are computed at a time; there are at least as many keys
    keys: int
    #: `key_row`, `value_row`: bytes from key to key, from value to value
    key_row: int
    value_row: int
    #: which masks there are: a vector of queries for each key, or a number for each key
    masks: tuple[str, ...]


def attention(
    program: type[AttentionProgram], isa: Isa, shape: AttentionSizes, *, is_limited: bool, is_bounded: bool
) -> tuple[bytes, bytes]:
    """Return the program and its table of constants."""
    make = partial(program, isa, shape, is_limited=is_limited, is_bounded=is_bounded)
    return with_table(lambda numbers: make(numbers).program())


class AttentionProgram:
    """The program for f32 numbers."""

    #: whether tensors hold bf16 numbers instead of f32
    bf16 = False

    #: the instruction that adds products: of one number of each lane, or of a pair
    accumulate = "VFMADD231PS"

    #: places in the frame: the first value, and the number of them
    values, count = VALUE, KEYS

    def __init__(
        self, isa: Isa, shape: AttentionSizes, numbers: tuple[bytes, ...], *, is_limited: bool, is_bounded: bool
    ) -> None:
        self.p = Program(isa, AttentionArguments, bf16=self.bf16)
        self.shape, self.numbers, self.is_limited, self.is_bounded = shape, numbers, is_limited, is_bounded
        self.keys = min(shape.keys, 12 if isa.registers == 32 else 6)
        self.nbytes, self.row = isa.nbytes, VECTORS * isa.nbytes
        self.lanes = isa.lanes
        #: lanes of a query and of a row of values, four bytes each
        self.depth, self.value_row = shape.depth, shape.value_row
        if self.bf16:
            self.depth, self.value_row = shape.depth // 2, 4 * shape.width
        self.largest, self.inverse = _VECTORS, _VECTORS + self.row
        self.packed = _VECTORS + 2 * self.row
        self.scores = self.packed + self.depth * self.row
        self.register = self.p.register

    def program(self) -> Program:
        """Return the instructions for a thread's share of the tasks."""
        p = self.p
        p.share(_ITEM, _END, "tasks")
        self._enter()
        with p.until(_ITEM, _END):
            self._begin()
            self._pack()
            self._score()
            self._exponentials()
            self._results()
        p.move(Register.RSP, at(FRAME, _STACK))
        return p

    def _enter(self) -> None:
        """Make room on the stack for the frame, the packed queries, and the scores of all keys."""
        p = self.p
        p.move(_B, Register.RSP)
        self._room(_A)
        p.emit("SUB_R64_RM64", Register.RSP, _A)
        p.immediate("AND_RM64_IMM8", Register.RSP, -64)
        p.move(FRAME, Register.RSP)
        self._keep(_STACK, _B)

    def _room(self, nbytes: int) -> None:
        """Set a register to the bytes of the frame, and of the alignment."""
        p = self.p
        p.move(nbytes, p.argument("keys"))
        p.immediate("SHL_RM64_IMM8", nbytes, self.row.bit_length() - 1)
        p.immediate("ADD_RM64_IMM32", nbytes, self.scores + 64)

    def _get(self, x: int, place: MemoryOperand) -> None:
        """Load a vector of f32 numbers, as the frame has them."""
        self.p.v("VMOVUPS", x, place)

    def _put(self, place: MemoryOperand, x: int) -> None:
        self.p.v("VMOVUPS <", place, x)

    def _keep(self, place: int, register: int) -> None:
        self.p.emit("MOV_RM64_R64", at(FRAME, place), register)

    def _begin(self) -> None:
        """Find the task's tensors, its queries and its keys."""
        p, offsets, first, block = self.p, _B, _C, Register.RDX
        p.divide(_ITEM, p.argument("blocks"))
        p.move(offsets, _A)
        p.emit("IMUL_R64_RM64", offsets, p.argument("entry"))
        p.add(offsets, p.argument("offsets"))
        p.move(first, block)
        p.emit("IMUL_R64_RM64", first, p.argument("block"))
        for index, (name, place) in enumerate((("src", _SRC), ("key", _KEY), ("value", VALUE), ("dst", _DST))):
            p.move(_D, p.argument(name))
            p.add(_D, at(offsets, 8 * index))
            if name in ("src", "dst"):
                p.move(_E, first)
                p.emit("IMUL_R64_RM64", _E, p.argument(f"{name}_row"))
                p.add(_D, _E)
            self._keep(place, _D)
        p.move(_A, p.argument("queries"))
        p.emit("SUB_R64_RM64", _A, first)
        # a mask has whole vectors of queries, but the last block may have one less
        p.move(_D, p.argument("mask_block"))
        p.emit("XOR_R32_RM32", Register.R11D, Register.R11D)
        p.immediate("CMP_RM64_IMM32", _A, self.nbytes // 4)
        p.emit("CMOVBE_R64_RM64", _D, _E)
        self._keep(_STEP, _D)
        p.move(_E, p.argument("block"))
        p.emit("CMP_R64_RM64", _A, _E)
        p.emit("CMOVA_R64_RM64", _A, _E)
        self._keep(_ROWS, _A)
        p.move(_A, p.argument("keys"))
        if self.is_limited:
            p.move(_E, first)
            p.add(_E, p.argument("limit"))
            self._keep(_LAST, _E)
            p.add(_E, p.argument("block"))
            p.emit("CMP_R64_RM64", _A, _E)
            p.emit("CMOVA_R64_RM64", _A, _E)
        self._keep(KEYS, _A)
        for index, kind in enumerate(self.shape.masks):
            p.move(_D, p.argument(f"mask_{index}"))
            p.add(_D, at(offsets, 8 * (4 + index)))
            if kind == "blocks":
                p.move(_A, block)
                p.immediate("SHL_RM64_IMM8", _A, VECTORS.bit_length() - 1)
                p.emit("IMUL_R64_RM64", _A, p.argument("mask_block"))
                p.add(_D, _A)
            self._keep(_MASKS + 8 * index, _D)

    def _pack(self) -> None:
        """Transpose the queries; missing queries of the last block are 0."""
        p, zero = self.p, self.register(2)
        p.move(_A, at(FRAME, _ROWS))
        p.emit("CMP_R64_RM64", _A, p.argument("block"))
        p.branch("JE_REL32_64", "whole")
        p.zero(zero)
        for index in range(VECTORS * self.depth):
            self._put(at(FRAME, self.packed + index * self.nbytes), zero)
        p.label("whole")
        p.emit("VEX_VMOVSS_XMM_M32", Register.XMM1, p.argument("scale"))
        p.move(_B, at(FRAME, _SRC))
        self._point(_C, self.packed)
        with p.repeat(at(FRAME, _ROWS), _D):
            for index in range(self.depth):
                self._pack_lane(at(_C, index * self.row), at(_B, 4 * index))
            p.add(_B, p.argument("src_row"))
            p.advance(4, _C)
        lowest = self.register(0)
        p.v("VBROADCASTSS", lowest, p.argument("start"))
        for vector in range(VECTORS):
            self._put(at(FRAME, self.largest + vector * self.nbytes), lowest)

    def _pack_lane(self, place: MemoryOperand, number: MemoryOperand) -> None:
        """Store a number of a query, multiplied by the scale."""
        self.p.emit("VEX_VMULSS_XMM_XMM_XMMM32", Register.XMM0, Register.XMM1, number)
        self.p.emit("VEX_VMOVSS_M32_XMM", place, Register.XMM0)

    def _point(self, register: int, place: int) -> None:
        self.p.move(register, FRAME)
        self.p.immediate("ADD_RM64_IMM32", register, place)

    # ------------------------------------------------------------------ scores

    def _score(self) -> None:
        """Compute the scores and the largest of each query; the last keys may be computed twice."""
        p, first = self.p, _D
        p.emit("XOR_R32_RM32", Register.ECX, Register.ECX)
        p.label("scores")
        totals = [[self.register(VECTORS * key + v) for v in range(VECTORS)] for key in range(self.keys)]
        self._products(totals, first)
        self._add_masks(totals, first)
        if self.is_bounded:
            self._bound(totals)
        if self.is_limited:
            self._mask_later_keys(totals, first)
        p.move(_C, first)
        p.immediate("SHL_RM64_IMM8", _C, self.row.bit_length() - 1)
        p.add(_C, FRAME)
        most = self.register(VECTORS * self.keys)
        for v in range(VECTORS):
            place = at(FRAME, self.largest + v * self.nbytes)
            self._get(most, place)
            for key, total in enumerate(totals):
                p.v("VMAXPS", most, most, total[v])
                self._put(at(_C, self.scores + key * self.row + v * self.nbytes), total[v])
            self._put(place, most)
        p.immediate("ADD_RM64_IMM32", first, self.keys)
        p.move(_A, at(FRAME, KEYS))
        p.emit("CMP_R64_RM64", first, _A)
        p.branch("JAE_REL32_64", "scored")
        p.immediate("SUB_RM64_IMM32", _A, self.keys)
        p.emit("CMP_R64_RM64", first, _A)
        p.emit("CMOVA_R64_RM64", first, _A)
        p.branch("JMP_REL32_64", "scores")
        p.label("scored")

    def _products(self, totals: Sequence[Sequence[int]], first: int) -> None:
        p, depth = self.p, self.depth
        queries = [self.register(VECTORS * self.keys + v) for v in range(VECTORS)]
        key = self.register(VECTORS * self.keys + VECTORS)
        p.move(_B, first)
        p.emit("IMUL_R64_RM64", _B, p.argument("key_row"))
        p.add(_B, at(FRAME, _KEY))
        self._point(_C, self.packed)
        for register in chain.from_iterable(totals):
            p.zero(register)
        turn = next(size for size in (8, 4, 2, 1) if depth % size == 0)
        p.immediate("MOV_R32_IMM32", Register.R11D, depth // turn)
        with p.repeat(_E, _A):
            for index in range(turn):
                for v, query in enumerate(queries):
                    self._get(query, at(_C, index * self.row + v * self.nbytes))
                for number, total in enumerate(totals):
                    p.v("VBROADCASTSS", key, at(_B, number * self.shape.key_row + 4 * index))
                    for v, query in enumerate(queries):
                        p.v(self.accumulate, total[v], query, key)
            p.advance(4 * turn, _B)
            p.advance(turn * self.row, _C)

    def _add_masks(self, totals: Sequence[Sequence[int]], first: int) -> None:
        p, free = self.p, self.register(VECTORS * self.keys)
        for index, kind in enumerate(self.shape.masks):
            p.move(_B, first)
            size = p.vector_nbytes if kind == "blocks" else p.number_nbytes
            p.immediate("SHL_RM64_IMM8", _B, size.bit_length() - 1)
            p.add(_B, at(FRAME, _MASKS + 8 * index))
            p.move(_C, _B)
            p.add(_C, at(FRAME, _STEP))
            for key, total in enumerate(totals):
                if kind == "row":
                    p.load_one(free, at(_B, key * size))
                for v, pointer in enumerate((_B, _C)):
                    added = free if kind == "row" else p.operand(free, at(pointer, key * size))
                    p.v("VADDPS", total[v], total[v], added)

    def _bound(self, totals: Sequence[Sequence[int]]) -> None:
        """Replace the scores below the lowest one by this; NaN stays."""
        lowest = self.register(VECTORS * self.keys)
        self.p.v("VBROADCASTSS", lowest, self.p.argument("lowest"))
        for total in chain.from_iterable(totals):
            self.p.v("VMAXPS", total, lowest, total)

    def _mask_later_keys(self, totals: Sequence[Sequence[int]], first: int) -> None:
        """Add minus infinity to the scores of keys after a query's last one; most blocks of keys have none.

        The distance of a key from the last one is half a key more than it is, so it is never 0.
        """
        p, last = self.p, self.register(VECTORS * self.keys)
        late = self.register(VECTORS * self.keys + 1)
        p.move(_A, at(FRAME, _LAST))
        p.emit("SUB_R64_RM64", _A, first)
        p.immediate("CMP_RM64_IMM32", _A, self.keys - 1)
        p.branch("JGE_REL32_64", "allowed")
        self._keep(_NUMBER, _A)
        for v in range(VECTORS):
            p.v("VPBROADCASTD", last, at(FRAME, _NUMBER))
            p.v("VCVTDQ2PS", last, last)
            p.v("VADDPS", last, last, p.argument("places", v * self.nbytes))
            for total in totals:
                p.v("VMULPS", late, last, p.argument("infinity"))
                p.v("VMINPS", late, late, p.argument("zeros"))
                p.v("VADDPS", total[v], total[v], late)
                p.v("VSUBPS", last, last, p.argument("ones"))
        p.label("allowed")

    # ------------------------------------------------------------------ weights

    def _exponentials(self) -> None:
        """Replace the scores by their exponentials; keep the inverse of each query's sum."""
        p = self.p
        p.move(Register.RDX, p.argument("numbers"))
        p.load_numbers(self.numbers)
        for v in range(VECTORS):
            p.release()
            most, total = p.vector(), p.vector()
            self._get(most, at(FRAME, self.largest + v * self.nbytes))
            p.zero(total)
            self._point(_B, self.scores + v * self.nbytes)
            with p.repeat(at(FRAME, KEYS), _D):
                x = p.vector()
                p.v("VSUBPS", x, most, at(_B))
                y = exp_of_negative(p, x)
                self._put(at(_B), y)
                p.v("VADDPS", total, total, y)
                p.advance(self.row, _B)
            self._keep_inverse(v, most, total)

    def _keep_inverse(self, v: int, free: int, total: int) -> None:
        p, one = self.p, free
        p.v("VMOVUPS", one, p.number(1.0))
        p.v("VDIVPS", one, one, total)
        self._put(at(FRAME, self.inverse + v * self.nbytes), one)

    # ------------------------------------------------------------------ results

    def _results(self) -> None:
        """Multiply the weights by the values: some rows of queries and some vectors of a row at a time."""
        p, vectors = self.p, self._columns()
        parts = -(-len(vectors) // _COLUMNS)
        width = -(-len(vectors) // parts)
        free = len(range(self.p.isa.registers)) - 1 - width
        rows = next(size for size in (16, 8, 4, 2, 1) if size * width <= min(free, 24))
        left, weights, dst = _G, _F, _E
        p.move(left, at(FRAME, _ROWS))
        p.move(weights, FRAME)
        p.move(dst, at(FRAME, _DST))
        p.label("results")
        for start in range(0, len(vectors), width):
            self._rows(vectors[start : start + width], rows, weights, dst, left)
        p.immediate("ADD_RM64_IMM32", weights, 4 * rows)
        for _ in range(rows):
            p.add(dst, p.argument("dst_row"))
        p.immediate("SUB_RM64_IMM32", left, rows)
        p.branch("JG_REL32_64", "results")

    def _columns(self) -> list[int]:
        """Return the first number of each vector of a row of values; the last one begins where it still fits."""
        return [min(start, self.shape.width - self.lanes) for start in range(0, self.shape.width, self.lanes)]

    def _rows(self, columns: Sequence[int], rows: int, weights: int, dst: int, left: int) -> None:
        p = self.p
        totals = [[self.register(len(columns) * row + c) for c in range(len(columns))] for row in range(rows)]
        used = rows * len(columns)
        values, weight = [self.register(used + c) for c in range(len(columns))], self.register(used + len(columns))
        for register in chain.from_iterable(totals):
            p.zero(register)
        p.move(_B, at(FRAME, self.values))
        p.move(_C, weights)
        p.immediate("ADD_RM64_IMM32", _C, self.scores)
        with p.repeat(at(FRAME, self.count), _D):
            for value, column in zip(values, columns, strict=True):
                self._get(value, at(_B, 4 * column))
            for row, total in enumerate(totals):
                p.v("VBROADCASTSS", weight, at(_C, 4 * row))
                for value, one in zip(values, total, strict=True):
                    p.v(self.accumulate, one, value, weight)
            p.advance(self.value_row, _B)
            p.advance(self.row, _C)
        p.move(_A, dst)
        after = f"after rows of {columns[0]}"
        for row, total in enumerate(totals):
            if row:
                p.immediate("CMP_RM64_IMM32", left, row)
                p.branch("JLE_REL32_64", after)
            p.v("VBROADCASTSS", weight, at(weights, self.inverse + 4 * row))
            for one, column in zip(total, columns, strict=True):
                p.v("VMULPS", one, one, weight)
                p.store(at(_A, p.number_nbytes * column), one)
            p.add(_A, p.argument("dst_row"))
        p.label(after)
