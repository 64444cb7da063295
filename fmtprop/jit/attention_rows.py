"""The kernel of attention of few queries, as in a decoder's step: it reads keys and values once, in memory order.

A task is a query of one head. Its scores stay in the thread's stack. Keys and values may have two parts: those of
earlier tokens, wherever the caller has them, and new ones.
"""

from __future__ import annotations

from ctypes import addressof, c_float, c_int64, c_uint64, c_void_p
from dataclasses import dataclass
from itertools import product
from math import inf, prod

from fmtprop.jit.arguments import Arguments, FloatVector, filled
from fmtprop.jit.attention import MASKS, Tensor
from fmtprop.jit.kernel import Kernel, isa, serves, threads_for
from fmtprop.jit.standalone import StandaloneKernel, StandaloneWork, assembled
from fmtprop.layout import DataType

#: most bytes of the stack that a thread uses
_STACK_NBYTES = 512 << 10

#: most numbers of a row
_LONGEST_ROW = 512

#: the largest number, and the smallest one of full precision
_LARGEST, _SMALLEST = (2 - 2.0**-23) * 2.0**127, 2.0**-126

#: bytes in front of a query and its scores in the frame
FRAME_NBYTES = 64


class AttentionRowsArguments(Arguments):
    """Arguments of the code."""

    _fields_ = (
        *((name, c_void_p) for name in ("src", "past_key", "past_value", "key", "value", "mask_0", "mask_1", "dst")),
        *((name, c_void_p) for name in ("offsets", "numbers")),
        *((name, c_uint64) for name in ("tasks", "entry", "frame", "past_keys", "keys", "vectors", "rest", "padded")),
        *((name, c_uint64) for name in ("past_key_row", "past_value_row", "key_row", "value_row")),
        ("scale", c_float),
        ("floor", c_float),
        ("lowest", FloatVector),
        ("least", FloatVector),
    )


@dataclass(frozen=True)
class AttentionRowsKernel(StandaloneKernel):
    """``dst = softmax(src · keys · scale + mask_0 + mask_1) · values`` by query; keys and values have two parts."""

    stem = "attention_rows"

    #: sizes of the batch axes, the heads and the queries of a head among them
    batch: tuple[int, ...]
    depth: int
    width: int
    #: number of earlier keys, 0 if there is one part; number of new keys
    keys: tuple[int, int]
    scale: float
    #: where src, past_key, past_value, key, value, the masks and dst are; a row is a key or a value there, and a mask's
    #: or query's numbers follow one another
    tensors: tuple[tuple[str, Tensor], ...]
    #: data type of all tensors; sums are f32
    dtype: DataType
    #: whether the result of a query without visible keys is 0, not NaN
    blanks: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the tensors, in the order of the table of offsets."""
        return tuple(name for name, _ in self.tensors)

    @property
    def is_offered(self) -> bool:
        """Whether this machine has such a kernel, for these sizes."""
        lanes, longest = isa().lanes, max(self.depth, self.width)
        if not serves(self.dtype) or 0 in (*self.batch, self.depth, self.width, sum(self.keys)):
            return False
        if self.depth % lanes or self.width % lanes or longest > _LONGEST_ROW:
            return False
        masks = sum(name.startswith("mask") for name in self.names)
        return masks <= MASKS and _frame_nbytes(self.depth, sum(self.keys), lanes) <= _STACK_NBYTES

    def assembled(self) -> Kernel:
        """Return the code; problems that differ only in batch, keys and places share it."""
        sizes, bf16 = (self.depth, self.width, self.names), self.dtype is DataType.BF16
        return assembled("attention_rows_program", "attention_rows", isa(), *sizes, bf16=bf16)

    def work(self, threads: int) -> StandaloneWork:
        """Return the kernel with arguments; its tensors are set later."""
        items = list(product(*map(range, self.batch)))
        starts = [sum(map(int.__mul__, t.batch, item)) for item in items for _, t in self.tensors]
        offsets, total, lanes = (c_int64 * len(starts))(*starts), sum(self.keys), isa().lanes
        rows = {f"{name}_row": t.row for name, t in self.tensors if name.endswith(("key", "value"))}
        arguments = AttentionRowsArguments(
            offsets=addressof(offsets),
            numbers=addressof(self.kernel.rows),
            tasks=len(items),
            entry=8 * len(self.tensors),
            frame=_frame_nbytes(self.depth, total, lanes),
            past_keys=self.keys[0],
            keys=self.keys[1],
            vectors=total // lanes,
            rest=total % lanes,
            padded=-(-total // lanes),
            scale=self.scale,
            floor=_SMALLEST if self.blanks else 0.0,
            lowest=filled(-inf),
            least=filled(-_LARGEST if self.blanks else -inf),
            **rows,
        )
        nbytes = self.dtype.nbytes * prod(self.batch) * total * (self.depth + self.width)
        return StandaloneWork(self.kernel, arguments, threads_for(nbytes, threads), offsets)


def _frame_nbytes(depth: int, keys: int, lanes: int) -> int:
    """Return the bytes of a query, of its scores with a vector after the last, and of the alignment."""
    return FRAME_NBYTES + 4 * (depth + keys + 2 * lanes) + 64
