"""The program of attention by tiles: the instructions for a thread's blocks of queries.

Products of queries and keys, and of weights and values, are products of tiles. Between them, vectors make weights of
scores, row by row: a pair of vectors, of 32 keys, becomes a vector of bf16 numbers in the same row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import inf

from iced_x86 import MemoryOperand, Register

from fmtprop.jit.assembler import at
from fmtprop.jit.attention_tiles import (
    FRAME_NBYTES,
    KEYS,
    QUERIES,
    AttentionTilesArguments,
    queries_row,
    results_row,
)
from fmtprop.jit.isa import Isa
from fmtprop.jit.program import with_table
from fmtprop.jit.tile_program import TileProgram
from fmtprop.jit.tiles import ROW_NBYTES, ROWS

_ITEM, _END, _FRAME = Register.R8, Register.R9, Register.R10
_A, _B, _C, _D, _E = Register.RAX, Register.RSI, Register.RDI, Register.RCX, Register.R11
_F, _G, _H = Register.RBP, Register.R12, Register.RDX

#: places in the frame: the caller's stack, the task's tensors and sizes, and the tensors that are packed
_STACK, _SRC, _KEY, _VALUE, _DST, _COUNT, _SEEN, _CHUNKS, _PACKED_KEY, _PACKED_VALUE = range(0, 80, 8)
_MASKS, _MODE, _OWN_MODE = 80, 96, 104

#: mask registers: the keys of the last pair of vectors, the last numbers of a query and of a result
_FIRST, _SECOND, _OF_DEPTH, _OF_WIDTH = Register.K1, Register.K2, Register.K3, Register.K4

#: bytes of a tile
_TILE_NBYTES = ROWS * ROW_NBYTES

#: 2^r for 0 <= r < 1, by iterated weighted least squares; its relative error is 1.0e-4, a twentieth of bf16's
_POWER = (0.07802435755729675, 0.2260671854019165, 0.6958336234092712, 0.9999251961708069)

#: of VREDUCEPS: what remains of a number above the next integer
_ABOVE_INTEGER = 0b0001

#: of the control register of vectors: denormal operands and results are 0. A weight of e^-100 would take a hundred
#: times as long, and is 0 in bf16 anyway
_NO_DENORMALS = 0x8040

#: a pair of ones in bf16
_ONE = 0x3F80


def attention_tiles(
    isa: Isa, depth: int, width: int, masks: int, *, is_limited: bool, is_bounded: bool, is_scaled_late: bool
) -> tuple[bytes, bytes]:
    """Return the program and its table of constants.

    `is_scaled_late`: whether the weights have the factor of the scores in their own.
    """
    options = {"is_limited": is_limited, "is_bounded": is_bounded, "is_scaled_late": is_scaled_late}
    return with_table(partial(_assembled, isa, depth, width, masks, options))


def _assembled(
    isa: Isa, depth: int, width: int, masks: int, options: dict[str, bool], numbers: tuple[bytes, ...]
) -> TileProgram:
    p = _AttentionTiles(isa, AttentionTilesArguments, bf16=True)
    p.depth, p.width, p.masks = depth, width, masks
    p.is_limited, p.is_bounded = options["is_limited"], options["is_bounded"]
    p.is_scaled_late = options["is_scaled_late"]
    p.share(_ITEM, _END, "tasks")
    p.enter(numbers)
    with p.tiles(), p.until(_ITEM, _END):
        p.begin()
        p.pack_keys()
        p.pack_values()
        p.pack_queries()
        p.by_tiles(p.scores)
        p.weights()
        p.by_tiles(p.sums)
        p.results()
    p.leave()
    return p


class _AttentionTiles(TileProgram):
    depth: int
    width: int
    masks: int
    is_limited: bool
    is_bounded: bool
    is_scaled_late: bool

    @property
    def parts(self) -> int:
        """Rows of tiles in a packed query."""
        return queries_row(self.depth) // ROW_NBYTES

    @property
    def columns(self) -> int:
        """Tiles side by side in a row of sums; a column behind the last result is the sum of the weights."""
        return results_row(self.width) // ROW_NBYTES

    # ------------------------------------------------------------------ tasks

    def enter(self, numbers: Sequence[bytes]) -> None:
        """Make room on the stack, and load what stays in registers."""
        self.move(_B, Register.RSP)
        self.emit("SUB_R64_RM64", Register.RSP, self.argument("frame"))
        self.immediate("AND_RM64_IMM8", Register.RSP, -64)
        self.move(_FRAME, Register.RSP)
        self.keep(_STACK, _B)
        self.emit("XOR_R32_RM32", Register.EAX, Register.EAX)
        for place in (_PACKED_KEY, _PACKED_VALUE):
            self.keep(place, _A)
        for mask, count in ((_OF_DEPTH, self.depth % 32), (_OF_WIDTH, self.width % 16)):
            self.immediate("MOV_R32_IMM32", Register.EAX, (1 << count) - 1)
            self.emit("VEX_KMOVD_KR_R32", mask, Register.EAX)
        self.move(Register.RDX, self.argument("numbers"))
        self.load_numbers(numbers)
        self.emit("VEX_VSTMXCSR_M32", at(_FRAME, _MODE))
        self.move(_A, at(_FRAME, _MODE))
        self.immediate("OR_RM64_IMM32", _A, _NO_DENORMALS)
        self.keep(_OWN_MODE, _A)
        self.emit("VEX_VLDMXCSR_M32", at(_FRAME, _OWN_MODE))

    def leave(self) -> None:
        """Restore the caller's stack and the mode of its vectors."""
        self.emit("VEX_VLDMXCSR_M32", at(_FRAME, _MODE))
        self.move(Register.RSP, at(_FRAME, _STACK))

    def keep(self, place: int, register: int) -> None:
        """Store a register in the frame."""
        self.emit("MOV_RM64_R64", at(_FRAME, place), register)

    def limit(self, register: int, most: int | MemoryOperand) -> None:
        """Replace a number by a smaller one."""
        self.emit("CMP_R64_RM64", register, most)
        self.emit("CMOVA_R64_RM64", register, most)

    def find(self, register: int, area: str) -> None:
        """Point to an area of the frame."""
        self.move(register, _FRAME)
        self.add(register, self.argument(area))

    def begin(self) -> None:
        """Find the task's tensors, its queries and its keys."""
        offsets, first = _B, _C
        self.divide(_ITEM, self.argument("blocks"))
        self.move(offsets, _A)
        self.emit("IMUL_R64_RM64", offsets, self.argument("entry"))
        self.add(offsets, self.argument("offsets"))
        self.move(first, Register.RDX)
        self.immediate("SHL_RM64_IMM8", first, QUERIES.bit_length() - 1)
        places = {"src": _SRC, "key": _KEY, "value": _VALUE, "dst": _DST}
        places |= {f"mask_{number}": _MASKS + 8 * number for number in range(self.masks)}
        for index, (name, place) in enumerate(places.items()):
            self.move(_D, self.argument(name))
            self.add(_D, at(offsets, 8 * index))
            if name not in ("key", "value"):
                self.move(_E, first)
                self.emit("IMUL_R64_RM64", _E, self.argument(f"{name}_row"))
                self.add(_D, _E)
            self.keep(place, _D)
        self.move(_A, self.argument("queries"))
        self.emit("SUB_R64_RM64", _A, first)
        self.immediate("MOV_R32_IMM32", Register.R11D, QUERIES)
        self.limit(_A, _E)
        self.keep(_COUNT, _A)
        self.move(_D, self.argument("keys"))
        if self.is_limited:
            self.add(first, self.argument("limit"))
            self.keep(_SEEN, first)
            self.add(first, _A)
            self.limit(_D, first)
        else:
            self.keep(_SEEN, _D)
        self.immediate("ADD_RM64_IMM8", _D, KEYS - 1)
        self.immediate("SHR_RM64_IMM8", _D, KEYS.bit_length() - 1)
        self.keep(_CHUNKS, _D)

    @contextmanager
    def if_new(self, pointer: int, place: int, packed: int) -> Iterator[None]:
        """Add a block that runs if a tensor is not the one that is packed."""
        after = f"packed {packed}"
        self.move(pointer, at(_FRAME, place))
        self.emit("CMP_R64_RM64", pointer, at(_FRAME, packed))
        self.branch("JE_REL32_64", after)
        self.keep(packed, pointer)
        yield
        self.label(after)

    # ------------------------------------------------------------------ operands of products

    def pack_keys(self) -> None:
        """Transpose pairs of numbers: a row of a tile has the same pair of 16 keys. Missing keys repeat the last."""
        rows, key, packed, left, step, none = [self.register(index) for index in range(16)], _B, _C, _D, _H, _A
        with self.if_new(key, _KEY, _PACKED_KEY):
            self.find(packed, "packed_keys")
            self.move(left, self.argument("keys"))
            self.emit("XOR_R32_RM32", Register.EAX, Register.EAX)
            self.label("keys")
            self.move(_F, key)
            self.move(_G, left)
            for part in range(self.parts):
                self.move(key, _F)
                self.move(left, _G)
                self.move(step, self.argument("key_row"))
                for row in rows:
                    self.load_part(row, key, part)
                    self.immediate("SUB_RM64_IMM8", left, 1)
                    self.emit("CMOVLE_R64_RM64", step, none)
                    self.add(key, step)
                for index, row in enumerate(self.transposed(rows, self.register(16))):
                    self.v("VMOVUPS <", at(packed, part * _TILE_NBYTES + index * ROW_NBYTES), row)
            self.advance(self.parts * _TILE_NBYTES, packed)
            self.emit("TEST_RM64_R64", left, left)
            self.branch("JG_REL32_64", "keys")

    def load_part(self, x: int, row: int, part: int) -> None:
        """Load 32 numbers of a query or key, with zeros behind its last."""
        whole = 32 * (part + 1) <= self.depth
        self.v("VMOVDQU16", x, at(row, ROW_NBYTES * part), mask=None if whole else _OF_DEPTH)

    def pack_values(self) -> None:
        """Interleave the values of two keys, with ones in the column behind them; the last pairs may be zeros."""
        value, packed, step = _B, _C, _H
        with self.if_new(value, _VALUE, _PACKED_VALUE):
            self.find(packed, "packed_values")
            self.move(step, self.argument("value_row"))
            self.move(_D, self.argument("keys"))
            self.immediate("SHR_RM64_IMM8", _D, 1)
            with self.repeat(_D, _A):
                self.pair_of_values()
                self.advance(results_row(self.width), packed)
                self.add(value, step)
                self.add(value, step)
            self.move(_D, self.argument("keys"))
            self.immediate("AND_RM64_IMM8", _D, 1)
            with self.repeat(_D, _A):
                self.pair_of_values(is_whole=False)
                self.advance(results_row(self.width), packed)
            self.zero(self.register(0))
            with self.repeat(self.argument("padding"), _A):
                for column in range(self.columns):
                    self.v("VMOVUPS <", at(packed, ROW_NBYTES * column), self.register(0))
                self.advance(results_row(self.width), packed)

    def pair_of_values(self, *, is_whole: bool = True) -> None:
        """Store the pairs of two values, or of a value and zeros."""
        x, y = self.register(0), self.register(1)
        ones = self.places([_ONE * (lane // 2 == self.width % 16) for lane in range(32)])
        for column in range(self.columns):
            count = min(self.width - 16 * column, 16)
            mask = None if count == 16 else _OF_WIDTH
            if count == 0:
                self.v("VMOVUPS", x, ones)
            else:
                self.v("VPMOVZXWD", x, at(_B, 32 * column), mask=mask)
            if count and is_whole:
                self.v("VPMOVZXWD", y, at(_B, 32 * column, _H), mask=mask)
                self.v("VPSLLD", y, y, immediate=16)
                self.v("VPORD", x, x, y)
            if 0 < count < 16:
                self.v("VPORD", x, x, ones)
            self.v("VMOVUPS <", at(_C, ROW_NBYTES * column), x)

    def pack_queries(self) -> None:
        """Copy the queries, with zeros behind their last numbers; rows without a query keep what they have."""
        x = self.register(0)
        self.move(_B, at(_FRAME, _SRC))
        self.move(_C, _FRAME)
        self.advance(FRAME_NBYTES, _C)
        with self.repeat(at(_FRAME, _COUNT), _D):
            for part in range(self.parts):
                self.load_part(x, _B, part)
                self.v("VMOVUPS <", at(_C, ROW_NBYTES * part), x)
            self.add(_B, self.argument("src_row"))
            self.advance(queries_row(self.depth), _C)

    # ------------------------------------------------------------------ products

    def by_tiles(self, product: Callable[[int], None]) -> None:
        """Add a product twice: for two tiles of queries, and for one where there are no more."""
        name = f"one tile of {product.__name__}"
        self.move(_A, at(_FRAME, _COUNT))
        self.immediate("CMP_RM64_IMM8", _A, ROWS)
        self.branch("JBE_REL32_64", name)
        product(2)
        self.branch("JMP_REL32_64", f"after {name}")
        self.label(name)
        product(1)
        self.label(f"after {name}")

    def scores(self, tiles: int) -> None:
        """Multiply queries and keys: two tiles of keys at a time, by all parts of the queries."""
        key, queries, step, of_queries, row = _B, _F, _A, _G, _H
        self.find(key, "packed_keys")
        self.move(queries, _FRAME)
        self.advance(FRAME_NBYTES, queries)
        self.immediate("MOV_R32_IMM32", Register.EAX, ROW_NBYTES)
        self.immediate("MOV_R32_IMM32", Register.R12D, queries_row(self.depth))
        self.move(row, self.argument("score_row"))
        rows = self.rows_of_tiles(tiles)
        with self.repeat(at(_FRAME, _CHUNKS), _D):
            self.zero_tiles(tiles, 2)
            for part in range(self.parts):
                for tile in range(tiles):
                    place = part * ROW_NBYTES + tile * ROWS * queries_row(self.depth)
                    self.load_tile(4 + tile, queries, of_queries, place)
                for tile in range(2):
                    self.load_tile(6 + tile, key, step, (tile * self.parts + part) * _TILE_NBYTES)
                self.products(tiles, 2)
            for tile, pointer in enumerate(rows):
                for column in range(2):
                    self.store_tile(pointer, row, 2 * tile + column, column * ROW_NBYTES)
            self.advance(2 * self.parts * _TILE_NBYTES, key)
            self.advance(2 * ROW_NBYTES, *rows)

    def sums(self, tiles: int) -> None:
        """Multiply weights and values: two tiles of columns at a time, by all keys."""
        value, step, row = _B, _A, _H
        nbytes = results_row(self.width)
        self.immediate("MOV_R32_IMM32", Register.EAX, nbytes)
        self.move(row, self.argument("score_row"))
        for first in range(0, self.columns, 2):
            count = min(2, self.columns - first)
            self.find(value, "packed_values")
            rows = self.rows_of_tiles(tiles)
            self.zero_tiles(tiles, count)
            with self.repeat(at(_FRAME, _CHUNKS), _D):
                for tile, pointer in enumerate(rows):
                    self.load_tile(4 + tile, pointer, row)
                for column in range(count):
                    self.load_tile(6 + column, value, step, (first + column) * ROW_NBYTES)
                self.products(tiles, count)
                self.advance(ROW_NBYTES, *rows)
                self.advance(ROWS * nbytes, value)
            for tile in range(tiles):
                for column in range(count):
                    place = self.first_result + tile * ROWS * nbytes + (first + column) * ROW_NBYTES
                    self.store_tile(_FRAME, step, 2 * tile + column, place)

    @property
    def first_result(self) -> int:
        """The place of the sums in the frame, behind the packed queries."""
        return FRAME_NBYTES + QUERIES * queries_row(self.depth)

    def rows_of_tiles(self, tiles: int) -> Sequence[int]:
        """Point to the first row of scores of each tile."""
        pointers = (_C, _E)[:tiles]
        self.find(_C, "scores")
        if tiles == 2:
            self.move(_E, self.argument("score_row"))
            self.immediate("SHL_RM64_IMM8", _E, ROWS.bit_length() - 1)
            self.add(_E, _C)
        return pointers

    def zero_tiles(self, tiles: int, columns: int) -> None:
        """Set the sums to zeros."""
        for tile in range(tiles):
            for column in range(columns):
                self.zero_tile(2 * tile + column)

    def products(self, tiles: int, columns: int) -> None:
        """Add the products of the tiles that are loaded."""
        for tile in range(tiles):
            for column in range(columns):
                self.add_products(2 * tile + column, 4 + tile, 6 + column)

    # ------------------------------------------------------------------ weights

    def weights(self) -> None:
        """Replace each row of scores by weights as bf16 numbers."""
        row, left = _B, _E
        self.find(row, "scores")
        if not self.is_limited:
            self.count_keys()
        for number, name in {16: "factor", 17: "scale", 18: "lowest"}.items():
            self.v("VBROADCASTSS", self.register(number), self.argument(name))
        for number, pointer in enumerate((_C, _H)[: self.masks]):
            self.move(pointer, at(_FRAME, _MASKS + 8 * number))
        with self.repeat(at(_FRAME, _COUNT), left):
            if self.is_limited:
                self.count_keys()
            for most in (self.register(0), self.register(1)):
                self.v("VMOVUPS", most, self.number(-inf))
            self.over_keys("most", self.largest)
            self.largest_everywhere()
            self.over_keys("weights", self.pair_of_weights)
            if self.is_limited:
                self.clear_rest()
            self.add(row, self.argument("score_row"))
            for number, pointer in enumerate((_C, _H)[: self.masks]):
                self.add(pointer, self.argument(f"mask_{number}_row"))

    def count_keys(self) -> None:
        """Set registers to the keys of whole pairs of vectors and to the rest, and the masks of the last pair."""
        whole, rest, ones = _F, _A, Register.R12D
        self.move(rest, at(_FRAME, _SEEN))
        if self.is_limited:
            self.immediate("ADD_RM64_IMM8", rest, 1)
            self.keep(_SEEN, rest)
            self.limit(rest, self.argument("keys"))
        self.move(whole, rest)
        self.immediate("AND_RM64_IMM8", rest, KEYS - 1)
        self.emit("SUB_R64_RM64", whole, rest)
        self.immediate("MOV_R32_IMM32", ones, -1)
        self.emit("VEX_BZHI_R32_RM32_R32", ones, ones, Register.EAX)
        self.emit("VEX_KMOVW_KR_R32", _FIRST, ones)
        self.immediate("SHR_RM32_IMM8", ones, 16)
        self.emit("VEX_KMOVW_KR_R32", _SECOND, ones)

    def over_keys(self, name: str, pair: Callable[[tuple[int | None, int | None]], None]) -> None:
        """Add instructions for each pair of vectors of a row, and once more for the last keys, with masks."""
        key, whole, rest = _D, _F, _A
        self.emit("XOR_R32_RM32", Register.ECX, Register.ECX)
        self.emit("CMP_R64_RM64", key, whole)
        self.branch("JAE_REL32_64", f"rest of {name}")
        with self.until(key, whole, step=KEYS):
            pair((None, None))
        self.label(f"rest of {name}")
        self.emit("TEST_RM64_R64", rest, rest)
        self.branch("JE_REL32_64", f"after {name}")
        pair((_FIRST, _SECOND))
        self.label(f"after {name}")

    def largest(self, masks: tuple[int | None, int | None]) -> None:
        """Finish the scores of a pair of vectors; the first registers keep the largest numbers."""
        x, y, scale, lowest = (self.register(number) for number in (2, 3, 17, 18))
        for half, mask in enumerate(masks):
            most, place = self.register(half), at(_B, half * ROW_NBYTES, _D, 4)
            if self.is_scaled_late:
                self.v("VMAXPS", most, most, place, mask=mask, merge=True)
                continue
            self.v("VMULPS", x, scale, place)
            for pointer in (_C, _H)[: self.masks]:
                self.v("VPMOVZXWD", y, at(pointer, half * ROW_NBYTES // 2, _D, 2), mask=mask)
                self.v("VPSLLD", y, y, immediate=16)
                self.v("VADDPS", x, x, y)
            if self.is_bounded:
                self.v("VMAXPS", x, lowest, x)  # if an operand is NaN, the last one is returned
            self.v("VMOVUPS <", place, x)
            self.v("VMAXPS", most, most, x, mask=mask, merge=True)

    def largest_everywhere(self) -> None:
        """Set the first register to the largest number of both, in each position."""
        most, x = self.register(0), self.register(1)
        self.v("VMAXPS", most, most, x)
        for operation, order in (("VSHUFF32X4", 0x4E), ("VSHUFF32X4", 0xB1), ("VPERMILPS", 0x4E), ("VPERMILPS", 0xB1)):
            self.v(operation, x, *[most] * (2 if operation == "VSHUFF32X4" else 1), immediate=order)
            self.v("VMAXPS", most, most, x)
        if self.is_scaled_late:
            self.v("VMULPS", most, most, self.register(16))

    def pair_of_weights(self, masks: tuple[int | None, int | None]) -> None:
        """Replace a pair of vectors of scores by one of weights; the weights of keys that are left out are 0."""
        first, second = (self.power(half, mask) for half, mask in enumerate(masks))
        self.v("VCVTNE2PS2BF16", first, second, first)
        self.v("VMOVUPS <", at(_B, 0, _D, 2), first)

    def power(self, half: int, mask: int | None) -> int:
        """Return 2^x for the distance x of scores from the largest one, which is not positive; NaN for NaN."""
        most, factor = self.register(0), self.register(16)
        x, fraction, y = (self.register(number + 4 * half) for number in range(1, 4))
        place = at(_B, half * ROW_NBYTES, _D, 4)
        if self.is_scaled_late:
            self.v("VMOVUPS", x, place)
            self.v("VFMSUB213PS", x, factor, most)
        else:  # the lowest finite numbers have a distance, although their multiples are infinite
            self.v("VMOVUPS", x, place)
            self.v("VSUBPS", x, x, most)
            self.v("VMULPS", x, x, factor)
        self.v("VREDUCEPS", fraction, x, immediate=_ABOVE_INTEGER)
        self.v("VMOVUPS", y, self.number(_POWER[0]))
        for coefficient in _POWER[1:]:
            self.v("VFMADD213PS", y, fraction, self.number(coefficient))
        self.v("VSCALEFPS", y, y, x, mask=mask)  # times 2 to the integer below x
        return y

    def clear_rest(self) -> None:
        """Set the weights behind the last key of a row to 0, up to the last key of the block."""
        key, end, rest, none = _D, _G, _A, self.register(0)
        self.zero(none)
        self.move(key, _F)
        self.add(key, rest)
        self.immediate("ADD_RM64_IMM8", key, KEYS - 1)
        self.immediate("AND_RM64_IMM8", key, -KEYS)
        self.move(end, at(_FRAME, _CHUNKS))
        self.immediate("SHL_RM64_IMM8", end, KEYS.bit_length() - 1)
        self.emit("CMP_R64_RM64", key, end)
        self.branch("JAE_REL32_64", "cleared")
        with self.until(key, end, step=KEYS):
            self.v("VMOVUPS <", at(_B, 0, key, 2), none)
        self.label("cleared")

    # ------------------------------------------------------------------ results

    def results(self) -> None:
        """Divide the sums by those of the weights, and store them."""
        sums, dst, inverse, x = _B, _C, self.register(0), self.register(1)
        one = self.number(1.0)
        assert isinstance(one, int)
        self.move(sums, _FRAME)
        self.advance(self.first_result, sums)
        self.move(dst, at(_FRAME, _DST))
        with self.repeat(at(_FRAME, _COUNT), _D):
            first = Register.XMM0
            self.emit("VEX_VMOVSS_XMM_M32", first, at(sums, 4 * self.width))
            self.emit("EVEX_VDIVSS_XMM_K1Z_XMM_XMMM32_ER", first, Register.XMM0 + (one - Register.ZMM0), first)
            self.v("VBROADCASTSS", inverse, first)
            for column in range(self.columns):
                count = min(self.width - 16 * column, 16)
                if count == 0:
                    continue
                place, half = at(dst, 32 * column), Register.YMM1
                self.v("VMULPS", x, inverse, at(sums, ROW_NBYTES * column))
                self.v("VCVTNEPS2BF16", half, x)
                if count == 16:
                    self.emit("EVEX_VMOVUPS_YMMM256_K1Z_YMM", place, half)
                else:
                    self.emit("EVEX_VMOVDQU16_YMMM256_K1Z_YMM", place, half, mask=_OF_WIDTH)
            self.advance(results_row(self.width), sums)
            self.add(dst, self.argument("dst_row"))
