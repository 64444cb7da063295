"""The programs of embedding bags: a check of offsets and indices, and the reduction of a thread's share of the bags.

The numbers of a row that fit in a few registers are added up along a bag; then come the next ones. If a row is not
whole vectors, the last vector begins earlier, and computes some numbers again; a row shorter than a vector is computed
number by number.
"""

from __future__ import annotations

from collections.abc import Sequence

from iced_x86 import MemoryOperand, Register

from fmtprop.jit.arguments import BagArguments
from fmtprop.jit.assembler import Assembler, at
from fmtprop.jit.gather_program import PLACE, check_indices, load_index
from fmtprop.jit.isa import AVX2, Isa
from fmtprop.jit.program import Program

#: the thread's current bag, and the one after its last; its result, and where its offset is
_ITEM, _END, _DST, _START = Register.R8, Register.R9, Register.RDI, Register.R10

#: the current index, the end of the bag's, and the current factor; a row of the table, and how many the bag had so far
_INDEX, _STOP, _FACTOR, _ROW, _ROWS = Register.RSI, Register.R11, Register.RAX, Register.RCX, Register.RDX

#: behind the last index for which a later one's row is fetched; the caller's, so it is restored
_AHEAD = Register.R13

#: registers of sums; indices between a row and the one that is fetched; bytes of a cache line
_SUMS, _ROWS_AHEAD, _LINE_NBYTES = 8, 16, 64

#: a number in the red zone below the stack (System V AMD64 ABI); no function is called while it is in use
_NUMBER = -8


def bag(
    isa: Isa, columns: int, index_nbytes: int, mode: str, *, padded: bool, weighted: bool, far: bool, bf16: bool
) -> bytes:
    """Return the program that reduces rows.

    `index_nbytes`: bytes of an index and of an offset, 4 or 8. `mode`: ``"sum"``, ``"mean"`` or ``"max"``. `padded`,
    `weighted`, `far`: whether an index is left out, whether each row has a factor, and whether the table is larger than
    near caches.
    """
    p = _Bags(isa, BagArguments, bf16=bf16)
    p.index_nbytes, p.mode, p.padded, p.weighted, p.far = index_nbytes, mode, padded, weighted, far
    p.is_whole = columns >= isa.lanes
    width = isa.lanes if p.is_whole else 1
    places = [min(first, columns - width) * p.number_nbytes for first in range(0, columns, width)]
    p.share(_ITEM, _END, "bags")
    p.point(_DST, "dst", _ITEM, "row")
    p.point(_START, "offsets", _ITEM, index_nbytes)
    p.emit("PUSH_R64", _AHEAD)
    p.move(_AHEAD, p.argument("count"))
    p.point(_AHEAD, "indices", _AHEAD, index_nbytes)
    p.advance(-_ROWS_AHEAD * index_nbytes, _AHEAD)
    with p.until(_ITEM, _END):
        for first in range(0, len(places), _SUMS):
            p.reduce(f"from {first}", places[first : first + _SUMS])
        p.advance(columns * p.number_nbytes, _DST)
        p.advance(index_nbytes, _START)
    p.emit("POP_R64", _AHEAD)
    return p.finished()


