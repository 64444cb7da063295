"""The programs of all kernels: the instructions for a thread's share of the numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from iced_x86 import Register

from fmtprop.jit.arguments import (
    CHUNK_NBYTES,
    UNROLLED,
    AverageArguments,
    BroadcastArguments,
    EltwiseArguments,
    FoldArguments,
    FunctionArguments,
)
from fmtprop.jit.assembler import Assembler, at
from fmtprop.jit.functions import FUNCTIONS
from fmtprop.jit.isa import Isa
from fmtprop.jit.program import ARITHMETIC, THREAD, THREADS, Program, with_table

#: the thread's current item, and the item after its last
_ITEM, _END = Register.R8, Register.R9

#: the work that is left within an item; the groups and the images that are left
_LEFT, _LEFT_OF_GROUPS, _LEFT_OF_IMAGES = Register.RCX, Register.RDX, Register.RDI

_SRC, _OTHER, _DST, _START = Register.RSI, Register.R11, Register.RDI, Register.R10

#: two vectors in the red zone below the stack (System V AMD64 ABI); no function is called while they are in use
_SCRATCH = (-64, -128)


# ---------------------------------------------------------------- a function


def function(isa: Isa, apply: Callable[[Assembler, int], int], *, bf16: bool) -> tuple[bytes, bytes]:
    """Return the program that applies a function to every number, and the table of constants that it reads."""
    return with_table(partial(_function, isa, apply, bf16=bf16))


def _function(isa: Isa, apply: Callable[[Assembler, int], int], numbers: tuple[bytes, ...], *, bf16: bool) -> Program:
    p = Program(isa, FunctionArguments, bf16=bf16)
    p.share(_ITEM, _END, "chunks")
    p.point(_SRC, "data", _ITEM, CHUNK_NBYTES)
    p.point(_LEFT, "data", _END, CHUNK_NBYTES)
    _apply_to_chunks(p, apply, numbers, _SRC)
    return p


def _apply_to_chunks(p: Program, apply: Callable[[Assembler, int], int], numbers: tuple[bytes, ...], dst: int) -> None:
    """Apply a function to all chunks from the source's register to the limit; dst may be the source's register."""
    p.move(Register.RDX, p.argument("table"))
    p.load_numbers(numbers)
    with p.until(_SRC, _LEFT, CHUNK_NBYTES):
        for offset in range(0, CHUNK_NBYTES, p.vector_nbytes):
            p.release()
            x = p.vector()
            p.load(x, at(_SRC, offset))
            p.store(at(dst, offset), apply(p, x))
        if dst != _SRC:
            p.advance(CHUNK_NBYTES, dst)


def eltwise(isa: Isa, alg: str, alpha: float, beta: float, *, bf16: bool) -> tuple[bytes, bytes]:
    """Return the program that applies a function to every number of another tensor, and the table that it reads."""
    return with_table(partial(_eltwise, isa, alg, alpha, beta, bf16=bf16))


def _eltwise(isa: Isa, alg: str, alpha: float, beta: float, numbers: tuple[bytes, ...], *, bf16: bool) -> Program:
    p = Program(isa, EltwiseArguments, bf16=bf16)
    p.share(_ITEM, _END, "chunks")
    p.point(_SRC, "src", _ITEM, CHUNK_NBYTES)
    p.point(_DST, "dst", _ITEM, CHUNK_NBYTES)
    p.point(_LEFT, "src", _END, CHUNK_NBYTES)
    _apply_to_chunks(p, lambda a, x: FUNCTIONS[alg](a, x, alpha, beta), numbers, _DST)
    return p


# ---------------------------------------------------------------- two operands


def broadcast(isa: Isa, alg: str, *, shared: bool, bf16: bool) -> bytes:
    """Return the program that combines each row with a row or with one number of another operand; dst may be src."""
    p = Program(isa, BroadcastArguments, bf16=bf16)
    x, y, number = p.register(0), p.register(1), p.register(2)
    moving = (_SRC, _DST) if shared else (_SRC, _DST, _OTHER)
    p.share(_ITEM, _END, "rows")
    p.point(_SRC, "src_0", _ITEM, "pitch")
    p.point(_DST, "dst", _ITEM, "row")
    p.point(_START, "table", _ITEM, 8)
    with p.until(_ITEM, _END):
        p.move(_OTHER, at(_START))
        p.add(_OTHER, p.argument("src_1"))
        if shared:
            p.load_one(number, at(_OTHER))
        for count in p.vectors(UNROLLED, _LEFT):
            for offset in range(0, count * p.vector_nbytes, p.vector_nbytes):
                p.load(x, at(_SRC, offset))
                p.v(ARITHMETIC[alg], x, x, number if shared else p.operand(y, at(_OTHER, offset)))
                p.store(at(_DST, offset), x)
            p.advance(count * p.vector_nbytes, *moving)
        with p.repeat(p.argument("rest"), _LEFT):
            p.load_one(x, at(_SRC))
            if not shared:
                p.load_one(y, at(_OTHER))
            p.v(ARITHMETIC[alg], x, x, number if shared else y)
            p.store_one(at(_DST), x)
            p.advance(p.number_nbytes, *moving)
        p.add(_SRC, p.argument("gap"))
        p.advance(8, _START)
    return p.finished()


# ---------------------------------------------------------------- averages of channels


def average(isa: Isa, group: int, *, bf16: bool) -> bytes:
    """Return the program that averages rows of channels, image by image: each thread sums, then the sums are added up.

    Threads share rows, not channels. A kernel that ran before in memory order (as SiLU does) left the same part of the
    rows in the same core's cache.
    """
    p = Program(isa, AverageArguments, bf16=bf16)
    rows, image, sums, row, channels = _END, _START, _OTHER, Register.RAX, _SRC
    totals, free = [p.register(index) for index in range(group)], p.register(group)
    p.portions(_ITEM, rows, "places")
    p.emit("SUB_R64_RM64", rows, _ITEM)
    p.point(image, "src", _ITEM, "row")
    p.point(sums, "sums", THREAD, "thread_sums")
    with p.repeat(p.argument("images"), _LEFT_OF_IMAGES):
        p.move(channels, image)
        with p.repeat(p.argument("groups"), _LEFT_OF_GROUPS):
            for total in totals:
                p.zero(total)
            p.move(row, channels)
            with p.repeat(rows, _LEFT):
                for index, total in enumerate(totals):
                    p.v("VADDPS", total, total, p.operand(free, at(row, index * p.vector_nbytes)))
                p.add(row, p.argument("row"))
            for index, total in enumerate(totals):
                p.v("VMOVUPS <", at(sums, index * isa.nbytes), total)
            p.advance(group * isa.nbytes, sums)
            p.advance(group * p.vector_nbytes, channels)
        p.add(image, p.argument("image"))
    p.emit("VEX_VZEROUPPER")
    p.emit("CALL_RM64", p.argument("barrier"))
    _gather(p)
    return p.finished()


def _gather(p: Program) -> None:
    """Add up the threads' sums and divide; each thread does some of the vectors."""
    sums, place, total = _OTHER, Register.RAX, p.register(0)
    p.share(_ITEM, _END, "vectors")
    p.point(sums, "sums", _ITEM, p.isa.nbytes)
    p.point(_DST, "dst", _ITEM, p.vector_nbytes)
    with p.until(_ITEM, _END):
        p.v("VMOVUPS", total, at(sums))
        p.move(place, sums)
        p.move(_START, THREADS)
        p.emit("DEC_RM64", _START)
        with p.repeat(_START, _LEFT):
            p.add(place, p.argument("thread_sums"))
            p.v("VADDPS", total, total, at(place))
        p.v("VDIVPS", total, total, p.argument("divisor"))
        p.store(at(_DST), total)
        p.advance(p.isa.nbytes, sums)
        p.advance(p.vector_nbytes, _DST)


