"""Kernels over consecutive rows of numbers: binary operations with a broadcast operand, reductions, averages.

oneDNN has binary kernels for a few broadcast patterns, and reductions only for the last axes of row-major tensors.
Everything else runs in its reference loops, a hundred times slower. In memory, nearly all of these cases are of two
kinds: rows are combined with other rows or with one number each; or rows are folded, each to one number or all to one
row.

The average of each channel of a channels-last tensor has a separate kernel. oneDNN's threads share blocks of channels,
so a core reads much from other cores' caches, or one core does all the work if channels are few.
Squeeze-and-excitation networks have dozens of these short steps.

References
----------
oneDNN v3.x, ``src/cpu/x64/jit_uni_pooling.cpp``, ``execute_forward`` for channels-last tensors.
"""

from __future__ import annotations

from ctypes import addressof, c_float, c_int64
from dataclasses import dataclass
from math import inf, prod

from fmtprop.jit.arguments import (
    CHUNK_NBYTES,
    UNROLLED,
    AverageArguments,
    BitVector,
    BroadcastArguments,
    EltwiseArguments,
    FoldArguments,
    address_of,
    filled,
)
from fmtprop.jit.kernel import Kernel, is_slow_inside, isa, serves, threads_for
from fmtprop.jit.standalone import ChannelKernel, StandaloneKernel, StandaloneWork, assembled, offered
from fmtprop.layout import DataType

#: most vectors of columns that are folded at a time, and most vectors of channels that are added up at a time
_COLUMN_VECTORS, _CHANNEL_VECTORS = 6, 12

#: pieces into which a few rows are cut (then threads have equal shares), and the least numbers of a piece
_PIECES, _PIECE_NUMBERS = 16, 256

#: alignment of a thread's sums
_LINE_NBYTES = 64

BROADCASTS = ("add", "sub", "mul", "div")

#: algorithm -> initial value of the fold
FOLDS = {"sum": 0.0, "mean": 0.0, "norm": 0.0, "max": -inf, "min": inf}


