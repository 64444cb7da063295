"""Kernels over rows of numbers that lie one behind the other: a second operand that broadcasts, and reductions.

oneDNN has binary kernels for a few patterns of broadcast, and reductions of the last axes of row-major tensors alone:
everything else runs in its reference loops, a hundred times slower. In memory nearly all of these are one of two
things: rows combined with other rows or with one number each, and rows that are folded, each by itself or all to one.
"""

from __future__ import annotations

from ctypes import Structure, addressof, c_float, c_int64, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache
from math import inf, prod

from fmtprop.jit.kernel import Kernel, isa, takes, unavailable
from fmtprop.jit.standalone import StandaloneKernel, StandaloneWork, address_of, threads_for
from fmtprop.layout import DataType

__all__ = ["BroadcastKernel", "FoldKernel", "broadcast_kernel_for", "fold_kernel_for"]

#: vectors that are worked on before a loop turns
UNROLLED = 4

#: vectors of columns that are folded at a time, at most
_GROUP = 6

#: pieces into which few rows are divided, so that threads have equal shares, and numbers that a piece has at least
_PIECES, _PIECE = 16, 256

_ASKED = ("omp_get_num_threads", "omp_get_thread_num")

BROADCASTS = ("add", "sub", "mul", "div")

#: algorithm -> what a fold begins with
FOLDS = {"sum": 0.0, "mean": 0.0, "norm": 0.0, "max": -inf, "min": inf}


class BroadcastArguments(Structure):
    """What the code of a broadcast finds its work by."""

    _fields_ = (
        *((name, c_void_p) for name in ("threads", "thread", "src", "other", "dst", "table")),
        *((name, c_uint64) for name in ("rows", "row", "blocks", "vectors", "rest")),
    )


class FoldArguments(Structure):
    """What the code of a fold finds its work by."""

    _fields_ = (
        *((name, c_void_p) for name in ("threads", "thread", "src", "dst")),
        *((name, c_uint64) for name in ("tasks", "groups", "group", "last", "row", "image", "count")),
        *((name, c_uint64) for name in ("blocks", "vectors", "rest")),
        ("start", c_float * 16),
        ("divisor", c_float * 16),
        ("magnitude", c_uint32 * 16),
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
        """What it does."""
        return f"broadcast_{self.alg}"

    @property
    def rows(self) -> int:
        """How many there are."""
        return prod(size for size, _ in self.outer)

    @property
    def problem(self) -> str:
        """Its sizes."""
        return f"{self.outer} rows of {self.length} numbers, shared={self.shared}, {self.dtype.value}"

    def assembled(self) -> Kernel:
        """Return the code, the same for all sizes."""
        return _broadcast(self.alg, self.shared, self.dtype)

    def work(self, threads: int) -> StandaloneWork:
        """Return it with places for its tensors."""
        size = self.dtype.nbytes
        starts = [0]
        for count, step in self.outer:
            starts = [start + index * step * size for start in starts for index in range(count)]
        table = (c_int64 * len(starts))(*starts)
        row = self.length * size
        arguments = BroadcastArguments(
            *(*map(address_of, _ASKED), None, None, None),
            *(addressof(table), len(starts), row, *_divided(self.length)),
        )
        fields = {"src_0": "src", "src_1": "other", "dst": "dst"}
        return StandaloneWork(self.kernel, arguments, fields, threads_for(len(starts) * row, threads), table)


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
        Of both tensors; computed in f32.

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
        """What it does."""
        return f"fold_{self.alg}"

    @property
    def problem(self) -> str:
        """Its sizes."""
        return f"{self.images}x{self.count}x{self.columns} numbers, {self.dtype.value}"

    @property
    def group(self) -> int:
        """How many vectors of columns are folded at a time: those that leave the least to be done twice."""
        lanes = _lanes()
        sizes = range(min(_GROUP, self.columns // lanes), 0, -1)
        return min(sizes, key=lambda size: -(-self.columns // (size * lanes)) * size)

    def assembled(self) -> Kernel:
        """Return the code, which others with such a number of columns share."""
        return _fold(self.alg, 0 if self.columns == 1 else self.group, self.dtype)

    def work(self, threads: int) -> StandaloneWork:
        """Return it with places for its tensors."""
        size = self.dtype.nbytes
        row = self.columns * size
        groups = group = last = 0
        if self.columns > 1:
            width = self.group * _lanes()
            groups, group, last = -(-self.columns // width), width * size, (self.columns - width) * size
        arguments = FoldArguments(
            *(*map(address_of, _ASKED), None, None),
            *(self.images * max(groups, 1), groups, group, last, row, self.count * row, self.count),
            *_divided(self.count),
            *((c_float * 16)(*[number] * 16) for number in (FOLDS[self.alg], self.count)),
            (c_uint32 * 16)(*[0x7FFFFFFF] * 16),
        )
        threads = threads_for(self.images * self.count * row, threads)
        return StandaloneWork(self.kernel, arguments, {"src": "src", "dst": "dst"}, threads)


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
    if alg not in BROADCASTS or unavailable() or not takes(dtype) or not axes or 0 in dict(axes):
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
    if alg not in FOLDS or unavailable() or not takes(dtype) or 0 in (images, count, columns):
        return None
    return FoldKernel(alg, images, count, columns, dtype) if columns == 1 or columns >= _lanes() else None


def _pieces(rows: int, length: int) -> int:
    """Return into how many pieces rows are divided, so that there are enough of them."""
    if rows >= _PIECES:
        return 1
    divisors = (n for n in range(1, length // _PIECE + 1) if length % n == 0)
    return next((n for n in divisors if n * rows >= _PIECES), 1)


def _divided(length: int) -> tuple[int, int, int]:
    """Return how often a loop over so many numbers turns: over several vectors, over one, over single numbers."""
    vectors, rest = divmod(length, _lanes())
    return (*divmod(vectors, UNROLLED), rest)


def _lanes() -> int:
    return isa().nbytes // 4


@cache
def _broadcast(alg: str, shared: bool, dtype: DataType) -> Kernel:
    from fmtprop.jit.row_programs import broadcast

    return Kernel(f"broadcast_{alg}", broadcast(isa(), alg, shared=shared, bf16=dtype is DataType.BF16), b"")


@cache
def _fold(alg: str, group: int, dtype: DataType) -> Kernel:
    from fmtprop.jit.row_programs import fold_columns, fold_rows

    bf16 = dtype is DataType.BF16
    code = fold_columns(isa(), alg, group, bf16=bf16) if group else fold_rows(isa(), alg, bf16=bf16)
    return Kernel(f"fold_{alg}", code, b"")
