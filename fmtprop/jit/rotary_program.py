"""The program of rotary embeddings: the instructions for a thread's share of the rows."""

from __future__ import annotations

from iced_x86 import Register

from fmtprop.jit.assembler import at
from fmtprop.jit.isa import Isa
from fmtprop.jit.program import Program
from fmtprop.jit.rotary import ANGLE_NBYTES, START_NBYTES, RotaryArguments

#: the thread's current row, and the row after its last; the turns that are left within a row
_ITEM, _END, _LEFT = Register.R8, Register.R9, Register.RCX

#: the order of four numbers in which neighbours are exchanged
_EXCHANGED = 0b10_11_00_01

_SRC, _DST, _COS, _SIN, _START = Register.RSI, Register.RDI, Register.R11, Register.RAX, Register.R10


def rotary(isa: Isa, half: int, *, interleaved: bool, bf16: bool) -> bytes:
    """Return the program that turns pairs of numbers of each row; dst may be src."""
    p = Program(isa, RotaryArguments, bf16=bf16)
    first, second, cos, sin, turned = (p.register(index) for index in range(5))
    apart, step = (1, 2) if interleaved else (half, 1)
    pair = ((0, 0), (apart * p.number_nbytes, apart * ANGLE_NBYTES))  # offsets of data, and of cosines and sines

    def advance(count: int) -> None:
        p.advance(count * p.number_nbytes, _SRC, _DST)
        p.advance(count * ANGLE_NBYTES, _COS, _SIN)

    def turn_neighbours() -> None:
        """Turn a vector of pairs at the pointers."""
        p.load(first, at(_SRC))
        p.v("VPERMILPS", second, first, immediate=_EXCHANGED)
        p.v("VMULPS", second, second, at(_SIN))
        p.v("VFMADDSUB132PS", first, second, at(_COS))  # subtracts from the first of a pair, adds to the second
        p.store(at(_DST), first)
        advance(isa.lanes)

    def turn(count: int) -> None:
        """Turn `count` pairs of numbers at the pointers: one, or a vector of them."""
        load, store, angles = (p.load, p.store, "VMOVUPS") if count > 1 else (p.load_one, p.store_one, "VBROADCASTSS")
        for number, (data, _) in zip((first, second), pair, strict=True):
            load(number, at(_SRC, data))
        for own, other, product, (data, angle) in zip(
            (first, second), (second, first), ("VFNMADD231PS", "VFMADD231PS"), pair, strict=True
        ):
            p.v(angles, cos, at(_COS, angle))
            p.v(angles, sin, at(_SIN, angle))
            p.v("VMULPS", turned, own, cos)
            p.v(product, turned, other, sin)
            store(at(_DST, data), turned)
        advance(count * step)

    p.share(_ITEM, _END, "rows")
    p.point(_DST, "dst", _ITEM, "row")
    p.point(_START, "table", _ITEM, START_NBYTES)
    with p.until(_ITEM, _END):
        p.move(_COS, at(_START))
        p.move(_SIN, _COS)
        p.move(_SRC, at(_START, START_NBYTES // 2))
        for pointer, name in ((_COS, "cos"), (_SIN, "sin"), (_SRC, "src")):
            p.add(pointer, p.argument(name))
        with p.repeat(p.argument("vectors"), _LEFT):
            turn_neighbours() if interleaved else turn(isa.lanes)
        with p.repeat(p.argument("rest"), _LEFT):
            turn(1)
        if not interleaved:
            p.advance(pair[1][0], _DST)
        p.advance(START_NBYTES, _START)
    return p.finished()
