"""The kernel of attention in bf16 by tiles of AMX.

As in :mod:`fmtprop.jit.attention`, a task is a block of queries of one head, and its scores stay in the thread's stack.
Here a row of scores belongs to a query. Keys and values are packed once for all blocks of a head.
"""

from __future__ import annotations

from ctypes import addressof, c_byte, c_float, c_int64, c_uint64, c_void_p
from dataclasses import dataclass
from itertools import product
from math import e, inf, log2, prod

from fmtprop.jit.arguments import Arguments
from fmtprop.jit.attention import MASKS, AttentionKernel
from fmtprop.jit.isa import AMX
from fmtprop.jit.kernel import Kernel, serves, threads_for
from fmtprop.jit.standalone import StandaloneWork, assembled
from fmtprop.jit.tiles import CONFIGURATION_NBYTES, ROW_NBYTES, configuration, no_tiles
from fmtprop.layout import DataType

#: queries of a block: two tiles of rows; keys that are treated together: two tiles of columns, or a row of numbers
QUERIES, KEYS = 32, 32

#: bytes in front of the packed queries in the frame
FRAME_NBYTES = 256

#: most bytes of the stack that a thread uses: half of the second cache of the smallest core with AMX
_STACK_NBYTES = 1 << 20


class AttentionTilesArguments(Arguments):
    """Arguments of the code."""

    _fields_ = (
        *((name, c_void_p) for name in ("src", "key", "value", "mask_0", "mask_1", "dst", "offsets", "numbers")),
        *((name, c_uint64) for name in ("tasks", "blocks", "queries", "keys", "limit", "entry", "frame")),
        *((name, c_uint64) for name in ("src_row", "key_row", "value_row", "mask_0_row", "mask_1_row", "dst_row")),
        *((name, c_uint64) for name in ("score_row", "packed_keys", "packed_values", "scores", "padding")),
        *((name, c_float) for name in ("scale", "factor", "lowest")),
        ("tiles", c_byte * CONFIGURATION_NBYTES),
    )


@dataclass(frozen=True)
class AttentionTilesKernel(AttentionKernel):
    """The same as :class:`AttentionKernel`, for bf16 numbers.

    Numbers of a mask's row follow one another. Its `row` has the bytes from query to query; 0 if it is the same for
    all.
    """

    @property
    def impl(self) -> str:
        """The kernel's name in plans and reports."""
        return f"{self.stem}:{AMX.name}"

    @property
    def blocks(self) -> int:
        """Blocks of queries of a head."""
        return -(-self.queries // QUERIES)

    @property
    def is_offered(self) -> bool:
        """Whether this machine has such a kernel, for these sizes."""
        if self.dtype is not DataType.BF16 or len(self.masks) > MASKS or not serves(self.dtype) or no_tiles():
            return False
        if 0 in (*self.batch, self.queries, self.keys, self.depth, self.width) or max(self.depth, self.width) > 512:
            return False
        return self._areas["frame"] <= _STACK_NBYTES

    @property
    def _is_scaled_late(self) -> bool:
        """Whether the scores are as the products give them; a factor of at most 1 makes no finite score infinite."""
        return not self.masks and self.lowest == -inf and 0 < self.scale * log2(e) <= 1

    @property
    def _areas(self) -> dict[str, int]:
        """Where the areas of the frame begin, and their bytes in all."""
        padded = -(-self.keys // KEYS) * KEYS
        # a line more, so that the rows of a tile do not compete for the same places in the first cache
        row = 4 * padded + ROW_NBYTES
        packed_keys = FRAME_NBYTES + QUERIES * (queries_row(self.depth) + results_row(self.width))
        packed_values = packed_keys + padded * queries_row(self.depth)
        scores = packed_values + padded // 2 * results_row(self.width)
        areas = {"packed_keys": packed_keys, "packed_values": packed_values, "scores": scores}
        return {**areas, "score_row": row, "frame": scores + QUERIES * row + ROW_NBYTES}

    def assembled(self) -> Kernel:
        """Return the code; problems that differ only in batch, queries and keys share it."""
        return assembled(
            *("attention_tiles_program", "attention_tiles", AMX, self.depth, self.width, len(self.masks)),
            is_limited=self.limit is not None,
            is_bounded=self.lowest > -inf,
            is_scaled_late=self._is_scaled_late,
            name=self.stem,
        )

    def work(self, threads: int) -> StandaloneWork:
        """Return the kernel with arguments; its tensors are set later."""
        tensors = (self.src, self.key, self.value, self.dst, *self.masks)
        items = list(product(*map(range, self.batch)))
        starts = [sum(map(int.__mul__, t.batch, item)) for item in items for t in tensors]
        offsets = (c_int64 * len(starts))(*starts)
        factor = log2(e) * (self.scale if self._is_scaled_late else 1.0)
        arguments = AttentionTilesArguments(
            offsets=addressof(offsets),
            numbers=addressof(self.kernel.rows),
            tasks=len(items) * self.blocks,
            blocks=self.blocks,
            queries=self.queries,
            keys=self.keys,
            limit=self.limit or 0,
            entry=8 * len(tensors),
            src_row=self.src.row,
            key_row=self.key.row,
            value_row=self.value.row,
            dst_row=self.dst.row,
            padding=(-self.keys % KEYS) // 2,
            scale=self.scale,
            factor=factor,
            lowest=self.lowest,
            tiles=(c_byte * CONFIGURATION_NBYTES)(*configuration()),
            **{f"mask_{number}_row": mask.row for number, mask in enumerate(self.masks)},
            **self._areas,
        )
        nbytes = self.dtype.nbytes * prod(self.batch) * self.queries * self.keys
        return StandaloneWork(self.kernel, arguments, threads_for(nbytes, threads), offsets)


def queries_row(depth: int) -> int:
    """Return the bytes of a packed query: whole rows of tiles."""
    return -(-2 * depth // ROW_NBYTES) * ROW_NBYTES


def results_row(width: int) -> int:
    """Return the bytes of a row of sums, or of pairs of packed values: their last column is that of the weights."""
    return -(-4 * (width + 1) // ROW_NBYTES) * ROW_NBYTES
