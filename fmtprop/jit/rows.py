"""Kernels over rows of numbers that lie one behind the other: a second operand that broadcasts, reductions, averages.

oneDNN has binary kernels for a few patterns of broadcast, and reductions of the last axes of row-major tensors alone:
everything else runs in its reference loops, a hundred times slower. In memory nearly all of these are one of two
things: rows combined with other rows or with one number each, and rows that are folded, each by itself or all to one.

The average of each channel of a channels-last tensor has a kernel of its own. oneDNN shares out blocks of channels for
it, so that much of what a core reads is in another's cache, or one core does it all where channels are few. In
squeeze-and-excitation blocks these are short steps by the dozen.

References
----------
oneDNN v3.x, ``src/cpu/x64/jit_uni_pooling.cpp``, ``execute_forward`` for channels-last tensors.
"""

from __future__ import annotations

from ctypes import Array, addressof, c_float, c_int64, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache
from math import inf, prod

from fmtprop.jit.kernel import Arguments, Kernel, address_of, isa, runtime_function, takes, threads_for, unavailable
from fmtprop.jit.standalone import StandaloneKernel, StandaloneWork
from fmtprop.layout import DataType

__all__ = [
    "AverageKernel",
    "BroadcastKernel",
    "FoldKernel",
    "average_kernel_for",
    "broadcast_kernel_for",
    "fold_kernel_for",
]

#: vectors that are worked on before a loop turns
UNROLLED = 4

#: vectors of columns that are folded at a time, and of channels that are added up at a time, at most
_COLUMN_VECTORS, _CHANNEL_VECTORS = 6, 12

#: pieces into which few rows are divided, so that threads have equal shares, and numbers that a piece has at least
_PIECES, _PIECE_NUMBERS = 16, 256

#: bytes to which the sums of a thread are aligned
_LINE_NBYTES = 64

BROADCASTS = ("add", "sub", "mul", "div")

#: algorithm -> what a fold begins with
FOLDS = {"sum": 0.0, "mean": 0.0, "norm": 0.0, "max": -inf, "min": inf}

_FloatVector, _BitVector = c_float * 16, c_uint32 * 16


class BroadcastArguments(Arguments):
    """What the code of a broadcast finds its work by."""

    _fields_ = (
        *((name, c_void_p) for name in ("src_0", "src_1", "dst", "table")),
        *((name, c_uint64) for name in ("rows", "row", "blocks", "vectors", "rest")),
    )


class FoldArguments(Arguments):
    """What the code of a fold finds its work by."""

    _fields_ = (
        *((name, c_void_p) for name in ("src", "dst")),
        *((name, c_uint64) for name in ("tasks", "groups", "group", "last", "row", "image", "count")),
        *((name, c_uint64) for name in ("blocks", "vectors", "rest")),
        *(("start", _FloatVector), ("divisor", _FloatVector), ("magnitude", _BitVector)),
    )


class AverageArguments(Arguments):
    """What the code of an average finds its work by."""

    _fields_ = (
        *((name, c_void_p) for name in ("barrier", "src", "dst", "sums")),
        *((name, c_uint64) for name in ("images", "image", "places", "row", "groups", "vectors", "thread_sums")),
        ("divisor", _FloatVector),
    )


@dataclass(frozen=True)
class BroadcastKernel(StandaloneKernel):
    """``dst[row, i] = src_0[row, i] alg src_1[start of row, i or 0]``.

    Parameters
    ----------
    alg : str
        Of :data:`BROADCASTS`.
    outer : tuple of (int, int)
        For the axes above a row, outermost first: size, and how far src_1 goes for each step, in elements.
    length : int
        Numbers in a row.
    shared : bool
        Whether all of a row shares one number of src_1.
    dtype : DataType
        Of all tensors; computed in f32.
    """

    alg: str
    outer: tuple[tuple[int, int], ...]
    length: int
    shared: bool
    dtype: DataType

    @property
    def stem(self) -> str:
        """The operation."""
        return f"broadcast_{self.alg}"

    @property
    def rows(self) -> int:
        """How many there are."""
        return prod(size for size, _ in self.outer)

    def assembled(self) -> Kernel:
        """Return the code, the same for all sizes."""
        return _assembled("broadcast", self.alg, self.dtype, shared=self.shared)

    def work(self, threads: int) -> StandaloneWork:
        """Return the kernel with arguments; its tensors are set later."""
        size = self.dtype.nbytes
        starts = [0]
        for count, step in self.outer:
            starts = [start + index * step * size for start in starts for index in range(count)]
        table, row = (c_int64 * len(starts))(*starts), self.length * size
        arguments = BroadcastArguments(table=addressof(table), rows=len(starts), row=row, **_divided(self.length))
        return StandaloneWork(self.kernel, arguments, threads_for(len(starts) * row, threads), table)


