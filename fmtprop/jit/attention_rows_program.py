"""The program of attention of few queries: the instructions for a thread's share of the tasks.

A task is the queries that share keys. It reads a block of keys, then of values, once for all of them. The softmax is
online: where a block has a larger score, the sums before it are made smaller (Milakov and Gimelshein, "Online
normalizer calculation for softmax", 2018).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final

from iced_x86 import MemoryOperand, Register

from fmtprop.jit.assembler import at
from fmtprop.jit.attention_rows import BLOCK, FRAME_NBYTES, AttentionRowsArguments, AttentionRowsShape
from fmtprop.jit.functions import exp_of_negative
from fmtprop.jit.isa import Isa
from fmtprop.jit.program import THREAD, THREADS, Program, with_table

#: the thread's current task, and its entry in the table of offsets
_ITEM, _ENTRY = Register.R8, Register.R10

#: the block's keys and values, and the keys of a part that are left: nothing asks for threads any more
_KEY, _VALUE, _LEFT = Register.R11, THREADS, THREAD

#: queries that are left; the entry of a query, or what a loop counts; pointers
_QUERIES_LEFT, _COUNT, _A, _B, _C, _D = (
    *(Register.R9, Register.RCX, Register.RAX),
    *(Register.RSI, Register.RDI, Register.RDX),
)

#: where functions expect their constants
_TABLE = Register.RDX

_FRAME = Register.RSP

#: places in the frame: the caller's stack, the task after the last, the keys of the block, those before it, those of it
#: that have scores, the codes behind the block, one number; then the addresses of a vector of keys
_STACK, _END, _KEYS, _BEFORE, _SCORED, _BEHIND, _NUMBER, _ADDRESSES = *range(0, 56, 8), 64

#: keys between a load and its prefetch to the second cache, with AVX-512 and with AVX2 (Zen 4, rows of 64 and 128
#: numbers in f32 and bf16: up to 16 % less time than with half or twice as many; 8 take up to 25 % longer with AVX2)
_KEYS_AHEAD: Final = {32: 16, 16: 64}

#: bytes of a line of a cache
_LINE_NBYTES: Final = 64

#: positions of a vector that have a key, and lanes of the last pairs of bf16 numbers, if these are half a vector
_EXISTING, _HALF = Register.K1, Register.K2

#: most queries with sums in registers, with AVX-512 and with AVX2
_SIDE_BY_SIDE: Final = {32: 12, 16: 4}


def attention_rows(isa: Isa, shape: AttentionRowsShape) -> tuple[bytes, bytes]:
    """Return the program, and the table of constants that it reads."""
    return with_table(partial(_assembled, isa, shape))


def _assembled(isa: Isa, shape: AttentionRowsShape, numbers: tuple[bytes, ...]) -> Program:
    p = _AttentionRows(isa, shape, numbers)
    p.share(_ITEM, _KEY, "tasks")
    p.enter()
    with p.until(_ITEM, at(_FRAME, _END)):
        p.begin()
        for name in ("past_", ""):
            if f"{name}key" in shape.shared:
                p.part(name)
        p.finish()
        p.add(_ENTRY, p.argument("entry"))
    p.move(_FRAME, at(_FRAME, _STACK))
    return p


class _AttentionRows(Program):
    def __init__(self, isa: Isa, shape: AttentionRowsShape, numbers: tuple[bytes, ...]) -> None:
        super().__init__(isa, AttentionRowsArguments, bf16=shape.bf16)
        self.shape, self._constants = shape, numbers
        #: the instruction that adds products: of one number of each lane, or of a pair
        self._multiply = "VDPBF16PS" if shape.bf16 else "VFMADD231PS"
        #: whether each key and each value is read once, as it lies in memory: with AVX2, few registers have a part of a
        #: query or of some values, and all keys of a vector were read part by part (up to 1.5 times as long on Zen 3)
        self._in_order = shape.queries == 1 and isa.nbytes == 32
        # bytes of a query, of a result and of a row of scores, then where they begin in the frame
        self._query, self._result, self._score = shape.depth * self.number_nbytes, 4 * shape.width, 4 * BLOCK
        self._most = FRAME_NBYTES
        self._factors = self._most + 4 * shape.queries
        self._sums = self._factors + 4 * shape.queries
        self._queries = self._sums + shape.queries * isa.nbytes
        self._results = self._queries + shape.queries * self._query
        self._scores = self._results + shape.queries * self._result
        self._decoded = -(-(self._scores + shape.queries * self._score) // 64) * 64

    # ------------------------------------------------------------------ tasks

    def enter(self) -> None:
        """Make room on the stack."""
        self.move(_A, _FRAME)
        self.emit("SUB_R64_RM64", _FRAME, self.argument("frame"))
        self.immediate("AND_RM64_IMM8", _FRAME, -64)
        self._keep(_STACK, _A)
        self._keep(_END, _KEY)
        self.point(_ENTRY, "offsets", _ITEM, "entry")
        if self._query % self.isa.nbytes:
            self.immediate("MOV_R32_IMM32", Register.EAX, (1 << self.isa.lanes // 2) - 1)
            self.emit("VEX_KMOVW_KR_R32", _HALF, Register.EAX)

    def begin(self) -> None:
        """Copy the queries, and clear what is known of them."""
        x, zero = self.register(0), self.register(1)
        self.zero(zero)
        self._clear(_BEFORE)
        with self._each_query((_C, self._queries, self._query), by_entry=True):
            self._find(_B, "src", _COUNT)
            for place, mask in self._vectors_of(self._query):
                self.v("VMOVUPS", x, at(_B, place), mask=mask)
                self.v("VMOVUPS <", at(_C, place), x, mask=mask, merge=mask is not None)
        sums, most = (_A, self._sums, self.isa.nbytes), (_B, self._most, 4)
        with self._each_query(sums, most, (_C, self._results, self._result)):
            self.emit("MOV_R32_RM32", Register.EDX, self.argument("least"))
            self.emit("MOV_RM32_R32", at(_B), Register.EDX)
            self.v("VMOVUPS <", at(_A), zero)
            for place in range(0, self._result, self.isa.nbytes):
                self.v("VMOVUPS <", at(_C, place), zero)

    def part(self, name: str) -> None:
        """Attend to earlier keys, or to new ones, block by block."""
        self._find(_KEY, f"{name}key")
        self._find(_VALUE, f"{name}value")
        self.move(_LEFT, self.argument(f"{name}keys"))
        block = self._new_label()
        done = f"done {block}"
        self.label(block)
        self.immediate("MOV_R32_IMM32", Register.EAX, BLOCK)
        self.emit("CMP_R64_RM64", _A, _LEFT)
        self.emit("CMOVA_R64_RM64", _A, _LEFT)
        self._keep(_KEYS, _A)
        for mask in () if self.shape.is_exact else self._shared_masks:
            shown = f"shown by {mask}, {block}"
            self._look_at(mask, shown)
            for kind, pointer in (("key", _KEY), ("value", _VALUE)):
                self._step(f"{name}{kind}_row")
                self.emit("IMUL_R64_RM64", _A, at(_FRAME, _KEYS))
                self.add(pointer, _A)
            self.branch("JMP_REL32_64", done)
            self.label(shown)
        with self._as_numbers(name, "key", _KEY, self.shape.depth) as step:
            self._score_block(step)
        self._exponentials()
        with self._as_numbers(name, "value", _VALUE, self.shape.width) as step:
            self._results_of_block(step)
        self.label(done)
        self.move(_A, at(_FRAME, _KEYS))
        self.emit("ADD_RM64_R64", at(_FRAME, _BEFORE), _A)
        self.emit("SUB_R64_RM64", _LEFT, _A)
        self.branch("JNE_REL32_64", block)

    @property
    def _shared_masks(self) -> list[str]:
        return [name for name in self.shape.shared if name.startswith("mask")]

    def _look_at(self, mask: str, shown: str) -> None:
        """Jump to a label if a mask is not -inf for one of the block's keys."""
        code, hidden = ("MOVZX_R32_RM16", 0xFF80) if self.bf16 else ("MOV_R32_RM32", 0xFF80 << 16)
        self._find(_B, mask)
        self.move(_D, at(_FRAME, _BEFORE))
        with self.repeat(at(_FRAME, _KEYS), _COUNT):
            self.emit(code, Register.EAX, at(_B, 0, _D, self.number_nbytes))
            self.immediate("CMP_RM32_IMM32", Register.EAX, hidden - (hidden >> 31 << 32))
            self.branch("JNE_REL32_64", shown)
            self.advance(1, _D)

    @contextmanager
    def _as_numbers(self, part: str, kind: str, pointer: int, size: int) -> Iterator[str | int]:
        """Decode the block's keys or values if they are codes; let a pointer have the first one's numbers meanwhile.

        Yields the bytes from one to the next, or the argument that has them.
        """
        name = f"{part}{kind}"
        if f"{name}_scales" not in self.shape.shared:
            yield f"{name}_row"
            return
        # behind the rows of this part that are done
        self._find(_D, f"{name}_scales")
        self.move(_A, self.argument(f"{part}keys"))
        self.emit("SUB_R64_RM64", _A, _LEFT)
        self.emit("IMUL_R64_RM64", _A, self.argument(f"{name}_scales_row"))
        self.add(_D, _A)
        self.emit("LEA_R64_M", _B, at(_FRAME, self._decoded))
        with self.repeat(at(_FRAME, _KEYS), _COUNT):
            self._decode_row(pointer, size)
            self.add(pointer, self.argument(f"{name}_row"))
            self.add(_D, self.argument(f"{name}_scales_row"))
            self.advance(size * self.number_nbytes, _B)
        self._keep(_BEHIND, pointer)
        self.emit("LEA_R64_M", pointer, at(_FRAME, self._decoded))
        yield size * self.number_nbytes
        self.move(pointer, at(_FRAME, _BEHIND))

    def _decode_row(self, pointer: int, size: int) -> None:
        """Multiply a row of codes by its scale."""
        scale, *numbers = (self.register(index) for index in range(3))
        lanes, step = self.isa.lanes, 2 if self.bf16 else 1
        self.load_one(scale, at(_D))
        self._prefetch(pointer, range(0, size, _LINE_NBYTES), size)
        for first in range(0, size, step * lanes):
            decoded = list(zip(range(first, size, lanes), numbers[:step], strict=False))
            for place, x in decoded:
                self.v("VPMOVSXBD", x, at(pointer, place))
                self.v("VCVTDQ2PS", x, x)
                self.v("VMULPS", x, x, scale)
            low, high = numbers
            if len(decoded) == 1:
                self.store(at(_B, first * self.number_nbytes), low)
                continue
            self.v("VCVTNE2PS2BF16", low, high, low)
            self.v("VMOVUPS <", at(_B, first * self.number_nbytes), low)

    def _step(self, step: str | int) -> None:
        """Set RAX to the bytes from a key or value to the next."""
        if isinstance(step, str):
            self.move(_A, self.argument(step))
        else:
            self.immediate("MOV_R32_IMM32", Register.EAX, step)

    def finish(self) -> None:
        """Divide the results by the sums of the weights."""
        x, inverse = self.register(0), self.register(1)
        with self._each_query((_A, self._sums, self.isa.nbytes), (_C, self._results, self._result), by_entry=True):
            self._find(_B, "dst", _COUNT)
            self.v("VMOVUPS", x, at(_A))
            self.across([x])
            self.emit("VEX_VMOVSS_XMM_M32", Register.XMM1, self.argument("floor"))
            self.emit("VEX_VMAXSS_XMM_XMM_XMMM32", Register.XMM0, Register.XMM1, Register.XMM0)  # of NaN, the second
            self.emit("VEX_VMOVSS_XMM_M32", Register.XMM1, self.argument("one"))
            self.emit("VEX_VDIVSS_XMM_XMM_XMMM32", Register.XMM1, Register.XMM1, Register.XMM0)
            self.emit("VEX_VMOVSS_M32_XMM", at(_FRAME, _NUMBER), Register.XMM1)
            self.v("VBROADCASTSS", inverse, at(_FRAME, _NUMBER))
            for vector in range(self._result // self.isa.nbytes):
                self.v("VMULPS", x, inverse, at(_C, vector * self.isa.nbytes))
                self.store(at(_B, vector * self.vector_nbytes), x)

    def _keep(self, place: int, register: int) -> None:
        self.emit("MOV_RM64_R64", at(_FRAME, place), register)

    def _clear(self, place: int) -> None:
        self.emit("XOR_R32_RM32", Register.EAX, Register.EAX)
        self._keep(place, _A)

    def _find(self, pointer: int, name: str, entry: int = _ENTRY) -> None:
        """Point to the task's part of a tensor, or to a query's."""
        names = self.shape.own if name in self.shape.own else self.shape.shared
        self.move(pointer, self.argument(name))
        self.add(pointer, at(entry, 8 * names.index(name)))

    @contextmanager
    def _each_query(self, *pointers: tuple[int, int, int], by_entry: bool = False) -> Iterator[None]:
        """Add a loop over the queries.

        `pointers`: a register, the place in the frame where it starts, and the bytes from query to query. `by_entry`:
        whether one follows the queries' entries, too.
        """
        if by_entry:
            self.emit("LEA_R64_M", _COUNT, at(_ENTRY, 8 * len(self.shape.shared)))
        for pointer, place, _ in pointers:
            self.emit("LEA_R64_M", pointer, at(_FRAME, place))
        self.immediate("MOV_RM64_IMM32", _QUERIES_LEFT, self.shape.queries)
        with self.repeat(_QUERIES_LEFT, _QUERIES_LEFT):
            yield
            for pointer, _, step in pointers:
                self.advance(step, pointer)
            if by_entry:
                self.advance(8 * len(self.shape.own), _COUNT)

    def _vectors_of(self, nbytes: int) -> list[tuple[int, int | None]]:
        """Return the places of vectors in a row, and the mask of the last if it is half a vector."""
        places = range(0, nbytes, self.isa.nbytes)
        return [(place, None if place + self.isa.nbytes <= nbytes else _HALF) for place in places]

    def _prefetch(self, pointer: int, places: Sequence[int], row_nbytes: int) -> None:
        """Prefetch places of a row that comes later, if rows follow one another."""
        for place in places:
            self.emit("PREFETCHT2_M8", at(pointer, place + _KEYS_AHEAD[self.isa.registers] * row_nbytes))

    # ------------------------------------------------------------------ scores

    def _score_block(self, step: str | int) -> None:
        """Compute the scores of the block's keys, as many as a vector has positions at a time."""
        self._clear(_SCORED)
        vector = self._new_label()
        self.label(vector)
        self.move(_COUNT, at(_FRAME, _KEYS))
        self.emit("SUB_R64_RM64", _COUNT, at(_FRAME, _SCORED))
        self._address_keys(step)
        self._score_vector()
        self.move(_A, at(_FRAME, _SCORED))
        self.advance(self.isa.lanes, _A)
        self._keep(_SCORED, _A)
        self.emit("CMP_R64_RM64", _A, at(_FRAME, _KEYS))
        self.branch("JB_REL32_64", vector)
        self._step(step)
        self.add(_KEY, _A)

    def _address_keys(self, step: str | int) -> None:
        """Keep the addresses of a vector of keys, the last again where there are fewer; count them down."""
        self._step(step)
        self.emit("XOR_R32_RM32", Register.EDX, Register.EDX)
        for lane in range(self.isa.lanes):
            self._keep(_ADDRESSES + 8 * lane, _KEY)
            if isinstance(step, str):
                self._prefetch(_KEY, range(0, self._query, _LINE_NBYTES), self._query)
            self.immediate("SUB_RM64_IMM8", _COUNT, 1)
            self.emit("CMOVLE_R64_RM64", _A, _D)
            self.add(_KEY, _A)

    def _score_vector(self) -> None:
        """Compute the scores of a vector of keys, query by query: -inf where there is no key."""
        lanes = self.isa.lanes
        totals, free = [self.register(index) for index in range(lanes)], self.register(lanes)
        scale, added, limit, existing = (self.register(lanes + 1 + index) for index in range(4))
        kept = [self.register(index) for index in range(lanes + 5, self.isa.registers)]
        shared = self._shared_masks
        # the missing keys, four bytes each
        self.emit("XOR_R32_RM32", Register.EDX, Register.EDX)
        self.emit("NEG_RM64", _COUNT)
        self.emit("CMOVS_R64_RM64", _COUNT, _D)
        self.immediate("SHL_RM64_IMM8", _COUNT, 2)
        self.v("VMOVUPS", limit, self.argument("limits", index=_COUNT))
        self.v("VMOVUPS", existing, self.argument("existing", index=_COUNT))
        if self.isa.nbytes == 64:
            self.emit("EVEX_VPMOVD2M_KR_ZMM", _EXISTING, existing)
        self.v("VBROADCASTSS", scale, self.argument("scale"))
        self.move(_C, at(_FRAME, _SCORED))
        self.move(_D, at(_FRAME, _BEFORE))
        self.add(_D, _C)
        for index, name in enumerate(shared):
            self._find(_A, name)
            self._load_mask(free if index else added, existing)
            if index:
                self.v("VADDPS", added, added, free)
        with self._each_query((_B, self._queries, self._query), by_entry=True):
            self._products(totals, kept)
            score = self.sums_of(totals, free)
            if shared:
                self.v("VFMADD213PS", score, scale, added)
            else:
                self.v("VMULPS", score, score, scale)
            for name in self.shape.own:
                if name.startswith("mask"):
                    self._find(_A, name, _COUNT)
                    self._load_mask(free, existing)
                    self.v("VADDPS", score, score, free)
            self.v("VMINPS", score, score, limit)  # of NaN, the second
            self.v("VMOVUPS <", at(_FRAME, self._scores, _C, 4), score)
            self.advance(BLOCK, _C)

    def _load_mask(self, x: int, existing: int) -> None:
        """Load the numbers of a mask that the present keys have."""
        place = at(_A, 0, _D, self.number_nbytes)
        if self.isa.nbytes == 32:
            self.emit("VEX_VMASKMOVPS_YMM_YMM_M256", x, existing, place)
        elif self.bf16:
            self.v("VPMOVZXWD", x, place, mask=_EXISTING)
            self.v("VPSLLD", x, x, immediate=16)
        else:
            self.v("VMOVUPS", x, place, mask=_EXISTING)

    def _products(self, totals: Sequence[int], kept: Sequence[int]) -> None:
        """Multiply a query and each of the keys; some vectors of the query are in registers at a time."""
        for total in totals:
            self.zero(total)
        vectors = self._vectors_of(self._query)
        if self._in_order:
            for lane, total in enumerate(totals):
                self.move(_A, at(_FRAME, _ADDRESSES + 8 * lane))
                for index, (place, _) in enumerate(vectors):
                    x = kept[index % len(kept)]
                    self.v("VMOVUPS", x, at(_A, place))
                    self.v(self._multiply, total, x, at(_B, place))
            return
        for start in range(0, len(vectors), len(kept)):
            loaded = list(zip(kept, vectors[start : start + len(kept)], strict=False))
            for x, (place, mask) in loaded:
                self.v("VMOVUPS", x, at(_B, place), mask=mask)
            for lane, total in enumerate(totals):
                self.move(_A, at(_FRAME, _ADDRESSES + 8 * lane))
                for x, (place, mask) in loaded:
                    self.v(self._multiply, total, x, at(_A, place), mask=mask, merge=mask is not None)

    # ------------------------------------------------------------------ weights

    def _exponentials(self) -> None:
        """Replace the scores by their exponentials; keep the sums, and the factors of the results so far."""
        first, second = self.register(0), self.register(1)
        self.move(_TABLE, self.argument("numbers"))
        self.load_numbers(self._constants)
        places = (_A, self._sums, self.isa.nbytes), (_B, self._scores, self._score), (_C, self._most, 4)
        with self._each_query(*places):
            most, total = self._two_vectors()
            old = self.vector()
            self.v("VBROADCASTSS", old, at(_C))
            self.v("VMOVUPS", most, old)
            with self._each_vector():
                self.v("VMAXPS", most, most, at(_B, 0, _COUNT, 4))
            self.across([first], "VMAXPS")
            self.emit("VEX_VMOVSS_M32_XMM", at(_C), Register.XMM0)
            self.v("VBROADCASTSS", most, at(_C))
            self.v("VSUBPS", old, most, old)
            factor = exp_of_negative(self, old)
            self.emit("VEX_VMOVSS_M32_XMM", at(_C, self._factors - self._most), Register.XMM0 + (factor - first))
            self.v("VMULPS", second, factor, at(_A))
            with self._each_vector():
                most, total = self._two_vectors()
                x = self.vector()
                self.v("VSUBPS", x, most, at(_B, 0, _COUNT, 4))
                y = exp_of_negative(self, x)
                self.v("VADDPS", total, total, y)
                self.store(at(_B, 0, _COUNT, self.number_nbytes), y)
            self.v("VMOVUPS <", at(_A), total)

    def _two_vectors(self) -> tuple[int, int]:
        """Return the first two registers, and give back all others."""
        self.release()
        return self.vector(), self.vector()

    @contextmanager
    def _each_vector(self) -> Iterator[None]:
        """Add a loop over the block's vectors of scores; a register has the number of the first one's key."""
        self.emit("XOR_R32_RM32", Register.ECX, Register.ECX)
        with self.until(_COUNT, at(_FRAME, _KEYS), self.isa.lanes):
            yield

    # ------------------------------------------------------------------ results

    def _results_of_block(self, step: str | int) -> None:
        """Add the products of the weights and the values, some queries and vectors of a row at a time."""
        vectors = self._result // self.isa.nbytes
        for queries in _pieces(self.shape.queries, _SIDE_BY_SIDE[self.isa.registers]):
            kept = len(queries) + (not self._in_order)  # sums, and values
            for columns in _pieces(vectors, (self.isa.registers - 1) // kept):
                self._add_products(queries, columns, step)
        self._step(step)
        self.emit("IMUL_R64_RM64", _A, at(_FRAME, _KEYS))
        self.add(_VALUE, _A)

    def _add_products(self, queries: range, columns: range, step: str | int) -> None:
        loaded = [] if self._in_order else [self.register(index) for index in range(len(columns))]
        values: Sequence[int | MemoryOperand] = loaded or [at(_B, column * self.vector_nbytes) for column in columns]
        free = self.register(self.isa.registers - 1)
        sums = {
            (query, column): self.register(len(loaded) + query_index * len(columns) + index)
            for query_index, query in enumerate(queries)
            for index, column in enumerate(columns)
        }
        for query in queries:
            self.v("VBROADCASTSS", free, at(_FRAME, self._factors + 4 * query))
            for column in columns:
                self.v("VMULPS", sums[query, column], free, self._result_at(query, column))
        self._step(step)
        self.move(_B, _VALUE)
        self.emit("LEA_R64_M", _C, at(_FRAME, self._scores + queries.start * self._score))
        self.move(_COUNT, at(_FRAME, _KEYS))
        self.emit("XOR_R32_RM32", Register.EDX, Register.EDX)
        key = self._new_label()
        self.label(key)
        if queries.start == 0 and isinstance(step, str):
            start, stop = (end * self.vector_nbytes for end in (columns.start, columns.stop))
            self._prefetch(_B, range(start, stop, _LINE_NBYTES), self.shape.width * self.number_nbytes)
        if loaded:
            self._load_values(loaded, free, columns)
        for index, query in enumerate(queries):
            weight: int | MemoryOperand = at(_C, index * self._score)
            spreads = self.isa.nbytes == 64
            if not spreads:
                self.v("VBROADCASTSS", free, weight)
                weight = free
            for value, column in zip(values, columns, strict=True):
                pair = (weight, value) if self._in_order else (value, weight)
                self.v(self._multiply, sums[query, column], *pair, spread=spreads)
        self.advance(4, _C)
        self.add(_B, _A)
        if self.bf16:
            self.add(_B, _A)
        self.immediate("SUB_RM64_IMM8", _COUNT, 2 if self.bf16 else 1)
        self.branch("JG_REL32_64", key)
        for (query, column), total in sums.items():
            self.v("VMOVUPS <", self._result_at(query, column), total)

    def _load_values(self, values: Sequence[int], free: int, columns: range) -> None:
        """Load vectors of a value, or pairs of bf16 numbers of two: the last value again, if it has no neighbour."""
        places = [column * self.vector_nbytes for column in columns]
        if not self.bf16:
            for value, place in zip(values, places, strict=True):
                self.v("VMOVUPS", value, at(_B, place))
            return
        self.immediate("CMP_RM64_IMM8", _COUNT, 1)
        self.emit("CMOVE_R64_RM64", _A, _D)
        for value, place in zip(values, places, strict=True):
            self.v("VPMOVZXWD", value, at(_B, place))
            self.load(free, at(_B, place, _A))
            self.v("VPORD", value, value, free)

    def _result_at(self, query: int, column: int) -> MemoryOperand:
        return at(_FRAME, self._results + query * self._result + column * self.isa.nbytes)


def _pieces(size: int, most: int) -> list[range]:
    """Return ranges that are together as long as `size`, each of at most `most`, and almost equal."""
    count = -(-size // most)
    return [range(size * piece // count, size * (piece + 1) // count) for piece in range(count)]
