"""Programs over rows of numbers: an operation with a second operand that broadcasts, and folds of rows or columns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from iced_x86 import Register

from fmtprop.jit.assembler import Assembler, Isa, at
from fmtprop.jit.frame import Frame
from fmtprop.jit.rows import UNROLLED, BroadcastArguments, FoldArguments

__all__ = ["broadcast", "fold_columns", "fold_rows"]

_OPERATIONS = {"add": "VADDPS", "sub": "VSUBPS", "mul": "VMULPS", "div": "VDIVPS"}

#: a vector in the red zone below the stack (System V AMD64 ABI), and another: nothing is called while they are in use
_SCRATCH = (-64, -128)


def broadcast(isa: Isa, alg: str, *, shared: bool, bf16: bool) -> bytes:
    """Return the program that combines rows with rows of another operand, or with one number each; dst may be src.

    Parameters
    ----------
    isa : Isa
        For which machine.
    alg : str
        The operation.
    shared : bool
        Whether each row has one number of the other operand.
    bf16 : bool
        Whether the numbers are bf16 and not f32; with AVX-512 and bf16 only.
    """
    a = Assembler(isa)
    frame = Frame(a, BroadcastArguments)
    row, end, start, other, left, src, dst = (
        *(Register.R8, Register.R9, Register.R10, Register.R11),
        *(Register.RCX, Register.RSI, Register.RDI),
    )
    x, y, number = isa.register(0), isa.register(1), isa.register(2)
    size, single = isa.nbytes_in_memory(bf16=bf16), 2 if bf16 else 4
    moving = (src, dst) if shared else (src, dst, other)
    frame.enter()
    frame.portions(row, end, frame.argument("rows"))
    a.emit("CMP_R64_RM64", row, end)
    a.branch("JAE_REL32_64", "done")
    for pointer, name in ((src, "src"), (dst, "dst")):
        a.emit("MOV_R64_RM64", pointer, row)
        a.emit("IMUL_R64_RM64", pointer, frame.argument("row"))
        a.emit("ADD_R64_RM64", pointer, frame.argument(name))
    a.emit("MOV_R64_RM64", start, row)
    a.immediate("SHL_RM64_IMM8", start, 3)
    a.emit("ADD_R64_RM64", start, frame.argument("table"))
    a.label("row")
    a.emit("MOV_R64_RM64", other, at(start))
    a.emit("ADD_R64_RM64", other, frame.argument("other"))
    if shared:
        a.load_one(number, at(other), bf16=bf16)

    def vectors(count: int) -> None:
        for offset in range(0, count * size, size):
            a.load(x, at(src, offset), bf16=bf16)
            if bf16 and not shared:
                a.load(y, at(other, offset), bf16=True)
            second = number if shared else y if bf16 else at(other, offset)
            a.v(_OPERATIONS[alg], x, x, second)
            a.store(at(dst, offset), x, bf16=bf16)
        _advance(a, moving, count * size)

    def one() -> None:
        a.load_one(x, at(src), bf16=bf16)
        if not shared:
            a.load_one(y, at(other), bf16=bf16)
        a.v(_OPERATIONS[alg], x, x, number if shared else y)
        a.store_one(at(dst), x, bf16=bf16)
        _advance(a, moving, single)

    _loop(a, frame, left, "blocks", lambda: vectors(UNROLLED))
    _loop(a, frame, left, "vectors", lambda: vectors(1))
    _loop(a, frame, left, "rest", one)
    _advance(a, (start,), 8)
    a.emit("INC_RM64", row)
    a.emit("CMP_R64_RM64", row, end)
    a.branch("JB_REL32_64", "row")
    a.label("done")
    frame.leave()
    return a.code()


# ---------------------------------------------------------------- folds


@dataclass(frozen=True)
class _Fold:
    """How numbers are folded into vectors.

    A maximum has a second vector: the largest magnitude, compared as integers, by which a NaN is never lost.
    """

    a: Assembler
    frame: Frame
    alg: str

    @property
    def extreme(self) -> str:
        """The instruction of a maximum or a minimum."""
        return {"max": "VMAXPS", "min": "VMINPS"}.get(self.alg, "")

    def state(self, index: int) -> tuple[int, ...]:
        """Return the vectors of an accumulator."""
        first = self.a.isa.register(2 * index)
        return (first, self.a.isa.register(2 * index + 1)) if self.extreme else (first,)

    @property
    def x(self) -> int:
        """The vector that is free for numbers."""
        return self.a.isa.register(12)

    def begin(self, state: tuple[int, ...]) -> None:
        """Set an accumulator to what a fold of nothing is."""
        self.a.v("VMOVUPS", state[0], self.frame.argument("start"))
        for register in state[1:]:
            first = Register.XMM0 + (
                register - self.a.isa.register(0)
            )  # the whole register: what is above becomes zero
            self.a.emit("VEX_VXORPS_XMM_XMM_XMMM128", first, first, first)

    def step(self, state: tuple[int, ...]) -> None:
        """Fold `x` in; it is lost."""
        a, x = self.a, self.x
        if self.extreme:
            a.v(self.extreme, state[0], state[0], x)
            a.v("VANDPS", x, x, self.frame.argument("magnitude"))
            a.v("VPMAXSD", state[1], state[1], x)
            return
        if self.alg == "norm":
            a.v("VMULPS", x, x, x)
        a.v("VADDPS", state[0], state[0], x)

    def join(self, state: tuple[int, ...], other: tuple[int, ...]) -> None:
        """Fold an accumulator into another."""
        for operation, mine, theirs in zip((self.extreme or "VADDPS", "VPMAXSD"), state, other, strict=False):
            self.a.v(operation, mine, mine, theirs)

    def finish(self, state: tuple[int, ...]) -> None:
        """Make the result of an accumulator."""
        a, result = self.a, state[0]
        if self.alg == "mean":
            a.v("VDIVPS", result, result, self.frame.argument("divisor"))
        elif self.alg == "norm":
            a.v("VSQRTPS", result, result)
        elif self.extreme:
            # both give their last operand where one is NaN: that, or else the first one again
            a.v(self.extreme, self.x, result, state[1])
            a.v({"VMAXPS": "VMINPS", "VMINPS": "VMAXPS"}[self.extreme], result, result, self.x)


def fold_columns(isa: Isa, alg: str, group: int, *, bf16: bool) -> bytes:
    """Return the program that folds rows column by column; the last group of columns may overlap the one before.

    Parameters
    ----------
    isa, bf16
        As of :func:`broadcast`.
    alg : str
        The fold.
    group : int
        How many vectors of columns are folded at a time.
    """
    a = Assembler(isa)
    frame = Frame(a, FoldArguments)
    fold = _Fold(a, frame, alg)
    task, end, left, src, dst = Register.R8, Register.R9, Register.RCX, Register.RSI, Register.RDI
    size, states = isa.nbytes_in_memory(bf16=bf16), [fold.state(index) for index in range(group)]
    frame.enter()
    frame.portions(task, end, frame.argument("tasks"))
    a.emit("CMP_R64_RM64", task, end)
    a.branch("JAE_REL32_64", "done")
    a.label("task")
    a.emit("MOV_R64_RM64", Register.RAX, task)
    a.emit("XOR_R32_RM32", Register.EDX, Register.EDX)
    a.emit("DIV_RM64", frame.argument("groups"))
    a.emit("IMUL_R64_RM64", Register.RDX, frame.argument("group"))
    a.emit("CMP_R64_RM64", Register.RDX, frame.argument("last"))
    a.emit("CMOVA_R64_RM64", Register.RDX, frame.argument("last"))
    for pointer, name, stride in ((src, "src", "image"), (dst, "dst", "row")):
        a.emit("MOV_R64_RM64", pointer, Register.RAX)
        a.emit("IMUL_R64_RM64", pointer, frame.argument(stride))
        a.emit("ADD_R64_RM64", pointer, Register.RDX)
        a.emit("ADD_R64_RM64", pointer, frame.argument(name))
    for state in states:
        fold.begin(state)

    def step() -> None:
        for index, state in enumerate(states):
            a.load(fold.x, at(src, index * size), bf16=bf16)
            fold.step(state)
        a.emit("ADD_R64_RM64", src, frame.argument("row"))

    _loop(a, frame, left, "count", step)
    for index, state in enumerate(states):
        fold.finish(state)
        a.store(at(dst, index * size), state[0], bf16=bf16)
    a.emit("INC_RM64", task)
    a.emit("CMP_R64_RM64", task, end)
    a.branch("JB_REL32_64", "task")
    a.label("done")
    frame.leave()
    return a.code()


def fold_rows(isa: Isa, alg: str, *, bf16: bool) -> bytes:
    """Return the program that folds each row to one number.

    Parameters
    ----------
    isa, alg, bf16
        As of :func:`fold_columns`.
    """
    a = Assembler(isa)
    frame = Frame(a, FoldArguments)
    fold = _Fold(a, frame, alg)
    row, end, left, src, dst = Register.R8, Register.R9, Register.RCX, Register.RSI, Register.RDI
    size, single = isa.nbytes_in_memory(bf16=bf16), 2 if bf16 else 4
    states = [fold.state(index) for index in range(UNROLLED)]
    frame.enter()
    frame.portions(row, end, frame.argument("tasks"))
    a.emit("CMP_R64_RM64", row, end)
    a.branch("JAE_REL32_64", "done")
    for pointer, name in ((src, "src"), (dst, "dst")):
        a.emit("MOV_R64_RM64", pointer, row)
        if pointer == src:
            a.emit("IMUL_R64_RM64", pointer, frame.argument("count"))
        a.immediate("SHL_RM64_IMM8", pointer, single.bit_length() - 1)
        a.emit("ADD_R64_RM64", pointer, frame.argument(name))
    a.label("row")
    for state in states:
        fold.begin(state)

    def vectors(count: int) -> None:
        for index in range(count):
            a.load(fold.x, at(src, index * size), bf16=bf16)
            fold.step(states[index])
        _advance(a, (src,), count * size)

    def one() -> None:
        a.load_one(fold.x, at(src), bf16=bf16)
        fold.step(states[0])
        _advance(a, (src,), single)

    _loop(a, frame, left, "blocks", lambda: vectors(UNROLLED))
    _loop(a, frame, left, "vectors", lambda: vectors(1))
    for state in states[1:]:
        fold.join(states[0], state)
    _across(a, fold, states)
    _loop(a, frame, left, "rest", one)
    fold.finish(states[0])
    a.store_one(at(dst), states[0][0], bf16=bf16)
    _advance(a, (dst,), single)
    a.emit("INC_RM64", row)
    a.emit("CMP_R64_RM64", row, end)
    a.branch("JB_REL32_64", "row")
    a.label("done")
    frame.leave()
    return a.code()


def _across(a: Assembler, fold: _Fold, states: list[tuple[int, ...]]) -> None:
    """Fold the numbers of the first accumulator to one, which is everywhere in it then: four chains side by side."""
    for register, place in zip(states[0], _SCRATCH, strict=False):
        a.v("VMOVUPS <", at(Register.RSP, place), register)
    for lane in range(a.isa.nbytes // 4):
        places = [at(Register.RSP, place + 4 * lane) for place in _SCRATCH]
        chain, new = states[lane % UNROLLED], (fold.x, a.isa.register(13))
        loaded = chain if lane < UNROLLED else new
        for register, number in zip(loaded[: len(chain)], places, strict=False):
            a.load_one(register, number)
        if lane >= UNROLLED:
            fold.join(chain, new)
    for chain in states[1:]:
        fold.join(states[0], chain)


def _loop(a: Assembler, frame: Frame, left: int, count: str, body: Callable[[], None]) -> None:
    """Add a loop that turns as often as an argument says."""
    a.emit("MOV_R64_RM64", left, frame.argument(count))
    a.emit("TEST_RM64_R64", left, left)
    a.branch("JE_REL32_64", f"after {count}")
    a.label(count)
    body()
    a.emit("DEC_RM64", left)
    a.branch("JNE_REL32_64", count)
    a.label(f"after {count}")


def _advance(a: Assembler, pointers: tuple[int, ...], nbytes: int) -> None:
    for pointer in pointers:
        a.immediate("ADD_RM64_IMM32", pointer, nbytes)