@dataclass(frozen=True)
class FoldKernel(StandaloneKernel):
    """``dst[image, i] = fold(src[image, :, i])``: column by column, or along a row where there is one column.

    Parameters
    ----------
    alg : str
        Of :data:`FOLDS`; ``"norm"`` is the Euclidean one.
    images, count, columns : int
        Sizes of src; all at least 1.
    dtype : DataType
        Data type of both tensors; computed in f32.

    Notes
    -----
    A maximum and a minimum are NaN where a number is, and infinite where all are, as in PyTorch.
    """

    alg: str
    images: int
    count: int
    columns: int
    dtype: DataType

    @property
    def stem(self) -> str:
        """The operation."""
        return f"fold_{self.alg}"

    @property
    def group(self) -> int:
        """How many vectors of columns are folded at a time: those that leave the least to be done twice."""
        lanes = _lanes()
        sizes = range(min(_COLUMN_VECTORS, self.columns // lanes), 0, -1)
        return min(sizes, key=lambda size: -(-self.columns // (size * lanes)) * size)

    def assembled(self) -> Kernel:
        """Return the code, which others with such a number of columns share."""
        if self.columns == 1:
            return _assembled("fold_rows", self.alg, self.dtype)
        return _assembled("fold_columns", self.alg, self.dtype, group=self.group)

    def work(self, threads: int) -> StandaloneWork:
        """Return the kernel with arguments; its tensors are set later."""
        size = self.dtype.nbytes
        row, groups, group, last = self.columns * size, 1, 0, 0
        if self.columns > 1:
            width = self.group * _lanes()
            groups, group, last = -(-self.columns // width), width * size, (self.columns - width) * size
        arguments = FoldArguments(
            tasks=self.images * groups,
            groups=groups,
            group=group,
            last=last,
            row=row,
            image=self.count * row,
            count=self.count,
            start=_vector(FOLDS[self.alg]),
            divisor=_vector(self.count),
            magnitude=_BitVector(*[0x7FFFFFFF] * 16),
            **_divided(self.count),
        )
        return StandaloneWork(self.kernel, arguments, threads_for(self.images * self.count * row, threads))


@dataclass(frozen=True)
class AverageKernel(StandaloneKernel):
    """``dst[n, c] = mean(src[n, :, c])``, by threads that share out the places of each image.

    Parameters
    ----------
    images, places, channels : int
        Sizes of src; all at least 1, and whole vectors of channels.
    dtype : DataType
        Data type of both tensors; computed in f32.
    """

    images: int
    places: int
    channels: int
    dtype: DataType

    @property
    def stem(self) -> str:
        """The operation."""
        return "average"

    @property
    def vectors(self) -> int:
        """Vectors of channels that an image has."""
        return self.channels // _lanes()

    @property
    def group(self) -> int:
        """How many vectors of channels are added up at a time: they divide the channels."""
        return next(size for size in range(_CHANNEL_VECTORS, 0, -1) if self.vectors % size == 0)

    def assembled(self) -> Kernel:
        """Return the code, which others with such a number of channels share."""
        return _assembled("average", None, self.dtype, group=self.group)

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
            divisor=_vector(self.places),
        )
        return StandaloneWork(self.kernel, arguments, threads, sums)


def broadcast_kernel_for(alg: str, axes: tuple[tuple[int, int], ...], dtype: DataType) -> BroadcastKernel | None:
    """Return a kernel, None where there is none on this machine or for such rows.

    Parameters
    ----------
    alg : str
        oneDNN's name without ``binary_``.
    axes : tuple of (int, int)
        Of the whole operand as it lies in memory, outermost first: size, and how far the other one goes for each step,
        in elements; neighbours that one axis could stand for are one.
    dtype : DataType
        Of all tensors.
    """
    if alg not in BROADCASTS or not _serves(dtype) or not axes or 0 in dict(axes):
        return None
    *outer, (length, step) = axes
    if step not in (0, 1) or length < _lanes():
        return None
    pieces = _pieces(prod(size for size, _ in outer), length)
    if pieces > 1:
        length //= pieces
        outer.append((pieces, step * length))
    return BroadcastKernel(alg, tuple(outer), length, step == 0, dtype)


def fold_kernel_for(alg: str, images: int, count: int, columns: int, dtype: DataType) -> FoldKernel | None:
    """Return a kernel, None where there is none on this machine or for so few columns.

    Parameters
    ----------
    alg, images, count, columns, dtype
        See :class:`FoldKernel`.
    """
    if alg not in FOLDS or not _serves(dtype) or 0 in (images, count, columns):
        return None
    return FoldKernel(alg, images, count, columns, dtype) if columns == 1 or columns >= _lanes() else None


def average_kernel_for(images: int, places: int, channels: int, dtype: DataType) -> AverageKernel | None:
    """Return a kernel, None where there is none on this machine or for so many channels.

    Parameters
    ----------
    images, places, channels, dtype
        See :class:`AverageKernel`.
    """
    if not _serves(dtype) or runtime_function("GOMP_barrier") is None or 0 in (images, places, channels):
        return None
    return AverageKernel(images, places, channels, dtype) if channels % _lanes() == 0 else None


def _serves(dtype: DataType) -> bool:
    return not unavailable() and takes(dtype)


def _pieces(rows: int, length: int) -> int:
    """Return into how many pieces rows are divided, so that there are enough of them."""
    if rows >= _PIECES:
        return 1
    divisors = (n for n in range(1, length // _PIECE_NUMBERS + 1) if length % n == 0)
    return next((n for n in divisors if n * rows >= _PIECES), 1)


def _divided(length: int) -> dict[str, int]:
    """Return how often loops over so many numbers turn: over several vectors, over one, over single numbers."""
    vectors, rest = divmod(length, _lanes())
    return {"blocks": vectors // UNROLLED, "vectors": vectors % UNROLLED, "rest": rest}


def _lanes() -> int:
    return isa().nbytes // 4


def _vector(number: float) -> Array[c_float]:
    return _FloatVector(*[number] * 16)


@cache
def _assembled(program: str, alg: str | None, dtype: DataType, **options: int) -> Kernel:
    """Return the code of a program, by its name: with it comes the assembler, which few networks need."""
    from fmtprop.jit import programs

    name = program if alg is None else f"{program}_{alg}"
    given = () if alg is None else (alg,)
    return Kernel(name, getattr(programs, program)(isa(), *given, **options, bf16=dtype is DataType.BF16))
