"""Kernels of depthwise convolutions of channels-last images, in f32 and bf16.

oneDNN 3.2 has a kernel for channels-last tensors in f32 (``brdgmm_dw``), but in bf16 only the one of blocks
(``jit_dw``), which takes 2 to 3.5 times as long as this one. Here a number of src is converted once for all positions
of a row of the window, and in bf16 two channels that lie in one word are separated by a shift and a mask: half the
instructions of widening them.

Threads share the blocks of channels of all rows. The sums of a piece of a row stay in registers over the whole window.
"""

from __future__ import annotations

from ctypes import addressof, c_int64, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from fmtprop.jit.arguments import Arguments
from fmtprop.jit.gemv import Tail
from fmtprop.jit.grouped_convolution import Row
from fmtprop.jit.isa import AVX512
from fmtprop.jit.kernel import Kernel, isa, serves, threads_for
from fmtprop.jit.standalone import StandaloneKernel, StandaloneWork, assembled
from fmtprop.layout import DataType

#: largest width of the window: the weights of a row of it stay in registers
_MOST_WIDTH: Final = 7

#: integers of a row of dst in the table: where src and weights begin, rows of the window
ROW_ENTRIES: Final = 4

#: most bytes of a row of src or dst: they are displacements in the code
_DISPLACEMENT_LIMIT: Final = 1 << 30


class DepthwiseArguments(Arguments):
    """Arguments of the code; those of rows and images are in bytes."""

    _fields_ = (
        *((name, c_void_p) for name in ("src", "weights", "bias", "dst", "rows", "channels", "table")),
        *((name, c_uint64) for name in ("tasks", "height", "blocks", "pairs", "src_image", "src_step", "dst_row")),
    )


@dataclass(frozen=True)
class DepthwiseKernel(StandaloneKernel):
    """A convolution of channels-last images with one channel per group; weights are channels-last, too."""

    stem = "depthwise"

    moves_freely: ClassVar[bool] = False

    images: int
    channels: int
    #: rows of src, dst and the window; rows from window to window, from one of its rows to the next, and before src
    heights: tuple[int, int, int, int, int, int]
    row: Row
    #: data type of src, weights and dst; sums are f32
    dtype: DataType
    #: whether there is a bias, in f32
    has_bias: bool
    tail: tuple[Tail, ...] = ()
    #: whether weights are f32 in any case; the window is of one position then
    wide: bool = False

    @property
    def is_offered(self) -> bool:
        """Whether this machine has such a kernel, for these sizes."""
        if not serves(self.dtype) or (self.dtype is DataType.BF16 and isa() is not AVX512):
            return False
        if not all(one.dtype is None and one.is_written for one in self.tail):
            return False
        longest = max(self.row.src, self.row.dst) + self.row.window * self.row.step
        return (
            self.channels >= isa().lanes
            and self.row.window <= _MOST_WIDTH
            and longest * self._pixel < _DISPLACEMENT_LIMIT
        )

    def assembled(self) -> Kernel:
        """Return the code; problems with equal rows share it."""
        return assembled(
            *("depthwise_program", "depthwise", isa(), self.row, self._pixel, self.tail),
            bf16=self.dtype is DataType.BF16,
            has_bias=self.has_bias,
            wide=self.wide,
        )

    @property
    def _pixel(self) -> int:
        """Bytes of the channels of a position."""
        return self.channels * self.dtype.nbytes

    def blocks(self) -> tuple[list[int], int]:
        """Return the first channel of each block, and how many blocks are of two vectors; these come first.

        The last block overlaps another where the channels are no whole blocks: it computes the same once more.
        """
        lanes = isa().lanes
        if self.dtype is DataType.F32:
            return [min(first, self.channels - lanes) for first in range(0, self.channels, lanes)], 0
        pairs = self.channels // (2 * lanes)
        firsts, left = [2 * lanes * pair for pair in range(pairs)], self.channels % (2 * lanes)
        if left > lanes and pairs:
            return [*firsts, self.channels - 2 * lanes], pairs + 1
        singles = range(self.channels - left, self.channels, lanes)
        return firsts + [min(first, self.channels - lanes) for first in singles], pairs

    def work(self, threads: int) -> StandaloneWork:
        """Return the kernel with arguments; its tensors are set later."""
        firsts, pairs = self.blocks()
        channels = (c_int64 * len(firsts))(*(first * self.dtype.nbytes for first in firsts))
        rows = self._rows()
        src_row = self.row.src * self._pixel
        arguments = DepthwiseArguments(
            rows=addressof(rows),
            channels=addressof(channels),
            table=addressof(self.kernel.rows),
            tasks=self.images * self.heights[1] * len(firsts),
            height=self.heights[1],
            blocks=len(firsts),
            pairs=pairs,
            src_image=self.heights[0] * src_row,
            src_step=self.heights[4] * src_row,
            dst_row=self.row.dst * self._pixel,
        )
        size = self.images * self.heights[1] * self.row.dst * self._pixel
        return StandaloneWork(self.kernel, arguments, threads_for(size, threads), keep=(rows, channels))

    def _rows(self) -> Any:
        """Return the entries of each row of dst: the rows of the window that are inside src."""
        src, dst, window, stride, step, pad = self.heights
        entries = []
        for position in range(dst):
            top = position * stride - pad
            inside = [tap for tap in range(window) if 0 <= top + tap * step < src]
            first, count = (inside[0], len(inside)) if inside else (0, 0)
            start = (top + first * step) * self.row.src * self._pixel if inside else 0
            entries += [start, first * self.row.window * self._pixel, count, *[0] * (ROW_ENTRIES - 3)]
        return (c_int64 * len(entries))(*entries)
