"""Kernels of convolutions in groups of few channels. Tensors are in blocks of as many channels as a vector has numbers.

On AVX2, oneDNN computes three positions of one block of outputs at a time: too few sums to keep both multipliers busy.
Where several groups share a block of channels, it is slower still. On ResNeXt-50's layers of 4 channels a group it
reaches 15 GFLOP/s, on those of 8 channels 43; these kernels reach 75 and 83 (v3.2, Zen 4, AVX2, one thread, CPU time).

Threads share the rows of all blocks. The sums of a piece of a row stay in registers over the whole window.
"""

from __future__ import annotations

from ctypes import addressof, c_int64, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from fmtprop.jit.arguments import Arguments
from fmtprop.jit.gemv import Tail
from fmtprop.jit.isa import AVX2
from fmtprop.jit.kernel import Kernel, isa, serves, threads_for
from fmtprop.jit.standalone import StandaloneKernel, StandaloneWork, assembled
from fmtprop.layout import DataType

#: channels of a group where several groups share a block: an instruction permutes four numbers
_FEW_CHANNELS: Final = (2, 4)

#: largest width of the window; the instructions of all its positions follow one another
_MOST_WIDTH = 7

#: integers of a row of dst in the table: where src and weights begin, rows of the window, and what is left of a block
ROW_ENTRIES: Final = 8


class GroupedConvolutionArguments(Arguments):
    """Arguments of the code; those of planes, images and units are in bytes."""

    _fields_ = (
        *((name, c_void_p) for name in ("src", "weights", "bias", "dst", "rows", "sources", "table")),
        *((name, c_uint64) for name in ("tasks", "height", "units", "blocks")),
        *(
            (name, c_uint64)
            for name in ("src_step", "src_image", "dst_image", "dst_unit", "dst_row", "weights_unit", "bias_unit")
        ),
    )


@dataclass(frozen=True)
class Row:
    """The sizes along a row, which are a part of the code."""

    src: int
    dst: int
    #: `window`, `stride`, `step`, `pad`: positions of the window, from window to window, from one of its positions to
    #: the next, and before the row
    window: int
    stride: int
    step: int
    pad: int

    def inside(self, position: int, tap: int) -> bool:
        """Return whether a position of dst reads a position of src at a tap of the window."""
        return 0 <= position * self.stride - self.pad + tap * self.step < self.src


@dataclass(frozen=True)
class GroupedConvolutionKernel(StandaloneKernel):
    """A convolution of images in groups, whose tensors are in blocks of channels."""

    stem = "grouped_convolution"

    moves_freely: ClassVar[bool] = False

    images: int
    groups: int
    inputs: int
    outputs: int
    #: rows of src, dst and the window; rows from window to window, from one of its rows to the next, and before src
    heights: tuple[int, int, int, int, int, int]
    row: Row
    has_bias: bool
    tail: tuple[Tail, ...] = ()

    @property
    def is_offered(self) -> bool:
        """Whether this machine has such a kernel, for these sizes."""
        lanes = isa().lanes
        if not serves(DataType.F32) or self.row.window > _MOST_WIDTH:
            return False
        if not all(one.dtype is None and one.is_written for one in self.tail):
            return False
        if self.is_few:
            return self.outputs == self.inputs and self.groups * self.inputs % lanes == 0
        # with 32 registers, oneDNN computes enough positions at a time
        return isa() is AVX2 and self.groups > 1 and self.inputs % lanes == 0 == self.outputs % lanes

    @property
    def is_few(self) -> bool:
        """Whether several groups share a block of channels."""
        return self.inputs in _FEW_CHANNELS

    @property
    def side_by_side(self) -> int:
        """Number of blocks of outputs that are computed together: they share what is read of src."""
        blocks = 1 if self.is_few else self.outputs // isa().lanes
        return next(count for count in (2, 3, 1) if blocks % count == 0)

    def assembled(self) -> Kernel:
        """Return the code; problems with equal rows share it."""
        block, plane = self._block, self.heights[1] * self.row.dst * isa().nbytes
        return assembled(
            *("grouped_convolution_program", "grouped_convolution", isa(), self.row, self.side_by_side),
            *(plane, block, self.tail),
            few=self.inputs if self.is_few else 0,
            has_bias=self.has_bias,
        )

    @property
    def _block(self) -> int:
        """Bytes of the weights of a block of outputs."""
        lanes = isa().lanes
        return self.inputs * self.heights[2] * self.row.window * lanes * 4

    def work(self, threads: int) -> StandaloneWork:
        """Return the kernel with arguments; its tensors are set later."""
        lanes, nbytes = isa().lanes, isa().nbytes
        src_plane, dst_plane = (self.heights[i] * size * nbytes for i, size in enumerate((self.row.src, self.row.dst)))
        blocks = self.groups * self.outputs // lanes
        units, per_group = blocks // self.side_by_side, max(self.outputs // lanes // self.side_by_side, 1)
        read = max(self.inputs // lanes, 1)
        sources = (c_int64 * units)(*(unit // per_group * read * src_plane for unit in range(units)))
        rows, keep = self._rows(src_plane), sources
        arguments = GroupedConvolutionArguments(
            rows=addressof(rows),
            sources=addressof(sources),
            table=addressof(self.kernel.rows),
            tasks=self.images * units * self.heights[1],
            height=self.heights[1],
            units=units,
            blocks=read,
            src_step=self.heights[4] * self.row.src * nbytes,
            src_image=self.groups * self.inputs // lanes * src_plane,
            dst_image=blocks * dst_plane,
            dst_unit=self.side_by_side * dst_plane,
            dst_row=self.row.dst * nbytes,
            weights_unit=self.side_by_side * self._block,
            bias_unit=self.side_by_side * nbytes,
        )
        size = self.images * blocks * dst_plane
        return StandaloneWork(self.kernel, arguments, threads_for(size, threads), keep=(rows, keep))

    def _rows(self, src_plane: int) -> Any:
        """Return the entries of each row of dst: the rows of the window that are inside src."""
        src, dst, window, stride, step, pad = self.heights
        row = self.row.src * isa().nbytes
        weights = self._block // max(self.inputs // isa().lanes, 1) // window
        entries = []
        for position in range(dst):
            top = position * stride - pad
            inside = [tap for tap in range(window) if 0 <= top + tap * step < src]
            first, count = (inside[0], len(inside)) if inside else (0, 0)
            start = (top + first * step) * row if inside else 0
            left = (src_plane - count * step * row, (window - count) * weights)
            entries += [start, first * weights, count, *left, *[0] * (ROW_ENTRIES - 5)]
        return (c_int64 * len(entries))(*entries)
