"""Kernels of group normalization on channels-last tensors.

PyTorch's operator for this format loses digits if a mean is large relative to the deviation, so it would need a copy to
rows and back, and oneDNN has no fast one. Networks that generate or restore images have dozens of these steps.

A thread has some places (pixels) of an image and reads them twice. First it adds up each channel's deviations from a
pivot, the mean of the first places. When all threads have met, each combines the sums to the groups' means and
deviations; then it writes its places of the result.
"""

from __future__ import annotations

from ctypes import addressof, c_float, c_int64, c_uint64, c_void_p
from dataclasses import dataclass

from fmtprop.jit.arguments import Arguments, FloatVector, filled
from fmtprop.jit.kernel import Kernel, isa, threads_for
from fmtprop.jit.standalone import ChannelKernel, StandaloneWork, assembled
from fmtprop.layout import DataType

#: number of places that are treated column by column, which stay in the nearest cache; number of places for the pivot
BLOCK_PLACES, PIVOT_PLACES = 8, 64

#: number of vectors that a thread keeps for each vector of channels
SLOTS = 4

#: most vectors of channels that are treated at a time
_CHANNEL_VECTORS = 4


class GroupNormArguments(Arguments):
    """Arguments of the code of a group normalization."""

    _fields_ = (
        *((name, c_void_p) for name in ("barrier", "src", "scale", "shift", "dst", "areas", "table")),
        *((name, c_uint64) for name in ("images", "image", "places", "row", "columns", "vectors", "groups", "group")),
        ("area", c_uint64),
        *((name, FloatVector) for name in ("divisor", "epsilon", "one")),
    )


@dataclass(frozen=True)
class GroupNormKernel(ChannelKernel):
    """``dst[n, :, c] = (src[n, :, c] - mean[n, g]) / deviation[n, g] * scale[c] + shift[c]``, g the group of c."""

    stem = "group_norm"

    #: `images`, `places`, `channels`: sizes of src; all at least 1, and whole vectors of channels
    images: int
    places: int
    channels: int
    #: number of groups; divides the channels
    groups: int
    epsilon: float
    #: data type of src and dst; computed in f32, as scale and shift are
    dtype: DataType

    @property
    def width(self) -> int:
        """Number of vectors of channels that are treated at a time: a divisor of `vectors`."""
        return self.divisor(_CHANNEL_VECTORS)

    def assembled(self) -> Kernel:
        """Return the code; problems with the same `width` share it."""
        return assembled("norm_program", "group_norm", isa(), self.width, bf16=self.dtype is DataType.BF16)

    def work(self, threads: int) -> StandaloneWork:
        """Return the kernel with arguments; its tensors are set later, scale and shift if there are any."""
        row, members = self.channels * self.dtype.nbytes, self.channels // self.groups
        threads = threads_for(self.places * row, threads)
        block, areas = self.areas(threads, SLOTS)
        starts = (divmod(channel, isa().lanes) for channel in range(self.channels))
        table = (c_int64 * self.channels)(*(4 * (vector * SLOTS * isa().lanes + lane) for vector, lane in starts))
        ones, zeros = ((c_float * self.channels)(*[number] * self.channels) for number in (1.0, 0.0))
        arguments = GroupNormArguments(
            **areas,
            scale=addressof(ones),
            shift=addressof(zeros),
            table=addressof(table),
            images=self.images,
            image=self.places * row,
            places=self.places,
            row=row,
            columns=self.vectors // self.width,
            vectors=self.vectors,
            groups=self.groups,
            group=members,
            divisor=filled(members * self.places),
            epsilon=filled(self.epsilon),
            one=filled(1.0),
        )
        return StandaloneWork(self.kernel, arguments, threads, (block, table, ones, zeros))