@dataclass(frozen=True)
class EltwiseKernel(StandaloneKernel):
    """``dst[i] = function(src[i])``, of functions that take oneDNN longer."""

    alg: str
    alpha: float
    beta: float
    size: int
    dtype: DataType

    @property
    def stem(self) -> str:
        """The function."""
        return self.alg

    @property
    def is_offered(self) -> bool:
        """Whether this machine has such a kernel, for this size."""
        nbytes = self.size * self.dtype.nbytes
        is_whole = nbytes > 0 and nbytes % CHUNK_NBYTES == 0
        return is_whole and is_slow_inside(self.alg, self.alpha, self.beta) and serves(self.dtype)

    def assembled(self) -> Kernel:
        """Return the code; problems that differ only in sizes share it."""
        function = self.alg, self.alpha, self.beta
        return assembled("programs", "eltwise", isa(), *function, bf16=self.dtype is DataType.BF16, name=self.alg)

    def work(self, threads: int) -> StandaloneWork:
        """Return the kernel with arguments; its tensors are set later."""
        nbytes = self.size * self.dtype.nbytes
        arguments = EltwiseArguments(chunks=nbytes // CHUNK_NBYTES, table=addressof(self.kernel.rows))
        return StandaloneWork(self.kernel, arguments, threads_for(nbytes, threads))


@dataclass(frozen=True)
class BroadcastKernel(StandaloneKernel):
    """``dst[row, i] = src_0[row, i] alg src_1[start of row, i or 0]``."""

    alg: str
    #: the axes above a row, outermost first: size, and src_1's stride in elements
    outer: tuple[tuple[int, int], ...]
    length: int
    #: elements from row to row of src_0, `length` if it is packed; dst is packed
    pitch: int
    #: whether a row is combined with one number of src_1
    shared: bool
    #: data type of all tensors; computed in f32
    dtype: DataType

    @property
    def stem(self) -> str:
        """The operation."""
        return f"broadcast_{self.alg}"

    @property
    def rows(self) -> int:
        """Number of rows."""
        return prod(size for size, _ in self.outer)

    @property
    def is_offered(self) -> bool:
        """Whether this machine has such a kernel, for these sizes."""
        return self.alg in BROADCASTS and serves(self.dtype) and self.length >= isa().lanes

    def assembled(self) -> Kernel:
        """Return the code; it does not depend on sizes."""
        return _assembled("broadcast", self.alg, self.dtype, shared=self.shared)

    def work(self, threads: int) -> StandaloneWork:
        """Return the kernel with arguments; its tensors are set later."""
        size = self.dtype.nbytes
        starts = [0]
        for count, step in self.outer:
            starts = [start + index * step * size for start in starts for index in range(count)]
        table, row, pitch = (c_int64 * len(starts))(*starts), self.length * size, self.pitch * size
        arguments = BroadcastArguments(
            table=addressof(table), rows=len(starts), row=row, pitch=pitch, gap=pitch - row, **_divided(self.length)
        )
        return StandaloneWork(self.kernel, arguments, threads_for(len(starts) * row, threads), table)


@dataclass(frozen=True)
class FoldKernel(StandaloneKernel):
    """``dst[image, i] = fold(src[image, :, i])``: column by column, or along a row if there is one column.

    A maximum or minimum is NaN if any number is NaN, as in PyTorch.
    """

    #: one of :data:`FOLDS`; ``"norm"`` is the Euclidean norm
    alg: str
    #: `images`, `count`, `columns`: sizes of src; all at least 1
    images: int
    count: int
    columns: int
    #: data type of both tensors; computed in f32
    dtype: DataType

    @property
    def stem(self) -> str:
        """The operation."""
        return f"fold_{self.alg}"

    @property
    def group(self) -> int:
        """Number of vectors of columns that are folded at a time: the one that repeats the least work."""
        sizes = range(min(_COLUMN_VECTORS, self.columns // isa().lanes), 0, -1)
        return min(sizes, key=lambda size: -(-self.columns // (size * isa().lanes)) * size)

    @property
    def is_offered(self) -> bool:
        """Whether this machine has such a kernel, for these sizes."""
        some = self.alg in FOLDS and 0 not in (self.images, self.count, self.columns)
        return serves(self.dtype) and some and (self.columns == 1 or self.columns >= isa().lanes)

    def assembled(self) -> Kernel:
        """Return the code; problems with the same `group` share it."""
        if self.columns == 1:
            return _assembled("fold_rows", self.alg, self.dtype)
        return _assembled("fold_columns", self.alg, self.dtype, group=self.group)

    def work(self, threads: int) -> StandaloneWork:
        """Return the kernel with arguments; its tensors are set later."""
        size = self.dtype.nbytes
        row, groups, group, last = self.columns * size, 1, 0, 0
        if self.columns > 1:
            width = self.group * isa().lanes
            groups, group, last = -(-self.columns // width), width * size, (self.columns - width) * size
        arguments = FoldArguments(
            tasks=self.images * groups,
            groups=groups,
            group=group,
            last=last,
            row=row,
            image=self.count * row,
            count=self.count,
            start=filled(FOLDS[self.alg]),
            divisor=filled(self.count),
            magnitude=BitVector(*[0x7FFFFFFF] * 16),
            **_divided(self.count),
        )
        return StandaloneWork(self.kernel, arguments, threads_for(self.images * self.count * row, threads))


@dataclass(frozen=True)
class AverageKernel(ChannelKernel):
    """``dst[n, c] = mean(src[n, :, c])``; threads share the places (pixels) of each image."""

    stem = "average"

    #: `images`, `places`, `channels`: sizes of src; all at least 1, and whole vectors of channels
    images: int
    places: int
    channels: int
    #: data type of both tensors; computed in f32
    dtype: DataType

    @property
    def group(self) -> int:
        """Number of vectors of channels that are added up at a time: a divisor of `vectors`."""
        return self.divisor(_CHANNEL_VECTORS)

    def assembled(self) -> Kernel:
        """Return the code; problems with the same `group` share it."""
        return assembled("programs", "average", isa(), self.group, bf16=self.dtype is DataType.BF16)

    def work(self, threads: int) -> StandaloneWork:
        """Return the kernel with arguments; its tensors are set later."""
        row = self.channels * self.dtype.nbytes
        threads = threads_for(self.images * self.places * row, threads)
        sums = (c_float * (threads * self.images * self.channels + _LINE_NBYTES // 4))()
        arguments = AverageArguments(
            barrier=address_of("GOMP_barrier"),
            sums=-(-addressof(sums) // _LINE_NBYTES) * _LINE_NBYTES,
            images=self.images,
            image=self.places * row,
            places=self.places,
            row=row,
            groups=self.vectors // self.group,
            vectors=self.images * self.vectors,
            thread_sums=self.images * self.channels * 4,
            divisor=filled(self.places),
        )
        return StandaloneWork(self.kernel, arguments, threads, sums)


def broadcast_kernel_for(
    alg: str, axes: tuple[tuple[int, int], ...], dtype: DataType, pitch: int | None = None
) -> BroadcastKernel | None:
    """Return a kernel; None if this machine has none or the rows are too short.

    `alg`: oneDNN's name without ``binary_``. `axes`: the axes of the operand with all elements, in memory order,
    outermost first: size, and the other operand's stride in elements. Neighbouring axes that can be one axis are
    merged. `pitch`: elements between the starts of two rows of that operand, a row being the last axis. Default: it is
    packed.
    """
    if not axes or 0 in dict(axes):
        return None
    *outer, (length, step) = axes
    if step not in (0, 1):
        return None
    pieces = _pieces(prod(size for size, _ in outer), length) if pitch in (None, length) else 1
    if pieces > 1:
        length, pitch = length // pieces, None
        outer.append((pieces, step * length))
    return offered(BroadcastKernel(alg, tuple(outer), length, pitch or length, step == 0, dtype))


def _pieces(rows: int, length: int) -> int:
    """Return the number of pieces into which each row is cut, so that threads have equal shares."""
    if rows >= _PIECES:
        return 1
    divisors = (n for n in range(1, length // _PIECE_NUMBERS + 1) if length % n == 0)
    return next((n for n in divisors if n * rows >= _PIECES), 1)


def _divided(length: int) -> dict[str, int]:
    """Return the turns of the loops over `length` numbers: over several vectors, one vector, and single numbers."""
    vectors, rest = divmod(length, isa().lanes)
    return {"blocks": vectors // UNROLLED, "vectors": vectors % UNROLLED, "rest": rest}


def _assembled(program: str, alg: str, dtype: DataType, **options: int) -> Kernel:
    return assembled("programs", program, isa(), alg, name=f"{program}_{alg}", bf16=dtype is DataType.BF16, **options)
