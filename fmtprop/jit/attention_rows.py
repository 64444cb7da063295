"""The kernel of attention of few queries, as in a decoder's step: it reads keys and values once, in memory order.

A task is the queries that share keys: those of a head, and of all heads of a group. Keys and values may have two parts:
those of earlier tokens, wherever the caller has them, and new ones. Those that are codes become numbers block by block.
"""

from __future__ import annotations

from ctypes import addressof, c_float, c_int32, c_int64, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, product
from math import inf, prod
from typing import Final

from fmtprop.jit.arguments import Arguments
from fmtprop.jit.attention import MASKS, Tensor
from fmtprop.jit.kernel import Kernel, isa, serves, threads_for
from fmtprop.jit.standalone import StandaloneKernel, StandaloneWork, assembled
from fmtprop.layout import DataType

#: keys that are read between two steps of the softmax: with their values, they fit into a first cache
BLOCK: Final = 64

#: bytes in front of the queries' numbers in the frame: addresses, and those of a vector of keys
FRAME_NBYTES: Final = 192

#: most queries of a task, and most numbers of a row: their numbers are in the thread's stack
_MOST_QUERIES, _LONGEST_ROW = 64, 512

#: most queries of a task whose products take less time than reading keys and values from memory (Zen 4)
_READ_FOR = 4

#: how the names of tensors end that have a row of each key
_BY_KEY = ("key", "value", "scales")

#: the largest number, and the smallest one of full precision
_LARGEST, _SMALLEST = (2 - 2.0**-23) * 2.0**127, 2.0**-126


class AttentionRowsArguments(Arguments):
    """Arguments of the code."""

    _fields_ = (
        *((name, c_void_p) for name in ("src", "past_key", "past_value", "key", "value", "mask_0", "mask_1", "dst")),
        *((f"{name}_scales", c_void_p) for name in ("past_key", "past_value", "key", "value")),
        *((name, c_void_p) for name in ("offsets", "numbers")),
        *((name, c_uint64) for name in ("tasks", "entry", "frame", "past_keys", "keys")),
        *((f"{name}_row", c_uint64) for name in ("past_key", "past_value", "key", "value")),
        *((f"{name}_scales_row", c_uint64) for name in ("past_key", "past_value", "key", "value")),
        *((name, c_float) for name in ("scale", "floor", "least", "one")),
        ("limits", c_float * 32),
        ("existing", c_int32 * 32),
    )


@dataclass(frozen=True)
class AttentionRowsShape:
    """What the code of attention of few queries depends on."""

    #: queries of a task; numbers of a query and of a value
    queries: int
    depth: int
    width: int
    #: the tensors that all queries of a task share, and those with a row of each query, in the order of an entry
    shared: tuple[str, ...]
    own: tuple[str, ...]
    bf16: bool
    #: whether blocks of hidden keys are read
    is_exact: bool