class _Bags(Program):
    """The program under construction."""

    index_nbytes: int
    mode: str
    padded: bool
    weighted: bool
    far: bool
    #: whether registers have whole vectors of a row; otherwise all numbers of a register are the same
    is_whole: bool

    def reduce(self, name: str, places: Sequence[int]) -> None:
        """Compute the numbers of a bag's result at these places, bytes from the start of its row."""
        sums, x, factor = [self.register(index) for index in range(len(places))], self.register(8), self.register(9)
        for one in sums:
            self.zero(one)
        self._begin(name)
        self.emit("CMP_R64_RM64", _INDEX, _STOP)
        self.branch("JAE_REL32_64", f"empty {name}")
        self.label(f"row {name}")
        if self.far:
            self._fetch(name, places)
        load_index(self, _ROW, at(_INDEX), self.index_nbytes)
        if self.padded:
            self.emit("CMP_R64_RM64", _ROW, self.argument("padding"))
            self.branch("JE_REL32_64", f"next {name}")
        self._find()
        if self.mode == "max":
            self.emit("TEST_RM64_R64", _ROWS, _ROWS)
            self.branch("JNE_REL32_64", f"other {name}")
            for one, place in zip(sums, places, strict=True):
                self._load(one, at(_ROW, place))
            self.label(f"other {name}")
        if self.weighted:
            self.load_one(factor, at(_FACTOR))
        for one, place in zip(sums, places, strict=True):
            self._load(x, at(_ROW, place))
            if self.mode == "max":
                self.v("VMAXPS", one, x, one)  # the second if one of them is NaN
            elif self.weighted:
                self.v("VFMADD231PS", one, x, factor)
            else:
                self.v("VADDPS", one, one, x)
        self.emit("INC_RM64", _ROWS)
        self.label(f"next {name}")
        self.advance(self.index_nbytes, _INDEX)
        if self.weighted:
            self.advance(self.number_nbytes, _FACTOR)
        self.emit("CMP_R64_RM64", _INDEX, _STOP)
        self.branch("JB_REL32_64", f"row {name}")
        if self.mode == "mean":
            self._divide(name, sums, x)
        self.label(f"empty {name}")
        for one, place in zip(sums, places, strict=True):
            (self.store if self.is_whole else self.store_one)(at(_DST, place), one)

    def _load(self, x: int, place: MemoryOperand) -> None:
        (self.load if self.is_whole else self.load_one)(x, place)

    def _find(self) -> None:
        """Point to a row of the table, by its index."""
        self.emit("IMUL_R64_RM64", _ROW, self.argument("pitch"))
        self.add(_ROW, self.argument("table"))

    def _fetch(self, name: str, places: Sequence[int]) -> None:
        """Fetch a row into the caches that is read later."""
        self.emit("CMP_R64_RM64", _INDEX, _AHEAD)
        self.branch("JAE_REL32_64", f"fetched {name}")
        load_index(self, _ROW, at(_INDEX, _ROWS_AHEAD * self.index_nbytes), self.index_nbytes)
        self._find()
        for place in range(places[0], places[-1] + 1, _LINE_NBYTES):
            self.emit("PREFETCHT0_M8", at(_ROW, place))
        self.label(f"fetched {name}")

    def _begin(self, name: str) -> None:
        """Point to the first of the bag's indices and factors, and behind the last index."""
        load_index(self, _INDEX, at(_START), self.index_nbytes)
        if self.weighted:
            self.point(_FACTOR, "factors", _INDEX, self.number_nbytes)
        self.move(_STOP, self.argument("count"))
        self.move(_ROWS, _ITEM)
        self.emit("INC_RM64", _ROWS)
        self.emit("CMP_R64_RM64", _ROWS, self.argument("starts"))
        self.branch("JAE_REL32_64", f"last {name}")
        load_index(self, _STOP, at(_START, self.index_nbytes), self.index_nbytes)
        self.label(f"last {name}")
        self.point(_INDEX, "indices", _INDEX, self.index_nbytes)
        self.point(_STOP, "indices", _STOP, self.index_nbytes)
        self.emit("XOR_R32_RM32", Register.EDX, Register.EDX)

    def _divide(self, name: str, sums: Sequence[int], x: int) -> None:
        """Divide sums by the number of rows."""
        self.emit("TEST_RM64_R64", _ROWS, _ROWS)
        self.branch("JE_REL32_64", f"empty {name}")
        low = Register.XMM0 + _SUMS
        self.emit("VEX_VCVTSI2SS_XMM_XMM_RM64", low, low, _ROWS)
        self.emit("VEX_VMOVSS_M32_XMM", at(Register.RSP, _NUMBER), low)
        self.v("VBROADCASTSS", x, at(Register.RSP, _NUMBER))
        for one in sums:
            self.v("VDIVPS", one, one, x)


def check(index_nbytes: int, has_last: bool) -> bytes:
    """Return ``int check(arguments)``: 1 if an index does not exist, 2 if offsets are not those of bags, else 0.

    `index_nbytes`: bytes of an index and of an offset, 4 or 8. `has_last`: whether the last offset is the end of the
    last bag.
    """
    a = Assembler(AVX2)  # any instruction set: there are no vectors

    def argument(name: str) -> MemoryOperand:
        return at(Register.RDI, getattr(BagArguments, name).offset)

    before, left = Register.R8, Register.RCX
    a.emit("MOV_R64_RM64", PLACE, argument("offsets"))
    a.emit("MOV_R64_RM64", left, argument("starts"))
    load_index(a, before, at(PLACE), index_nbytes)
    a.emit("TEST_RM64_R64", before, before)
    a.branch("JNE_REL32_64", "disordered")
    a.label("offset")
    load_index(a, Register.RDX, at(PLACE), index_nbytes)
    a.emit("CMP_R64_RM64", Register.RDX, before)
    a.branch("JL_REL32_64", "disordered")
    a.emit("MOV_R64_RM64", before, Register.RDX)
    a.immediate("ADD_RM64_IMM32", PLACE, index_nbytes)
    a.emit("DEC_RM64", left)
    a.branch("JNE_REL32_64", "offset")
    a.emit("CMP_R64_RM64", before, argument("count"))
    a.branch("JA_REL32_64", "disordered")
    a.emit("MOV_R64_RM64", PLACE, argument("indices"))
    a.emit("MOV_R64_RM64", left, before if has_last else argument("count"))
    check_indices(a, index_nbytes, argument("below"), argument("reach"))
    a.label("disordered")
    a.immediate("MOV_R32_IMM32", Register.EAX, 2)
    a.emit("RETNQ")
    return a.code()
