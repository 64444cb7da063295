"""Kernels of rotary embeddings: one pass over rows that may lie anywhere."""

from __future__ import annotations

from ctypes import addressof, c_int64, c_uint64, c_void_p
from dataclasses import dataclass

from fmtprop.jit.arguments import Arguments
from fmtprop.jit.kernel import Kernel, isa, serves, threads_for
from fmtprop.jit.standalone import StandaloneKernel, StandaloneWork, assembled
from fmtprop.layout import DataType

#: bytes of a cosine or sine, and of a row's entry in the table: where its angles start, and where it starts itself
ANGLE_NBYTES, START_NBYTES = 4, 16

#: widest half of a row: its bytes are displacements in the code
_HALF_LIMIT = 1 << 16


class RotaryArguments(Arguments):
    """Arguments of the code."""

    _fields_ = (
        *((name, c_void_p) for name in ("src", "cos", "sin", "dst", "table")),
        *((name, c_uint64) for name in ("rows", "row", "vectors", "rest")),
    )


@dataclass(frozen=True)
class RotaryKernel(StandaloneKernel):
    """``dst[r] = src[r] * cos[a] + (-second half of src[r], first half) * sin[a]`` with the angles `a` of each row `r`.

    Interleaved, the second factor of the sine is ``(-src[r, 1], src[r, 0], -src[r, 3], …)``.
    """

    stem = "rotary"

    #: the axes above a row, outermost first: size, stride of cos and sin, stride of src, in elements
    axes: tuple[tuple[int, int, int], ...]
    half: int
    #: data type of src and of dst, which is packed; cos and sin are f32
    dtype: DataType
    #: whether pairs are neighbours
    interleaved: bool = False

    @property
    def is_offered(self) -> bool:
        """Whether this machine has such a kernel, for these sizes."""
        sizes = [size for size, *_ in self.axes]
        return serves(self.dtype) and 0 < self.half <= _HALF_LIMIT and 0 not in sizes

    def assembled(self) -> Kernel:
        """Return the code; all problems of a data type and size of rows share it."""
        options = {"interleaved": self.interleaved, "bf16": self.dtype is DataType.BF16}
        return assembled("rotary_program", "rotary", isa(), self.half, **options)

    def work(self, threads: int) -> StandaloneWork:
        """Return the kernel with arguments; its tensors are set later."""
        starts = [(0, 0)]
        for size, angles, src in self.axes:
            starts = [(a + angles * index, s + src * index) for a, s in starts for index in range(size)]
        nbytes, row = self.dtype.nbytes, 2 * self.half * self.dtype.nbytes
        table = (c_int64 * (2 * len(starts)))(*(start for a, s in starts for start in (a * ANGLE_NBYTES, s * nbytes)))
        # pairs in a vector, or in two of halves
        vectors, rest = divmod(self.half, isa().lanes // 2 if self.interleaved else isa().lanes)
        arguments = RotaryArguments(table=addressof(table), rows=len(starts), row=row, vectors=vectors, rest=rest)
        return StandaloneWork(self.kernel, arguments, threads_for(len(starts) * row, threads), table)