@dataclass(frozen=True)
class AttentionRowsKernel(StandaloneKernel):
    """``dst = softmax(src · keys · scale + mask_0 + mask_1) · values`` by query; keys and values have two parts.

    Those that have scales are s8, and ``codes · scale`` for each of their rows.
    """

    stem = "attention_rows"

    #: sizes of the batch axes, the heads and the queries of a head among them
    batch: tuple[int, ...]
    depth: int
    width: int
    #: number of earlier keys, 0 if there is one part; number of new keys
    keys: tuple[int, int]
    scale: float
    #: where src, past_key, past_value, key, value, their scales, the masks and dst are; a row is a key, a value or a
    #: scale there, and a mask's or query's numbers follow one another
    tensors: tuple[tuple[str, Tensor], ...]
    #: data type of all tensors but codes; sums are f32
    dtype: DataType
    #: whether the result of a query without visible keys is 0, not NaN
    blanks: bool = False
    #: whether a value that is not finite makes NaN of its weight 0, too. Otherwise, blocks of hidden keys are not read.
    is_exact: bool = False

    @property
    def moves_freely(self) -> bool:  # type: ignore[override]  # the same, computed
        """Whether reading the keys and values, once for all queries of a task, takes all the time."""
        return self.queries <= _READ_FOR

    @property
    def queries(self) -> int:
        """Queries of a task."""
        return prod(self.batch[self._outer :])

    @cached_property
    def _outer(self) -> int:
        """Number of batch axes in front of those along which keys and values are repeated, as many as a task has."""
        steps = zip(*[one.batch for name, one in self.tensors if name.endswith(_BY_KEY)], strict=True)
        outer = max((axis + 1 for axis, own in enumerate(steps) if any(own)), default=0)
        return next(first for first in range(outer, len(self.batch) + 1) if prod(self.batch[first:]) <= _MOST_QUERIES)

    @cached_property
    def _own(self) -> tuple[str, ...]:
        """The names of tensors with a row of each query, not one of each task."""
        return tuple(name for name, one in self.tensors if name in ("src", "dst") or any(one.batch[self._outer :]))

    @property
    def is_offered(self) -> bool:
        """Whether this machine has such a kernel, for these sizes."""
        lanes, longest = isa().lanes, max(self.depth, self.width)
        if not serves(self.dtype) or 0 in (*self.batch, self.depth, self.width, sum(self.keys)):
            return False
        if self.depth % lanes or self.width % lanes or longest > _LONGEST_ROW:
            return False
        return sum(name.startswith("mask") for name, _ in self.tensors) <= MASKS

    def assembled(self) -> Kernel:
        """Return the code; problems that differ only in batch, keys and places share it."""
        return self._code(self.queries)

    def _code(self, queries: int) -> Kernel:
        """Return the code for tasks of a number of queries."""
        own, bf16 = self._own, self.dtype is DataType.BF16
        shared = tuple(name for name, _ in self.tensors if name not in own)
        shape = AttentionRowsShape(queries, self.depth, self.width, shared, own, bf16, self.is_exact)
        return assembled("attention_rows_program", "attention_rows", isa(), shape)

    def work(self, threads: int) -> StandaloneWork:
        """Return the kernel with arguments; its tensors are set later.

        Where there are fewer tasks than threads, several threads read the same keys, each for some of their queries.
        """
        nbytes = self.dtype.nbytes * prod(self.batch) * sum(self.keys) * (self.depth + self.width)
        threads = threads_for(nbytes, threads)
        divisors = (n for n in range(self.queries, 0, -1) if self.queries % n == 0)
        queries = next(n for n in divisors if n == 1 or prod(self.batch) >= n * threads)
        own, lanes, kernel, places = self._own, isa().lanes, self._code(queries), dict(self.tensors)
        axes = [range(size) for size in self.batch]
        outer, inner = axes[: self._outer], axes[self._outer :]
        starts = list[int]()
        for task, first in product(product(*outer), range(0, self.queries, queries)):
            starts += [_start(one, task) for name, one in self.tensors if name not in own]
            of_task = islice(product(*inner), first, first + queries)
            starts += [_start(places[name], (*task, *query)) for query in of_task for name in own]
        offsets = (c_int64 * len(starts))(*starts)
        frame = 4 * queries * (2 + lanes + self.depth + self.width + BLOCK)
        frame += self.dtype.nbytes * BLOCK * max(self.depth, self.width) + 64
        rows = {f"{name}_row": one.row for name, one in self.tensors if name.endswith(_BY_KEY)}
        arguments = AttentionRowsArguments(
            offsets=addressof(offsets),
            numbers=addressof(kernel.rows),
            tasks=prod(self.batch) // queries,
            entry=8 * (len(self.tensors) - len(own) + queries * len(own)),
            frame=FRAME_NBYTES + frame + 64,
            past_keys=self.keys[0],
            keys=self.keys[1],
            scale=self.scale,
            floor=_SMALLEST if self.blanks else 0.0,
            least=-_LARGEST,
            one=1.0,
            limits=(c_float * 32)(*(inf,) * lanes, *(-inf,) * lanes),
            existing=(c_int32 * 32)(*(-1,) * lanes),
            **rows,
        )
        return StandaloneWork(kernel, arguments, threads, offsets)


def _start(tensor: Tensor, item: tuple[int, ...]) -> int:
    """Return the bytes to an item of a tensor."""
    return sum(step * index for step, index in zip(tensor.batch, item, strict=False))
