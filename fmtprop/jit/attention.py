"""The kernel of attention: softmax(query · key · scale + masks) · value, without scores in memory.

A task is a block of queries of one head. Its scores stay in the thread's stack, which is in cache: they are computed
transposed, a vector of queries for each key, so that softmax needs no sums across a vector.
"""

from __future__ import annotations

from ctypes import addressof, c_float, c_int64
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product
from math import inf, prod

from fmtprop.jit.arguments import VECTORS, AttentionArguments, filled
from fmtprop.jit.isa import AVX2
from fmtprop.jit.kernel import Kernel, isa, serves, threads_for
from fmtprop.jit.standalone import StandaloneKernel, StandaloneWork
from fmtprop.layout import DataType

#: most masks of a kernel
MASKS = 2

#: most keys with scores that are computed at a time
_KEYS = 12

#: most bytes of the stack that a thread uses
_STACK_NBYTES = 512 << 10

#: fewest queries for which blocks of vectors of queries pay
_FEWEST_QUERIES = 4


@dataclass(frozen=True)
class Tensor:
    """A tensor in memory."""

    #: bytes from item to item of each batch axis; 0 where an item is repeated
    batch: tuple[int, ...]
    #: bytes from query to query, or from key to key. A mask in blocks of queries has 0 here: a vector of queries
    #: follows the other for each key, then the next block. A mask that is the same for all queries has the bytes from
    #: number to number.
    row: int


@dataclass(frozen=True)
class AttentionKernel(StandaloneKernel):
    """``dst = softmax(src · key · scale + mask_0 + mask_1) · value`` for each item of a batch."""

    stem = "attention"
    moves_freely = False

    #: sizes of the batch axes, the heads among them
    batch: tuple[int, ...]
    #: `queries`, `keys`, `depth`, `width`: rows of src; columns of key; numbers of a row of src; numbers of a row of
    #: value
    queries: int
    keys: int
    depth: int
    width: int
    scale: float
    #: query i has no weight for keys after i + limit, of which there is one at least; None if it has for all
    limit: int | None
    lowest: float
    #: `src`, `key`, `value`, `dst`: where they are. Numbers of a row follow one another (of key: those of a column).
    src: Tensor
    key: Tensor
    value: Tensor
    dst: Tensor
    masks: tuple[Tensor, ...] = ()
    #: data type of all tensors; sums are f32
    dtype: DataType = DataType.F32

    @cached_property
    def lanes(self) -> int:
        """Numbers in a vector."""
        return lanes_for(self.width, self.dtype)

    @property
    def blocks(self) -> int:
        """Blocks of queries of a head."""
        return -(-self.queries // (VECTORS * self.lanes))

    @property
    def is_offered(self) -> bool:
        """Whether this machine has such a kernel, for these sizes."""
        if not serves(self.dtype) or len(self.masks) > MASKS:
            return False
        if self.width < 8 or self.queries < _FEWEST_QUERIES or 0 in (*self.batch, self.keys, self.depth):
            return False
        nbytes = 4 * VECTORS * self.lanes * (self.keys + self.depth)
        if self.dtype is not DataType.F32:
            nbytes += 2 * self.keys * self.width
            if self.depth % 2 or self.width < self.lanes:
                return False
        return nbytes <= _STACK_NBYTES and self.depth <= 512

    def assembled(self) -> Kernel:
        """Return the code; problems that differ only in batch, queries and keys share it."""
        from fmtprop.jit.attention_program import AttentionSizes

        masks = tuple("blocks" if mask.row == 0 else "row" for mask in self.masks)
        shape = AttentionSizes(self.depth, self.width, min(self.keys, _KEYS), self.key.row, self.value.row, masks)
        return _assembled(
            shape, self.lanes, self.dtype, is_limited=self.limit is not None, is_bounded=self.lowest > -inf
        )

    def work(self, threads: int) -> StandaloneWork:
        """Return the kernel with arguments; its tensors are set later."""
        tensors = (self.src, self.key, self.value, self.dst, *self.masks)
        items = list(product(*map(range, self.batch)))
        starts = [sum(map(int.__mul__, t.batch, item)) for item in items for t in tensors]
        offsets, block = (c_int64 * len(starts))(*starts), VECTORS * self.lanes
        arguments = AttentionArguments(
            offsets=addressof(offsets),
            numbers=addressof(self.kernel.rows),
            tasks=len(items) * self.blocks,
            blocks=self.blocks,
            block=block,
            queries=self.queries,
            keys=self.keys,
            limit=self.limit or 0,
            entry=8 * len(tensors),
            mask_block=self.keys * self.lanes * self.dtype.nbytes,
            src_row=self.src.row,
            key_row=self.key.row,
            dst_row=self.dst.row,
            scale=self.scale,
            start=-inf,
            lowest=self.lowest,
            ones=filled(1.0),
            infinity=filled(inf),
            places=(c_float * (VECTORS * 16))(*[place + 0.5 for place in range(VECTORS * 16)]),
        )
        nbytes = self.dtype.nbytes * prod(self.batch) * self.queries * self.keys
        return StandaloneWork(self.kernel, arguments, threads_for(nbytes, threads), offsets)


def lanes_for(width: int, dtype: DataType) -> int:
    """Return the numbers in a vector of the kernel for rows of `width` numbers: those of this machine, or half."""
    return isa().lanes if width >= isa().lanes or dtype is not DataType.F32 else 8


@cache
def _assembled(shape: object, lanes: int, dtype: DataType, **options: bool) -> Kernel:
    from fmtprop.jit.attention_bf16_program import HalfAttentionProgram
    from fmtprop.jit.attention_program import AttentionProgram, AttentionSizes, attention

    assert isinstance(shape, AttentionSizes)
    used = isa() if lanes * 4 == isa().nbytes else AVX2
    program = AttentionProgram if dtype is DataType.F32 else HalfAttentionProgram
    return Kernel("attention", *attention(program, used, shape, **options))