# ---------------------------------------------------------------- folds


@dataclass(frozen=True)
class _Fold:
    """The instructions that fold numbers into accumulators (sum, norm, maximum or minimum).

    A maximum has a second vector for the largest magnitude, compared as integers: it keeps a NaN.
    """

    p: Program
    alg: str

    @property
    def extreme(self) -> str:
        """The instruction of a maximum or a minimum."""
        return {"max": "VMAXPS", "min": "VMINPS"}.get(self.alg, "")

    def states(self, count: int) -> list[tuple[int, ...]]:
        """Return the vectors of `count` accumulators."""
        register, each = self.p.register, 2 if self.extreme else 1
        return [tuple(map(register, range(2 * index, 2 * index + each))) for index in range(count)]

    @property
    def x(self) -> int:
        """The vector that is free for numbers."""
        return self.p.register(12)

    def begin(self, states: list[tuple[int, ...]]) -> None:
        """Set accumulators to the fold's initial value."""
        for state in states:
            self.p.v("VMOVUPS", state[0], self.p.argument("start"))
            for register in state[1:]:
                self.p.zero(register)

    def vectors(self, states: list[tuple[int, ...]]) -> None:
        """Fold a vector into each accumulator."""
        for index, state in enumerate(states):
            self.p.load(self.x, at(_SRC, index * self.p.vector_nbytes))
            self.step(state)

    def step(self, state: tuple[int, ...]) -> None:
        """Fold `x` in; it is lost."""
        p, x = self.p, self.x
        if self.extreme:
            p.v(self.extreme, state[0], state[0], x)
            p.v("VANDPS", x, x, p.argument("magnitude"))
            p.v("VPMAXSD", state[1], state[1], x)
            return
        if self.alg == "norm":
            p.v("VMULPS", x, x, x)
        p.v("VADDPS", state[0], state[0], x)

    def join(self, state: tuple[int, ...], other: tuple[int, ...]) -> None:
        """Fold an accumulator into another."""
        for operation, mine, theirs in zip((self.extreme or "VADDPS", "VPMAXSD"), state, other, strict=False):
            self.p.v(operation, mine, mine, theirs)

    def across(self, states: list[tuple[int, ...]]) -> None:
        """Fold the numbers of the first accumulator to one number, which then fills it."""
        p, new = self.p, (self.x, self.p.register(13))
        for register, place in zip(states[0], _SCRATCH, strict=False):
            p.v("VMOVUPS <", at(Register.RSP, place), register)
        for lane in range(p.isa.lanes):
            chain = states[lane % UNROLLED]
            loaded = chain if lane < UNROLLED else new[: len(chain)]
            for register, place in zip(loaded, _SCRATCH, strict=False):
                p.v("VBROADCASTSS", register, at(Register.RSP, place + 4 * lane))
            if lane >= UNROLLED:
                self.join(chain, new)
        for chain in states[1:]:
            self.join(states[0], chain)

    def finish(self, state: tuple[int, ...]) -> None:
        """Compute the result from an accumulator."""
        p, result = self.p, state[0]
        if self.alg == "mean":
            p.v("VDIVPS", result, result, p.argument("divisor"))
        elif self.alg == "norm":
            p.v("VSQRTPS", result, result)
        elif self.extreme:
            # if an operand is NaN, both instructions return the last one: the NaN; otherwise the second gives `result`
            # back
            p.v(self.extreme, self.x, result, state[1])
            p.v({"VMAXPS": "VMINPS", "VMINPS": "VMAXPS"}[self.extreme], result, result, self.x)


