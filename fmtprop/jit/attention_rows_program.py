"""The program of attention of few queries: the instructions for a thread's share of the queries."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from iced_x86 import Register

from fmtprop.jit.assembler import at
from fmtprop.jit.attention_rows import FRAME_NBYTES, AttentionRowsArguments
from fmtprop.jit.functions import exp_of_negative
from fmtprop.jit.isa import Isa
from fmtprop.jit.program import Program, with_table

#: the thread's current query, and the one after its last; the query's entry in the table of offsets
_ITEM, _END, _ENTRY = Register.R8, Register.R9, Register.R10

_ROW, _PLACE, _LEFT, _FRAME = Register.RSI, Register.RDI, Register.RCX, Register.RSP

#: where functions expect their constants
_TABLE = Register.RDX

#: places in the frame: the caller's stack, a number, and the query
_STACK, _NUMBER, _QUERY = 0, 8, FRAME_NBYTES

#: sums of a score side by side, and vectors of a value that are summed at a time
_CHAINS, _COLUMNS = 4, 8

#: bytes between a load and its prefetch to the second cache, as in :mod:`fmtprop.jit.gemv_program`
_AHEAD_NBYTES = 4096


def attention_rows(isa: Isa, depth: int, width: int, names: tuple[str, ...], *, bf16: bool) -> tuple[bytes, bytes]:
    """Return the program, and the table of constants that it reads.

    `names`: the tensors, in the order of the table of offsets.
    """
    return with_table(partial(_assembled, isa, depth, width, names, bf16=bf16))


def _assembled(
    isa: Isa, depth: int, width: int, names: tuple[str, ...], numbers: tuple[bytes, ...], *, bf16: bool
) -> Program:
    p = _AttentionRows(isa, AttentionRowsArguments, bf16=bf16)
    p.names, p.query_vectors, p.value_vectors = names, depth // isa.lanes, width // isa.lanes
    p.share(_ITEM, _END, "tasks")
    p.enter()
    p.point(_ENTRY, "offsets", _ITEM, "entry")
    with p.until(_ITEM, _END):
        p.query()
        p.scores()
        p.masks()
        p.exponentials(numbers)
        p.results()
        p.add(_ENTRY, p.argument("entry"))
    p.move(_FRAME, at(_FRAME, _STACK))
    return p


class _AttentionRows(Program):
    names: tuple[str, ...]
    query_vectors: int
    value_vectors: int

    @property
    def first_score(self) -> int:
        """The place of the scores in the frame."""
        return _QUERY + self.query_vectors * self.isa.nbytes

    def enter(self) -> None:
        """Make room on the stack for a query and its scores."""
        self.move(_ROW, _FRAME)
        self.emit("SUB_R64_RM64", _FRAME, self.argument("frame"))
        self.immediate("AND_RM64_IMM8", _FRAME, -64)
        self.emit("MOV_RM64_R64", at(_FRAME, _STACK), _ROW)

    def find(self, pointer: int, name: str) -> None:
        """Point to the query's part of a tensor."""
        self.move(pointer, self.argument(name))
        self.add(pointer, at(_ENTRY, 8 * self.names.index(name)))

    def parts(self, kind: str) -> Sequence[tuple[str, str]]:
        """Return the tensors of keys or of values, and the arguments with their numbers of rows."""
        both = ((f"past_{kind}", "past_keys"), (kind, "keys"))
        return [(name, count) for name, count in both if name in self.names]

    def at_scores(self) -> None:
        """Point to the first score."""
        self.move(_PLACE, _FRAME)
        self.advance(self.first_score, _PLACE)

    def query(self) -> None:
        """Copy the query, multiplied by the scale, as f32."""
        x, scale = self.register(0), self.register(1)
        self.find(_ROW, "src")
        self.v("VBROADCASTSS", scale, self.argument("scale"))
        for vector in range(self.query_vectors):
            self.load(x, at(_ROW, vector * self.vector_nbytes))
            self.v("VMULPS", x, x, scale)
            self.v("VMOVUPS <", at(_FRAME, _QUERY + vector * self.isa.nbytes), x)

    def scores(self) -> None:
        """Compute the products of the query and each key; a vector of the lowest numbers follows the last."""
        count = min(_CHAINS, self.query_vectors)
        chains, x = [self.register(index) for index in range(count)], self.register(_CHAINS)
        self.at_scores()
        for name, keys in self.parts("key"):
            self.find(_ROW, name)
            with self.repeat(self.argument(keys), _LEFT):
                for chain in chains:
                    self.zero(chain)
                for vector in range(self.query_vectors):
                    place = vector * self.vector_nbytes
                    self.emit("PREFETCHT2_M8", at(_ROW, place + _AHEAD_NBYTES))
                    self.load(x, at(_ROW, place))
                    self.v("VFMADD231PS", chains[vector % count], x, at(_FRAME, _QUERY + vector * self.isa.nbytes))
                self.across(chains)
                self.emit("VEX_VMOVSS_M32_XMM", at(_PLACE), Register.XMM0)
                self.advance(4, _PLACE)
                self.add(_ROW, self.argument(f"{name}_row"))
        self.v("VMOVUPS", x, self.argument("lowest"))
        self.v("VMOVUPS <", at(_PLACE), x)

    def masks(self) -> None:
        """Add the masks to the scores."""
        x, y = self.register(0), self.register(1)
        for name in self.names:
            if not name.startswith("mask"):
                continue
            self.find(_ROW, name)
            self.at_scores()
            with self.repeat(self.argument("vectors"), _LEFT):
                self.load(x, at(_ROW))
                self.v("VADDPS", x, x, at(_PLACE))
                self.v("VMOVUPS <", at(_PLACE), x)
                self.advance(self.vector_nbytes, _ROW)
                self.advance(self.isa.nbytes, _PLACE)
            with self.repeat(self.argument("rest"), _LEFT):
                self.load_one(x, at(_ROW))
                self.v("VBROADCASTSS", y, at(_PLACE))
                self.v("VADDPS", x, x, y)
                self.emit("VEX_VMOVSS_M32_XMM", at(_PLACE), Register.XMM0)
                self.advance(self.number_nbytes, _ROW)
                self.advance(4, _PLACE)

    def exponentials(self, numbers: tuple[bytes, ...]) -> None:
        """Replace the scores by their exponentials, and keep the inverse of their sum."""
        most = first = self.register(0)
        self.v("VMOVUPS", most, self.argument("least"))
        self.at_scores()
        with self.repeat(self.argument("padded"), _LEFT):
            self.v("VMAXPS", most, most, at(_PLACE))
            self.advance(self.isa.nbytes, _PLACE)
        # the place after the scores is free: it holds the vector, of which each number is compared
        self.v("VMOVUPS <", at(_PLACE), most)
        for lane in range(self.isa.lanes):
            self.v("VBROADCASTSS", self.register(1), at(_PLACE, 4 * lane))
            self.v("VMAXPS", most, most, self.register(1))
        self.move(_TABLE, self.argument("numbers"))
        self.load_numbers(numbers)
        self.release()
        most, total = self.vector(), self.vector()
        self.zero(total)
        self.at_scores()
        with self.repeat(self.argument("padded"), _LEFT):
            x = self.vector()
            self.v("VSUBPS", x, most, at(_PLACE))
            y = exp_of_negative(self, x)
            self.v("VMOVUPS <", at(_PLACE), y)
            self.v("VADDPS", total, total, y)
            self.advance(self.isa.nbytes, _PLACE)
        one = self.register(2)
        self.v("VMOVUPS", one, self.number(1.0))
        self.v("VMOVUPS", first, total)
        self.v("VMOVUPS <", at(_PLACE), one)  # across changes the second vector
        self.across([first])
        self.emit("VEX_VMOVSS_XMM_M32", Register.XMM1, self.argument("floor"))
        self.emit("VEX_VMAXSS_XMM_XMM_XMMM32", Register.XMM0, Register.XMM1, Register.XMM0)  # of NaN, the second
        self.emit("VEX_VMOVSS_XMM_M32", Register.XMM1, at(_PLACE))
        self.emit("VEX_VDIVSS_XMM_XMM_XMMM32", Register.XMM1, Register.XMM1, Register.XMM0)
        self.emit("VEX_VMOVSS_M32_XMM", at(_FRAME, _NUMBER), Register.XMM1)

    def results(self) -> None:
        """Multiply the weights by the values, some vectors of a row at a time."""
        weight, x = self.register(_COLUMNS), self.register(_COLUMNS + 1)
        for start in range(0, self.value_vectors, _COLUMNS):
            count = min(_COLUMNS, self.value_vectors - start)
            totals = [self.register(index) for index in range(count)]
            places = [(start + index) * self.vector_nbytes for index in range(count)]
            for total in totals:
                self.zero(total)
            self.at_scores()
            for name, keys in self.parts("value"):
                self.find(_ROW, name)
                with self.repeat(self.argument(keys), _LEFT):
                    self.v("VBROADCASTSS", weight, at(_PLACE))
                    for total, place in zip(totals, places, strict=True):
                        self.emit("PREFETCHT2_M8", at(_ROW, place + _AHEAD_NBYTES))
                        self.v("VFMADD231PS", total, weight, self.operand(x, at(_ROW, place)))
                    self.advance(4, _PLACE)
                    self.add(_ROW, self.argument(f"{name}_row"))
            self.v("VBROADCASTSS", weight, at(_FRAME, _NUMBER))
            self.find(_ROW, "dst")
            for total, place in zip(totals, places, strict=True):
                self.v("VMULPS", total, total, weight)
                self.store(at(_ROW, place), total)
