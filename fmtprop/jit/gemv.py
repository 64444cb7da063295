"""Kernels of products of a few rows and a matrix: the matrix is read once, in the order of its memory.

The step of a decoder for one token consists of such products of one row, and of those of each head's query with its
keys; a step for several sequences, or for several tokens that a smaller model proposes, of products of a few rows.
oneDNN and BLAS libraries block them for many rows, and read the matrix at a third to three quarters of the memory
bandwidth.

Threads share the outputs. A task is as many outputs as a vector has numbers, for all rows: the sums of an output are
computed side by side, one output after another, then bias and the functions behind it are applied to all of them.
"""

from __future__ import annotations

from ctypes import addressof, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Final

from fmtprop.jit.arguments import Arguments
from fmtprop.jit.kernel import Kernel, isa, serves, takes, threads_for, writes
from fmtprop.jit.standalone import StandaloneKernel, StandaloneWork, assembled
from fmtprop.layout import DataType

#: vectors of the weights that are multiplied one after another, without a jump between them
CHAINS: Final = 4

#: most rows, and most bytes of more than two rows: half of a first cache. More bytes come from the second cache again
#: and again, and oneDNN is faster. oneDNN takes 1.5 times as long for 2 rows of 768 or 3072 numbers; for 3 to 6 rows of
#: 768, 1.2 to 1.4 times in f32, 1.0 to 1.4 in bf16 (Zen 4, one thread)
MOST_ROWS, _MOST_NBYTES = 6, 20 << 10

#: limit of the bytes from the first row to the last: they are a displacement in the code
_DISPLACEMENT_LIMIT = 1 << 31

#: most post-ops
MOST_POST_OPS: Final = 4

#: tensors that a task reads or writes at its outputs
AT_OUTPUTS: Final = ("bias", "dst", *(f"post_op_{number}" for number in range(MOST_POST_OPS)))

#: oneDNN's algorithms of binary post-ops that a kernel has
_BINARY = frozenset({"add", "sub", "mul", "div"})


class GemvArguments(Arguments):
    """Arguments of the code."""

    _fields_ = (
        *((name, c_void_p) for name in ("src", "weights", "table", *AT_OUTPUTS)),
        *((f"{name}_item", c_uint64) for name in ("src", "weights", *AT_OUTPUTS)),
        *((f"{name}_row", c_uint64) for name in AT_OUTPUTS),
        *((name, c_uint64) for name in ("tasks", "item", "last", "row", "gap", "blocks", "vectors", "rows")),
    )


@dataclass(frozen=True)
class Tail:
    """What follows the sums: a function of one number, or of two."""

    #: oneDNN's name of the algorithm, without ``eltwise_`` or ``binary_``
    alg: str
    alpha: float = 0.0
    beta: float = 0.0
    #: data type of the second operand, which a function of two numbers has
    dtype: DataType | None = None
    #: whether the second operand is one number for all outputs
    is_number: bool = False

    @property
    def is_written(self) -> bool:
        """Whether a kernel can have it."""
        if self.dtype is None:
            return writes(self.alg, self.alpha, self.beta)
        return self.alg in _BINARY and takes(self.dtype)


@dataclass(frozen=True)
class GemvKernel(StandaloneKernel):
    """``dst[m, n] = tail(sum over k of src[m, k] * weights[n, k] + bias[n])``, for each item of a batch."""

    stem = "gemv"

    #: `outputs`, `depth`: rows of the weights, and numbers of a row
    outputs: int
    depth: int
    #: `dtype`, `dst`: data types of src and weights, and of dst; sums are f32
    dtype: DataType
    dst: DataType
    #: data type of the bias; None without one
    bias: DataType | None = None
    tail: tuple[Tail, ...] = ()
    items: int = 1
    #: name of an operand or result, and numbers from item to item; those that are not named are the same for all
    steps: tuple[tuple[str, int], ...] = ()
    #: numbers from row to row of the weights; 0 for rows that follow one another
    pitch: int = 0
    rows: int = 1
    #: name of src, dst or another tensor at the outputs, and numbers from row to row; those that are not named are the
    #: same for all rows
    row_steps: tuple[tuple[str, int], ...] = ()

    @property
    def overwrites(self) -> bool:  # type: ignore[override]  # the same, computed
        """Whether dst may be a summand: not where the last task's outputs overlap those of the one before."""
        return self.outputs % isa().lanes == 0

    @property
    def is_offered(self) -> bool:
        """Whether this machine has such a kernel, for these sizes."""
        row = self.depth * self.dtype.nbytes
        if not serves(self.dtype, self.dst, self.bias or DataType.F32):
            return False
        if len(self.tail) > MOST_POST_OPS or not all(one.is_written for one in self.tail):
            return False
        if self.rows > 2 and self.rows * row > _MOST_NBYTES:
            return False
        if not 0 < self.rows <= MOST_ROWS or self.src_rows[-1] + row >= _DISPLACEMENT_LIMIT:
            return False
        return row > 0 and row % isa().nbytes == 0 and self.outputs >= isa().lanes

    def assembled(self) -> Kernel:
        """Return the code; problems that differ only in sizes share it, and in the steps of tensors at the outputs."""
        types = (self.dtype, self.dst, self.bias)
        return assembled("gemv_program", "gemv", isa(), *types, self.tail, self.src_rows)

    @property
    def src_rows(self) -> tuple[int, ...]:
        """Where the rows of src start, in bytes."""
        step = dict(self.row_steps).get("src", 0) * self.dtype.nbytes
        return tuple(row * step for row in range(self.rows))

    def work(self, threads: int) -> StandaloneWork:
        """Return the kernel with arguments; its tensors are set later."""
        row = self.depth * self.dtype.nbytes
        blocks, vectors = divmod(row // isa().nbytes, CHAINS)
        tasks, pitch = -(-self.outputs // isa().lanes), self.pitch * self.dtype.nbytes or row
        scales = {"src": self.dtype.nbytes, "weights": self.dtype.nbytes}
        arguments = GemvArguments(
            **{f"{name}_item": step * scales.get(name, 1) for name, step in self.steps},
            **{f"{name}_row": step for name, step in self.row_steps if name != "src"},
            table=addressof(self.kernel.rows),
            tasks=self.items * tasks,
            item=tasks,
            last=self.outputs - isa().lanes,
            row=pitch,
            gap=pitch - row,
            blocks=blocks,
            vectors=vectors,
            rows=self.rows,
        )
        return StandaloneWork(self.kernel, arguments, threads_for(self.items * self.outputs * row, threads))