def fold_columns(isa: Isa, alg: str, group: int, *, bf16: bool) -> bytes:
    """Return the program that folds rows column by column; the last group of columns may overlap the one before."""
    p = Program(isa, FoldArguments, bf16=bf16)
    fold = _Fold(p, alg)
    states = fold.states(group)
    p.share(_ITEM, _END, "tasks")
    with p.until(_ITEM, _END):
        p.divide(_ITEM, p.argument("groups"))
        p.emit("IMUL_R64_RM64", Register.RDX, p.argument("group"))
        p.emit("CMP_R64_RM64", Register.RDX, p.argument("last"))
        p.emit("CMOVA_R64_RM64", Register.RDX, p.argument("last"))
        p.point(_SRC, "src", Register.RAX, "image")
        p.point(_DST, "dst", Register.RAX, "row")
        for pointer in (_SRC, _DST):
            p.add(pointer, Register.RDX)
        fold.begin(states)
        with p.repeat(p.argument("count"), _LEFT):
            fold.vectors(states)
            p.add(_SRC, p.argument("row"))
        for index, state in enumerate(states):
            fold.finish(state)
            p.store(at(_DST, index * p.vector_nbytes), state[0])
    return p.finished()


def fold_rows(isa: Isa, alg: str, *, bf16: bool) -> bytes:
    """Return the program that folds each row to one number."""
    p = Program(isa, FoldArguments, bf16=bf16)
    fold = _Fold(p, alg)
    states = fold.states(UNROLLED)
    p.share(_ITEM, _END, "tasks")
    p.point(_SRC, "src", _ITEM, "image")
    p.point(_DST, "dst", _ITEM, "row")
    with p.until(_ITEM, _END):
        fold.begin(states)
        for count in p.vectors(UNROLLED, _LEFT):
            fold.vectors(states[:count])
            p.advance(count * p.vector_nbytes, _SRC)
        for state in states[1:]:
            fold.join(states[0], state)
        fold.across(states)
        with p.repeat(p.argument("rest"), _LEFT):
            p.load_one(fold.x, at(_SRC))
            fold.step(states[0])
            p.advance(p.number_nbytes, _SRC)
        fold.finish(states[0])
        p.store_one(at(_DST), states[0][0])
        p.advance(p.number_nbytes, _DST)
    return p.finished()
